"""Tests of the cost limits of request bodies: excess is refused before the work, and values can be re-encoded."""

from __future__ import annotations

import msgspec
import pytest

from neve.errors import ProtocolError
from neve.remoting.body import (
    MAX_NODES,
    HeartbeatData,
    NodeBudget,
    TopicConfig,
    convert,
    dumps,
    lenient_loads,
    loads_as,
)

GROUP = b'{"groupName":"g","subscriptionDataSet":{"$ref":"$.z"}}'


def referring(count: int) -> bytes:
    """Return a small body that expands to count * count subscriptions."""
    topics = b",".join([b'{"topic":"t"}'] * count)
    return b'{"clientID":"x","z":[%b],"consumerDataSet":[%b]}' % (topics, b",".join([GROUP] * count))


def test_referenced_values_count_at_each_reference() -> None:
    few = loads_as(referring(10), HeartbeatData)
    assert [len(group.subscription_data_set) for group in few.consumer_data_set] == [10] * 10
    with pytest.raises(ProtocolError, match="too many values"):
        loads_as(referring(1500), HeartbeatData)
    doubled = b'{"a":[1,1],' + b",".join(b'"a%d":[{"$ref":"$.a%b"},{"$ref":"$.a%b"}]' % (n, p, p) for n, p in
                                         enumerate([b"", *(b"%d" % n for n in range(20))])) + b"}"  # fmt: skip
    with pytest.raises(ProtocolError, match="too many values"):
        lenient_loads(doubled)


@pytest.mark.parametrize("path", [b"$", b"@", b"..", b"$.a", b"$.a[0]"])
def test_self_referencing_value_is_refused(path: bytes) -> None:
    with pytest.raises(ProtocolError):
        lenient_loads(b'{"a":[{"b":{"$ref":"%b"}}]}' % path)


def test_strict_json_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = msgspec.json.decode

    def counting(raw: bytes, **options: object) -> object:
        decoded.append(len(raw))
        return decode(raw, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(msgspec.json, "decode", counting)
    bomb = b'{"clientID":"x","consumerDataSet":[' + b"{}," * MAX_NODES + b"{}]}"
    for read in (lenient_loads, lambda raw: loads_as(raw, HeartbeatData)):
        with pytest.raises(ProtocolError, match="too many values"):
            read(bomb)
    assert decoded == []
    assert lenient_loads(b"[1,[2,{}]]") == [1, [2, {}]]
    assert decoded == [10]


def test_dialect_parsing_stops_at_the_budget() -> None:
    budget = NodeBudget(800)
    with pytest.raises(ProtocolError, match="too many values"):
        lenient_loads(b"{'a':[" + b"{}," * 100_000 + b"0]}", budget)
    assert budget.left > -20, "it ended with the value that was one too many"
    assert len(lenient_loads(b"{'a':[" + b"{}," * 90 + b"0]}", NodeBudget(800))["a"]) == 91


def test_parts_of_a_body_share_a_budget() -> None:
    budget = NodeBudget(10)
    assert loads_as(b'{"a":"1","b":"2"}', dict[str, str], budget) == {"a": "1", "b": "2"}
    assert loads_as(b"{'a':'1'}", dict[str, str], NodeBudget(20)) == {"a": "1"}
    with pytest.raises(ProtocolError, match="too many values"):
        for _ in range(10):
            loads_as(b'{"a":"1","b":"2"}', dict[str, str], budget)


@pytest.mark.parametrize("raw", [b"[%b]", b'{"a":%b}', b"{'a':%b}", b"{a:{%b:1}}", b'[{"$ref":"$[1]"},%b]'])
@pytest.mark.parametrize("number", [b"9" * 19, b"-" + b"9" * 30, b"9" * 5000])
def test_numbers_are_limited_to_64_bits(raw: bytes, number: bytes) -> None:
    with pytest.raises(ProtocolError):
        lenient_loads(raw % number)
    for fits in (2**63 - 1, -(2**63)):
        assert str(fits) in str(lenient_loads(raw % str(fits).encode()))


def test_unencodable_values_in_bodies_are_refused() -> None:
    for field, value in (("topicSysFlag", 10**30), ("perm", 2**31), ("readQueueNums", -(2**40))):
        raw = b"{'topicName':'t','%b':%d}" % (field.encode(), value)
        with pytest.raises(ProtocolError):
            convert(lenient_loads(raw), TopicConfig)
        with pytest.raises(ProtocolError):
            loads_as(raw.replace(b"'", b'"'), TopicConfig)
    for raw in (rb"{'a':'\ud800'}", b"{'a':1e999}"):
        with pytest.raises(ProtocolError):
            lenient_loads(raw)
    dumps(lenient_loads(rb"{'a':'\ud83d\ude00','b':1.5e300}"))


@pytest.mark.parametrize("quote", [b'"', b"'"])
def test_nesting_is_limited_in_strict_json(quote: bytes) -> None:
    for depth in (40, 500, 100_000):
        with pytest.raises(ProtocolError):
            lenient_loads(b"[" * depth + quote + quote + b"]" * depth)
    assert lenient_loads(b"[" * 30 + quote + quote + b"]" * 30)
