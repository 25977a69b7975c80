"""The message record: what a producer's message looks like in the CommitLog and on the wire of a pull.

Source: RocketMQ's MessageDecoder, MessageExtEncoder, MessageSysFlag, MessageConst, MessageClientIDSetter.

All integers are signed and big endian. A record, version 1 (version 2 differs in the magic and has a
topic length of two bytes):

    pos  bytes  field                          pos  bytes  field
    0    4      totalSize, of the whole        56   8      storeTimestamp, ms
    4    4      magic                          64   8|20   storeHost, as bornHost
    8    4      bodyCRC = crc32 & 0x7FFFFFFF   72   4      reconsumeTimes
    12   4      queueId                        76   8      preparedTransactionOffset
    16   4      flag, the user's               84   4      bodyLength
    20   8      queueOffset                    88   n      body, as sent
    28   8      physicalOffset                      1|2    topicLength (2 in version 2)
    36   4      sysFlag                             n      topic
    40   8      bornTimestamp, ms                   2      propertiesLength
    48   8|20   bornHost: IPv4|IPv6, port i32       n      properties

Positions after bornHost hold for two IPv4 hosts. bodyCRC covers the stored body only.
properties = (name 0x01 value 0x02)*.
A record with magic BLANK fills the end of a CommitLog file: 4 bytes of size, 4 of magic; it is never sent.
"""

from __future__ import annotations

import ipaddress
import zlib
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MAGIC_V1: Final = -626843481
MAGIC_V2: Final = -626843477
MAGIC_BLANK: Final = -875286124

COMPRESSED: Final = 0x1
MULTI_TAGS: Final = 0x2
TRANSACTION_PREPARED: Final = 0x4
TRANSACTION_COMMIT: Final = 0x8
TRANSACTION_ROLLBACK: Final = 0xC
BORN_HOST_V6: Final = 0x10
STORE_HOST_V6: Final = 0x20
COMPRESSION_LZ4: Final = 0x100
COMPRESSION_ZSTD: Final = 0x200
COMPRESSION_ZLIB: Final = 0x300
COMPRESSION_MASK: Final = 0x700

PROPERTY_KEYS: Final = "KEYS"
PROPERTY_TAGS: Final = "TAGS"
PROPERTY_UNIQUE_KEY: Final = "UNIQ_KEY"
PROPERTY_WAIT: Final = "WAIT"
PROPERTY_DELAY: Final = "DELAY"
PROPERTY_RETRY_TOPIC: Final = "RETRY_TOPIC"
PROPERTY_REAL_TOPIC: Final = "REAL_TOPIC"
PROPERTY_REAL_QUEUE_ID: Final = "REAL_QID"
PROPERTY_PRODUCER_GROUP: Final = "PGROUP"
PROPERTY_TRANSACTION_PREPARED: Final = "TRAN_MSG"
PROPERTY_RECONSUME_TIME: Final = "RECONSUME_TIME"
PROPERTY_MAX_RECONSUME_TIMES: Final = "MAX_RECONSUME_TIMES"
PROPERTY_ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
PROPERTY_CLUSTER: Final = "CLUSTER"
PROPERTY_POP_CK: Final = "POP_CK"
PROPERTY_MSG_REGION: Final = "MSG_REGION"
PROPERTY_TRACE_SWITCH: Final = "TRACE_ON"

PROPERTIES_LENGTH_MAX: Final = 32767
RECORD_SIZE_MIN: Final = 91
INFLATED_LENGTH_MAX: Final = 64 << 20

_HEAD = Struct(">iiiiiqqiq")
_HOST_V4 = Struct(">4si")
_HOST_V6 = Struct(">16si")
_AFTER_STORE_HOST = Struct(">iqi")
_I16 = Struct(">h")
_I32 = Struct(">i")
_I64 = Struct(">q")
_BATCH_HEAD = Struct(">iiiii")
assert _HEAD.size == 48

Host = tuple[str, int]


class MalformedRecord(ValueError):
    """Bytes that are not a whole record."""


