"""Bodies in the JSON dialect of RocketMQ's Java side.

It is JSON with three extensions: unquoted numbers as map keys `{0:"addr"}`, objects as map keys
`{{"brokerName":"b","queueId":0,"topic":"t"}:{...}}`, and `{"$ref":"$.path"}` for an object that was written before.
Strings may be in single quotes, and keys may be bare words.

Any peer may send a body, so decoding is bounded in advance: in values (`NodeBudget`, references counted each time they
are followed), in depth, and in the range of numbers (64 bits).

Structs that occur by the ten thousand are declared `gc=False`: they contain no reference cycles, and the garbage
collector does not traverse them while a body is decoded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from neve.errors import ProtocolError
from neve.remoting.headers import Int32, Int64

MAX_DEPTH = 32
# The default limit of values in a body: 20,000 topics, or the locks of 50,000 queues.
MAX_NODES = 200_000
# The limit for a response that a client requested: the offsets of a hundred thousand queues in the dialect.
ANSWER_NODES = 16_000_000
# The dialect is decoded in Python: one of its values costs as much as this many decoded by msgspec.
_DIALECT_COST = 8
_INT64 = range(-(2**63), 2**63)
T = TypeVar("T")


class MessageQueue(NamedTuple):
    """One queue of one broker; the key of offset tables."""

    topic: str
    broker_name: str
    queue_id: int


class DataVersion(msgspec.Struct, frozen=True, rename="camel"):
    """The version of a table; equal versions mean equal tables."""

    state_version: Int64 = 0
    timestamp: Int64 = 0
    counter: Int64 = 0


class TopicConfig(msgspec.Struct, rename="camel", gc=False):
    """The configuration of a topic on a broker."""

    topic_name: str
    read_queue_nums: Int32 = 16
    write_queue_nums: Int32 = 16
    perm: Int32 = 6
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: Int32 = 0
    order: bool = False
    attributes: dict[str, str] = {}


class QueueData(msgspec.Struct, rename="camel", gc=False):
    """A topic's queues on one broker."""

    broker_name: str
    read_queue_nums: Int32 = 0
    write_queue_nums: Int32 = 0
    perm: Int32 = 6
    topic_sys_flag: Int32 = 0


class BrokerData(msgspec.Struct, rename="camel"):
    """The addresses of a broker by id; id 0 is the master."""

    cluster: str
    broker_name: str
    broker_addrs: dict[Int64, str] = {}
    enable_acting_master: bool = False
    zone_name: str | None = None


class TopicRouteData(msgspec.Struct, rename="camel"):
    """The route of a topic: its queues and brokers."""

    queue_datas: list[QueueData] = []
    broker_datas: list[BrokerData] = []
    filter_server_table: dict[str, list[str]] = {}
    order_topic_conf: str | None = None


class SubscriptionData(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """A consumer's subscription to one topic; without tag hashes it matches all messages."""

    topic: str
    sub_string: str = "*"
    tags_set: tuple[str, ...] = ()
    code_set: tuple[Int64, ...] = ()
    sub_version: Int64 = 0
    expression_type: str | None = "TAG"
    class_filter_mode: bool = False


class ConsumerData(msgspec.Struct, rename="camel"):
    """A consumer group's entry in a heartbeat."""

    group_name: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    subscription_data_set: list[SubscriptionData] = []
    unit_mode: bool = False


class ProducerData(msgspec.Struct, rename="camel"):
    """A producer group's entry in a heartbeat."""

    group_name: str


class HeartbeatData(msgspec.Struct, rename="camel"):
    """The client of a connection and its groups."""

    client_id: str = msgspec.field(name="clientID")
    producer_data_set: list[ProducerData] = []
    consumer_data_set: list[ConsumerData] = []
    heartbeat_fingerprint: Int64 = 0
    without_sub: bool = False


def convert(value: object, kind: type[T]) -> T:
    """Convert a decoded body to a type; strings are converted to numbers as needed. Raises ProtocolError."""
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the body does not fit: {error}") from error


class NodeBudget:
    """The number of values that may still be decoded; the parts of one body can share a budget."""

    __slots__ = ("left",)

    def __init__(self, nodes: int = MAX_NODES) -> None:
        self.left = nodes

    def spend(self, nodes: int) -> None:
        """Take values from the budget before they are decoded. Raises ProtocolError if it is exceeded."""
        self.left -= nodes
        if self.left < 0:
            raise ProtocolError("the body holds too many values")


def loads_as(data: bytes | memoryview, kind: type[T], budget: NodeBudget | None = None) -> T:
    """Decode a body of the dialect into a type that bounds each of its numbers. Raises ProtocolError."""
    raw, budget = bytes(data), budget or NodeBudget()
    if not _refers(raw):
        budget.spend(_nodes_at_most(raw))
        try:
            return msgspec.json.decode(raw, type=kind, strict=False)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"the body does not fit: {error}") from error
        except _NOT_STRICT:
            return convert(_read_dialect(raw, budget), kind)
    return convert(_read_dialect(raw, budget), kind)


