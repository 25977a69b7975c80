"""Pop without a socket: its state and log, receipt strings, waiters, queue assignment."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.intake.log_writer import LogWriter
from broker.long_polling.pop_long_polling import ANY_QUEUE, PopLongPolling, Waiter
from broker.pop import assignment
from broker.pop.extra_info import ExtraInfo
from broker.pop.pop_book import PopBook, revive_log
from broker.pop.pop_log import Ack, ChangeInvisibleTime, PopCheckPoint
from broker.pop.pop_queue import QueueLock, is_out
from broker.store.config import ASYNC_FLUSH, SYNC_FLUSH, StoreConfig
from broker.store.errors import StoreFull
from broker.store.message_store import MessageStore
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from infra.clock import ManualClock
from infra.disk.filesystem import RealDisk
from neve.errors import BrokerError
from neve.remoting.body import MessageQueue
from neve.remoting.names import real_topic
from tests.kit.broker.synced import nothing_to_sync


class PopStore:
    """A store with ten messages and the pop state of one group. `restart` drops everything that is only in memory."""

    def __init__(self, root: Path, flush: str = ASYNC_FLUSH) -> None:
        self.root, self.clock, self.disk, self.flush = root, ManualClock(), RealDisk(), flush
        self.disk.make_dirs(root / "config")
        self.open()
        for _ in range(10):
            self.store.put("t", 0, b"body", b"", flag=0, sys_flag=0, born_timestamp=1, born_host=("10.1.2.3", 4000))

    def open(self) -> None:
        config = StoreConfig(self.root, commit_log_file_size=1 << 20, flush_disk_type=self.flush)
        self.store = MessageStore(config, self.disk, self.clock)
        self.store.load()
        self.offsets = ConsumerOffsetManager(self.disk, self.root / "config" / "consumerOffset.json", nothing_to_sync)
        path = self.root / "config" / "popState.json"
        self.book = PopBook(
            self.store,
            LogWriter(self.store),
            self.offsets,
            self.clock,
            self.disk,
            path,
            revive_log("c"),
            nothing_to_sync,
        )
        self.offsets.subscribe(self.book.set_elsewhere)
        self.book.load()

    def restart(self) -> None:
        self.store.shutdown()
        self.open()

    def pop(self, count: int, *, visible_in: int = 1000) -> tuple[int, list[int]]:
        queue = self.book.open("g", "t", 0, 0)
        now, start = self.clock.now_ms(), queue.next_offset
        offsets = list(range(start, start + count))
        self.book.record(PopCheckPoint("g", "t", 0, start + count, now, now + visible_in, False, offsets))
        return now, offsets

    def group_offset(self) -> int:
        return self.offsets.query("g", "t", 0)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[PopStore]:
    broker = PopStore(tmp_path)
    yield broker
    broker.store.shutdown()


def test_committed_offset_is_the_lowest_unacknowledged_one(broker: PopStore) -> None:
    popped, _ = broker.pop(4)
    broker.book.record(Ack("g", "t", 0, popped, [1, 2]))
    assert broker.group_offset() == 0
    broker.book.record(Ack("g", "t", 0, popped, [0]))
    assert broker.group_offset() == 3
    broker.book.record(Ack("g", "t", 0, popped, [3]))
    assert broker.group_offset() == 4


@pytest.mark.parametrize("with_image", [True, False])
def test_restart_restores_acknowledged_and_in_flight_messages(broker: PopStore, with_image: bool) -> None:
    popped, _ = broker.pop(4)
    if with_image:
        asyncio.run(broker.book.save())
    broker.book.record(Ack("g", "t", 0, popped, [0, 2]))
    broker.restart()
    queue = broker.book.find("g", "t", 0)
    assert queue is not None
    assert (sorted(queue.flights), queue.next_offset, broker.group_offset()) == ([1, 3], 4, 1)
    broker.clock.advance(1001)
    assert [offset for _, offset, _ in broker.book.take_due()] == [1, 3]


def test_extended_invisibility_delays_redelivery_and_voids_the_old_receipt(broker: PopStore) -> None:
    popped, _ = broker.pop(1)
    broker.clock.advance(500)
    now = broker.clock.now_ms()
    broker.book.record(ChangeInvisibleTime("g", "t", 0, 0, popped, now, now + 5000))
    broker.clock.advance(600)
    assert not broker.book.take_due()
    queue = broker.book.find("g", "t", 0)
    assert queue is not None
    assert is_out(queue, [0], popped) == []
    assert is_out(queue, [0], now) == [0]
    broker.clock.advance(4500)
    assert len(broker.book.take_due()) == 1


def test_pop_resumes_at_an_offset_that_was_set_elsewhere(broker: PopStore) -> None:
    broker.pop(5)
    broker.offsets.commit("g", "t", 0, 2)
    queue = broker.book.find("g", "t", 0)
    assert queue is not None
    assert (queue.next_offset, queue.flights) == (2, {})
    broker.restart()
    assert broker.group_offset() == 2


@pytest.mark.parametrize("flush", [ASYNC_FLUSH, SYNC_FLUSH])
def test_reset_on_a_full_disk_survives_a_restart_before_the_pops_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise StoreFull("no room")

    broker = PopStore(tmp_path, flush)
    broker.pop(5)
    with monkeypatch.context() as patched:
        patched.setattr(broker.store, "put", full)
        broker.offsets.reset("g", "t", 0, 0)
    asyncio.run(broker.book.settle())
    broker.restart()
    queue = broker.book.find("g", "t", 0)
    assert queue is not None
    assert (queue.next_offset, queue.flights) == (0, {})
    broker.store.shutdown()


def test_dropped_queue_stays_dropped_after_a_restart(broker: PopStore) -> None:
    broker.pop(5)
    broker.book.drop(topic="t")
    broker.offsets.delete_topic("t")
    broker.restart()
    assert broker.book.find("g", "t", 0) is None
    assert broker.group_offset() == -1


def test_only_the_log_behind_the_saved_image_is_needed(broker: PopStore) -> None:
    broker.pop(1)
    assert broker.book.oldest_needed_physical() is not None
    asyncio.run(broker.book.save())
    assert broker.book.oldest_needed_physical() is None


def test_check_point_string_has_seven_or_eight_fields() -> None:
    text = "3 1700000000000 60000 0 1 broker-a 2 5"
    info = ExtraInfo.parse(text)
    assert (info.to_text(), info.retry, info.offset) == (text, "1", 5)
    assert ExtraInfo.parse("3 17 60 0 0 b 2").to_text() == "3 17 60 0 0 b 2"
    assert ExtraInfo.parse(f"{text} 16233") == info == ExtraInfo.parse(f"{text} 16233 more")  # as a proxy returns it
    for wrong in ("", "1 2 3", "x 17 60 0 0 b 2", "3 17 60 0 0 b 2 x"):
        with pytest.raises(BrokerError):
            ExtraInfo.parse(wrong)


def test_retry_topic_name_follows_the_receipts_retry_field() -> None:
    assert real_topic("t", "g", "1") == "%RETRY%g_t"
    assert real_topic("t", "g", "0") == "t"
    assert real_topic("t", "g", "2") == "%RETRY%g+t"
    assert real_topic("t", "g", "[[1]]") == "%RETRY%g_t"  # of a foreign client: no such topic


async def test_message_wakes_one_waiter_of_each_group() -> None:
    polling = PopLongPolling()
    waiters = [Waiter(group, "t", (f"%RETRY%{group}_t",), ANY_QUEUE) for group in ("g", "g", "h")]
    for waiter in waiters:
        polling.add(waiter)
    polling.arrived("t", 3)
    assert [waiter.future.done() for waiter in waiters] == [True, False, True]
    polling.arrived("%RETRY%g_t", 0)
    assert waiters[1].future.done()
    for waiter in waiters:
        polling.remove(waiter)
    assert polling.count == 0


def test_queue_assignments_are_disjoint_and_cover_all_queues() -> None:
    queues = [MessageQueue("t", broker, queue) for broker in ("a", "b") for queue in range(5)]
    for strategy in (assignment.AVERAGE, assignment.BY_CIRCLE):
        shares = [assignment.share(strategy, client, queues, ["1", "2", "3"]) for client in "123"]
        assert sorted(queue for part in shares for queue in part) == queues
        assert [len(part) for part in shares] == [4, 3, 3]
    assert assignment.share(assignment.AVERAGE, "4", queues, ["1", "2", "3"]) == []
    with pytest.raises(ValueError, match="strategy"):
        assignment.share("DICE", "1", queues, ["1"])


def test_pop_assignment_shares_brokers_or_neighbouring_queues() -> None:
    queues = [MessageQueue("t", broker, queue) for broker in ("a", "b") for queue in range(2)]
    everything = assignment.share_for_pop(assignment.AVERAGE, "1", queues, ["1", "2"], 8)
    assert everything == [MessageQueue("t", "a", -1), MessageQueue("t", "b", -1)]
    part = assignment.share_for_pop(assignment.AVERAGE, "4", queues, ["1", "2", "3", "4"], 1)
    assert sorted(part) == [queues[0], queues[3]]


def test_skipped_queue_lock_reports_once_that_it_is_free() -> None:
    lock = QueueLock()
    assert not lock.pass_by()
    lock.take()
    assert not lock.release()
    lock.take()
    assert lock.pass_by() and lock.pass_by()
    assert lock.release()
    lock.take()
    assert not lock.release()


async def test_freed_queue_wakes_its_waiters() -> None:
    polling = PopLongPolling()
    zero, one = (Waiter("g", "t", ("r",), queue_id) for queue_id in (0, 1))
    polling.add(zero)
    polling.add(one)
    polling.wake("g", "t", 1)
    assert (zero.future.done(), one.future.done()) == (False, True)
    polling.wake("g", "t")
    assert zero.future.done()
