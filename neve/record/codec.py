"""Records to bytes and back. Source: RocketMQ's MessageExtEncoder, MessageDecoder."""

from __future__ import annotations

import ipaddress
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from neve.record.layout import (
    HEADS,
    HOST_FLAGS,
    HOST_V4,
    HOST_V4_SIZE,
    HOST_V6,
    I16,
    I32,
    MAGIC_V1,
    MAGIC_V2,
    PROPERTIES_LENGTH_MAX,
    RECORD_SIZE_MIN,
    SIZE_AND_MAGIC,
    SYS_FLAG_AT,
    host_flags,
    host_sizes,
    struct_without,
    topic_field,
)
from neve.record.properties import bytes_to_properties, properties_to_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
    sys_flag = sys_flag & ~HOST_FLAGS | host_flags(len(born), len(store))
    magic, topic_part = topic_field(topic)
    crc = zlib.crc32(body) & 0x7FFFFFFF if body_crc is None else body_crc
    head = HEADS[len(born), len(store)]
    size = head.size + len(body) + len(topic_part) + 2 + len(properties)
    fixed = head.pack(
        size, magic, crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born_timestamp, born,
        store_timestamp, store, reconsume_times, prepared_transaction_offset, len(body),
    )  # fmt: skip
    record = b"".join((fixed, body, topic_part, I16.pack(len(properties)), properties))
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
    size, magic = SIZE_AND_MAGIC.unpack_from(view)
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise MalformedRecord(f"unknown magic {magic & 0xFFFFFFFF:#010x}")
    if not RECORD_SIZE_MIN <= size <= len(view):
        raise MalformedRecord(f"size {size} outside the buffer of {len(view)} bytes")
    view = view[:size]
    (sys_flag,) = I32.unpack_from(view, SYS_FLAG_AT)
    head = HEADS[host_sizes(sys_flag)]
    (
        _, _, crc, queue_id, flag, queue_offset, physical_offset, _, born_timestamp, born_host, store_timestamp,
        store_host, reconsume_times, prepared, body_length,
    ) = head.unpack_from(need(view, 0, head.size))  # fmt: skip
    position = head.size
    body, position = take(view, position, body_length)
    topic_length, width = (
        (need(view, position, 1)[0], 1) if magic == MAGIC_V1 else (I16.unpack_from(need(view, position, 2))[0], 2)
    )
    topic, position = take(view, position + width, topic_length)
    properties_length = I16.unpack_from(need(view, position, 2))[0]
    properties, position = take(view, position + 2, properties_length)
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
        born_host=host_text(born_host),
        store_timestamp=store_timestamp,
        store_host=host_text(store_host),
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


class StoredBody(NamedTuple):
    """What a reader of bodies looks at; `body` is as stored, perhaps compressed."""

    queue_offset: int
    sys_flag: int
    store_timestamp: int
    body: bytes


def iter_bodies(buffer: bytes) -> Iterator[StoredBody]:
    """As `iter_records`, for who wants no more of them than that: a tenth of the time.

    Raises:
        MalformedRecord: a length reaches outside the record, or the record outside the buffer.
    """
    position, end = 0, len(buffer)
    while position < end:
        if end - position < RECORD_SIZE_MIN:
            raise MalformedRecord(f"{end - position} bytes are too few for a record")
        (sys_flag,) = I32.unpack_from(buffer, position + SYS_FLAG_AT)
        head = _SEEN[host_sizes(sys_flag)]
        if end - position < head.size:
            raise MalformedRecord(f"{end - position} bytes are too few for a record of these hosts")
        size, magic, offset, stored_at, length = head.unpack_from(buffer, position)
        if magic not in (MAGIC_V1, MAGIC_V2):
            raise MalformedRecord(f"unknown magic {magic & 0xFFFFFFFF:#010x}")
        if not RECORD_SIZE_MIN <= size <= end - position:
            raise MalformedRecord(f"size {size} outside the buffer of {end - position} bytes")
        begin = position + head.size
        if not 0 <= length <= size - head.size:
            raise MalformedRecord(f"a body of {length} bytes in a record of {size}")
        yield StoredBody(offset, sys_flag, stored_at, buffer[begin : begin + length])
        position += size


_UNSEEN = (
    "body_crc", "queue_id", "flag", "physical_offset", "sys_flag", "born_timestamp", "born_host", "store_host",
    "reconsume_times", "prepared_transaction_offset",
)  # fmt: skip
_SEEN = {(born, store): struct_without(*_UNSEEN, born=born, store=store) for born, store in HEADS}


def need(view: memoryview, position: int, length: int) -> memoryview:
    """A part of a record. Raises MalformedRecord where it reaches outside."""
    if length < 0 or position + length > len(view):
        raise MalformedRecord(f"a field of {length} bytes at {position} reaches outside the record of {len(view)}")
    return view[position : position + length]


def take(view: memoryview, position: int, length: int) -> tuple[bytes, int]:
    """A field's bytes and where the next one begins. Raises MalformedRecord."""
    return bytes(need(view, position, length)), position + length


def raw_properties(record: memoryview) -> bytes:
    """The properties of a whole, sound record, and nothing else of it taken apart."""
    (sys_flag,) = I32.unpack_from(record, SYS_FLAG_AT)
    at = HEADS[host_sizes(sys_flag)].size
    (body_length,) = I32.unpack_from(record, at - 4)
    at += body_length
    at += 2 + I16.unpack_from(record, at)[0] if SIZE_AND_MAGIC.unpack_from(record)[1] == MAGIC_V2 else 1 + record[at]
    (length,) = I16.unpack_from(record, at)
    return bytes(record[at + 2 : at + 2 + length])


@lru_cache(maxsize=1024)
def host_text(packed: bytes) -> str:
    """`ip:port` of a host's 8 or 20 bytes, an IPv6 address in brackets."""
    if len(packed) == HOST_V4_SIZE:
        address, port = HOST_V4.unpack(packed)
        return f"{'.'.join(map(str, address))}:{port}"
    address, port = HOST_V6.unpack(packed)
    return f"[{ipaddress.IPv6Address(address)}]:{port}"


def parse_host(text: str) -> Host:
    """A decoded record's `ip:port`."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def pack_host(host: Host) -> bytes:
    """The 8 or 20 bytes of a host; an IPv4 address inside IPv6 is stored as IPv4."""
    address = ipaddress.ip_address(host[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    packing = HOST_V4 if address.version == 4 else HOST_V6
    return packing.pack(address.packed, host[1])
