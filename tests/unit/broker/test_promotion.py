"""A slave of an Apache master is promoted: pending deliveries continue, and no message is delivered twice."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.broker_controller import BrokerController
from broker.ha.plain_slave import FollowedFile
from broker.metadata.last_poll import LastPoll
from broker.metadata.stock_tables import TimerCheckPoint
from broker.promotion import timers
from broker.promotion.promotion import Promotion
from broker.promotion.stored import Delivered
from broker.store.message_store import MessageStore, PutResult
from infra.clock import ManualClock
from infra.disk.filesystem import RealDisk
from infra.net.remoting_server import Connection
from infra.process.startup import StartupError
from neve.record.codec import iter_records
from neve.remoting.names import HALF_TOPIC, OP_HALF_TOPIC, SCHEDULE_TOPIC, WHEEL_TIMER_TOPIC
from tests.kit.broker.in_process import running, send
from tests.kit.clock.waiting import until
from tests.unit.broker.apache_slave import SLAVE, Front, bodies, master, put
from tests.unit.broker.metadata.members import TablesMember

REVIVE_LOG = "rmq_sys_REVIVE_LOG_DefaultCluster"
COMMIT = 8
NOW_MS = time.time_ns() // 1_000_000  # The time of the import; a test may begin more than an hour later.
READ_MS = NOW_MS - NOW_MS % 1000
DAY_MS = 24 * 3_600_000
LATER_MS = READ_MS + DAY_MS


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(bounded())


def timer(store: MessageStore, key: str, due: int, **more: Any) -> PutResult:
    """Append a timer message to RocketMQ's queue of timers."""
    return put(store, WHEEL_TIMER_TOPIC, 0, key.encode(), TIMER_OUT_MS=due, REAL_QID=0,
               **{"REAL_TOPIC": "t", "UNIQ_KEY": key, **more})  # fmt: skip


def half(store: MessageStore, key: str, **more: Any) -> PutResult:
    return put(store, HALF_TOPIC, 0, key.encode(), UNIQ_KEY=key, REAL_TOPIC="t", REAL_QID=0, PGROUP="p", **more)


class Copied:
    """A slave with its master's whole log and tables. The master is stopped."""

    def __init__(self, front: Front, root: Path) -> None:
        self.front, self.root = front, root
        self.last_poll = root / "config" / "lastPoll.json"

    def poll(self) -> dict[str, Any]:
        """Return the last saved poll of the master."""
        return dict(json.loads(self.last_poll.read_bytes())["poll"])

    def polled(self, **changes: int) -> None:
        """Change the last saved poll."""
        value = json.loads(self.last_poll.read_bytes())
        self.last_poll.write_text(json.dumps({**value, "poll": self.poll() | changes}))

    @asynccontextmanager
    async def promoted(self, *settings: str) -> AsyncIterator[tuple[BrokerController, Connection]]:
        async with running(self.root, f"namesrvAddr={self.front.address}", *settings) as found:
            yield found

    @asynccontextmanager
    async def slave(self) -> AsyncIterator[BrokerController]:
        async with running(self.root, *SLAVE, f"namesrvAddr={self.front.address}") as (slave, _):
            yield slave


@asynccontextmanager
async def copied(
    root: Path, fill: Callable[[MessageStore, Front], None] = lambda store, front: None, *, retire: bool = True
) -> AsyncIterator[Copied]:
    async with master(root) as (front, _):
        fill(front.source.store, front)
        copy = Copied(front, root / "slave")
        async with copy.slave() as slave:
            store = front.source.store
            await until(lambda: slave.store.max_physical_offset == store.max_physical_offset)
            await until(lambda: slave.last_poll.current is not None)
        if retire:
            await front.retire()
        yield copy


