"""Half messages and timers over a real store and a manual clock. A crash is a second store on the first one's files."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.config import BrokerConfig
from broker.intake.internal_records import WRITTEN_BY_NEVE
from broker.intake.log_writer import REAPPEND_AGAIN_MS, LogWriter
from broker.intake.message import NewMessage
from broker.store.config import StoreConfig
from broker.store.errors import StoreFull
from broker.store.message_store import MessageStore, PutResult
from broker.waiting.half_messages import COMMIT, ROLLBACK, HalfMessages
from broker.waiting.schedule_message import ScheduleMessage
from broker.waiting.timer_message import TimerMessages, code_of_entry
from infra.clock import ManualClock
from infra.disk.filesystem import RealDisk
from infra.loop.supervisor import Faults
from neve.errors import BrokerError
from neve.record.codec import decode_record, iter_records
from neve.record.layout import TRANSACTION_COMMIT
from neve.remoting.codes import ResponseCode
from neve.remoting.names import HALF_TOPIC, OP_HALF_TOPIC, SCHEDULE_TOPIC, WHEEL_TIMER_TOPIC
from tests.kit.broker.synced import nothing_to_sync
from tests.kit.store.sim_disk import SimDisk

HOST = ("127.0.0.1", 1)


class CrashedStore:
    """A broker's store, in the state that a crash at this moment would leave."""

    def __init__(self, root: Path, clock: ManualClock) -> None:
        self.root, self.clock = root, clock
        self.store = MessageStore(StoreConfig(root, commit_log_file_size=1 << 20, store_host=HOST), RealDisk(), clock)
        self.store.load()
        self.config = BrokerConfig()
        self.writer = writer = LogWriter(self.store)
        self.timers = TimerMessages(
            self.store, writer, clock, self.config, lambda topic: None if topic == "gone" else 8, Faults()
        )
        self.timers.load()
        self.halves = HalfMessages(self.store, writer, clock)
        self.halves.load()

    def put(
        self,
        topic: str,
        body: bytes,
        properties: dict[str, str],
        *,
        tags_code: int = 0,
        sys_flag: int = 0,
        half: int = 0,
        queue_id: int = 0,
    ) -> PutResult:
        return self.store.put(
            topic,
            queue_id,
            body,
            "".join(f"{name}\x01{value}\x02" for name, value in properties.items()).encode(),
            flag=0,
            sys_flag=sys_flag,
            born_timestamp=self.clock.now_ms(),
            born_host=HOST,
            tags_code=tags_code,
            prepared_transaction_offset=half,
        )

    def half(self, body: bytes, **properties: str) -> PutResult:
        stored = self.put(HALF_TOPIC, body, properties)
        self.halves.added(stored, properties)
        return stored

    def timer(self, body: bytes, recall: str | None = None, topic: str = "orders", **properties: str) -> None:
        names = {**properties, "UNIQ_KEY": f"id-{body.decode()}"}
        if recall:
            names["TIMER_DEL_UNIQKEY"] = recall
        message = NewMessage(
            topic=topic,
            queue_id=0,
            body=body,
            properties="".join(f"{name}\x01{value}\x02" for name, value in names.items()).encode(),
            born_timestamp=self.clock.now_ms(),
        )
        assert self.timers.take(message, names) is not None

    def delivered(self, topic: str = "orders") -> list[bytes]:
        got = self.store.reader.get(topic, 0, 0, 2000, 1 << 20)
        return [record.body for buffer in got.buffers for record in iter_records(buffer)]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[[], CrashedStore]]:
    """Return a function that makes a machine. Each later call starts on the files of a crash of the former machine."""
    clock, running = ManualClock(), list[CrashedStore]()

    def start() -> CrashedStore:
        root = tmp_path / str(len(running))
        if running:
            shutil.copytree(running[-1].root, root)
        running.append(CrashedStore(root, clock))
        return running[-1]

    yield start
    for each in running:
        each.store.shutdown()


