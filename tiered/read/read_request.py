"""A read of a queue, as both tiers answer it."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec


class ReadRequest(msgspec.Struct):
    """Messages of a queue from `offset` on: at most `max_count` of them, and at least one even above `max_bytes`.

    `group` is the consumer group. `codes` are the tag hashes to select, None for all messages. `client` identifies a
    reader within the group, if its readers progress separately. The owner may move `offset` between two reads.
    """

    group: str
    topic: str
    queue_id: int
    offset: int
    max_count: int
    max_bytes: int
    codes: frozenset[int] | None = None
    client: Hashable = None