def test_promoted_slave_serves_its_former_masters_messages(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with copied(tmp_path) as copy:
            async with copy.promoted() as (broker, connection):
                assert await bodies(connection) == [b"0", b"1", b"2"]
                assert broker.offsets.query("g", "t", 0) == 2
                assert broker.topics.topics["t"].read_queue_nums == 4
                assert copy.front.registered[-1]["brokerId"] == "0"
                await send(connection, "t", b"3")
                assert not FollowedFile(RealDisk(), copy.root).is_there
            async with copy.promoted() as (_, connection):
                assert await bodies(connection) == [b"0", b"1", b"2", b"3"], "a start as any other"
            with pytest.raises(StartupError, match="needs an empty storePathRootDir"):
                async with copy.slave():
                    raise AssertionError

    run(scenario)


def test_slave_is_not_promoted_while_its_master_is_running(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with copied(tmp_path, retire=False) as copy:
            with pytest.raises(StartupError, match=r"answers: stop it first.*It can continue with brokerRole=SLAVE"):
                async with copy.promoted():
                    raise AssertionError
            await copy.front.master.shutdown()  # not known to the name server
            with pytest.raises(StartupError, match=r"knows 127\.0\.0\.1:.* as the master"):
                async with copy.promoted():
                    raise AssertionError
            copy.front.knows_master = False
            with pytest.raises(StartupError, match="no name server confirms that its master is gone"):
                async with copy.promoted("namesrvAddr=127.0.0.1:1"):
                    raise AssertionError
            with pytest.raises(StartupError, match="is of another broker"):
                async with copy.promoted("brokerName=other"):
                    raise AssertionError
            async with copy.promoted() as (_, connection):
                assert await bodies(connection) == [b"0", b"1", b"2"]

    run(scenario)


def _keeps_pops_elsewhere(_: MessageStore, front: Front) -> None:
    front.settings["popConsumerKVServiceEnable"] = "true"


def _says_nothing_of_timers(store: MessageStore, front: Front) -> None:
    front.timers = None
    timer(store, "T", LATER_MS)


@pytest.mark.parametrize(
    ("fill", "why"),
    [
        (_keeps_pops_elsewhere, "popConsumerKVServiceEnable=true"),
        (_says_nothing_of_timers, "does not report which of 1 timers"),
    ],
)
def test_promotion_with_unknown_master_state_is_refused(
    tmp_path: Path, fill: Callable[[MessageStore, Front], None], why: str
) -> None:
    async def scenario() -> None:
        async with copied(tmp_path, fill) as copy:
            with pytest.raises(StartupError, match=why):
                async with copy.promoted():
                    raise AssertionError
            async with copy.slave() as slave:
                assert slave.store.max_physical_offset == copy.front.source.store.max_physical_offset

    run(scenario)


def test_promotion_without_the_masters_tables_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with copied(tmp_path) as copy:
            copy.last_poll.unlink()
            with pytest.raises(StartupError, match="never got the tables of its master"):
                async with copy.promoted():
                    raise AssertionError

    run(scenario)


@pytest.mark.parametrize("goes_on_as", ["master", "slave"])
def test_promotion_interrupted_by_a_crash_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on_as: str
) -> None:
    def fill(store: MessageStore, front: Front) -> None:
        half(store, "H")
        front.timers = (READ_MS, 0)
        timer(store, "T", LATER_MS)

    async def scenario() -> None:
        async with copied(tmp_path, fill) as copy:
            end = copy.front.source.store.max_physical_offset
            with monkeypatch.context() as patched, pytest.raises(StartupError, match="pulled the plug"):
                patched.setattr(Promotion, "_finish", _crash)
                async with copy.promoted():
                    raise AssertionError
            if goes_on_as == "slave":
                async with copy.slave() as slave:
                    assert slave.store.max_physical_offset == end
                return
            async with copy.promoted() as (broker, _):
                assert [found.queue_offset for found in broker.transactions.waiting()] == [0]
                assert len(broker.timers) == 1
                store = broker.store
                assert (store.queues.max_offset(OP_HALF_TOPIC, 0), store.queues.max_offset(WHEEL_TIMER_TOPIC, 1)) == (
                    1,
                    1,
                )

    run(scenario)


def test_crash_at_the_end_of_a_promotion_loses_nothing_of_the_new_log(tmp_path: Path) -> None:
    """The first of the two files that mark a running promotion has been removed, the second has not."""

    async def scenario() -> None:
        async with copied(tmp_path) as copy:
            async with copy.promoted() as (_, connection):
                await send(connection, "t", b"3")
                left = copy.root / "ha" / "promotion.json"
            left.write_text('{"end":0}')
            with pytest.raises(StartupError, match="needs an empty storePathRootDir"):
                async with copy.slave():
                    raise AssertionError
            assert not (copy.root / "diverged").exists(), "nothing was cut"

    run(scenario)


def test_poll_of_a_truncated_log_does_not_count_for_a_promotion(
    tmp_path: Path,
) -> None:
    """Deliveries that the poll reports may be lost with the truncated tail. A promotion needs a new poll."""

    async def scenario() -> None:
        async with copied(tmp_path) as copy:
            async with running(copy.root, *SLAVE, "namesrvAddr=127.0.0.1:1") as (slave, _):
                assert slave.last_poll.current is not None
                assert slave.plain_slave is not None
                await slave.plain_slave.truncate(slave.store.max_physical_offset - 1)
                assert slave.last_poll.current is None
            with pytest.raises(StartupError, match="never got the tables"):
                async with copy.promoted():
                    raise AssertionError

    run(scenario)


def test_second_to_last_poll_survives_a_restart_of_the_slave(tmp_path: Path) -> None:
    """A message delivered at its due time may be reported only by the next poll."""

    async def scenario() -> None:
        async with copied(tmp_path, retire=False) as copy:
            before = copy.poll()["askedAt"]
            put(copy.front.source.store, "t", body=b"more")
            async with copy.slave() as slave:
                end = copy.front.source.store.max_physical_offset
                await until(lambda: slave.last_poll.current is not None and slave.last_poll.current.asked_at == end)
                assert slave.last_poll.current is not None
                assert slave.last_poll.current.log_begin == before < end

    run(scenario)


def _crash(_: Promotion) -> None:
    raise OSError("pulled the plug")


@pytest.mark.parametrize("is_younger", [True, False])
def test_topic_newer_than_the_last_poll_is_kept_and_a_deleted_one_is_not(tmp_path: Path, *, is_younger: bool) -> None:
    def fill(store: MessageStore, front: Front) -> None:
        for queue in (0, 2):
            put(store, "fresh", queue)
            put(store, "%RETRY%g", queue)

    async def scenario() -> None:
        async with copied(tmp_path, fill) as copy:
            if is_younger:
                first = copy.front.source.store.reader.entry("fresh", 0, 0)
                assert first is not None
                copy.polled(askedAt=first[0])
            for _ in range(2):
                async with copy.promoted() as (broker, _connection):
                    found = {topic: broker.topics.topics.get(topic) for topic in ("fresh", "%RETRY%g")}
                    queues = [0 if one is None else one.read_queue_nums for one in found.values()]
                    assert queues == ([3, 3] if is_younger else [0, 0])

    run(scenario)


def test_delayed_messages_resume_behind_the_last_delivered_copy(tmp_path: Path) -> None:
    def fill(store: MessageStore, front: Front) -> None:
        front.source.life.stop()  # no delivery by the source itself
        for number in range(3):
            put(store, SCHEDULE_TOPIC, 0, b"d%d" % number, UNIQ_KEY=f"D{number}", DELAY=1, REAL_TOPIC="t", REAL_QID=0)
        put(store, "t", 0, b"d0", UNIQ_KEY="D0", DELAY=1, REAL_TOPIC="t", REAL_QID=0)
        front.delays = "{1:0}"

    async def scenario() -> None:
        async with copied(tmp_path, fill) as copy:
            # as if it had been delivered after the poll
            copy.polled(logBegin=0, askedAt=0)
            async with copy.promoted() as (broker, connection):
                await until(lambda: broker.store.queues.max_offset("t", 0) == 6)
                assert (await bodies(connection))[3:] == [b"d0", b"d1", b"d2"]

    run(scenario)


def timers_of(broker: BrokerController) -> dict[str, int]:
    """Return the due time of each timer by its body."""
    waits = {(when, position) for when, offset, position in broker.timers._heap if offset in broker.timers._waiting}
    found = {}
    for when, position in waits:
        raw = broker.store.reader.record_at(position)
        assert raw is not None
        (record,) = iter_records(raw)
        found[record.body.decode()] = when
    assert len(found) == len(waits)
    return found


def test_promotion_neither_repeats_nor_loses_a_timer(tmp_path: Path) -> None:
    def fill(store: MessageStore, front: Front) -> None:
        timer(store, "old", READ_MS - 5000)
        timer(store, "waits", LATER_MS)
        timer(store, "rolled", LATER_MS + 1)
        timer(store, "recall", LATER_MS, TIMER_DEL_UNIQKEY="t+gone")
        timer(store, "pop", LATER_MS, TAGS="ck", REAL_TOPIC=REVIVE_LOG)
        timer(store, "rolled", LATER_MS + 1, TIMER_ROLL_TIMES=1)
        timer(store, "behind", LATER_MS + 2)
        front.timers = (READ_MS, store.queues.max_offset(WHEEL_TIMER_TOPIC, 0))
        timer(store, "not looked at", READ_MS - 1000)

    async def scenario() -> None:
        async with copied(tmp_path, fill) as copy:
            async with copy.promoted() as (broker, connection):
                await until(lambda: broker.store.queues.max_offset("t", 0) == 4)
                assert (await bodies(connection))[3:] == [b"not looked at"]
                found = timers_of(broker)
                # RocketMQ's check point is not needed: the pop state includes it
                assert found.pop("pop", LATER_MS) == LATER_MS
                expected = {"waits": LATER_MS, "recall": LATER_MS, "rolled": LATER_MS + 1, "behind": LATER_MS + 2}
                assert found == expected
                assert broker.timers._recalls.keys() == {"t+gone"}
            async with copy.promoted() as (broker, _):
                found = timers_of(broker)
                found.pop("pop", None)
                assert found == expected, "a start as any other"

    run(scenario)


def test_pending_timers_are_kept_in_memory_only_by_their_offsets(tmp_path: Path) -> None:
    """There may be millions of them."""
    store, count, size = TablesMember(tmp_path, ManualClock(NOW_MS)).store, 40, 50_000
    for number in range(count):
        timer(store, f"{number:0{size}}", LATER_MS + number, UNIQ_KEY=f"U{number}")
    poll = LastPoll(
        master="", log_begin=0, asked_at=0, delays={}, timers=TimerCheckPoint(READ_MS, count), system={}, elsewhere=[]
    )
    tracemalloc.start()
    try:
        waiting = timers.not_delivered(store, poll)
        assert not isinstance(waiting, timers.UnreadableTimers)
        delivered = Delivered(store, (), above=0, ended_above=store.max_physical_offset)
        assert poll.timers is not None
        left = timers.sort_out(store, waiting, poll.timers, delivered, NOW_MS)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(waiting), left.is_empty) == (count, False)
    assert kept < count * size // 4


