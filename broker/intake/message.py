"""What a put takes, a message without a place in the log yet (RocketMQ's MessageExtBrokerInner), and what it gives."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

# Who sends what the broker writes down for itself.
NOBODY = ("127.0.0.1", 0)


class NewMessage(msgspec.Struct, kw_only=True, gc=False):
    """One message on its way into the log; `tags_code` and `keys` are what it is found by."""

    topic: str
    queue_id: int
    body: bytes | memoryview
    properties: bytes = b""
    flag: int = 0
    sys_flag: int = 0
    born_timestamp: int
    born_host: tuple[str, int] = NOBODY
    reconsume_times: int = 0
    tags_code: int = 0
    # Unique id and keys, with spaces between them; none: it is in no index.
    keys: str = ""
    prepared_transaction_offset: int = 0
    # Stored with it, right behind it, or neither.
    beside: NewMessage | None = None


@dataclass(slots=True)
class Stored:
    """A put that was done: what its sender is told."""

    msg_id: str
    queue_id: int
    queue_offset: int
    # What lies below is on the disk once the message is.
    end_offset: int
    unique: str = ""
    # When a timer message is due.
    deliver_ms: int | None = None
