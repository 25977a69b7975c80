"""Records to bytes and back. Source: RocketMQ's MessageExtEncoder, MessageDecoder."""

from __future__ import annotations

import ipaddress
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from neve.record.layout import (
    AFTER_STORE_HOST,
    BORN_HOST_V6,
    HEAD,
    HOST_V4,
    HOST_V6,
    I16,
    I64,
    MAGIC_V1,
    MAGIC_V2,
    PROPERTIES_LENGTH_MAX,
    RECORD_SIZE_MIN,
    STORE_HOST_V6,
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
    sys_flag &= ~(BORN_HOST_V6 | STORE_HOST_V6)
    sys_flag |= (BORN_HOST_V6 if len(born) == 20 else 0) | (STORE_HOST_V6 if len(store) == 20 else 0)
    magic = MAGIC_V1 if len(topic) <= 127 else MAGIC_V2
    topic_length = bytes((len(topic),)) if magic == MAGIC_V1 else I16.pack(len(topic))
    crc = zlib.crc32(body) & 0x7FFFFFFF if body_crc is None else body_crc
    size = 72 + len(born) + len(store) + len(body) + len(topic_length) + len(topic) + 2 + len(properties)
    head = HEAD.pack(size, magic, crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born_timestamp)
    after = AFTER_STORE_HOST.pack(reconsume_times, prepared_transaction_offset, len(body))
    parts = (head, born, I64.pack(store_timestamp), store, after, body, topic_length, topic)
    record = b"".join((*parts, I16.pack(len(properties)), properties))
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
    (size, magic, crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born_timestamp) = HEAD.unpack_from(view)
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise MalformedRecord(f"unknown magic {magic & 0xFFFFFFFF:#010x}")
    if not RECORD_SIZE_MIN <= size <= len(view):
        raise MalformedRecord(f"size {size} outside the buffer of {len(view)} bytes")
    view = view[:size]
    position = 48
    born_host, position = _unpack_host(view, position, sys_flag & BORN_HOST_V6)
    (store_timestamp,) = I64.unpack_from(need(view, position, 8))
    store_host, position = _unpack_host(view, position + 8, sys_flag & STORE_HOST_V6)
    reconsume_times, prepared, body_length = AFTER_STORE_HOST.unpack_from(need(view, position, 16))
    position += 16
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


def need(view: memoryview, position: int, length: int) -> memoryview:
    if length < 0 or position + length > len(view):
        raise MalformedRecord(f"a field of {length} bytes at {position} reaches outside the record of {len(view)}")
    return view[position : position + length]


def take(view: memoryview, position: int, length: int) -> tuple[bytes, int]:
    return bytes(need(view, position, length)), position + length


def _unpack_host(view: memoryview, position: int, is_v6: int) -> tuple[str, int]:
    packing = HOST_V6 if is_v6 else HOST_V4
    address, port = packing.unpack_from(need(view, position, packing.size))
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
    packing = HOST_V4 if address.version == 4 else HOST_V6
    return packing.pack(address.packed, host[1])
