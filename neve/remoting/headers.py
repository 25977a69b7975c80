"""Typed header fields, decoded from a command's ext map of strings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec

from neve.errors import BrokerError
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.names import DEFAULT_TOPIC
from neve.remoting.signature import ACCESS_KEY, SIGNATURE

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
HeaderT = TypeVar("HeaderT", bound=msgspec.Struct)

_MAX_DIGITS = 20


class BadHeader(BrokerError):
    """A field is missing or of the wrong type; the request fails, but the connection continues."""

    def __init__(self, remark: str) -> None:
        super().__init__(ResponseCode.SYSTEM_ERROR, remark)


def require_str(ext: Mapping[str, str], name: str) -> str:
    """Return a required field, which may be empty. Raises BadHeader."""
    value = ext.get(name)
    if value is None:
        raise BadHeader(f"the custom field <{name}> is null")
    return value


def require_int(ext: Mapping[str, str], name: str) -> int:
    """Return a required 64-bit number. Raises BadHeader."""
    return _to_int(name, require_str(ext, name))


def optional_int(ext: Mapping[str, str], name: str, default: int) -> int:
    """Return a 64-bit number, or the default if the field is missing or empty. Raises BadHeader."""
    value = ext.get(name)
    return _to_int(name, value) if value else default


def optional_bool(ext: Mapping[str, str], name: str, default: bool = False) -> bool:
    """Return a boolean as Java decodes it: "true" in any case is true, everything else is false."""
    value = ext.get(name)
    return value.lower() == "true" if value is not None else default


def _to_int(name: str, value: str) -> int:
    try:
        number = int(value) if len(value) <= _MAX_DIGITS else None
    except ValueError:
        number = None
    if number is None or not -(2**63) <= number < 2**63:
        raise BadHeader(f"the custom field <{name}> is no 64-bit number")
    return number


def parse_header(ext: Mapping[str, str], header: type[HeaderT]) -> HeaderT:
    """Decode a header struct from the ext map; unknown fields are ignored. Raises BadHeader."""
    try:
        return msgspec.convert(ext, header, strict=False)
    except msgspec.ValidationError as error:
        raise BadHeader(f"the custom header does not fit: {error}") from error


class SendMessageHeader(msgspec.Struct, rename="camel", gc=False):
    """Fields of SEND_MESSAGE (10) and SEND_REPLY_MESSAGE (324), with long names."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int32
    queue_id: Int32
    sys_flag: Int32
    born_timestamp: Int64
    flag: Int32
    properties: str | None = None
    reconsume_times: Int32 | None = None
    unit_mode: bool | None = None
    max_reconsume_times: Int32 | None = None
    batch: bool | None = None


class _SendMessageHeaderV2(SendMessageHeader, gc=False):
    """The fields of a send with the one-letter names of codes 310, 320 and 325."""

    producer_group: str = msgspec.field(name="a")
    topic: str = msgspec.field(name="b")
    default_topic: str = msgspec.field(name="c")
    default_topic_queue_nums: Int32 = msgspec.field(name="d")
    queue_id: Int32 = msgspec.field(name="e")
    sys_flag: Int32 = msgspec.field(name="f")
    born_timestamp: Int64 = msgspec.field(name="g")
    flag: Int32 = msgspec.field(name="h")
    properties: str | None = msgspec.field(name="i", default=None)
    reconsume_times: Int32 | None = msgspec.field(name="j", default=None)
    unit_mode: bool | None = msgspec.field(name="k", default=None)
    max_reconsume_times: Int32 | None = msgspec.field(name="l", default=None)
    batch: bool | None = msgspec.field(name="m", default=None)


