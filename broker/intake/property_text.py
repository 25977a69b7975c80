"""Property strings of sends: name 0x01 value 0x02, again and again."""

from neve.errors import BrokerError
from neve.record.layout import PROPERTIES_LENGTH_MAX
from neve.record.properties import PROPERTY_DLQ_ORIGIN_TOPIC, PROPERTY_RETRY_TOPIC
from neve.remoting.codes import ResponseCode
from neve.remoting.headers import SendMessageHeader
from neve.remoting.names import RETRY_PREFIX, is_retry_or_dlq


def join_properties(properties: dict[str, str]) -> str:
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items())


def ended(text: str) -> str:
    """With the last separator, so that pairs can follow."""
    return text if not text or text[-1] == "\x02" else text + "\x02"


def ended_bytes(raw: bytes) -> bytes:
    return raw if not raw or raw[-1] == 2 else raw + b"\x02"


def target_pairs(topic: str, queue_id: int) -> bytes:
    """Where a message that waits under another topic belongs."""
    return f"REAL_TOPIC\x01{topic}\x02REAL_QID\x01{queue_id}\x02".encode()


def drop_stated_origin(topic: str, properties: dict[str, str]) -> None:
    """Remove the origin that came with a message of an ordinary topic, before the broker copies it for a retry.

    Only a message in a group's retry or dead-letter topic has an origin. In any other topic a client set the property,
    for example a bridge that republishes messages with all their properties, and an erasure would go by it. The name of
    a pop-retry topic, `%RETRY%group+topic`, states the origin of all that is in it.
    """
    if not is_retry_or_dlq(topic) or (topic.startswith(RETRY_PREFIX) and "+" in topic):
        properties.pop(PROPERTY_RETRY_TOPIC, None)
        properties.pop(PROPERTY_DLQ_ORIGIN_TOPIC, None)


def properties_of(header: SendMessageHeader) -> str:
    """Before they are taken apart: a header may be as long as its frame. BrokerError when they can't be a record's."""
    text = header.properties or ""
    if len(text) > PROPERTIES_LENGTH_MAX:
        raise BrokerError(
            ResponseCode.MESSAGE_ILLEGAL,
            f"the message is illegal, its properties have {len(text)} characters, the limit is {PROPERTIES_LENGTH_MAX}",
        )
    return text