@dataclass(frozen=True, slots=True)
class MessageRecord:
    """One record, decoded. Times are ms since 1970; hosts are `ip:port`; `body` is as stored, perhaps compressed."""

    size: int
    magic: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_timestamp: int
    born_host: str
    store_timestamp: int
    store_host: str
    reconsume_times: int
    prepared_transaction_offset: int
    body: bytes
    topic: str
    properties_raw: bytes

    @property
    def properties(self) -> dict[str, str]:
        return bytes_to_properties(self.properties_raw)

    @property
    def next_reconsume_times(self) -> int:
        """What a copy that is tried again carries; a producer may have sent the highest number that an i32 has."""
        return min(self.reconsume_times + 1, 2**31 - 1)


def encode_record(
    *,
    topic: bytes,
    body: bytes | memoryview,
    properties: bytes,
    queue_id: int,
    flag: int,
    queue_offset: int,
    physical_offset: int,
    sys_flag: int,
    born_timestamp: int,
    born_host: Host,
    store_timestamp: int,
    store_host: Host,
    reconsume_times: int = 0,
    prepared_transaction_offset: int = 0,
    body_crc: int | None = None,
) -> bytes:
    """The record's bytes. The host bits of `sys_flag` are set from the hosts."""
    born, store = pack_host(born_host), pack_host(store_host)
    sys_flag &= ~(BORN_HOST_V6 | STORE_HOST_V6)
    sys_flag |= (BORN_HOST_V6 if len(born) == 20 else 0) | (STORE_HOST_V6 if len(store) == 20 else 0)
    magic = MAGIC_V1 if len(topic) <= 127 else MAGIC_V2
    topic_length = bytes((len(topic),)) if magic == MAGIC_V1 else _I16.pack(len(topic))
    crc = zlib.crc32(body) & 0x7FFFFFFF if body_crc is None else body_crc
    size = 72 + len(born) + len(store) + len(body) + len(topic_length) + len(topic) + 2 + len(properties)
    head = _HEAD.pack(size, magic, crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born_timestamp)
    after = _AFTER_STORE_HOST.pack(reconsume_times, prepared_transaction_offset, len(body))
    parts = (head, born, _I64.pack(store_timestamp), store, after, body, topic_length, topic)
    record = b"".join((*parts, _I16.pack(len(properties)), properties))
    assert len(record) == size
    return record


def reencode_record(
    record: MessageRecord, *, topic: str, properties: Mapping[str, str], queue_id: int | None = None
) -> bytes:
    """The record as it is, but for the topic and properties (and queue) under which somebody is to see it.

    Properties that became too long for a record are left as they were.
    """
    return encode_record(
        topic=topic.encode(),
        body=record.body,
        properties=fitting_properties(record, properties),
        queue_id=record.queue_id if queue_id is None else queue_id,
        flag=record.flag,
        queue_offset=record.queue_offset,
        physical_offset=record.physical_offset,
        sys_flag=record.sys_flag,
        born_timestamp=record.born_timestamp,
        born_host=parse_host(record.born_host),
        store_timestamp=record.store_timestamp,
        store_host=parse_host(record.store_host),
        reconsume_times=record.reconsume_times,
        prepared_transaction_offset=record.prepared_transaction_offset,
        body_crc=record.body_crc,
    )


def fitting_properties(record: MessageRecord, properties: Mapping[str, str]) -> bytes:
    """The properties for a copy of the record, or its own where what was added to them does not fit."""
    raw = properties_to_bytes(properties)
    return raw if len(raw) <= PROPERTIES_LENGTH_MAX else record.properties_raw


