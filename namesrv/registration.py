"""The body of REGISTER_BROKER, plain or compressed.

Compressed: a zlib stream of

    i32 n, DataVersion JSON | i32 count, count x { i32 n, topic as text } | i32 n, filter servers JSON | mapping tail

with a topic as `name readQueues writeQueues perm filterType attributesJson`; old versions lack the last part.
"""

from __future__ import annotations

import struct
import zlib

import msgspec

from neve.errors import BrokerError, ProtocolError
from neve.remoting.body import DataVersion, NodeBudget, TopicConfig, loads_as
from neve.remoting.codes import ResponseCode
from neve.remoting.frame import MAX_FRAME

MAX_INFLATED = MAX_FRAME  # the plain form of a registration fits in a frame
# JSON nodes per topic: its fields, their map, and some attributes.
_NODES_OF_TOPIC = 16
_I32 = struct.Struct(">i")
_TEXT_FIELDS = 5
_SMALL_DIGITS = 10


class _Wrapper(msgspec.Struct, rename="camel"):
    topic_config_table: dict[str, TopicConfig] | None = None
    data_version: DataVersion | None = None


class _Body(msgspec.Struct, rename="camel"):
    topic_config_serialize_wrapper: _Wrapper | None = None
    filter_server_list: list[str] | None = None


class BrokerRegistration(msgspec.Struct):
    """The topics of a broker, with their version."""

    topics: dict[str, TopicConfig] = {}
    data_version: DataVersion = DataVersion()
    filter_servers: list[str] = []


def check_crc(body: bytes, expected: int) -> None:
    """Raise BrokerError for a wrong checksum; zero means that the broker sent none."""
    if expected and zlib.crc32(body) & 0x7FFFFFFF != expected:
        raise BrokerError(ResponseCode.SYSTEM_ERROR, "crc32 not match")


def parse_registration(body: bytes, *, compressed: bool, max_topics: int) -> BrokerRegistration:
    """Parse either form; an empty body has no topics. Raises BrokerError for more than `max_topics`, ProtocolError."""
    if not body:
        return BrokerRegistration()
    budget = NodeBudget((max_topics + 1) * _NODES_OF_TOPIC)
    if compressed:
        return _Reader(_inflate(body), budget, max_topics).read()
    parsed = loads_as(body, _Body, budget)
    wrapper = parsed.topic_config_serialize_wrapper or _Wrapper()
    topics = wrapper.topic_config_table or {}
    _check_count(len(topics), max_topics)
    return BrokerRegistration(topics, wrapper.data_version or DataVersion(), parsed.filter_server_list or [])


def _check_count(topics: int, max_topics: int) -> None:
    if topics > max_topics:
        remark = f"register broker failed: {topics} topics, maxTopicsPerBroker is {max_topics}"
        raise BrokerError(ResponseCode.SYSTEM_ERROR, remark)


def _inflate(body: bytes) -> bytes:
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(body, MAX_INFLATED)
    except zlib.error as error:
        raise ProtocolError(f"invalid compressed registration: {error}") from error
    if not stream.eof:
        raise ProtocolError("the compressed registration is truncated or too large")
    return data


class _Reader:
    def __init__(self, data: bytes, budget: NodeBudget, max_topics: int) -> None:
        self._data = data
        self._budget, self._max_topics = budget, max_topics
        self._at = 0

    def read(self) -> BrokerRegistration:
        version = loads_as(self._block(), DataVersion, self._budget)
        count = self._number()
        _check_count(count, self._max_topics)
        topics: dict[str, TopicConfig] = {}
        for _ in range(count):
            topic = parse_topic_text(self._block().decode("utf-8", "replace"), self._budget)
            topics[topic.topic_name] = topic
        filters = loads_as(self._block(), list[str], self._budget)
        return BrokerRegistration(topics, version, filters)

    def _number(self) -> int:
        if self._at + 4 > len(self._data):
            raise ProtocolError("the registration ends early")
        (number,) = _I32.unpack_from(self._data, self._at)
        self._at += 4
        if number < 0:
            raise ProtocolError("the registration contains a negative length")
        return int(number)

    def _block(self) -> bytes:
        size = self._number()
        block = self._data[self._at : self._at + size]
        if len(block) != size:
            raise ProtocolError("the registration ends early")
        self._at += size
        return block


def parse_topic_text(text: str, budget: NodeBudget) -> TopicConfig:
    """Parse the text form of a topic."""
    parts = text.split(" ", _TEXT_FIELDS)
    budget.spend(1)
    try:
        name, read_queues, write_queues, perm, kind = parts[:_TEXT_FIELDS]
        topic = TopicConfig(name, _small(read_queues), _small(write_queues), _small(perm), kind)
    except ValueError as error:
        raise ProtocolError(f"invalid topic in a registration: {error}") from error
    if len(parts) > _TEXT_FIELDS and parts[_TEXT_FIELDS]:
        topic.attributes = loads_as(parts[_TEXT_FIELDS].encode(), dict[str, str], budget)
    return topic


def _small(text: str) -> int:
    number = int(text) if len(text) < _SMALL_DIGITS else -1
    if number < 0:
        raise ValueError(f"expected a number of queues or a permission, got {text[:_SMALL_DIGITS]!r}")
    return number
