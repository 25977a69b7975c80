from __future__ import annotations

import threading
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neve.client.group.allocation import ALLOCATIONS
from neve.client.group.process_queue import ProcessQueue
from neve.client.group.pull import Subscription
from neve.client.group.received import Received
from neve.client.model import Message, MessageQueue, message_from_record
from neve.client.net.route import parse_route, route_from_default
from neve.client.send.latency import FaultTable
from neve.errors import ProtocolError
from neve.record.codec import decode_record, encode_record
from neve.record.properties import properties_to_bytes
from neve.remoting.address import parse_address

QUEUE = MessageQueue("t", "a", 0)


def queues(count: int) -> list[MessageQueue]:
    return [MessageQueue("t", f"b{number % 3}", number) for number in range(count)]


@given(
    st.sampled_from(["average", "circular"]), st.integers(0, 40), st.sets(st.text(max_size=5), min_size=1, max_size=9)
)
def test_every_queue_is_allocated_to_exactly_one_member(kind: str, count: int, members: set[str]) -> None:
    allocate = ALLOCATIONS[kind]
    shares = [allocate(member, list(members), queues(count)) for member in members]
    assert sorted(queue for share in shares for queue in share) == sorted(queues(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert allocate("somebody else", sorted(members - {"somebody else"}), queues(count)) == []


def received(offset: int, body: bytes = b"xy") -> Message:
    return Message("t", body, queue_offset=offset)


def test_committed_offset_stops_at_the_first_unsettled_message() -> None:
    process_queue = ProcessQueue(QUEUE, 10)
    assert process_queue.committable == 10
    process_queue.fetched([received(10), received(11), received(14)], 16)  # 12, 13 and 15 were filtered out
    assert (process_queue.committable, process_queue.unacked, process_queue.open_offsets) == (10, 3, (10, 14))
    assert process_queue.ack(11) is not None
    assert process_queue.committable == 10
    process_queue.delivered(Received("t", b"xy", queue_offset=10), 5.0, threading.current_thread())
    assert process_queue.ack(10) == 5.0
    assert process_queue.committable == 14
    assert process_queue.ack(10) is None
    assert process_queue.ack(14) is not None
    assert (process_queue.committable, process_queue.unacked, process_queue.open_offsets) == (16, 0, (0, 0))


@given(st.permutations(range(12)))
def test_acks_in_any_order_reach_the_end_offset(order: list[int]) -> None:
    process_queue = ProcessQueue(QUEUE, 0)
    process_queue.fetched([received(offset) for offset in range(12)], 12)
    done: set[int] = set()
    for offset in order:
        process_queue.ack(offset)
        done.add(offset)
        assert process_queue.committable == next((o for o in range(12) if o not in done), 12)


def test_slow_or_failing_broker_is_avoided_for_a_while() -> None:
    now = 0
    table = FaultTable(lambda: now)
    table.answered("quick", 20)
    table.answered("slow", 2_500)
    table.answered("slowest", 60_000)
    table.failed("dead")
    table.refused("full")
    names = ("new", "quick", "slow", "slowest", "dead", "full")
    assert [table.is_available(name) for name in names] == [True, True] + [False] * 4
    assert [table.is_reachable(name) for name in names] == [True] * 5 + [False]
    now = 5_000
    assert table.is_available("slow")
    assert not table.is_available("dead")
    now = 10_000
    assert table.is_available("dead")
    table.answered("slowest", 5)
    table.answered("full", 5)
    assert (table.is_available("slowest"), table.is_reachable("full")) == (False, True)
    now = 30_000
    assert table.is_available("slowest")


@pytest.mark.parametrize(
    ("latency_ms", "pause_ms"),
    [(0, 0), (549, 0), (550, 2_000), (1_799, 2_000), (1_800, 5_000), (3_000, 6_000), (5_000, 10_000), (15_000, 30_000)],
)
def test_avoidance_times_equal_the_table_of_the_java_client(latency_ms: int, pause_ms: int) -> None:
    now = 0
    table = FaultTable(lambda: now)
    table.answered("b", latency_ms)
    assert table.is_available("b") == (pause_ms == 0)
    now = pause_ms
    assert table.is_available("b")
    now -= 1
    assert table.is_available("b") == (pause_ms == 0)


ROUTE = {
    "brokerDatas": [
        {"brokerName": "a", "cluster": "c", "brokerAddrs": {0: "h:1", "1": "h:2"}},
        {"brokerName": "b", "cluster": "c", "brokerAddrs": {"1": "h:3"}},
    ],
    "queueDatas": [
        {"brokerName": "b", "perm": 6, "readQueueNums": 1, "writeQueueNums": 1},
        {"brokerName": "a", "perm": 4, "readQueueNums": 2, "writeQueueNums": 2},
        {"brokerName": "a", "perm": 2, "readQueueNums": 2, "writeQueueNums": 6},
        {"brokerName": "gone", "perm": 6, "readQueueNums": 9, "writeQueueNums": 9},
    ],
}


def test_route_lists_usable_queues() -> None:
    route = parse_route("t", ROUTE)
    assert route.write_queues == tuple(MessageQueue("t", "a", number) for number in range(6))  # b has no master
    assert route.read_queues == (MessageQueue("t", "a", 0), MessageQueue("t", "a", 1), MessageQueue("t", "b", 0))
    assert (route.master("a"), route.master("b"), route.address("b"), route.address("x")) == ("h:1", None, "h:3", None)
    assumed = route_from_default("new", route)
    assert assumed.write_queues == tuple(MessageQueue("new", "a", number) for number in range(4))


@pytest.mark.parametrize("body", [[], {"brokerDatas": [{}]}, {"queueDatas": [{"brokerName": "a"}]}, {"queueDatas": 3}])
def test_invalid_route_body_is_a_protocol_error(body: object) -> None:
    with pytest.raises(ProtocolError):
        parse_route("t", body)


def test_subscriptions_compare_tag_strings() -> None:
    assert Subscription().matches(received(0))
    two = Subscription(" A || B ")
    assert two.tags == {"A", "B"}
    assert [two.matches(Message("t", b"", tags)) for tags in ("A", "B", "AB", None)] == [True, True, False, False]
    assert Subscription("TAGS = 'x'", "SQL92").matches(received(0))


def record(topic: str, body: bytes, sys_flag: int = 0, **properties: str) -> bytes:
    return encode_record(
        topic=topic.encode(),
        body=body,
        properties=properties_to_bytes(properties),
        queue_id=3,
        flag=5,
        queue_offset=42,
        physical_offset=4711,
        sys_flag=sys_flag,
        born_timestamp=1000,
        born_host=("127.0.0.1", 5),
        store_timestamp=2000,
        store_host=("10.0.0.1", 10911),
        reconsume_times=2,
    )


def test_record_is_converted_to_the_sent_message() -> None:
    raw = record("%RETRY%g", zlib.compress(b"body"), 0x301, TAGS="T", KEYS="a b", UNIQ_KEY="U", RETRY_TOPIC="orders")
    message = message_from_record(decode_record(raw), "broker-a")
    assert (message.topic, message.body, message.tags, message.keys) == ("orders", b"body", "T", ("a", "b"))
    assert message.queue == MessageQueue("%RETRY%g", "broker-a", 3)
    assert (message.msg_id, message.offset_msg_id) == ("U", "0A00000100002A9F0000000000001267")
    assert (message.queue_offset, message.reconsume_times, message.sys_flag) == (42, 2, 0)


def test_damaged_compressed_body_is_returned_as_stored() -> None:
    message = message_from_record(decode_record(record("t", b"no zlib", 0x301)), "b")
    assert (message.body, message.sys_flag, message.msg_id) == (b"no zlib", 0x301, message.offset_msg_id)


def test_address_must_have_host_and_port() -> None:
    assert parse_address("h:1") == ("h", 1)
    assert parse_address("[::1]:9876") == ("::1", 9876)
    for bad in ("h", ":1", "h:x"):
        with pytest.raises(ValueError, match=r"."):
            parse_address(bad)
