"""Input and result of a put (RocketMQ's MessageExtBrokerInner and PutMessageResult)."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

# Born host of records that the broker itself creates.
NOBODY = ("127.0.0.1", 0)


class NewMessage(msgspec.Struct, kw_only=True, gc=False):
    """A message that has no place in the log yet; `tags_code` and `keys` go into its index entries."""

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
    # Unique id and keys, separated by spaces; if empty, the message is in no key index.
    keys: str = ""
    prepared_transaction_offset: int = 0
    # A record to append right behind this one; both are stored or neither.
    beside: NewMessage | None = None


@dataclass(slots=True)
class Stored:
    """A stored message: the facts for the sender's answer."""

    msg_id: str
    queue_id: int
    queue_offset: int
    # The message is durable once all bytes below this physical offset are.
    end_offset: int
    unique: str = ""
    # Delivery time of a timer message.
    deliver_ms: int | None = None