def decode_record(buffer: bytes | bytearray | memoryview, offset: int = 0) -> MessageRecord:
    """The record that begins at `offset`.

    Raises:
        MalformedRecord: a length reaches outside the record, or the record outside the buffer.
    """
    view = memoryview(buffer)[offset:]
    if len(view) < RECORD_SIZE_MIN:
        raise MalformedRecord(f"{len(view)} bytes are too few for a record")
    (size, magic, crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born_timestamp) = _HEAD.unpack_from(
        view
    )
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise MalformedRecord(f"unknown magic {magic & 0xFFFFFFFF:#010x}")
    if not RECORD_SIZE_MIN <= size <= len(view):
        raise MalformedRecord(f"size {size} outside the buffer of {len(view)} bytes")
    view = view[:size]
    position = 48
    born_host, position = _unpack_host(view, position, sys_flag & BORN_HOST_V6)
    (store_timestamp,) = _I64.unpack_from(_need(view, position, 8))
    store_host, position = _unpack_host(view, position + 8, sys_flag & STORE_HOST_V6)
    reconsume_times, prepared, body_length = _AFTER_STORE_HOST.unpack_from(_need(view, position, 16))
    position += 16
    body, position = _take(view, position, body_length)
    topic_length, width = (
        (_need(view, position, 1)[0], 1) if magic == MAGIC_V1 else (_I16.unpack_from(_need(view, position, 2))[0], 2)
    )
    topic, position = _take(view, position + width, topic_length)
    properties_length = _I16.unpack_from(_need(view, position, 2))[0]
    properties, position = _take(view, position + 2, properties_length)
    if position != size:
        raise MalformedRecord(f"fields end at {position}, the record at {size}")
    return MessageRecord(
        size=size,
        magic=magic,
        body_crc=crc,
        queue_id=queue_id,
        flag=flag,
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        sys_flag=sys_flag,
        born_timestamp=born_timestamp,
        born_host=born_host,
        store_timestamp=store_timestamp,
        store_host=store_host,
        reconsume_times=reconsume_times,
        prepared_transaction_offset=prepared,
        body=body,
        topic=topic.decode("utf-8", "surrogateescape"),
        properties_raw=properties,
    )


def iter_records(buffer: bytes | bytearray | memoryview) -> Iterator[MessageRecord]:
    """The records that stand one after another in a pull's body."""
    view, position = memoryview(buffer), 0
    while position < len(view):
        record = decode_record(view, position)
        yield record
        position += record.size


def _need(view: memoryview, position: int, length: int) -> memoryview:
    if length < 0 or position + length > len(view):
        raise MalformedRecord(f"a field of {length} bytes at {position} reaches outside the record of {len(view)}")
    return view[position : position + length]


def _take(view: memoryview, position: int, length: int) -> tuple[bytes, int]:
    return bytes(_need(view, position, length)), position + length


def _unpack_host(view: memoryview, position: int, is_v6: int) -> tuple[str, int]:
    packing = _HOST_V6 if is_v6 else _HOST_V4
    address, port = packing.unpack_from(_need(view, position, packing.size))
    text = str(ipaddress.IPv6Address(address)) if is_v6 else ".".join(map(str, address))
    return (f"[{text}]:{port}" if is_v6 else f"{text}:{port}"), position + packing.size


def parse_host(text: str) -> Host:
    """A decoded record's `ip:port`."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def pack_host(host: Host) -> bytes:
    """The 8 or 20 bytes of a host; an IPv4 address inside IPv6 is stored as IPv4."""
    address = ipaddress.ip_address(host[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    packing = _HOST_V4 if address.version == 4 else _HOST_V6
    return packing.pack(address.packed, host[1])


# ---- properties --------------------------------------------------------------------------------------------


def properties_to_bytes(properties: Mapping[str, str]) -> bytes:
    """`name 0x01 value 0x02` for each pair; one with an empty value is left out: RocketMQ's reader skips it."""
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items() if name and value).encode()


def bytes_to_properties(raw: bytes) -> dict[str, str]:
    """The pairs that RocketMQ's reader sees (MessageDecoder.string2messageProperties)."""
    pairs = (pair.partition("\x01") for pair in raw.decode("utf-8", "replace").split("\x02"))
    return {name: value for name, separator, value in pairs if name and separator and value}


def tags_code(tags: str | None) -> int:
    """Java's `String.hashCode` of the tags: over UTF-16 units, wrapped to a signed 32-bit integer; 0 for none."""
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


# ---- bodies ------------------------------------------------------------------------------------------------


def inflate(body: bytes, sys_flag: int, limit: int = INFLATED_LENGTH_MAX) -> bytes:
    """The body as the producer had it.

    Raises:
        ValueError: the body is damaged, or longer than `limit` bytes when inflated.
        ModuleNotFoundError: the body needs `lz4` or `zstandard`, and that is not installed.
    """
    if not sys_flag & COMPRESSED:
        return body
    codec = sys_flag & COMPRESSION_MASK
    inflater = {COMPRESSION_LZ4: _inflate_lz4, COMPRESSION_ZSTD: _inflate_zstd}.get(codec, _inflate_zlib)
    inflated = inflater(body, limit + 1)
    if len(inflated) > limit:
        raise ValueError(f"the body is longer than {limit} bytes when inflated")
    return inflated


