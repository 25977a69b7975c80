"""Message properties: their names, their encoding `(name 0x01 value 0x02)*`, and the hash code of tags.

Source: RocketMQ's MessageConst, MessageDecoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_PAIR_END: Final = 0x02
PROPERTY_KEYS: Final = "KEYS"
PROPERTY_TAGS: Final = "TAGS"
PROPERTY_UNIQUE_KEY: Final = "UNIQ_KEY"
PROPERTY_WAIT: Final = "WAIT"
PROPERTY_DELAY: Final = "DELAY"
PROPERTY_RETRY_TOPIC: Final = "RETRY_TOPIC"
PROPERTY_DLQ_ORIGIN_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
PROPERTY_REAL_TOPIC: Final = "REAL_TOPIC"
PROPERTY_REAL_QUEUE_ID: Final = "REAL_QID"
PROPERTY_PRODUCER_GROUP: Final = "PGROUP"
PROPERTY_TRANSACTION_PREPARED: Final = "TRAN_MSG"
PROPERTY_RECONSUME_TIME: Final = "RECONSUME_TIME"
PROPERTY_MAX_RECONSUME_TIMES: Final = "MAX_RECONSUME_TIMES"
PROPERTY_ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
PROPERTY_CLUSTER: Final = "CLUSTER"
PROPERTY_POP_CK: Final = "POP_CK"
PROPERTY_FIRST_POP_TIME: Final = "1ST_POP_TIME"
PROPERTY_MSG_REGION: Final = "MSG_REGION"
PROPERTY_TRACE_SWITCH: Final = "TRACE_ON"


def properties_to_bytes(properties: Mapping[str, str]) -> bytes:
    """Encode properties; pairs with an empty value are left out, because RocketMQ's reader skips them."""
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items() if name and value).encode()


def bytes_to_properties(raw: bytes) -> dict[str, str]:
    """Decode properties as RocketMQ's reader does (MessageDecoder.string2messageProperties)."""
    return text_to_properties(raw.decode("utf-8", "replace"))


def text_to_properties(text: str) -> dict[str, str]:
    """Decode the properties of a request header; the last value of a repeated name counts."""
    pairs = (pair.partition("\x01") for pair in text.split("\x02"))
    return {name: value for name, _, value in pairs if name and value}


def last_value(raw: bytes, name: bytes) -> str:
    """Return the value of one property without decoding all; "" if there is none.

    `name` includes its separator 0x01.
    """
    at = raw.rfind(name)
    while at >= 0:
        if not at or raw[at - 1] == _PAIR_END:
            value_at = at + len(name)
            value_end = raw.find(_PAIR_END, value_at)
            value = raw[value_at:] if value_end < 0 else raw[value_at:value_end]
            if value:
                return value.decode("utf-8", "replace")
        at = raw.rfind(name, 0, at + len(name) - 1)
    return ""


def exact_pairs(raw: bytes) -> tuple[list[tuple[str, str]], bool]:
    """Return the pairs that a map of strings can represent exactly, in order, and whether the text ended with 0x02.

    The first value of a repeated name is returned. Pairs that are not valid UTF-8 are left out.
    """
    tail = raw.endswith(b"\x02")
    pairs: dict[str, str] = {}
    for part in (raw[:-1] if tail else raw).split(b"\x02"):
        name, separator, value = part.partition(b"\x01")
        if not separator:
            continue
        try:
            pairs.setdefault(name.decode(), value.decode())
        except UnicodeDecodeError:
            continue
    return list(pairs.items()), tail


def tags_code(tags: str | None) -> int:
    """Return Java's `String.hashCode` of the tags over UTF-16 units, a signed 32-bit integer; 0 for no tags."""
    if not tags:
        return 0
    code = 0
    if tags.isascii():
        for unit in tags.encode():
            code = (31 * code + unit) & 0xFFFFFFFF
    else:
        units = tags.encode("utf-16-be", "surrogatepass")
        for high, low in zip(units[::2], units[1::2], strict=True):
            code = (31 * code + (high << 8 | low)) & 0xFFFFFFFF
    return code - 0x100000000 if code & 0x80000000 else code