def test_half_messages_and_their_check_counts_survive_a_crash(machine: Callable[[], CrashedStore]) -> None:
    first = machine()
    stored = [first.half(b"%d" % index) for index in range(4)]
    for index, outcome in ((0, COMMIT), (2, ROLLBACK)):
        half = first.halves.find(index)
        assert half is not None
        first.halves.end(half, outcome)
    first.halves.asked(first.halves.waiting())
    first.halves.asked(first.halves.waiting())
    second = machine()
    assert [(half.queue_offset, half.checks) for half in second.halves.waiting()] == [(1, 2), (3, 2)]
    assert second.halves.pinned_from() == stored[1].physical_offset
    for half in second.halves.waiting():
        second.halves.end(half, COMMIT)
    third = machine()
    assert (len(third.halves), third.halves.pinned_from()) == (0, None)
    third.half(b"later")
    assert [half.queue_offset for half in machine().halves.waiting()] == [4]


def test_crash_between_a_commit_and_its_mark_delivers_the_message_once(machine: Callable[[], CrashedStore]) -> None:
    first = machine()
    stored = first.half(b"m")
    first.put("orders", b"m", {}, sys_flag=TRANSACTION_COMMIT, half=stored.physical_offset)
    second = machine()
    assert len(second.halves) == 0
    assert second.delivered() == [b"m"]