def test_reappended_timer_is_not_placed_behind_its_recall(tmp_path: Path) -> None:
    def fill(store: MessageStore, front: Front) -> None:
        timer(store, "recalled", LATER_MS)
        timer(store, "rolled", LATER_MS + 1)
        timer(store, "recall", LATER_MS, TIMER_DEL_UNIQKEY="t+recalled")
        timer(store, "rolled", LATER_MS + 1, TIMER_ROLL_TIMES=1)  # timers below its first copy are appended again
        front.timers = (READ_MS, store.queues.max_offset(WHEEL_TIMER_TOPIC, 0))

    async def scenario() -> None:
        async with copied(tmp_path, fill) as copy, copy.promoted() as (broker, _):
            assert timers_of(broker) == {"recall": LATER_MS, "rolled": LATER_MS + 1}

    run(scenario)


def test_timer_delivered_after_the_poll_is_not_delivered_again(tmp_path: Path) -> None:
    def fill(store: MessageStore, front: Front) -> None:
        timer(store, "before", READ_MS - 2000)
        timer(store, "delivered", READ_MS - 1000)
        timer(store, "due", READ_MS - 1000)
        put(store, "t", 0, b"delivered", UNIQ_KEY="delivered", TIMER_OUT_MS=READ_MS - 1000)
        front.timers = (READ_MS - 1500, store.queues.max_offset(WHEEL_TIMER_TOPIC, 0))

    async def scenario() -> None:
        async with copied(tmp_path, fill) as copy:
            copy.polled(logBegin=0, askedAt=0)
            async with copy.promoted() as (broker, connection):
                await until(lambda: broker.store.queues.max_offset("t", 0) == 5)
                assert (await bodies(connection))[3:] == [b"delivered", b"due"]
                assert len(broker.timers) == 0

    run(scenario)


