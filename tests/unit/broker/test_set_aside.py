"""A message, answer or waiting pull that cannot be processed is skipped or quarantined, and delays no other."""

from __future__ import annotations

import asyncio
import errno
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from access.guard import Unguarded
from broker.broker_controller import BrokerController
from broker.clients.client_manager import ClientManager
from broker.config import BrokerConfig
from broker.intake.log_writer import LogWriter
from broker.life import BrokerLife
from broker.long_polling.pull_request_hold import HeldPull, PullRequestHold
from broker.pop.pop_queue import Flight, PopQueue
from broker.pop.revive import PopRevive
from broker.store.config import SYNC_FLUSH, StoreConfig
from broker.store.message_store import MessageStore, PutResult
from broker.waiting.check_back import CheckBack, ProducerQuestions
from broker.waiting.delivery import TRIES, ReadQueues
from broker.waiting.half_messages import HalfMessages
from broker.waiting.schedule_message import ScheduleMessage
from broker.waiting.timer_message import TimerMessages
from infra.clock import ManualClock
from infra.disk.filesystem import OutOfDescriptors
from infra.loop.supervisor import FAILING_RUNS, HANGING_S, Faults
from infra.process.startup import EXIT_FAILED
from neve.record.codec import MalformedRecord, MessageRecord, decode_record, iter_records
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import SERIALIZE_BINARY, RemotingCommand, encode_command
from neve.remoting.names import CHECK_MAX_TOPIC, HALF_TOPIC, SCHEDULE_TOPIC, WHEEL_TIMER_TOPIC
from tests.kit.broker.in_process import running, send
from tests.kit.broker.synced import nothing_to_sync
from tests.kit.clock.waiting import until
from tests.kit.store.by_key import by_key
from tests.kit.store.sim_disk import SimDisk

HOUR_MS = 3_600_000
# A digit for str.isdigit(), but not a number for int().
NO_QUEUE = "\N{SUPERSCRIPT TWO}"


class FullDirectoryDisk(SimDisk):
    """A disk on which no new file can be created below a directory while `closed` names it."""

    def __init__(self) -> None:
        super().__init__()
        self.closed: str | None = None

    def create_preallocated(self, path: Path, size: int, *, sync: bool = True) -> None:
        if path.parent.name == self.closed:
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        super().create_preallocated(path, size, sync=sync)


class UnreadableStore:
    def __init__(self) -> None:
        self.disk, self.clock, self.faults = FullDirectoryDisk(), ManualClock(), Faults()
        self.config = BrokerConfig()
        self.open()

    def open(self) -> None:
        config = StoreConfig(Path("/store"), commit_log_file_size=1 << 18, index_slots=64, index_entries=100)
        self.store = MessageStore(config, self.disk, self.clock)
        self.store.load()

    def put(self, topic: str, queue_id: int, body: bytes, code: int = 0, **properties: str) -> Any:
        raw = "".join(f"{name}\x01{value}\x02" for name, value in properties.items()).encode()
        return self.store.put(
            topic, queue_id, body, raw, flag=0, sys_flag=0, born_timestamp=0, born_host=("10.0.0.1", 1),
            tags_code=code, keys=properties.get("KEYS"),
        )  # fmt: skip

    def bodies(self, topic: str) -> list[bytes]:
        got = self.store.reader.get(topic, 0, 0, 32, 1 << 20)
        return [record.body for buffer in got.buffers for record in iter_records(buffer)]


@pytest.fixture
def world() -> Iterator[UnreadableStore]:
    world = UnreadableStore()
    yield world
    world.store.shutdown()


def test_delayed_message_without_a_valid_queue_delays_no_other(world: UnreadableStore) -> None:
    schedule = ScheduleMessage(
        world.store,
        LogWriter(world.store),
        world.clock,
        [1000, 2000],
        world.disk,
        Path("/store/delay"),
        nothing_to_sync,
        world.faults,
        read_queues=lambda topic: 8,
    )
    world.put(SCHEDULE_TOPIC, 0, b"odd", REAL_TOPIC="orders", REAL_QID=NO_QUEUE)
    world.put(SCHEDULE_TOPIC, 0, b"behind it", REAL_TOPIC="orders", REAL_QID="0")
    world.put(SCHEDULE_TOPIC, 1, b"the next level", REAL_TOPIC="orders", REAL_QID="0")
    world.clock.advance(2000)
    schedule.deliver_due()
    assert world.bodies("orders") == [b"behind it", b"the next level"]
    assert world.faults.counts == {"a delayed message": 1}
    assert schedule.deliver_due() == 0