def _inflate_zlib(body: bytes, length_max: int) -> bytes:
    try:
        return zlib.decompressobj().decompress(body, length_max)
    except zlib.error as error:
        raise ValueError(f"the body is not what its sysFlag says: {error}") from error


def _inflate_lz4(body: bytes, length_max: int) -> bytes:
    import lz4.frame  # noqa: PLC0415 - an optional library

    try:
        return bytes(lz4.frame.LZ4FrameDecompressor().decompress(body, max_length=length_max))
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"the body is not what its sysFlag says: {error}") from error


def _inflate_zstd(body: bytes, length_max: int) -> bytes:
    import zstandard  # noqa: PLC0415 - an optional library

    try:
        # `decompress(max_output_size=…)` obeys the size that the frame declares; a stream obeys us.
        return zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body).read(length_max)
    except zstandard.ZstdError as error:
        raise ValueError(f"the body is not what its sysFlag says: {error}") from error


def encode_batch(messages: Iterable[tuple[bytes, int, bytes]]) -> bytes:
    """The body of SEND_BATCH_MESSAGE from (body, flag, properties): size, magic 0, crc 0, flag, body, properties."""
    parts: list[bytes] = []
    for body, flag, properties in messages:
        size = _BATCH_HEAD.size + len(body) + 2 + len(properties)
        parts += (_BATCH_HEAD.pack(size, 0, 0, flag, len(body)), body, _I16.pack(len(properties)), properties)
    return b"".join(parts)


def decode_batch(blob: bytes | memoryview) -> list[tuple[int, bytes, bytes]]:
    """(flag, body, properties) of each message in a batch.

    Raises:
        MalformedRecord: a length does not fit.
    """
    view, position = memoryview(blob), 0
    messages: list[tuple[int, bytes, bytes]] = []
    while position < len(view):
        size, _magic, _crc, flag, body_length = _BATCH_HEAD.unpack_from(_need(view, position, _BATCH_HEAD.size))
        body, at = _take(view, position + _BATCH_HEAD.size, body_length)
        (properties_length,) = _I16.unpack_from(_need(view, at, 2))
        properties, at = _take(view, at + 2, properties_length)
        if at != position + size:
            raise MalformedRecord(f"a batched message says {size} bytes and has {at - position}")
        messages.append((flag, body, properties))
        position = at
    return messages


# ---- ids ---------------------------------------------------------------------------------------------------


def offset_msg_id(host: Host, physical_offset: int) -> str:
    """RocketMQ's offsetMsgId: where the record lies, in upper-case hex (32 characters for IPv4, 56 for IPv6)."""
    return (pack_host(host) + _I64.pack(physical_offset)).hex().upper()


def parse_offset_msg_id(msg_id: str) -> tuple[str, int, int]:
    """(ip, port, physical offset) of an offsetMsgId.

    Raises:
        ValueError: it is none.
    """
    raw = bytes.fromhex(msg_id)
    if len(raw) not in (16, 28):
        raise ValueError(f"{msg_id!r} is no offsetMsgId")
    address, rest = raw[: len(raw) - 12], raw[len(raw) - 12 :]
    return str(ipaddress.ip_address(address)), _I32.unpack_from(rest)[0], _I64.unpack_from(rest, 4)[0]


class UniqueIdGenerator:
    """Makes UNIQ_KEYs in upper-case hex: ip, pid i16, this generator's salt i32, ms since it began i32, counter i16."""

    def __init__(self, host_ip: str, pid: int, salt: int, now_ms: int) -> None:
        address = pack_host((host_ip, 0))[:-4]
        self._prefix = (
            (address + (pid & 0xFFFF).to_bytes(2, "big") + (salt & 0xFFFFFFFF).to_bytes(4, "big")).hex().upper()
        )
        self._begin_ms = now_ms
        self._counter = 0

    def next(self, now_ms: int) -> str:
        self._counter = (self._counter + 1) & 0xFFFF
        return f"{self._prefix}{(now_ms - self._begin_ms) & 0xFFFFFFFF:08X}{self._counter:04X}"