def lenient_loads(data: bytes | memoryview, budget: NodeBudget | None = None) -> Any:
    """Decode strict JSON or the dialect. Raises ProtocolError.

    Object keys become MessageQueue or tuples of pairs; bare number keys become ints.
    """
    raw, budget = bytes(data), budget or NodeBudget()
    if not _refers(raw):
        if _nodes_at_most(raw) > budget.left:
            raise ProtocolError("the body holds too many values")
        try:
            value = msgspec.json.decode(raw)
        except _NOT_STRICT:
            return _read_dialect(raw, budget)
        return _checked(value, budget)
    return _read_dialect(raw, budget)


_NOT_STRICT = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _refers(raw: bytes) -> bool:
    """Return whether a body may contain references; the search for `$` alone is ten times as fast."""
    return b"$" in raw and b'"$ref"' in raw


def _nodes_at_most(raw: bytes) -> int:
    """Return an upper bound of the values: each but the first follows one of these characters."""
    return 1 + raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def _read_dialect(raw: bytes, budget: NodeBudget) -> Any:
    try:
        return _Parser(raw.decode(), budget).parse()
    except (ValueError, IndexError) as error:
        raise ProtocolError(f"the body is no JSON: {error}") from error


def _checked(root: Any, budget: NodeBudget) -> Any:
    """Check an untyped value level by level: its size with references followed, its depth, its numbers."""
    budget.spend(1)
    level = [root]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is int and value not in _INT64:
                raise ProtocolError("a number in the body has more than 64 bits")
            if kind is dict or kind is list:
                budget.spend(len(value))
                below.extend(value.values() if kind is dict else value)
        if not below:
            return root
        level = below
    raise ProtocolError("the body is nested too deeply, or refers to itself")


_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"-?\d{1,40}(\.\d{1,40})?([eE][+-]?\d{1,4})?")
_WORD = re.compile(r"[A-Za-z_$][\w$.]{0,254}")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*+)"', re.DOTALL)
_SINGLE = re.compile(r"'((?:[^'\\]|\\.)*+)'", re.DOTALL)
_LITERALS = {"true": True, "false": False, "null": None, "NaN": None}
_PATH_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


class _Parser:
    """A recursive parser of one text, bounded in depth and in values."""

    def __init__(self, text: str, budget: NodeBudget) -> None:
        self._text = text
        self._budget = budget
        self._at = 0
        self._references: list[tuple[Any, Any, str]] = []  # container, key, path

    def parse(self) -> Any:
        root = self._value(0)
        self._skip()
        if self._at != len(self._text):
            raise ValueError(f"text after the value at {self._at}")
        for container, key, path in self._references:
            container[key] = _resolve(root, path)
        return _checked(root, self._budget) if self._references else root

    def _skip(self) -> str:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return self._text[self._at : self._at + 1]

    def _expect(self, sign: str) -> None:
        if self._skip() != sign:
            raise ValueError(f"no {sign!r} at {self._at}")
        self._at += 1

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        self._budget.spend(_DIALECT_COST)
        sign = self._skip()
        if sign == "{":
            return self._object(depth)
        if sign == "[":
            return self._array(depth)
        if sign in ("'", '"') and sign:
            return self._string(sign)
        return self._bare()

    def _object(self, depth: int) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        self._at += 1
        if self._skip() == "}":
            self._at += 1
            return result
        while True:
            key = _freeze(self._key(depth))
            self._expect(":")
            self._store(result, key, self._value(depth + 1))
            if self._more("}"):
                return result

    def _array(self, depth: int) -> list[Any]:
        result: list[Any] = []
        self._at += 1
        if self._skip() == "]":
            self._at += 1
            return result
        while True:
            result.append(None)
            self._store(result, len(result) - 1, self._value(depth + 1))
            if self._more("]"):
                return result

    def _store(self, container: Any, key: Any, value: Any) -> None:
        if isinstance(value, dict) and len(value) == 1 and isinstance(path := value.get("$ref"), str):
            self._references.append((container, key, path))
        container[key] = value

    def _more(self, end: str) -> bool:
        sign = self._skip()
        self._at += 1
        if sign not in (",", end) or not sign:
            raise ValueError(f"no ',' or {end!r} at {self._at - 1}")
        return sign == end

    def _key(self, depth: int) -> Any:
        sign = self._skip()
        if sign == "{":
            return self._value(depth + 1)
        if sign in ("'", '"') and sign:
            return self._string(sign)
        if match := _NUMBER.match(self._text, self._at):
            self._at = match.end()
            return _whole(match.group()) if match.lastindex is None else match.group()
        if match := _WORD.match(self._text, self._at):
            self._at = match.end()
            return match.group()
        raise ValueError(f"no key at {self._at}")

    def _string(self, quote: str) -> str:
        match = (_DOUBLE if quote == '"' else _SINGLE).match(self._text, self._at)
        if match is None:
            raise ValueError(f"a string without end at {self._at}")
        self._at = match.end()
        inner = match.group(1)
        if "\\" not in inner:
            return inner
        if quote == "'":
            inner = inner.replace("\\'", "'").replace('"', '\\"')
        text = str(json.loads(f'"{inner}"', strict=False))
        text.encode()  # raises ValueError for an unpaired surrogate, which could not be encoded again
        return text

    def _bare(self) -> Any:
        if match := _NUMBER.match(self._text, self._at):
            self._at = match.end()
            return _whole(match.group()) if match.lastindex is None else _fraction(match.group())
        match = _WORD.match(self._text, self._at)
        if match is None or match.group() not in _LITERALS:
            raise ValueError(f"no value at {self._at}")
        self._at = match.end()
        return _LITERALS[match.group()]


