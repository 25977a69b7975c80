"""The fast path of sends gives the same records and answers as the general path, and leaves unknown requests to it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.wire import request, send_ext
from infra.disk.filesystem import RealDisk
from neve.remoting.codes import RequestCode
from neve.remoting.command import decode_command
from tests.kit.broker.in_process import ask, running
from tests.kit.clock.calls_per_turn import CallsPerTurn
from tests.unit.broker.send_frames import (
    NOT_PLAIN,
    PLAIN,
    TOPIC,
    SendTarget,
    frame,
    with_broker,
)


@pytest.mark.parametrize("flag", [0, 2], ids=["two-way", "one-way"])
def test_plain_send_equals_one_by_the_general_path(tmp_path: Path, flag: int) -> None:
    def work(broker: SendTarget) -> None:
        for name, ext in PLAIN.items():
            fast = broker.send(ext, name.encode(), express=True, flag=flag)
            assert broker.dispatched == 0, name
            assert len(fast[1]) == 1, name
            assert fast == broker.send(ext, name.encode(), express=False, flag=flag), name
            broker.dispatched = 0

    with_broker(tmp_path, work)


@pytest.mark.parametrize("topics", [(TOPIC,) * 5, (TOPIC, "other", "other", TOPIC, "other")], ids=["one", "two"])
def test_statistics_of_sends_in_one_read_equal_those_of_single_sends(tmp_path: Path, topics: tuple[str, ...]) -> None:
    def work(broker: SendTarget) -> None:
        stats = broker.controller.stats
        counted = []
        for together in (True, False):
            before = {topic: (of.calls, of.count, of.size) for topic in topics for of in [stats.of_topic(topic)]}
            frames = [frame({"b": topic}, b"x" * number) for number, topic in enumerate(topics)]
            connection, _ = broker.connect(express=together)
            for data in [b"".join(frames)] if together else frames:
                connection.data_received(data)
            counted.append(
                {
                    topic: (of.calls - calls, of.count - count, of.size - size)
                    for topic, (calls, count, size) in before.items()
                    for of in [stats.of_topic(topic)]
                }
            )
        assert broker.dispatched == len(topics)
        assert counted[0] == counted[1]
        assert sum(count for _, count, _ in counted[0].values()) == len(topics)

    with_broker(tmp_path, work, topics=tuple(dict.fromkeys(topics)))


def test_send_that_is_not_plain_is_left_to_the_general_path(tmp_path: Path) -> None:
    def work(broker: SendTarget) -> None:
        for name, ext in NOT_PLAIN.items():
            fast = broker.send(ext, b"body", express=True)
            assert broker.dispatched == 1, name
            if name not in {"a topic that is created", "a retry topic"}:  # answered once it is saved
                assert fast[0] is not None, name
            broker.dispatched = 0
        too_large = broker.send({}, b"x" * (4 << 20) + b"x", express=True)
        assert too_large[0][0] == 13
        assert broker.dispatched == 1

    with_broker(tmp_path, work)


def test_topic_changed_since_the_last_read_is_looked_up_again(tmp_path: Path) -> None:
    def work(broker: SendTarget) -> None:
        topics = broker.controller.topics
        assert broker.send({"e": 2}, b"as it was", express=True)[0][0] == 0
        topics.update(msgspec.structs.replace(topics.topics[TOPIC], read_queue_nums=1, write_queue_nums=1))
        assert broker.send({"e": 2}, b"no such queue any more", express=True) == broker.send(
            {"e": 2}, b"no such queue any more", express=False
        )
        assert not broker.send({"e": 2}, b"no such queue any more", express=True)[1]

    with_broker(tmp_path, work)


_PART = st.one_of(
    st.sampled_from(["TAGS", "KEYS", "WAIT", "UNIQ_KEY", "\x01", "\x02", "true", "false", "A1", "DELAY"]),
    st.text(max_size=5),
)


def test_any_property_string_gives_the_same_result_on_both_paths(tmp_path: Path) -> None:
    def work(broker: SendTarget) -> None:
        @settings(max_examples=300, deadline=None)
        @given(st.lists(_PART, max_size=12))
        def check(parts: list[str]) -> None:
            text = "".join(parts).encode("utf-8", "replace").decode()
            assert broker.send({"i": text}, b"", express=True) == broker.send({"i": text}, b"", express=False)

        check()

    with_broker(tmp_path, work)


def test_frames_of_one_read_are_answered_in_order_on_both_paths(tmp_path: Path) -> None:
    def work(broker: SendTarget) -> None:
        connection, outside = broker.connect(express=True)
        delayed = frame({"i": "DELAY\x013\x02"}, b"later")
        frames = [frame({}, b"0"), delayed, frame({}, b"1"), frame({"e": 99}, b"no"), frame({}, b"2")]
        numbered = [each.replace(b'"opaque":77', b'"opaque":%d' % (10 + n)) for n, each in enumerate(frames)]
        stream = b"".join(numbered)
        for start in range(0, len(stream), 100):  # also if the network divides them
            connection.data_received(stream[start : start + 100])
        answers, position = [], 0
        while position < len(outside.written):
            length = int.from_bytes(outside.written[position : position + 4], "big")
            answers.append(decode_command(outside.written[position + 4 : position + 4 + length]))
            position += 4 + length
        assert [(answer.opaque, answer.code) for answer in answers] == [(10, 0), (11, 0), (12, 0), (13, 29), (14, 0)]
        offsets = [int(answers[n].ext["queueOffset"]) for n in (0, 2, 4)]
        assert offsets == list(range(offsets[0], offsets[0] + 3))
        assert broker.dispatched == 2

    with_broker(tmp_path, work)


async def test_queues_created_by_sends_of_one_read_are_made_in_bounded_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues, each = 100, 3
    made = CallsPerTurn(RealDisk.create_preallocated)

    def create(disk: RealDisk, path: Path, size: int, *, sync: bool = True) -> None:
        made(disk, path, size)

    monkeypatch.setattr(RealDisk, "create_preallocated", create)

    async with running(tmp_path) as (broker, connection):
        topic = {"topic": "wide", "readQueueNums": queues, "writeQueueNums": queues, "perm": 6}
        assert (await ask(connection, RequestCode.UPDATE_AND_CREATE_TOPIC, **topic)).code == 0
        reader, writer = await asyncio.open_connection(*broker.address)
        sends = [(opaque, opaque % queues) for opaque in range(queues * each)]
        made.most = 0
        writer.write(
            b"".join(request(310, opaque, send_ext("wide", queue, queues=queues), b"x") for opaque, queue in sends)
        )
        answers = []
        for _ in sends:
            length = int.from_bytes(await reader.readexactly(4), "big")
            answers.append(decode_command(await reader.readexactly(length)))
        assert [(answer.opaque, answer.code) for answer in answers] == [(opaque, 0) for opaque, _ in sends]
        assert [int(answer.ext["queueOffset"]) for answer in answers] == [n // queues for n in range(len(sends))]
        assert made.all >= queues
        assert made.most <= 32
        writer.close()


def test_sync_flush_answers_no_send_before_its_fsync(tmp_path: Path) -> None:
    def work(broker: SendTarget) -> None:
        connection, outside = broker.connect(express=True)
        connection.data_received(frame({}, b"0") + frame({"i": "WAIT\x01false\x02"}, b"1") + frame({}, b"2"))
        assert outside.written.count(b'"opaque"') == 1  # only the send that does not wait
        flusher = broker.controller.flusher
        flusher._complete(broker.store.visibility.flush())
        connection.flush()
        assert outside.written.count(b'"code":0') == 3

    with_broker(tmp_path, work, flush_disk_type="SYNC_FLUSH")


class DeadWriter:
    """The writer of a file on a failed disk."""

    def write(self, data: bytes | memoryview, position: int) -> None:
        raise OSError("the disk is gone")

    def sync(self) -> None:
        raise OSError("the disk is gone")


def test_send_to_a_failed_store_is_answered_by_the_general_path(tmp_path: Path) -> None:
    def work(broker: SendTarget) -> None:
        file = broker.store.log.at(broker.store.newest_segment_base)
        assert file is not None
        file.writer = file.crc_writer = DeadWriter()
        answer, stored = broker.send({}, b"x", express=True)
        assert (answer[0], stored) == (14, [])
        assert "not available" in answer[2]
        assert broker.store.end.failure is not None

    with_broker(tmp_path, work)