def send_v2_fields(
    *,
    group: str,
    topic: str,
    default_topic_queues: int,
    broker_name: str,
    queue_id: int,
    sys_flag: int,
    born_timestamp: int,
    flag: int,
    properties: str,
    reconsume_times: int = 0,
    max_reconsume_times: int | None = None,
    is_batch: bool = False,
) -> dict[str, str]:
    """Encode a send header as clients do; `max_reconsume_times` is set only for a message sent back."""
    fields = {
        "a": group,
        "b": topic,
        "c": DEFAULT_TOPIC,
        "d": str(default_topic_queues),
        "e": str(queue_id),
        "f": str(sys_flag),
        "g": str(born_timestamp),
        "h": str(flag),
        "i": properties,
        "j": str(reconsume_times),
        "k": "false",
        "m": "true" if is_batch else "false",
        "n": broker_name,
    }
    if max_reconsume_times is not None:
        fields["l"] = str(max_reconsume_times)
    return fields


class SendV2Frame(msgspec.Struct, gc=False):
    """The whole JSON header of SEND_MESSAGE_V2 (310) as far as an append needs it: decoded in one step."""

    flag: Int32
    opaque: Int32
    header: _SendMessageHeaderV2 = msgspec.field(name="extFields")


# Numbers as clients format them; a missing one is empty. A lookup costs half as much as formatting.
_DECIMAL: dict[int | None, str] = {None: ""} | {number: str(number) for number in range(1024)}


class _AnyDecimal(dict[int | None, str]):
    """A table of all numbers; a lookup in a plain dict takes half the time."""

    def __missing__(self, number: int | None) -> str:
        return str(number)


_ANY_DECIMAL = _AnyDecimal(_DECIMAL)
_TRUTH = {None: "", False: "false", True: "true"}


class SignedSendHeaderV2(_SendMessageHeaderV2, gc=False, forbid_unknown_fields=True):
    """All fields of a signed SEND_MESSAGE_V2 of common clients; a request with further fields is rejected."""

    access_key: str = msgspec.field(name=ACCESS_KEY, default="")
    signature: str = msgspec.field(name=SIGNATURE, default="")
    broker_name: str = msgspec.field(name="n", default="")


class SignedSendV2Frame(msgspec.Struct, gc=False):
    """The header of a signed `SendV2Frame`."""

    flag: Int32
    opaque: Int32
    header: SignedSendHeaderV2 = msgspec.field(name="extFields")


def covered(headers: list[SignedSendHeaderV2]) -> list[str]:
    """Return the texts that the signatures of sends cover beside their bodies: the values in the order of their names.

    Values are formatted as Java does. The signature of a client that formats a value differently does not match.
    """
    try:
        return _covered(headers, _DECIMAL)
    except KeyError:
        return _covered(headers, _ANY_DECIMAL)


def _covered(headers: list[SignedSendHeaderV2], decimal: dict[int | None, str]) -> list[str]:
    truth = _TRUTH
    return [
        f"{of.access_key}{of.producer_group}{of.topic}{of.default_topic}{decimal[of.default_topic_queue_nums]}"
        f"{decimal[of.queue_id]}{decimal[of.sys_flag]}{of.born_timestamp}{decimal[of.flag]}{of.properties or ''}"
        f"{decimal[of.reconsume_times]}{truth[of.unit_mode]}{decimal[of.max_reconsume_times]}{truth[of.batch]}"
        f"{of.broker_name}"
        for of in headers
    ]


class PullMessageHeader(msgspec.Struct, rename="camel"):
    """Fields of PULL_MESSAGE (11) and LITE_PULL_MESSAGE (361)."""

    consumer_group: str
    topic: str
    queue_id: Int32
    queue_offset: Int64
    max_msg_nums: Int32
    sys_flag: Int32
    commit_offset: Int64 = 0
    suspend_timeout_millis: Int64 = 0
    sub_version: Int64 = 0
    subscription: str | None = None
    expression_type: str | None = None
    max_msg_bytes: Int32 | None = None


_LONG_NAMES = frozenset((RequestCode.SEND_MESSAGE.value, RequestCode.SEND_REPLY_MESSAGE.value))


def parse_send_header(code: int, ext: Mapping[str, str]) -> SendMessageHeader:
    """Decode the header of any of the five send codes. Raises BadHeader."""
    return parse_header(ext, SendMessageHeader if code in _LONG_NAMES else _SendMessageHeaderV2)