def test_delivered_timer_keeps_the_last_property_of_rocketmqs_format(tmp_path: Path) -> None:
    def fill(store: MessageStore, front: Front) -> None:
        put(store, WHEEL_TIMER_TOPIC, 0, b"b", TIMER_OUT_MS=READ_MS - 1000, REAL_TOPIC="t", REAL_QID=0, KEYS="k")
        front.timers = (READ_MS, 0)

    async def scenario() -> None:
        async with copied(tmp_path, fill) as copy, copy.promoted() as (broker, _):
            await until(lambda: broker.store.queues.max_offset("t", 0) == 4)
            (record,) = iter_records(broker.store.reader.get("t", 0, 3, 1, 1 << 20).buffers[0])
            assert record.properties["KEYS"] == "k"
            assert "TIMER_DEQUEUE_MS" in record.properties

    run(scenario)


def test_half_messages_without_an_end_are_pending_after_a_promotion(tmp_path: Path) -> None:
    def fill(store: MessageStore, front: Front) -> None:
        half(store, "passed by the master's floor")
        half(store, "marked")
        committed = half(store, "committed, and not marked yet")
        half(store, "asked about")
        half(store, "open", TRANSACTION_CHECK_TIMES=2)
        half(store, "asked about", TRANSACTION_CHECK_TIMES=1)
        half(store, "committed by its first place")
        half(store, "committed by its first place", TRANSACTION_CHECK_TIMES=1)
        half(store, "immune", TRAN_PREPARED_QUEUE_OFFSET=1)
        put(store, OP_HALF_TOPIC, 0, b"0,", TAGS="d")
        put(store, OP_HALF_TOPIC, 0, b"1,", TAGS="d")
        put(store, "t", 0, b"c", sys_flag=COMMIT, prepared=committed.physical_offset, UNIQ_KEY="another")
        put(store, "t", 0, b"c", sys_flag=COMMIT, prepared=1, UNIQ_KEY="committed by its first place")
        group = "CID_RMQ_SYS_TRANS"
        offsets = {f"{HALF_TOPIC}@{group}": {"0": 1}, f"{OP_HALF_TOPIC}@{group}": {"0": 1}, "t@g": {"0": 2}}
        front.offsets = json.dumps({"offsetTable": offsets})

    async def scenario() -> None:
        async with copied(tmp_path, fill) as copy:
            for _ in range(2):
                async with copy.promoted() as (broker, _):
                    waiting = {one.queue_offset: one.checks for one in broker.transactions.waiting()}
                    assert waiting == {4: 2, 5: 1}, "at each start"

    run(scenario)


