"""What changes in the broker's tables, as records of the metadata log: one JSON object for each change.

    topic     rmq_sys_METADATA_LOG; in no table, so that clients neither see nor read it. A record counts only if a neve
              broker wrote it: preparedTransactionOffset proves that (`broker.intake.internal_records`)
    queue 0   changes, in the order in which they hold
    queue 1   delay positions, each record all of them: the last one counts
    queue 2   of a broker set: which master has settled its archive; the last one counts. A neve that knows nothing of
              this queue passes it by

    {"v":1,"kind":…, …}
    v      format of the record; one above ours, or a kind that we don't know, was written by a newer neve
    kind   what changed, with these fields:

    topic           config, version             made or altered; the row as in topics.json, the table's version after it
    topic gone      topic, ends, beginsAgain, version     ends: queue → where it ended; beginsAgain: its offsets, too
    group           config, version             as in subscriptionGroup.json
    group gone      group, withOffsets, version
    forbidden       group, topic, forbidden, version      what a group may not read
    mode            topic, group, mode, neighbours        as in messageRequestMode.json
    reset           group, topic, offsets       where a group is sent; its running consumers are told
    offsets         group, topic, offsets       all its offsets there: copied from another group, or what the pop book
                                                had of queues that leave it
    user            name, user                  as in auth.json, its secret as it stands there
    user gone       name
    policies        subject, policies           as in auth.json, all of the subject's
    policies gone   subject
    delays          offsets                     delay level → queue offset of the next message to deliver
    raised          queues                      topic → queue → where it goes on, above what the archive has named
    erased          rows                        topic → queue → [[first, last], …] of internal topics: hidden from all
                                                requests; those of archived topics are in the archive's journal
    settled         epoch                       of a master, whose log has, or goes on above, all that the archive names

`settled` lies behind the `raised` that it needed: whoever has it in his log has what its master settled. A topic's
deletion lies behind its last record, and its re-creation before the first new one. Whoever meets a record
that it can't read stops there and says so: what follows may rest on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

import msgspec

VERSION = 1
#: The queues of the metadata log.
CHANGES, DELAYS, SETTLED = 0, 1, 2


class UnreadableChange(ValueError):
    """A record of the metadata log that this neve can't follow."""


class _Change(msgspec.Struct, rename="camel", tag_field="kind", frozen=True, kw_only=True):
    v: int = VERSION


class TopicPut(_Change, tag="topic", frozen=True):
    """See the module."""

    config: dict[str, Any]
    version: dict[str, int]


class TopicGone(_Change, tag="topic gone", frozen=True):
    """See the module."""

    topic: str
    ends: dict[int, int]
    begins_again: bool
    version: dict[str, int]


class GroupPut(_Change, tag="group", frozen=True):
    """See the module."""

    config: dict[str, Any]
    version: dict[str, int]


class GroupGone(_Change, tag="group gone", frozen=True):
    """See the module."""

    group: str
    with_offsets: bool
    version: dict[str, int]


class GroupForbidden(_Change, tag="forbidden", frozen=True):
    """See the module."""

    group: str
    topic: str
    forbidden: bool
    version: dict[str, int]


class ModePut(_Change, tag="mode", frozen=True):
    """See the module."""

    topic: str
    group: str
    mode: str
    neighbours: int


class OffsetsReset(_Change, tag="reset", frozen=True):
    """See the module."""

    group: str
    topic: str
    offsets: dict[int, int]


class OffsetsCopied(_Change, tag="offsets", frozen=True):
    """See the module."""

    group: str
    topic: str
    offsets: dict[int, int]


class UserPut(_Change, tag="user", frozen=True):
    """See the module."""

    name: str
    user: dict[str, Any]


class UserGone(_Change, tag="user gone", frozen=True):
    """See the module."""

    name: str


class PoliciesPut(_Change, tag="policies", frozen=True):
    """See the module."""

    subject: str
    policies: list[dict[str, Any]]


class PoliciesGone(_Change, tag="policies gone", frozen=True):
    """See the module."""

    subject: str


class DelayPositions(_Change, tag="delays", frozen=True):
    """See the module."""

    offsets: dict[int, int]


class QueuesRaised(_Change, tag="raised", frozen=True):
    """See the module."""

    queues: dict[str, dict[int, int]]


class RowsErased(_Change, tag="erased", frozen=True):
    """Erased messages of internal topics, by topic and queue."""

    rows: dict[str, dict[int, list[tuple[int, int]]]]


class ArchiveSettled(_Change, tag="settled", frozen=True):
    """See the module."""

    epoch: int


Change = (
    TopicPut | TopicGone | GroupPut | GroupGone | GroupForbidden | ModePut | OffsetsReset | OffsetsCopied
    | UserPut | UserGone | PoliciesPut | PoliciesGone | DelayPositions | QueuesRaised | RowsErased
    | ArchiveSettled
)  # fmt: skip
UserChange = UserPut | UserGone | PoliciesPut | PoliciesGone
_QUEUES: Mapping[type, int] = {DelayPositions: DELAYS, ArchiveSettled: SETTLED}
KINDS = frozenset(kind.__struct_config__.tag for kind in get_args(Change))
assert len(KINDS) == len(get_args(Change))


class _Head(msgspec.Struct):
    v: int
    kind: str


_head = msgspec.json.Decoder(_Head)
_decoder: msgspec.json.Decoder[Change] = msgspec.json.Decoder(Change)


def queue_of(change: Change) -> int:
    """Of the metadata log."""
    return _QUEUES.get(type(change), CHANGES)


def encode_change(change: Change) -> bytes:
    """The body of its record."""
    return msgspec.json.encode(change)


def decode_change(data: bytes | memoryview) -> Change:
    """Raises UnreadableChange; its text tells the kind, and nothing of what the record holds."""
    try:
        head = _head.decode(data)
        if head.v == VERSION and head.kind in KINDS:
            return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnreadableChange(f"a damaged change: {type(error).__name__}") from None
    raise UnreadableChange(
        f"a change of kind {head.kind!r}, format {head.v}: written by a newer neve (this one reads format {VERSION})"
    )


Row = TypeVar("Row")


def row_of(config: Mapping[str, Any] | Sequence[Any], shape: type[Row]) -> Row:
    """A table's row out of a change, read as its file is. Raises UnreadableChange."""
    try:
        return msgspec.convert(config, shape, strict=False, str_keys=True)
    except msgspec.ValidationError as error:
        raise UnreadableChange(f"a damaged change: {error}") from error