def test_unreadable_delay_level_delays_no_other(world: UnreadableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = ScheduleMessage(
        world.store,
        LogWriter(world.store),
        world.clock,
        [1000, 2000],
        world.disk,
        Path("/store/delay"),
        nothing_to_sync,
        world.faults,
        read_queues=lambda topic: 8,
    )
    for queue_id in range(2):
        world.put(SCHEDULE_TOPIC, queue_id, b"level %d" % (queue_id + 1), REAL_TOPIC="orders", REAL_QID="0")
    world.clock.advance(2000)
    get = world.store.reader.get

    def damaged(topic: str, queue_id: int, *rest: Any) -> Any:
        if (topic, queue_id) == (SCHEDULE_TOPIC, 0):
            raise OSError(errno.EIO, "Input/output error")
        return get(topic, queue_id, *rest)

    monkeypatch.setattr(world.store.reader, "get", damaged)
    schedule.deliver_due()
    assert world.bodies("orders") == [b"level 2"]
    monkeypatch.undo()
    schedule.deliver_due()
    assert world.bodies("orders") == [b"level 2", b"level 1"]


def test_timer_without_a_valid_queue_delays_no_other(world: UnreadableStore) -> None:
    timers = TimerMessages(
        world.store, LogWriter(world.store), world.clock, world.config, lambda topic: 8, world.faults
    )
    when = world.clock.now_ms() + 1000
    for body, queue in ((b"odd", NO_QUEUE), (b"behind it", "0")):
        stored = world.put(WHEEL_TIMER_TOPIC, 0, body, when, REAL_TOPIC="orders", REAL_QID=queue)
        timers.added(when, stored, None)
    world.clock.advance(1000)
    timers.deliver_due()
    assert (world.bodies("orders"), len(timers)) == ([b"behind it"], 0)
    assert world.faults.counts == {"a timer message": 1}


def make_schedule(
    world: UnreadableStore, read_queues: ReadQueues = lambda topic: 8, writer: LogWriter | None = None
) -> ScheduleMessage:
    return ScheduleMessage(
        world.store,
        writer or LogWriter(world.store),
        world.clock,
        [1000, 2000],
        world.disk,
        Path("/store/delay"),
        nothing_to_sync,
        world.faults,
        read_queues=read_queues,
    )


def make_timers(world: UnreadableStore, read_queues: ReadQueues = lambda topic: 8) -> TimerMessages:
    return TimerMessages(world.store, LogWriter(world.store), world.clock, world.config, read_queues, world.faults)


def park_timer(
    world: UnreadableStore, timers: TimerMessages, body: bytes, topic: str = "orders", queue: str = "0"
) -> None:
    when = world.clock.now_ms() + 1000
    timers.added(when, world.put(WHEEL_TIMER_TOPIC, 0, body, when, REAL_TOPIC=topic, REAL_QID=queue), None)


class FailingWriter(LogWriter):
    """Fails in an unexpected way for one body."""

    def put_copy(self, record: MessageRecord, *args: Any, **kwargs: Any) -> PutResult:
        if record.body == b"odd":
            raise AssertionError("unexpected")
        return super().put_copy(record, *args, **kwargs)


def quarantined(world: UnreadableStore) -> list[bytes]:
    directory = Path("/store/quarantine")
    names = world.disk.list_dir(directory) if world.disk.exists(directory) else []
    return [decode_record(world.disk.read(directory / name)).body for name in names]


def test_timer_with_an_unexpected_error_is_quarantined(world: UnreadableStore) -> None:
    writer = FailingWriter(world.store)
    timers = TimerMessages(world.store, writer, world.clock, world.config, lambda topic: 8, world.faults)
    for body in (b"odd", b"behind it"):
        park_timer(world, timers, body)
    world.clock.advance(1000)
    for _ in range(TRIES - 1):
        timers.deliver_due()
    assert (world.bodies("orders"), quarantined(world), len(timers)) == ([], [], 2)
    timers.deliver_due()
    assert (world.bodies("orders"), quarantined(world), len(timers)) == ([b"behind it"], [b"odd"], 0)
    again = make_timers(world)
    again.load()
    assert len(again) == 0


def test_delayed_message_with_an_unexpected_error_is_quarantined(world: UnreadableStore) -> None:
    schedule = make_schedule(world, writer=FailingWriter(world.store))
    for body in (b"odd", b"behind it"):
        world.put(SCHEDULE_TOPIC, 0, body, REAL_TOPIC="orders", REAL_QID="0")
    world.clock.advance(1000)
    for _ in range(TRIES - 1):
        schedule.deliver_due()
    assert (world.bodies("orders"), quarantined(world)) == ([], [])
    schedule.deliver_due()
    schedule.deliver_due()
    assert (world.bodies("orders"), quarantined(world)) == ([b"behind it"], [b"odd"])


def test_damaged_delayed_record_is_quarantined_at_once(world: UnreadableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = make_schedule(world)
    for body in (b"odd", b"behind it"):
        world.put(SCHEDULE_TOPIC, 0, body, REAL_TOPIC="orders", REAL_QID="0")
    world.clock.advance(1000)

    def damaged(buffer: Any) -> Iterator[MessageRecord]:
        for record in iter_records(buffer):
            if record.body == b"odd":
                raise MalformedRecord("damaged")
            yield record

    monkeypatch.setattr("broker.waiting.schedule_message.iter_records", damaged)
    schedule.deliver_due()
    schedule.deliver_due()
    assert (world.bodies("orders"), quarantined(world)) == ([b"behind it"], [b"odd"])


def test_message_is_not_quarantined_by_an_error_of_the_disk(world: UnreadableStore) -> None:
    timers = make_timers(world)
    park_timer(world, timers, b"later")
    world.clock.advance(1000)
    world.disk.closed = "0"  # the queue of the target can't be created
    for _ in range(2 * TRIES):
        timers.deliver_due()
    assert (quarantined(world), len(timers)) == ([], 1)
    world.disk.closed = None
    timers.deliver_due()
    assert (world.bodies("orders"), len(timers)) == ([b"later"], 0)


def test_message_waits_while_its_quarantine_file_is_refused(
    world: UnreadableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = FailingWriter(world.store)
    timers = TimerMessages(world.store, writer, world.clock, world.config, lambda topic: 8, world.faults)
    park_timer(world, timers, b"odd")
    world.clock.advance(1000)

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(world.disk, "write_atomic", full)
        for _ in range(2 * TRIES):
            timers.deliver_due()
        assert (quarantined(world), len(timers)) == ([], 1)
    timers.deliver_due()
    assert (quarantined(world), len(timers)) == ([b"odd"], 0)


def fail_appends_to(world: UnreadableStore, topic: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    put = world.store.put

    def failing(to: str, *rest: Any, **more: Any) -> Any:
        if to == topic:
            raise error
        return put(to, *rest, **more)

    monkeypatch.setattr(world.store, "put", failing)


TRANSIENT = (OSError(errno.EIO, "Input/output error"), OutOfDescriptors(errno.EMFILE, "Too many open files"))


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_delayed_message_is_retried_after_a_transient_error(
    world: UnreadableStore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    schedule = make_schedule(world)
    for body in (b"first", b"second"):
        world.put(SCHEDULE_TOPIC, 0, body, REAL_TOPIC="orders", REAL_QID="0")
    world.clock.advance(1000)
    fail_appends_to(world, "orders", error, monkeypatch)
    for _ in range(3):
        assert schedule.deliver_due() == 0
    assert world.faults.counts == {"a delay level": 3}
    assert schedule.pending() == 2
    monkeypatch.undo()
    assert schedule.deliver_due() == 2
    assert world.bodies("orders") == [b"first", b"second"]


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
@pytest.mark.parametrize("fails", ["the append", "the read"])
def test_timer_message_is_retried_after_a_transient_error(
    world: UnreadableStore, monkeypatch: pytest.MonkeyPatch, error: Exception, fails: str
) -> None:
    timers = make_timers(world)
    for body in (b"first", b"second"):
        park_timer(world, timers, body)
    world.clock.advance(1000)
    if fails == "the append":
        fail_appends_to(world, "orders", error, monkeypatch)
    else:

        def unreadable(position: int) -> bytes:
            raise error

        monkeypatch.setattr(world.store.reader, "record_at", unreadable)
    for _ in range(3):
        assert timers.deliver_due() == 0
    assert world.faults.counts == {"a timer delivery": 3}
    monkeypatch.undo()
    assert timers.deliver_due() == 2
    assert (world.bodies("orders"), len(timers)) == ([b"first", b"second"], 0)


def test_pending_message_of_a_deleted_topic_creates_no_queue(world: UnreadableStore) -> None:
    schedule = make_schedule(world, lambda topic: None if topic == "gone" else 1)
    timers = make_timers(world, lambda topic: None if topic == "gone" else 1)
    for topic in ("gone", "orders"):
        world.put(SCHEDULE_TOPIC, 0, b"delayed", REAL_TOPIC=topic, REAL_QID="0")
        park_timer(world, timers, b"timer", topic)
    world.clock.advance(1000)
    schedule.deliver_due()
    timers.deliver_due()
    assert world.store.queues.names_of("gone") == []
    assert world.bodies("orders") == [b"delayed", b"timer"]
    assert not world.faults.counts, "a deleted topic is no fault"


def test_pending_message_is_delivered_to_an_existing_queue(world: UnreadableStore) -> None:
    """The topic had eight queues when it was parked, and has two now."""
    schedule, timers = make_schedule(world, lambda topic: 2), make_timers(world, lambda topic: 2)
    for queue in ("0", "1", "5", "7"):
        world.put(SCHEDULE_TOPIC, 0, b"delayed", REAL_TOPIC="orders", REAL_QID=queue)
        park_timer(world, timers, b"timer", queue=queue)
    world.clock.advance(1000)
    schedule.deliver_due()
    timers.deliver_due()
    assert [world.store.queues.max_offset("orders", queue) for queue in range(2)] == [2, 6]


class CheckedProducer:
    """The connection of a producer that is asked for the outcome of its transactions."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.connection = self

    def send_oneway(self, command: RemotingCommand) -> None:
        encode_command(command)
        self.asked += [record.body for record in iter_records(command.body)]


class Transactions:
    def __init__(self, world: UnreadableStore) -> None:
        self.world, self.producer = world, CheckedProducer()
        self.halves = HalfMessages(world.store, LogWriter(world.store), world.clock)
        life, clients = BrokerLife(world.clock), ClientManager(world.clock, lambda group: None)
        life.started()
        clients.next_producer = lambda group, may: self.producer  # type: ignore[method-assign, assignment, return-value]
        topics: Any = SimpleNamespace(create_now=lambda topic, nums: None)
        self.check_back = CheckBack(
            world.config,
            world.clock,
            life,
            world.faults,
            world.clock.now_ms,
            transactions=self.halves,
            store=world.store,
            writer=LogWriter(world.store),
            producers=ProducerQuestions(
                clients, Unguarded(), broker_name=world.config.broker_name, address=("127.0.0.1", 10911)
            ),
            topics=topics,
            register_soon=lambda: None,
        )

    def half(self, body: bytes, **properties: str) -> None:
        names = {"REAL_TOPIC": "orders", "REAL_QID": "0", "PGROUP": "pg", **properties}
        self.halves.added(self.world.put(HALF_TOPIC, 0, body, 0, **names), properties)

    def round(self) -> None:
        asyncio.run(self.check_back.run())


def test_half_message_without_a_valid_queue_is_discarded_and_blocks_none(world: UnreadableStore) -> None:
    world.config.transaction_check_max = 2
    transactions = Transactions(world)
    transactions.half(b"odd", REAL_QID=NO_QUEUE)
    transactions.half(b"behind it")
    for _ in range(3):
        world.clock.advance(60_000)
        transactions.round()
    assert transactions.producer.asked == [b"behind it"] * 2
    assert (len(transactions.halves), world.bodies(CHECK_MAX_TOPIC)) == (0, [b"odd", b"behind it"])


def test_damaged_half_message_is_quarantined_and_pins_no_segment(
    world: UnreadableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions = Transactions(world)
    transactions.half(b"odd")

    def damaged(raw: bytes) -> MessageRecord:
        raise MalformedRecord("damaged")

    world.clock.advance(HOUR_MS)
    with monkeypatch.context() as patched:
        patched.setattr("broker.waiting.check_back.decode_record", damaged)
        transactions.round()
    assert (transactions.halves.pinned_from(), quarantined(world)) == (None, [b"odd"])
    transactions.halves.load()
    assert len(transactions.halves) == 0


def test_check_immunity_keeps_a_half_message_no_longer_than_the_log(world: UnreadableStore) -> None:
    """RocketMQ skips half messages older than fileReservedTime as well.

    Otherwise one would keep its segment forever.
    """
    transactions = Transactions(world)
    transactions.half(b"half", CHECK_IMMUNITY_TIME_IN_SECONDS="999999999999999")
    world.clock.advance(world.config.file_reserved_time * HOUR_MS)
    transactions.round()
    assert len(transactions.halves) == 1
    world.clock.advance(1)
    transactions.round()
    assert (transactions.halves.pinned_from(), world.bodies(CHECK_MAX_TOPIC)) == (None, [b"half"])


def test_failing_suspended_pull_delays_none_of_those_woken_with_it(world: UnreadableStore) -> None:
    hold = PullRequestHold(world.clock, 10, world.faults)
    told: list[bool] = []

    def fail(last: bool) -> None:
        raise OSError(errno.EIO, "Input/output error")

    connection: Any = object()
    for resume in (fail, told.append, fail, told.append):
        hold.hold(HeldPull(connection, "t", 0, 5, 10.0, None, resume))
    assert hold.arrived("t", 0, 5, 0)
    hold.wake()
    assert (told, hold.count) == ([False, False], 0)
    assert world.faults.counts == {"a waiting pull": 2}


def test_index_file_that_cannot_be_created_loses_only_keys(world: UnreadableStore) -> None:
    world.disk.closed = "index"
    world.put("orders", 0, b"one", KEYS="k1")
    world.store.after_flush(world.store.visibility.flush())
    assert (world.bodies("orders"), world.store.index.skipped) == ([b"one"], 1)
    world.disk.closed = None
    world.put("orders", 0, b"two", KEYS="k2")
    world.store.after_flush(world.store.visibility.flush())
    assert len(by_key(world.store, "orders", "k2", 10, 0, 1 << 60)) == 1


def test_index_file_that_could_not_be_mapped_does_not_stop_a_start(
    world: UnreadableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        real = world.disk.map

        def closed(path: Path, size: int) -> Any:
            if path.parent.name == "index":
                raise OSError(errno.EMFILE, "Too many open files", str(path))
            return real(path, size)

        patch.setattr(world.disk, "map", closed)
        world.put("orders", 0, b"one", KEYS="k1")
        world.store.after_flush(world.store.visibility.flush())
    for number in range(2, 4):
        world.put("orders", 0, b"more", KEYS=f"k{number}")
        world.store.after_flush(world.store.visibility.flush())
    world.store.shutdown()
    world.open()
    assert len(by_key(world.store, "orders", "k3", 10, 0, 1 << 60)) == 1


def test_popped_message_that_cannot_be_redelivered_delays_no_other(
    world: UnreadableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_off: list[int] = []
    flights = [(PopQueue(("g", "t", 0), 3), offset, Flight(0, 0, False)) for offset in range(3)]
    life = BrokerLife(world.clock)
    life.started()
    pops: Any = SimpleNamespace(
        take_due=lambda: flights, put_off=lambda queue, offset, flight, until: put_off.append(offset)
    )
    unasked: Any = None
    revive = PopRevive(
        world.clock,
        life,
        world.faults,
        lambda name, work: pytest.fail("nothing is waited for"),
        tiered=unasked,
        pops=pops,
        polling=unasked,
        topics=unasked,
        groups=unasked,
        retries=unasked,
    )

    async def revive_one(queue: PopQueue, offset: int, flight: Flight, *, waits: bool) -> int:
        if offset == 0:
            raise OSError(errno.EIO, "Input/output error")
        return 1

    monkeypatch.setattr(revive, "_revive", revive_one)
    assert asyncio.run(revive.run_due()) == 2
    assert (put_off, world.faults.counts) == ([0], {"a popped message": 1})


# ---- in a broker


async def page(broker: BrokerController, name: str) -> tuple[int, str]:
    assert broker.admin_address is not None
    url = "http://{}:{}/{}".format(*broker.admin_address, name)

    def get() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(get)


async def test_start_removes_unfinished_quarantine_files(tmp_path: Path) -> None:
    """A crash during the write of a quarantine file leaves a temporary file whose name no later write reuses."""
    directory = tmp_path / "broker" / "quarantine"
    directory.mkdir(parents=True)
    for name in ("T-0-1.record", ".T-0-2.record.tmp"):
        (directory / name).write_bytes(b"record")
    async with running(tmp_path / "broker"):
        assert [path.name for path in directory.iterdir()] == ["T-0-1.record"]


async def test_repeatedly_failing_task_is_on_the_health_pages(tmp_path: Path) -> None:
    async with running(tmp_path / "broker") as (broker, connection):
        assert await page(broker, "readyz") == (200, "ready\n")
        runs: list[int] = []

        def fail() -> int:
            runs.append(1)
            raise OSError("no more open files")

        broker.schedule.deliver_due = fail  # type: ignore[method-assign]
        await until(lambda: len(runs) > FAILING_RUNS)
        status, text = await page(broker, "readyz")
        assert status == 503
        assert "task schedule: failing" in text
        assert (await page(broker, "livez"))[0] == 200
        await send(connection, "orders")


@pytest.mark.parametrize("flush_disk_type", [SYNC_FLUSH, "ASYNC_FLUSH"])
async def test_failed_flusher_stops_the_broker(tmp_path: Path, flush_disk_type: str) -> None:
    async with running(tmp_path / "broker", f"flushDiskType={flush_disk_type}") as (broker, connection):
        await send(connection, "orders")

        def fail() -> int:
            raise ValueError("an error of ours")

        broker.flusher._interval_ms = fail
        await broker.flusher.flush_now()
        async with asyncio.timeout(20):
            await broker.life.end_requested.wait()
        assert (broker.life.exit_code, broker.life.accepting) == (EXIT_FAILED, False)
        assert [(await page(broker, name))[0] for name in ("livez", "readyz")] == [503, 503]
        with pytest.raises(AssertionError, match="until it has started"):
            await send(connection, "orders")


async def test_registration_task_survives_a_failure_and_retries(tmp_path: Path) -> None:
    async with running(tmp_path / "broker") as (broker, _):
        tries: list[int] = []

        async def register() -> None:
            tries.append(len(tries))
            if len(tries) == 1:
                raise OSError(errno.EMFILE, "Too many open files")

        broker.registration.now = register  # type: ignore[method-assign]
        broker.registration.soon()
        await until(lambda: len(tries) == 2, "the topics are registered after all")
        broker.registration.soon()
        await until(lambda: len(tries) == 3)


async def test_hanging_fsync_is_on_the_health_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path / "broker") as (broker, _):
        flusher = broker.flusher
        assert broker.health.troubles() == []
        monkeypatch.setattr(flusher, "syncing_since", broker.clock.monotonic() - HANGING_S - 1)
        status, text = await page(broker, "livez")
        assert (status, text.splitlines()[:1]) == (503, ["not live"])
        assert "task flush: hanging" in text
        monkeypatch.undo()


async def test_answer_with_an_oversized_header_is_replaced_and_delays_no_other(tmp_path: Path) -> None:
    """It would contain the recall handle and the message's own id, in the binary format."""

    async with running(tmp_path / "broker", "flushDiskType=SYNC_FLUSH") as (_, connection):
        await send(connection, "orders")
        ext = {
            "a": "p", "b": "orders", "c": "TBW102", "d": "1", "e": "0", "f": "0", "g": "1", "h": "0", "j": "0",
            "i": "TIMER_DELAY_SEC\x01600\x02UNIQ_KEY\x01" + "K" * 30_000 + "\x02",
        }  # fmt: skip
        long = RemotingCommand(Code.SEND_MESSAGE_V2, ext=ext, body=b"odd", serialize_type=SERIALIZE_BINARY)
        answer = await connection.invoke(long, 30)
        assert (answer.code, answer.ext["queueId"]) == (0, "0")
        await send(connection, "orders")
