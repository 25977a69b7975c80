"""The body of a trace message, as RocketMQ's TraceDataEncoder writes and mqadmin queryMsgTraceById reads it.

Fields with \\x01 between them, each line ended by \\x02:

    Pub             ms  region  group  topic  message id  tags  keys  store host  body length  cost  message type
                    offset message id  success
    SubBefore       ms  region  group  request id  message id  redeliveries  keys
    SubAfter        request id  message id  cost  success  keys  outcome  ms  group
    EndTransaction  ms  region  group  topic  message id  tags  keys  store host  message type  transaction id  state
                    by a check

`ms` is the time since 1970, `cost` a duration in ms. Missing values are `null`, as in Java, whose reader would lose an
empty last field.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from neve.client.model import Message
from neve.record.properties import PROPERTY_MSG_REGION

TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"
DEFAULT_REGION = "DefaultRegion"
_BETWEEN, _END = "\x01", "\x02"


class MessageType(IntEnum):
    """The type of a message; values are Java's ordinals."""

    NORMAL = 0
    HALF = 1
    TRANSACTION = 2
    DELAYED = 3


class Ended(IntEnum):
    """The outcome of a delivery; values are the ordinals of ConsumeReturnType."""

    SUCCESS = 0
    TIME_OUT = 1
    EXCEPTION = 2
    FAILED = 4


class Trace(NamedTuple):
    """One line of a trace message, and the keys by which it can be found."""

    line: str
    words: tuple[str, ...]


class Sent(NamedTuple):
    """A message that a broker stored. Times are in ms."""

    at: int
    cost: int
    region: str
    group: str
    message: Message
    msg_id: str
    offset_msg_id: str
    address: str
    kind: MessageType
    is_success: bool


def pub(sent: Sent) -> Trace:
    """Return the trace of a sent message."""
    message = sent.message
    return _trace(
        message, sent.msg_id,
        "Pub", sent.at, sent.region, sent.group, message.topic, sent.msg_id, message.tags or None, _keys(message),
        sent.address, len(message.body), sent.cost, int(sent.kind), sent.offset_msg_id, sent.is_success,
    )  # fmt: skip


def sub_before(message: Message, group: str, request_id: str, at: int) -> Trace:
    """Return the trace of a delivery to the application at `at`, in ms since 1970."""
    return _trace(
        message, message.msg_id,
        "SubBefore", at, region(message), group, request_id, message.msg_id, message.reconsume_times, _keys(message),
    )  # fmt: skip


def sub_after(message: Message, group: str, request_id: str, *, at: int, cost: int, ended: Ended) -> Trace:
    """Return the trace of a settled message. A late ack counts as a success of the application."""
    is_success = ended in (Ended.SUCCESS, Ended.TIME_OUT)
    return _trace(
        message, message.msg_id,
        "SubAfter", request_id, message.msg_id, cost, is_success, _keys(message), int(ended), at, group,
    )  # fmt: skip


def end_transaction(
    message: Message, group: str, address: str, *, transaction_id: str, state: str, at: int, by_check: bool
) -> Trace:
    """Return the trace of the end of a transaction; `state` is COMMIT_MESSAGE, ROLLBACK_MESSAGE or UNKNOW."""
    return _trace(
        message, message.msg_id,
        "EndTransaction", at, region(message), group, message.topic, message.msg_id, message.tags or None,
        _keys(message), address, int(MessageType.TRANSACTION), transaction_id, state, by_check,
    )  # fmt: skip


def region(message: Message) -> str:
    """Return the region of the broker that stored the message."""
    return message.properties.get(PROPERTY_MSG_REGION) or DEFAULT_REGION


def _keys(message: Message) -> str | None:
    return " ".join(message.keys) or None


def _trace(message: Message, msg_id: str, *fields: str | int | bool | None) -> Trace:
    return Trace(_BETWEEN.join(map(_text, fields)) + _END, (msg_id, *" ".join(message.keys).split()))


def _text(field: str | int | bool | None) -> str:
    if field is None:
        return "null"
    return str(field).lower() if isinstance(field, bool) else str(field)


_FIELDS = {
    "Pub": (
        "at_ms", "region", "group", "topic", "msg_id", "tags", "keys", "store_host", "body_length", "cost_ms", "kind",
        "offset_msg_id", "is_success",
    ),
    "SubBefore": ("at_ms", "region", "group", "request_id", "msg_id", "redeliveries", "keys"),
    "SubAfter": ("request_id", "msg_id", "cost_ms", "is_success", "keys", "ended", "at_ms", "group"),
    "EndTransaction": (
        "at_ms", "region", "group", "topic", "msg_id", "tags", "keys", "store_host", "kind", "transaction_id", "state",
        "by_check",
    ),
}  # fmt: skip


def parse_traces(body: str) -> list[dict[str, str]]:
    """Return the lines of a trace message as fields by name; `what` is the type of the line.

    Lines of unknown types and fields of the value null are left out. Older clients send fewer fields.
    """
    found = []
    for line in body.split(_END):
        what, *values = line.strip().split(_BETWEEN)
        if what in _FIELDS:
            fields = {name: value for name, value in zip(_FIELDS[what], values, strict=False) if value != "null"}
            found.append({"what": what, **fields})
    return found