def test_late_commit_does_not_end_a_half_message_at_the_logs_begin(tmp_path: Path) -> None:
    store = TablesMember(tmp_path, ManualClock(NOW_MS)).store
    assert half(store, "waits").physical_offset == 0
    put(store, "t", 0, b"c", sys_flag=COMMIT, prepared=0, UNIQ_KEY="another", REAL_TOPIC="t")
    put(store, SCHEDULE_TOPIC, 17, b"c", sys_flag=COMMIT, prepared=700, UNIQ_KEY="delayed", REAL_TOPIC="t")
    delivered = Delivered(store, (), above=0, ended_above=0)
    assert delivered.committed_places == {700}
    assert delivered.ended_ids == {("t", "another"), ("t", "delayed")}


def check_point(start: int, pop_time: int, count: int, *, invisible: int = DAY_MS, topic: str = "t") -> bytes:
    differences = list(range(count))
    return json.dumps({
        "bm": 0, "bn": "broker-a", "c": "g", "d": differences, "it": invisible, "n": count, "pt": pop_time, "q": 0,
        "ro": 0, "so": start, "t": topic,
    }).encode()  # fmt: skip


def acknowledged(start: int, pop_time: int, *offsets: int) -> bytes:
    one = {"bn": "broker-a", "c": "g", "pt": pop_time, "q": 0, "so": start, "t": "t"}
    more = {"ao": offsets[0]} if len(offsets) == 1 else {"aol": list(offsets), "ao": -1}
    return json.dumps(one | more).encode()


