"""The body of REGISTER_BROKER, plain or compressed.

Compressed: a zlib stream of

    i32 n, DataVersion JSON | i32 count, count x { i32 n, topic as text } | i32 n, filter servers JSON | mapping tail

with a topic as `name readQueues writeQueues perm filterType attributesJson`, the last part missing in old versions.
"""

from __future__ import annotations

import struct
import zlib

import msgspec

from neve.errors import BrokerError, ProtocolError
from neve.remoting.body import DataVersion, TopicConfig, convert, lenient_loads, loads_as
from neve.remoting.codes import ResponseCode

MAX_INFLATED = 64 * 1024 * 1024
_I32 = struct.Struct(">i")
_TEXT_FIELDS = 5


class _Wrapper(msgspec.Struct, rename="camel"):
    topic_config_table: dict[str, TopicConfig] | None = None
    data_version: DataVersion | None = None


class _Body(msgspec.Struct, rename="camel"):
    topic_config_serialize_wrapper: _Wrapper | None = None
    filter_server_list: list[str] | None = None


class Registration(msgspec.Struct):
    """What a broker tells about its topics."""

    topics: dict[str, TopicConfig] = {}
    data_version: DataVersion = DataVersion()
    filter_servers: list[str] = []


def check_crc(body: bytes, expected: int) -> None:
    """Zero means that the broker did not say."""
    if expected and zlib.crc32(body) & 0x7FFFFFFF != expected:
        raise BrokerError(ResponseCode.SYSTEM_ERROR, "crc32 not match")


def parse_registration(body: bytes, *, compressed: bool) -> Registration:
    """Either form; an empty body registers no topic."""
    if not body:
        return Registration()
    if compressed:
        return _Reader(_inflate(body)).read()
    parsed = loads_as(body, _Body)
    wrapper = parsed.topic_config_serialize_wrapper or _Wrapper()
    return Registration(
        wrapper.topic_config_table or {}, wrapper.data_version or DataVersion(), parsed.filter_server_list or []
    )


def _inflate(body: bytes) -> bytes:
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(body, MAX_INFLATED)
    except zlib.error as error:
        raise ProtocolError(f"the compressed registration is broken: {error}") from error
    if not stream.eof:
        raise ProtocolError("the compressed registration is cut off or too large")
    return data


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def read(self) -> Registration:
        version = loads_as(self._block(), DataVersion)
        count = self._number()
        topics: dict[str, TopicConfig] = {}
        for _ in range(count):
            topic = parse_topic_text(self._block().decode("utf-8", "replace"))
            topics[topic.topic_name] = topic
        filters = convert(lenient_loads(self._block()), list[str])
        return Registration(topics, version, filters)

    def _number(self) -> int:
        if self._at + 4 > len(self._data):
            raise ProtocolError("the registration ends early")
        (number,) = _I32.unpack_from(self._data, self._at)
        self._at += 4
        if number < 0:
            raise ProtocolError("a negative length in the registration")
        return int(number)

    def _block(self) -> bytes:
        size = self._number()
        block = self._data[self._at : self._at + size]
        if len(block) != size:
            raise ProtocolError("the registration ends early")
        self._at += size
        return block


def parse_topic_text(text: str) -> TopicConfig:
    """One topic in its text form."""
    parts = text.split(" ", _TEXT_FIELDS)
    try:
        name, read_queues, write_queues, perm, kind = parts[:_TEXT_FIELDS]
        topic = TopicConfig(name, int(read_queues), int(write_queues), int(perm), kind)
    except ValueError as error:
        raise ProtocolError(f"a topic's text does not fit: {error}") from error
    if len(parts) > _TEXT_FIELDS and parts[_TEXT_FIELDS]:
        topic.attributes = convert(lenient_loads(parts[_TEXT_FIELDS].encode()), dict[str, str])
    return topic
