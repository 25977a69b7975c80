"""Checks arguments before a request: the rules of RocketMQ's Validators, TopicValidator and MessageConst."""

from __future__ import annotations

import re
from collections.abc import Mapping

from neve.errors import ClientError
from neve.record.layout import PROPERTIES_LENGTH_MAX
from neve.record.properties import properties_to_bytes
from neve.remoting.codes import ResponseCode
from neve.remoting.names import NOT_FOR_SENDING, TOPIC_LENGTH_MAX

GROUP_LENGTH_MAX = 255  # of RocketMQ's clients; brokers have a smaller limit
_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")

# Names with a meaning for clients and brokers, which applications must not use.
RESERVED_PROPERTIES = frozenset(
    {
        "1ST_POP_TIME",
        "ARRIVE_TIME",
        "BORN_TIMESTAMP",
        "BUYER_ID",
        "CLUSTER",
        "CONSUME_START_TIME",
        "CORRECTION_FLAG",
        "CORRELATION_ID",
        "DELAY",
        "DLQ_ORIGIN_MESSAGE_ID",
        "DLQ_ORIGIN_TOPIC",
        "DUP_INFO",
        "EXTEND_UNIQ_INFO",
        "INNER_MULTI_QUEUE_OFFSET",
        "INSTANCE_ID",
        "KEYS",
        "MAX_OFFSET",
        "MAX_RECONSUME_TIMES",
        "MIN_OFFSET",
        "MQ2_FLAG",
        "MSG_REGION",
        "MSG_TYPE",
        "ORIGIN_MESSAGE_ID",
        "PGROUP",
        "POP_CK",
        "POP_CK_OFFSET",
        "PUSH_REPLY_TIME",
        "REAL_QID",
        "REAL_TOPIC",
        "RECONSUME_TIME",
        "REPLY_TO_CLIENT",
        "RETRY_TOPIC",
        "TAGS",
        "TIMER_DELAY_LEVEL",
        "TIMER_DELAY_MS",
        "TIMER_DELAY_SEC",
        "TIMER_DELIVER_MS",
        "TIMER_DEL_UNIQKEY",
        "TIMER_DEQUEUE_MS",
        "TIMER_ENQUEUE_MS",
        "TIMER_OUT_MS",
        "TIMER_ROLL_TIMES",
        "TRACE_ON",
        "TRANSFER_FLAG",
        "TRAN_MSG",
        "TRAN_PREPARED_QUEUE_OFFSET",
        "TTL",
        "UNIQ_KEY",
        "WAIT",
        "__BORNHOST",
        "__CRC32#",
    }
)


def check_topic(topic: str) -> None:
    """Raise ClientError unless messages may be sent to a topic of this name."""
    _check_name("topic", topic, TOPIC_LENGTH_MAX)
    if topic in NOT_FOR_SENDING:
        raise ClientError(f"sending to topic {topic} is forbidden: only brokers write to it")


def check_timeout(timeout: float | None) -> None:
    """Raise ClientError if `timeout`, in seconds, is neither None nor positive."""
    if timeout is not None and not timeout > 0:
        raise ClientError(f"timeout must be more than 0 s, got {timeout!r}")


def check_group(group: str) -> None:
    """Raise ClientError unless `group` is a valid name of a producer or consumer group."""
    _check_name("group", group, GROUP_LENGTH_MAX)


def body_bytes(body: object) -> bytes:
    """Return the bytes of a body; a str is encoded as UTF-8.

    Raises:
        ClientError: the body is neither bytes nor str. `bytes(5)` would be five zero bytes.
    """
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    raise ClientError(f"a body is bytes or str, not {type(body).__name__}")


def check_properties(properties: Mapping[str, str]) -> None:
    """Raise ClientError if a property of an application cannot be encoded, or has a reserved name."""
    for name, value in properties.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ClientError(f"property {name!r}: name and value are str, not {type(value).__name__}")
        if not name.strip() or not value.strip() or {"\x01", "\x02"} & {*name, *value}:
            raise ClientError(f"property {name!r} is empty or holds a separator")
        if name in RESERVED_PROPERTIES:
            raise ClientError(f"property {name} is used by the system: it has an argument of its own, or is not yours")


def check_body(size: int, limit: int) -> None:
    """Raise ClientError if a body is empty or larger than `limit` bytes."""
    if size == 0:
        raise ClientError("the message body is empty", ResponseCode.MESSAGE_ILLEGAL)
    if size > limit:
        raise ClientError(f"{size} bytes are more than {limit}", ResponseCode.MESSAGE_ILLEGAL)


def packed_properties(properties: Mapping[str, str]) -> bytes:
    """Return the encoded properties.

    Raises:
        ClientError: they are longer than a record's length field can say.
    """
    packed = properties_to_bytes(properties)
    if len(packed) > PROPERTIES_LENGTH_MAX:
        raise ClientError(f"properties of {len(packed)} bytes are too long", ResponseCode.MESSAGE_ILLEGAL)
    return packed


def _check_name(what: str, name: str, length_max: int) -> None:
    if not name.strip():
        raise ClientError(f"no {what}")
    if len(name) > length_max:
        raise ClientError(f"the {what} is longer than {length_max} characters")
    if _NAME.fullmatch(name) is None:
        raise ClientError(f"the {what} {name!r} has other characters than %|a-zA-Z0-9_-")