def revive(store: MessageStore, tag: str, body: bytes, due: int | None) -> None:
    """Append a record to the revive log, or to the timers with the revive log as target."""
    if due is None:
        put(store, REVIVE_LOG, 2, body, TAGS=tag)
    else:
        put(store, WHEEL_TIMER_TOPIC, 0, body, TAGS=tag, TIMER_OUT_MS=due, REAL_TOPIC=REVIVE_LOG, REAL_QID=2)


def test_popped_messages_are_in_flight_unless_acknowledged(tmp_path: Path) -> None:
    pop_time = NOW_MS

    def fill(store: MessageStore, front: Front) -> None:
        for number in range(3, 20):
            put(store, "t", 0, b"%d" % number, UNIQ_KEY=f"U{number}")
        revive(store, "ck", check_point(0, pop_time - 9, 2), None)  # already passed
        revive(store, "ck", check_point(2, pop_time - 8, 3), None)  # 2, 3, 4
        revive(store, "ack", acknowledged(2, pop_time - 8, 3), None)
        revive(store, "ck", check_point(5, pop_time, 4), LATER_MS - 1000)  # 5 to 8
        revive(store, "bAck", acknowledged(5, pop_time, 5, 6), LATER_MS)
        revive(store, "ack", acknowledged(5, pop_time, 7), LATER_MS)
        revive(store, "ck", check_point(7, pop_time + 1, 1), LATER_MS)  # with an extended invisibility
        revive(store, "ck", check_point(12, pop_time + 2, 1), LATER_MS)  # from before the group's reset
        front.timers = (READ_MS, store.queues.max_offset(WHEEL_TIMER_TOPIC, 0))
        offsets = {"t@g": {"0": 10}, f"{REVIVE_LOG}@CID_RMQ_SYS_REVIVE_GROUP": {"2": 0}}
        front.offsets = json.dumps({"offsetTable": offsets})

    async def scenario() -> None:
        async with copied(tmp_path, fill) as copy:
            for _ in range(2):
                async with copy.promoted() as (broker, _):
                    queue = broker.pops.find("g", "t", 0)
                    assert queue is not None
                    flights = {offset: one.pop_time for offset, one in queue.flights.items()}
                    assert flights == {2: pop_time - 8, 4: pop_time - 8, 7: pop_time + 1, 8: pop_time}
                    assert queue.next_offset == 10
                    assert broker.offsets.query("g", "t", 0) == 2

    run(scenario)


def test_late_check_point_does_not_advance_a_group_that_was_reset(
    tmp_path: Path,
) -> None:
    def fill(store: MessageStore, front: Front) -> None:
        revive(store, "ck", check_point(0, NOW_MS - 60_000, 3), None)  # its copy, behind the poll
        front.timers = (READ_MS, 0)
        front.offsets = json.dumps({"offsetTable": {"t@g": {"0": 1}}})

    async def scenario() -> None:
        async with copied(tmp_path, fill) as copy:
            copy.polled(askedAt=copy.poll()["askedAt"] - 1)  # the check point is behind it
            async with copy.promoted() as (broker, _):
                queue = broker.pops.find("g", "t", 0)
                assert queue is not None
                assert (queue.next_offset, list(queue.flights)) == (1, [0])

    run(scenario)


def test_message_redelivered_after_the_poll_is_not_redelivered_again(tmp_path: Path) -> None:
    pop_time = NOW_MS - 60_000

    def fill(store: MessageStore, front: Front) -> None:
        revive(store, "ck", check_point(0, pop_time, 3, invisible=10_000), None)
        first = store.reader.get("t", 0, 0, 1, 1 << 20).buffers[0]
        (record,) = iter_records(first)
        store.put(
            "%RETRY%g_t", 0, record.body, record.properties_raw, flag=0, sys_flag=0,
            born_timestamp=record.born_timestamp, born_host=("127.0.0.1", 1), reconsume_times=1,
        )  # fmt: skip
        front.timers = (READ_MS, 0)

    async def scenario() -> None:
        async with copied(tmp_path, fill) as copy:
            copy.polled(logBegin=0, askedAt=0)
            async with copy.promoted() as (broker, _):
                await until(lambda: broker.revive.revived == 2)
                queue = broker.pops.find("g", "t", 0)
                assert queue is not None
                assert queue.next_offset == 3, "handed out behind the poll"
                await until(lambda: not queue.flights)

    run(scenario)