def test_mark_refused_by_a_full_disk_is_written_later(
    machine: Callable[[], CrashedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine()
    first.half(b"m")
    (half,) = first.halves.waiting()

    def full(*args: object, **kwargs: object) -> PutResult:
        raise StoreFull("no room")

    with monkeypatch.context() as patched:
        patched.setattr(first.store, "append", full)
        first.halves.end(half, COMMIT)
    assert first.halves.outcome(half.queue_offset) == COMMIT
    first.halves.write_marks()
    assert len(machine().halves) == 0


@pytest.mark.parametrize(
    ("body", "properties"),
    [
        (b"0,x", {"TAGS": "d"}),
        (b"\xff", {"TAGS": "d"}),
        (b"9" * 5000, {"TAGS": "d"}),
        (b"0,", {"TAGS": "d", "HALF_FROM": "two"}),
        (b"0,", {"TAGS": "d", "HALF_FROM": "2", "OP_FROM": "-1"}),
    ],
)
def test_start_ignores_a_damaged_mark_of_half_messages(
    machine: Callable[[], CrashedStore], body: bytes, properties: dict[str, str]
) -> None:
    first = machine()
    for index in range(3):
        first.half(b"%d" % index)
    ended = first.halves.find(1)
    assert ended is not None
    first.halves.end(ended, COMMIT)
    first.put(OP_HALF_TOPIC, body, properties)
    second = machine()
    assert [half.queue_offset for half in second.halves.waiting()] == [0, 2]
    assert second.writer.internal.ignored == {OP_HALF_TOPIC: 1}


@pytest.mark.parametrize(
    "body", [b"garbage", b"1,2", b"1,2,3,", b"-1,2,3", b"1,-2,3", b"\xff,1,2", b"9" * 5000 + b",1,1"]
)
def test_start_ignores_a_damaged_mark_of_timers(machine: Callable[[], CrashedStore], body: bytes) -> None:
    first = machine()
    first.timer(b"now", TIMER_DELIVER_MS=str(first.clock.now_ms() + 1000))
    first.timer(b"later", TIMER_DELIVER_MS=str(first.clock.now_ms() + 9000))
    first.clock.advance(2000)
    first.timers.deliver_due()
    assert first.delivered() == [b"now"]
    first.put(WHEEL_TIMER_TOPIC, body, {}, half=WRITTEN_BY_NEVE, queue_id=1)
    second = machine()
    assert second.writer.internal.ignored == {WHEEL_TIMER_TOPIC: 1}
    second.clock.advance(9000)
    second.timers.deliver_due()
    assert second.delivered() == [b"now", b"later"]


def test_timers_are_delivered_in_due_order_and_never_early(machine: Callable[[], CrashedStore]) -> None:
    first = machine()
    for text, ms in ((b"8", 8000), (b"2", 2000), (b"5", 5000)):
        first.timer(text, TIMER_DELAY_MS=str(ms))
    first.clock.advance(1999)
    assert first.timers.deliver_due() == 0
    first.clock.advance(1)
    assert first.timers.deliver_due() == 1
    first.clock.advance(6000)
    first.timers.deliver_due()
    assert first.delivered() == [b"2", b"5", b"8"]
    assert first.timers.pinned_from() is None


def test_timers_survive_a_crash_and_are_delivered_once(machine: Callable[[], CrashedStore]) -> None:
    first = machine()
    first.timer(b"1", TIMER_DELAY_SEC="1")
    first.timer(b"late", TIMER_DELAY_SEC="259200")
    first.timer(b"2", TIMER_DELIVER_MS=str(first.clock.now_ms() + 2000))
    first.clock.advance(1000)
    first.timers.deliver_due()
    second = machine()
    assert len(second.timers) == 2
    assert second.timers.pinned_from() == first.timers.pinned_from()
    second.clock.advance(259_200_000)
    second.timers.deliver_due()
    assert second.delivered() == [b"1", b"2", b"late"]
    assert len(machine().timers) == 0


def test_recall_survives_a_crash(machine: Callable[[], CrashedStore]) -> None:
    first = machine()
    first.timer(b"a", TIMER_DELAY_MS="6000")
    first.timer(b"b", TIMER_DELAY_MS="6000")
    first.timer(b"0", recall="orders+id-a", TIMER_DELAY_MS="6000")
    second = machine()
    second.clock.advance(6000)
    second.timers.deliver_due()
    assert second.delivered() == [b"b"]
    second.timer(b"a", TIMER_DELAY_MS="1000")
    second.clock.advance(1000)
    second.timers.deliver_due()
    assert second.delivered() == [b"b", b"a"]


def test_many_timers_of_one_moment_are_delivered_in_several_rounds(machine: Callable[[], CrashedStore]) -> None:
    first = machine()
    bodies = [b"%d" % index for index in range(1200)]
    for body in bodies:
        first.timer(body, TIMER_DELAY_MS="1000")
    first.clock.advance(1000)
    assert first.timers.deliver_due() < 1200
    second = machine()
    while second.timers.deliver_due():
        pass
    assert second.delivered() == bodies


def test_timer_of_a_deleted_topic_is_dropped(machine: Callable[[], CrashedStore]) -> None:
    first = machine()
    first.timer(b"m", topic="gone", TIMER_DELAY_MS="1000")
    first.clock.advance(1000)
    assert first.timers.deliver_due() == 1
    assert "gone" not in first.store.queues.names()


def test_clock_set_back_hides_no_timer_from_the_next_start(machine: Callable[[], CrashedStore]) -> None:
    first = machine()
    first.timer(b"1", TIMER_DELAY_MS="60000")
    first.clock.advance(60_000)
    first.timers.deliver_due()
    first.clock.set_wall(first.clock.now_ms() - 30_000)
    first.timer(b"2", TIMER_DELAY_MS="1000")
    second = machine()
    second.clock.advance(31_000)
    second.timers.deliver_due()
    assert second.delivered() == [b"1", b"2"]


@pytest.mark.parametrize(
    ("properties", "code"),
    [
        ({"TIMER_DELAY_SEC": "259201"}, 13),
        ({"TIMER_DELAY_MS": "soon"}, 13),
        ({"TIMER_DELIVER_MS": "9" * 18}, 13),
        ({"TIMER_DELIVER_MS": "1", "TIMER_DEL_UNIQKEY": "orders+id"}, 13),
    ],
)
def test_invalid_or_unsupported_delivery_time_is_refused(
    machine: Callable[[], CrashedStore], properties: dict[str, str], code: int
) -> None:
    with pytest.raises(BrokerError) as caught:
        machine().timers.time_of(properties)
    assert caught.value.code == code


def test_delivery_time_in_the_past_means_at_once(machine: Callable[[], CrashedStore]) -> None:
    timers = machine().timers
    assert timers.time_of({"TIMER_DELIVER_MS": "1"}) is None
    assert timers.time_of({"TIMER_DELAY_SEC": "0"}) is None
    assert timers.time_of({"KEYS": "k"}) is None


def test_overlong_check_immunity_is_ignored_also_at_a_start(
    machine: Callable[[], CrashedStore],
) -> None:
    before = machine()
    before.half(b"odd", CHECK_IMMUNITY_TIME_IN_SECONDS="9" * 5000)
    before.half(b"even", CHECK_IMMUNITY_TIME_IN_SECONDS="7")
    assert [half.immunity_ms for half in before.halves.waiting()] == [None, 7000]
    assert [half.immunity_ms for half in machine().halves.waiting()] == [None, 7000]


def test_timer_lookup_appends_nothing_after_the_clock_was_set_back(machine: Callable[[], CrashedStore]) -> None:
    first = machine()
    for delay in ("10", "600"):
        first.timer(delay.encode(), TIMER_DELAY_SEC=delay)
    first.clock.advance(60_000)
    assert first.timers.deliver_due() == 1
    first.clock.set_wall(first.clock.now_ms() - 60_000)
    end = first.store.max_physical_offset
    assert first.timers.time_of({"TIMER_DELAY_SEC": "5"}) == first.clock.now_ms() + 5_000
    assert first.store.max_physical_offset == end
    first.timer(b"5", TIMER_DELAY_SEC="5")
    assert first.timers.deliver_due() == 0
    first.clock.advance(5_000)
    assert first.timers.deliver_due() == 1


def test_timers_above_the_limit_are_refused_until_one_is_delivered(machine: Callable[[], CrashedStore]) -> None:
    before = machine()
    before.config.timer_max_pending = 2
    for body in (b"1", b"2"):
        before.timer(body, TIMER_DELAY_SEC="1")
    with pytest.raises(BrokerError, match="max num limit is 2: timerMaxPending") as refused:
        before.timers.time_of({"TIMER_DELAY_SEC": "5"})
    assert refused.value.code == ResponseCode.SYSTEM_ERROR
    assert before.timers.time_of({"TIMER_DELAY_SEC": "0"}) is None  # due at once: it is not stored as a timer
    before.clock.advance(1000)
    assert before.timers.deliver_due() == 2
    assert before.timers.time_of({"TIMER_DELAY_SEC": "5"}) is not None


def test_pending_timer_is_reappended_from_its_segment_and_delivered_once(machine: Callable[[], CrashedStore]) -> None:
    first = machine()
    for index in range(100):
        first.timer(b"%d" % index, TIMER_DELAY_SEC="3600")
    first.timer(b"recalled", TIMER_DELAY_SEC="3600")
    first.timer(b"recall", recall="orders+id-recalled", TIMER_DELAY_SEC="3600")
    first.store.end.roll()
    segment = first.store.reader.segments()[0]
    assert (first.timers.pinned_from(), len(first.timers)) == (segment.base, 102)
    while first.timers.reappend(segment.end):
        assert len(first.timers) >= 101
    pinned = first.timers.pinned_from()
    assert pinned is not None
    assert pinned >= segment.end
    first.store.after_flush(first.store.visibility.flush())
    first.store.take_out(segment.base)()
    second = machine()
    assert second.timers.pinned_from() == pinned
    for each in (first, second):
        each.clock.set_wall(first.clock.now_ms())
    first.clock.advance(3_600_000)
    for each in (first, second):
        while each.timers.deliver_due():
            pass
        assert each.delivered() == [b"%d" % index for index in range(100)]
        assert len(each.timers) == 0


def test_crash_before_the_mark_of_a_reappended_timer_loses_none(machine: Callable[[], CrashedStore]) -> None:
    first = machine()
    first.timer(b"a", TIMER_DELAY_SEC="3600")
    first.store.end.roll()
    first.timers._mark = lambda: None  # type: ignore[method-assign]
    assert first.timers.reappend(first.store.reader.segments()[0].end)
    second = machine()
    first.clock.advance(3_600_000)
    second.timers.deliver_due()
    assert second.delivered() == [b"a", b"a"]


def test_reappended_half_message_is_found_by_its_first_offset(
    machine: Callable[[], CrashedStore],
) -> None:
    first = machine()
    stored = [first.half(b"%d" % index) for index in range(100)]
    first.halves.asked(first.halves.waiting()[:2])
    first.store.end.roll()
    segment = first.store.reader.segments()[0]
    assert not first.halves.reappend(segment.end), "most end by themselves within minutes"
    first.clock.advance(REAPPEND_AGAIN_MS)
    while first.halves.reappend(segment.end):
        assert len(first.halves) == 100
    first.store.after_flush(first.store.visibility.flush())
    first.store.take_out(segment.base)()
    second = machine()
    for each in (first, second):
        pinned = each.halves.pinned_from()
        assert pinned is not None
        assert pinned >= segment.end
        assert [half.checks for half in each.halves.waiting()] == [1] * 2 + [0] * 98
        for index in (0, 99):
            half = each.halves.reappended_from(stored[index].physical_offset)
            assert half is not None
            raw = each.store.reader.record_at(half.physical_offset)
            assert raw is not None
            assert decode_record(raw).body == b"%d" % index
            each.halves.end(half, ROLLBACK)
            assert each.halves.reappended_from(stored[index].physical_offset) is None
    third = machine()
    assert len(third.halves) == 98


def test_reappended_half_message_is_not_appended_again_for_half_an_hour(machine: Callable[[], CrashedStore]) -> None:
    one = machine()
    one.half(b"a")
    one.clock.advance(REAPPEND_AGAIN_MS)
    assert one.halves.reappend(one.store.max_physical_offset)
    end = one.store.max_physical_offset
    one.clock.advance(REAPPEND_AGAIN_MS - 1)
    assert not one.halves.reappend(end)
    one.clock.advance(1)
    assert one.halves.reappend(end)
    (half,) = one.halves.waiting()
    assert len(half.earlier) == 2


def test_crash_before_the_mark_of_a_reappended_half_message_keeps_one(machine: Callable[[], CrashedStore]) -> None:
    first = machine()
    stored = first.half(b"a")
    first.half(b"b")
    first.clock.advance(REAPPEND_AGAIN_MS)
    first.halves._mark = lambda *_: False  # type: ignore[method-assign]
    assert first.halves.reappend(first.store.max_physical_offset)
    second = machine()
    assert len(second.halves) == 2
    half = second.halves.reappended_from(stored.physical_offset)
    assert half is not None
    assert half.physical_offset > stored.physical_offset


def test_half_message_that_cannot_be_reappended_keeps_its_offset(
    machine: Callable[[], CrashedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machine()
    stored = one.half(b"a")
    one.clock.advance(REAPPEND_AGAIN_MS)

    def full(*_: object, **__: object) -> PutResult:
        raise StoreFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(one.store, "put", full)
        with pytest.raises(StoreFull):
            one.halves.reappend(one.store.max_physical_offset)
    half = one.halves.find(stored.queue_offset)
    assert half is not None
    assert (half.earlier, one.halves.pinned_from()) == ([], stored.physical_offset)


def reappend_all(timers: TimerMessages, below: int) -> None:
    while timers.reappend(below):
        pass


def test_reappended_timer_is_not_appended_again_for_half_an_hour(
    machine: Callable[[], CrashedStore],
) -> None:
    """Otherwise each run of the retention on a full disk would append every pending timer once more."""
    one = machine()
    one.timer(b"a", TIMER_DELAY_SEC="86400")
    reappend_all(one.timers, one.store.max_physical_offset)
    end = one.store.max_physical_offset
    for _ in range(3):
        one.clock.advance(REAPPEND_AGAIN_MS // 3 - 1)
        reappend_all(one.timers, end)
        assert one.store.max_physical_offset == end
    one.clock.advance(3)
    reappend_all(one.timers, end)
    assert one.store.max_physical_offset > end


def test_timer_due_soon_is_not_reappended(machine: Callable[[], CrashedStore]) -> None:
    one = machine()
    one.timer(b"a", TIMER_DELAY_SEC=str(REAPPEND_AGAIN_MS // 1000))
    assert not one.timers.reappend(one.store.max_physical_offset)


def test_reappended_or_delivered_timers_leave_a_bounded_number_of_entries(machine: Callable[[], CrashedStore]) -> None:
    """Each reappend leaves an entry in the heap, and each delivery behind a pending timer one in the stored order."""
    one = machine()
    for index in range(200):
        one.timer(b"%d" % index, TIMER_DELAY_SEC="250000")
    most = 2 * 200 + 1024 + 1
    for _ in range(20):
        one.clock.advance(REAPPEND_AGAIN_MS)
        reappend_all(one.timers, one.store.max_physical_offset)
        assert len(one.timers._heap) <= most
    for _ in range(40):
        for index in range(50):
            one.timer(b"%d" % index, TIMER_DELAY_SEC="1")
        one.clock.advance(1000)
        while one.timers.deliver_due():
            pass
        assert len(one.timers._stored_order) <= most + 50
    one.clock.advance(250_000_000)
    while one.timers.deliver_due():
        pass
    assert (len(one.timers), one.store.queues.max_offset("orders", 0)) == (0, 2000 + 200)


LEVELS = [60_000, 2 * 86_400_000]


def schedule_of(one: CrashedStore) -> ScheduleMessage:
    (one.root / "config").mkdir(exist_ok=True)
    path = one.root / "config" / "delayOffset.json"
    schedule = ScheduleMessage(
        one.store,
        LogWriter(one.store),
        one.clock,
        LEVELS,
        RealDisk(),
        path,
        nothing_to_sync,
        Faults(),
        read_queues=lambda topic: 8,
    )
    schedule.load()
    return schedule


def delay(one: CrashedStore, body: bytes, level: int) -> None:
    one.put(SCHEDULE_TOPIC, body, {"REAL_TOPIC": "orders", "REAL_QID": "0", "KEYS": "k"}, queue_id=level - 1)


def test_long_delayed_message_is_reappended_as_a_timer_and_delivered_once(
    machine: Callable[[], CrashedStore],
) -> None:
    first = machine()
    schedule = schedule_of(first)
    delay(first, b"soon", 1)
    for index in range(40):
        delay(first, b"%d" % index, 2)
    first.store.end.roll()
    segment = first.store.reader.segments()[0]
    while schedule.reappend(segment.end, first.timers):
        assert len(first.timers) <= 40
    assert len(first.timers) == 40
    assert schedule.oldest_pending_physical() == segment.base, "what is due soon goes by itself"
    raw = first.store.reader.record_at(first.timers._heap[0][2])
    assert raw is not None
    assert code_of_entry(decode_record(raw)) == first.clock.now_ms() + LEVELS[1], "a lost entry is made again"
    first.clock.advance(LEVELS[0])
    assert schedule.deliver_due() == 1
    assert schedule.oldest_pending_physical() is None
    first.store.after_flush(first.store.visibility.flush())
    first.store.take_out(segment.base)()
    second = machine()
    again = schedule_of(second)
    second.clock.advance(LEVELS[1] - LEVELS[0] - 1)
    assert (again.deliver_due(), second.timers.deliver_due()) == (0, 0)
    second.clock.advance(1)
    again.deliver_due()
    second.timers.deliver_due()
    assert second.delivered() == [b"soon", *(b"%d" % index for index in range(40))]
    got = second.store.reader.get("orders", 0, 40, 1, 1 << 20)
    (record,) = [record for buffer in got.buffers for record in iter_records(buffer)]
    assert record.properties == {"REAL_TOPIC": "orders", "REAL_QID": "0", "KEYS": "k"}


def test_delayed_messages_become_timers_up_to_the_limit(machine: Callable[[], CrashedStore]) -> None:
    one = machine()
    one.config.timer_max_pending = 3
    schedule = schedule_of(one)
    for index in range(5):
        delay(one, b"%d" % index, 2)
    while schedule.reappend(one.store.max_physical_offset, one.timers):
        assert len(one.timers) <= 3
    assert (len(one.timers), schedule.pending()) == (3, 2)


def test_timer_that_cannot_be_reappended_keeps_its_offset(
    machine: Callable[[], CrashedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine()
    first.timer(b"a", TIMER_DELAY_SEC="3600")
    first.store.end.roll()

    def full(*_: object, **__: object) -> PutResult:
        raise StoreFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(first.store, "put", full)
        with pytest.raises(StoreFull):
            first.timers.reappend(first.store.reader.segments()[0].end)
    assert (first.timers.pinned_from(), len(first.timers)) == (0, 1)
    first.clock.advance(3_600_000)
    first.timers.deliver_due()
    assert first.delivered() == [b"a"]


def test_timer_whose_queue_entry_was_lost_keeps_its_due_time(tmp_path: Path) -> None:
    """A power cut loses the page with the entry's code and keeps the record of an unflushed send."""
    clock, disk = ManualClock(), SimDisk()
    config = StoreConfig(tmp_path, commit_log_file_size=1 << 20, store_host=HOST, code_of=code_of_entry)
    store = MessageStore(config, disk, clock)
    store.load()
    when = clock.now_ms() + 60_000
    for recall in ("", "TIMER_DEL_UNIQKEY\x01orders+x\x02"):
        properties = f"TIMER_OUT_MS\x01{when}\x02REAL_TOPIC\x01orders\x02REAL_QID\x010\x02TAGS\x01a\x02{recall}"
        store.put(
            WHEEL_TIMER_TOPIC, 0, b"m", properties.encode(), flag=0, sys_flag=0, born_timestamp=0, born_host=HOST,
            tags_code=-when if recall else when,
        )  # fmt: skip
    first = store.log.at(0)
    assert first is not None
    first.crc_map[:] = bytes(len(first.crc_map))
    disk.kill()
    again = MessageStore(config, disk, clock)
    assert again.load().records_without_crc == 2
    entries = [again.reader.entry(WHEEL_TIMER_TOPIC, 0, offset) for offset in range(2)]
    assert [entry[2] for entry in entries if entry is not None] == [when, -when]


@pytest.mark.parametrize("waiting", [0, 1, 700])
def test_timer_is_not_delayed_by_a_clock_that_was_a_day_ahead(
    machine: Callable[[], CrashedStore], waiting: int
) -> None:
    first = machine()
    right = first.clock.now_ms()
    for index in range(waiting):
        first.timer(b"later %d" % index, TIMER_DELAY_SEC="100000")
    first.timer(b"early", TIMER_DELAY_SEC="1")
    first.clock.set_wall(right + 86_400_000)
    assert first.timers.deliver_due() == 1
    first.clock.set_wall(right + 2000)
    while first.timers.deliver_due() or first.timers._rewind_below is not None:
        pass
    first.timer(b"now", TIMER_DELAY_SEC="1")
    assert first.timers.deliver_due() == 0
    second = machine()
    assert len(second.timers) == waiting + 1, "a start knows what was delivered and what waits"
    for each in (first, second):
        each.clock.set_wall(right + 3000)
        assert each.timers.deliver_due() == 1
        assert each.delivered() == [b"early", b"now"]
        each.clock.set_wall(right + 100_000_000)
        while each.timers.deliver_due():
            pass
        assert len(each.delivered()) == waiting + 2


def test_timer_due_soon_is_reappended_after_the_clock_was_corrected(machine: Callable[[], CrashedStore]) -> None:
    """Otherwise the mark's position stays below timers that were delivered early, and a start delivers them again."""
    first = machine()
    right = first.clock.now_ms()
    first.timer(b"soon", TIMER_DELAY_SEC="900")
    first.timer(b"early", TIMER_DELAY_SEC="30")
    first.clock.set_wall(right + 600_000)
    assert first.timers.deliver_due() == 1
    first.clock.set_wall(right + 2_000)
    while first.timers.deliver_due() or first.timers._rewind_below is not None:
        pass
    second = machine()
    assert len(second.timers) == 1
    for each in (first, second):
        each.clock.set_wall(right + 900_000)
        each.timers.deliver_due()
        assert each.delivered() == [b"early", b"soon"]


@pytest.mark.parametrize("clock_goes_back", [False, True])
def test_timer_whose_record_is_only_partly_confirmed_is_not_lost(
    machine: Callable[[], CrashedStore], clock_goes_back: bool
) -> None:
    """A slave of an Apache master acknowledges pieces of records."""
    first = machine()
    right = first.clock.now_ms()
    if clock_goes_back:
        first.timer(b"early", TIMER_DELAY_SEC="1")
        first.clock.set_wall(right + 86_400_000)
        assert first.timers.deliver_due() == 1
    delivered = first.delivered()
    first.store.visibility.join_set(first.store.max_physical_offset)
    first.timer(b"soon", TIMER_DELAY_SEC="2")
    first.store.visibility.confirm(first.store.max_physical_offset - 1)
    if clock_goes_back:
        first.clock.set_wall(right + 2_000)
        while first.timers.deliver_due() or first.timers._rewind_below is not None:
            pass
    first.clock.set_wall(right + 200_000_000)
    assert first.timers.deliver_due() == 0
    assert len(first.timers) == 1
    first.store.visibility.confirm(first.store.max_physical_offset)
    assert first.timers.deliver_due() == 1
    first.store.visibility.confirm(first.store.max_physical_offset)
    assert first.delivered() == [*delivered, b"soon"]