def _whole(digits: str) -> int:
    number = int(digits)
    if number not in _INT64:
        raise ValueError("a number of more than 64 bits")
    return number


def _fraction(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError("a number that is too large")
    return number


def _freeze(key: Any) -> Any:
    if not isinstance(key, dict):
        return key
    queue_id = key.get("queueId")
    if type(queue_id) is int and key.keys() >= {"topic", "brokerName"}:
        return MessageQueue(str(key["topic"]), str(key["brokerName"]), queue_id)
    return tuple(sorted((str(name), _freeze(value)) for name, value in key.items()))


def _resolve(root: Any, path: str) -> Any:
    """Return the target of a reference; None if it does not exist."""
    if not path.startswith("$"):  # @ and ..: an enclosing value
        raise ValueError("the value refers to itself")
    target, position = root, 1
    while position < len(path):
        step = _PATH_STEP.match(path, position)
        if step is None:
            return None
        try:
            target = target[step.group(1)] if step.group(1) is not None else target[int(step.group(2))]
        except (KeyError, IndexError, TypeError):
            return None
        position = step.end()
    return target


def dumps(value: object) -> bytes:
    """Encode a value as compact strict JSON; null fields are included."""
    return msgspec.json.encode(value)


def dumps_standard(value: object) -> bytes:
    """Encode a value as ASCII JSON with sorted keys and without nulls, the name server's format for newer clients."""
    plain = _without_nulls(msgspec.to_builtins(value, str_keys=True))
    return json.dumps(plain, separators=(",", ":"), sort_keys=True).encode()


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def dumps_object_keys(value: object) -> bytes:
    """Encode a value in the dialect: bare number keys, MessageQueue keys as objects, no null fields."""
    parts: list[str] = []
    _write(value, parts)
    return "".join(parts).encode()


def _write(value: Any, parts: list[str]) -> None:
    if type(value) is int:
        parts.append(repr(value))
    elif isinstance(value, MessageQueue):
        parts.append(_queue(value))
    elif isinstance(value, msgspec.Struct):
        named = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
        _write({name: getattr(value, field) for field, name in named}, parts)
    elif isinstance(value, Mapping):
        separator = "{"
        for key, item in value.items():
            if item is None:
                continue
            parts.append(separator)
            parts.append(_queue(key) if isinstance(key, MessageQueue) else _plain(key))
            parts.append(":")
            _write(item, parts)
            separator = ","
        parts.append("}" if separator == "," else "{}")
    elif isinstance(value, list | tuple | set | frozenset):
        separator = "["
        for item in value:
            parts.append(separator)
            _write(item, parts)
            separator = ","
        parts.append("]" if separator == "," else "[]")
    else:
        parts.append(_plain(value))


def _queue(queue: MessageQueue) -> str:
    return f'{{"brokerName":{_text(queue.broker_name)},"queueId":{queue.queue_id},"topic":{_text(queue.topic)}}}'


def _plain(value: Any) -> str:
    if type(value) is int:
        return repr(value)
    return _text(value) if type(value) is str else json.dumps(value, ensure_ascii=False)


@lru_cache(4096)
def _text(value: str) -> str:
    """Encode a string; cached, because maps of many queues repeat the same names."""
    return json.dumps(value, ensure_ascii=False)
