"""Tests of message traces: their content and format, and that no call waits for them."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest

from neve.client import connect
from neve.client.model import Message, MessageQueue, SendResult, SendStatus
from neve.client.options import ClientOptions
from neve.client.send import trace_sender
from neve.client.send.draft import Drafts
from neve.client.trace.format import TRACE_TOPIC, Ended, Trace, parse_traces
from neve.client.trace.recorder import BATCH, BUFFER_MAX, ConsumeTraces, Traces
from neve.record.properties import bytes_to_properties
from neve.remoting.command import RemotingCommand
from tests.kit.cluster.fake_cluster import Answer, send_ok

QUEUE = MessageQueue("t", "b0", 0)
RECEIVED = Message("t", b"abc", "T", ("k1", "k2"), queue=QUEUE, queue_offset=5, msg_id="ID", reconsume_times=2)


def traces() -> Traces:
    """Return traces with a clock that advances by 1 ms per read."""
    ids, clock = itertools.count(1), itertools.count(1000)
    return Traces(lambda: f"R{next(ids)}", lambda: next(clock))


def lines(noted: Traces) -> list[list[str]]:
    """Return the fields of each line."""
    found = []
    while batch := noted.take():
        for trace in batch:
            assert trace.line.endswith("\x02")
            found.append(trace.line[:-1].split("\x01"))
    return found


def sent(noted: Traces, *, answer: dict[str, str] | None = None, **changes: Any) -> None:
    """Record a stored message, with `changes` to its draft."""
    message = Message("t", b"abc", "T", ("k1", "k2"))
    draft = replace(Drafts(ClientOptions(), lambda: "ID").single(message), **changes)
    result = SendResult(SendStatus.SEND_OK, draft.msg_id, "OFFSET-ID", QUEUE, 7)
    noted.sent(draft, "G", "1.2.3.4:10911", {} if answer is None else answer, result, cost=3)


# ---- format


def test_send_trace_has_the_field_order_of_rocketmq() -> None:
    noted = traces()
    sent(noted, answer={"MSG_REGION": "north"})
    fields = "Pub 997 north G t ID T k1_k2 1.2.3.4:10911 3 3 0 OFFSET-ID true"
    assert lines(noted) == [[field.replace("_", " ") for field in fields.split()]]


def test_missing_trace_field_is_written_as_null() -> None:
    """The Java reader splits lines and would lose an empty last field."""
    noted = traces()
    ConsumeTraces(noted, "G").consumption_started(Message("t", b"abc", queue=QUEUE, queue_offset=5, msg_id="ID"))
    assert lines(noted) == [["SubBefore", "1000", "DefaultRegion", "G", "R1", "ID", "0", "null"]]


@pytest.mark.parametrize(
    ("changes", "kind"), [({"sys_flag": 4}, "1"), ({"properties": "DELAY\x013\x02"}, "3"), ({"sys_flag": 1}, "0")]
)
def test_trace_distinguishes_half_and_delayed_messages(changes: dict[str, Any], kind: str) -> None:
    noted = traces()
    sent(noted, **changes)
    assert lines(noted)[0][11] == kind


def test_each_message_of_a_batch_has_its_trace_line() -> None:
    noted = traces()
    sent(noted, msg_id="ID1,ID2")
    assert [line[5] for line in lines(noted)] == ["ID1", "ID2"]


@pytest.mark.parametrize(
    ("how", "success"), [(Ended.SUCCESS, "true"), (Ended.TIME_OUT, "true"), (Ended.FAILED, "false")]
)
def test_consumption_is_traced_in_two_lines_with_one_request_id(how: Ended, success: str) -> None:
    noted = traces()
    consuming = ConsumeTraces(noted, "G")
    consuming.consumption_started(RECEIVED)
    consuming.ended(RECEIVED, how)
    consuming.ended(RECEIVED, Ended.EXCEPTION)  # only the first end counts
    assert lines(noted) == [
        ["SubBefore", "1000", "DefaultRegion", "G", "R1", "ID", "2", "k1 k2"],
        ["SubAfter", "R1", "ID", "1", success, "k1 k2", str(int(how)), "1001", "G"],
    ]


def test_traces_can_be_disabled_by_broker_and_producer() -> None:
    noted = traces()
    sent(noted, answer={"TRACE_ON": "false"})
    sent(noted, topic=TRACE_TOPIC)
    consuming = ConsumeTraces(noted, "G")
    consuming.consumption_started(replace(RECEIVED, properties={"TRACE_ON": "false"}))
    consuming.ended(RECEIVED, Ended.SUCCESS)
    assert len(noted) == 0


# ---- bounds


def test_traces_beyond_the_buffer_are_dropped_and_counted() -> None:
    noted = traces()
    for number in range(BUFFER_MAX + 3):
        noted.add(Trace(f"{number}\x02", ()))
    assert (len(noted), noted.dropped) == (BUFFER_MAX, 3)
    assert lines(noted)[-1] == [str(BUFFER_MAX - 1)]


def test_traces_of_unsettled_messages_are_dropped_eventually() -> None:
    noted = traces()
    consuming = ConsumeTraces(noted, "G")
    for offset in range(BUFFER_MAX + 1):
        consuming.consumption_started(replace(RECEIVED, queue_offset=offset))
        noted.take()
    for offset in (0, 1):
        consuming.ended(replace(RECEIVED, queue_offset=offset), Ended.SUCCESS)
    assert (noted.dropped, [line[0] for line in lines(noted)]) == (1, ["SubAfter"])


def test_trace_messages_respect_the_size_limit() -> None:
    noted = traces()
    for _ in range(BATCH + 1):
        noted.add(Trace("x\x02", ("k" * 9_000,)))
    sizes = []
    while batch := noted.take():
        sizes.append(sum(len(word) for trace in batch for word in trace.words))
    assert max(sizes) < 32_000
    assert sum(sizes) == (BATCH + 1) * 9_000


# ---- sending


async def test_traces_of_sends_are_found_by_message_id_and_not_traced(fake_cluster: Any) -> None:
    async with fake_cluster() as cluster:
        async with connect(cluster.namesrv.address, trace=True, producer_group="P") as client:
            results = [await client.send("t", b"x", keys="k") for _ in range(3)]
        requests = [r for r in cluster.brokers[0].requests if r.code == 310 and r.ext["b"] == TRACE_TOPIC]
        (request,) = requests
        assert bytes_to_properties(request.ext["i"].encode())["KEYS"].split() == [
            results[0].msg_id, "k", results[1].msg_id, results[2].msg_id,
        ]  # fmt: skip
        assert request.body.count(b"\x02") == 3
        assert client.traces_dropped == 0


async def test_nothing_is_traced_unless_asked_for(fake_cluster: Any) -> None:
    async with fake_cluster() as cluster:
        async with connect(cluster.namesrv.address) as client:
            await client.send("t", b"x")
        assert [r.ext["b"] for r in cluster.brokers[0].requests if r.code == 310] == ["t"]


async def test_full_trace_batch_is_sent_without_waiting(fake_cluster: Any) -> None:
    async with fake_cluster() as cluster, connect(cluster.namesrv.address, trace=True) as client:
        await asyncio.gather(*(client.send("t", b"x") for _ in range(BATCH)))
        while TRACE_TOPIC not in [r.ext["b"] for r in cluster.brokers[0].requests if r.code == 310]:
            await client.admin.topic_route("t")


async def test_failing_trace_sends_do_not_affect_message_sends(
    fake_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_sender, "_CLOSE_S", 0.05)
    behaviour: dict[str, Answer] = {"traces": None}  # silence

    def broker(request: RemotingCommand) -> Answer:
        is_trace = request.code == 310 and request.ext["b"] == TRACE_TOPIC
        return behaviour["traces"] if is_trace else send_ok(request)

    async with fake_cluster(broker) as cluster:
        async with connect(cluster.namesrv.address, trace=True) as client:
            for _ in range(3 * BATCH):
                assert (await client.send("t", b"x")).status is SendStatus.SEND_OK
        assert client.traces_dropped == 3 * BATCH
        monkeypatch.undo()
        behaviour["traces"] = (16, {}, b"")  # no permission
        async with connect(cluster.namesrv.address, trace=True) as client:
            await client.send("t", b"x")
        assert client.traces_dropped == 1


def test_traces_are_parsed_into_named_fields() -> None:
    noted = traces()
    sent(noted)
    (line,) = [one.line for one in noted.take()]
    (told,) = parse_traces(line + "Unknown\x01x\x02")
    fields = line.removesuffix("\x02").split("\x01")
    assert told["what"] == "Pub"
    assert (told["at_ms"], told["msg_id"], told["is_success"]) == (fields[1], fields[5], "true")
    assert "null" not in told.values()
    assert parse_traces("SubAfter\x01r\x01id\x015\x01true\x02") == [
        {"what": "SubAfter", "request_id": "r", "msg_id": "id", "cost_ms": "5", "is_success": "true"}
    ]
