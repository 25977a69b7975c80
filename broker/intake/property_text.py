"""Property strings of messages: a sequence of name, byte 0x01, value, byte 0x02."""

from neve.errors import BrokerError
from neve.record.layout import PROPERTIES_LENGTH_MAX
from neve.record.properties import PROPERTY_DLQ_ORIGIN_TOPIC, PROPERTY_RETRY_TOPIC
from neve.remoting.codes import ResponseCode
from neve.remoting.headers import SendMessageHeader
from neve.remoting.names import RETRY_PREFIX, is_retry_or_dlq


def join_properties(properties: dict[str, str]) -> str:
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items())


def ended(text: str) -> str:
    """Return the text with its last separator, so that pairs can be appended."""
    return text if not text or text[-1] == "\x02" else text + "\x02"


def ended_bytes(raw: bytes) -> bytes:
    return raw if not raw or raw[-1] == 2 else raw + b"\x02"


def target_pairs(topic: str, queue_id: int) -> bytes:
    """Return the properties that name the real queue of a message stored in an internal topic."""
    return f"REAL_TOPIC\x01{topic}\x02REAL_QID\x01{queue_id}\x02".encode()


def drop_stated_origin(topic: str, properties: dict[str, str]) -> None:
    """Remove properties that claim an origin, if the topic's messages have none; call it before a copy for a retry.

    Only a message in a group's retry or dead-letter topic has an origin. In any other topic a client set the property,
    for example a bridge that republishes messages with all properties, and an erasure would rely on it. In a pop-retry
    topic the topic's name, `%RETRY%group+topic`, states the origin instead.
    """
    if not is_retry_or_dlq(topic) or (topic.startswith(RETRY_PREFIX) and "+" in topic):
        properties.pop(PROPERTY_RETRY_TOPIC, None)
        properties.pop(PROPERTY_DLQ_ORIGIN_TOPIC, None)


def properties_of(header: SendMessageHeader) -> str:
    """Return the property string of a send. Raises BrokerError if it is too long for a record.

    The length is checked before parsing, because a header may be as long as its frame.
    """
    text = header.properties or ""
    if len(text) > PROPERTIES_LENGTH_MAX:
        raise BrokerError(
            ResponseCode.MESSAGE_ILLEGAL,
            f"the message is illegal, its properties have {len(text)} characters, the limit is {PROPERTIES_LENGTH_MAX}",
        )
    return text
