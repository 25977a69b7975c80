"""Tests of erased messages: they stay in the log files, but no client request returns them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from broker.store import erased
from broker.store.erased_rows import at_once, hide
from broker.store.errors import StoreCorrupt
from broker.store.message_store import MessageStore
from infra.clock import ManualClock
from infra.disk.filesystem import DiskFull
from neve.record.codec import decode_record, iter_records
from neve.remoting.codes import GetMessageStatus as Status
from tests.kit.store.by_key import by_key
from tests.kit.store.replicas import open_store as open_replica
from tests.kit.store.sim_disk import SimDisk
from tests.unit.store.master_and_slave import MasterAndSlave
from tests.unit.store.short_records import SIZE, short

Open = Callable[..., MessageStore]
Put = Callable[..., Any]
ALL = 1 << 60


def erase(store: MessageStore, *offsets: int, topic: str = "t", queue: int = 0) -> int:
    """Erase offsets, and return the number of new runs."""
    hidden = hide(store, [(topic, queue, at, at) for at in offsets], at_once)
    if hidden.is_changed:
        store.queue_changes.save()
    return hidden.runs


def read(store: MessageStore, begin: int = 0, *, topic: str = "t", codes: Iterable[int] | None = None) -> list[int]:
    """Return the offsets that a reader gets, and check that it makes progress with each read."""
    found: list[int] = []
    offset, end = begin, store.queues.max_offset(topic, 0)
    wanted = None if codes is None else frozenset(codes)
    while offset < end:
        got = store.reader.get(topic, 0, offset, 4, 1 << 20, wanted)
        assert got.status in {Status.FOUND, Status.NO_MATCHED_MESSAGE}, "no reader is told that its offset is wrong"
        offsets = [record.queue_offset for buffer in got.buffers for record in iter_records(buffer)]
        assert got.count == len(offsets) and all(offset <= at < got.next_offset for at in offsets)
        assert offset < got.next_offset <= end
        found, offset = found + offsets, got.next_offset
    return found


@pytest.mark.parametrize("seed", range(20))
def test_spans_behave_like_sets_of_offsets(seed: int) -> None:
    dice = random.Random(seed)
    spans, offsets = erased.NONE, set[int]()
    for _ in range(30):
        first = dice.randrange(100)
        new = first, first + dice.randrange(6)
        spans, offsets = erased.united(spans, [new]), offsets | set(range(new[0], new[1] + 1))
        assert [at for first, last in spans for at in range(first, last + 1)] == sorted(offsets)
        assert all(one[1] + 1 < other[0] for one, other in pairwise(spans)), "they lie apart"
        at, end = dice.randrange(110), dice.randrange(110)
        assert erased.behind(spans, at) == next(one for one in range(at, 200) if one not in offsets)
        assert erased.before(spans, at) == next(one for one in range(at, -2, -1) if one not in offsets)
        assert erased.has(spans, (at, at + 3)) == (set(range(at, at + 4)) <= offsets)
        inside = {one for one in offsets if at <= one < end}
        assert {one for a, b in erased.within(spans, at, end) for one in range(a, b + 1)} == inside
        assert {one for a, b in erased.meeting(spans, at, at + 9) for one in range(a, b + 1)} >= {
            one for one in offsets if at <= one < at + 9
        }
        assert all(b >= at and a < at + 9 for a, b in erased.meeting(spans, at, at + 9))
        left = erased.left_of(9, at, erased.meeting(spans, at, at + 9)).tolist()
        assert left == [one not in offsets for one in range(at, at + 9)]
    assert erased.within(spans, 0, 200) is spans


@pytest.mark.parametrize("seed", range(10))
def test_readers_skip_erased_and_get_all_others_once(open_store: Open, put: Put, seed: int) -> None:
    """Queue files have 400 entries, and some erased runs span two files."""
    dice, store, tags = random.Random(seed), open_store(), []
    for _ in range(900):
        tags.append(dice.randrange(3))
        put(store, tags_code=tags[-1])
    gone: set[int] = set()
    for _ in range(dice.randrange(1, 60)):
        first = dice.choice((dice.randrange(900), dice.randrange(380, 420)))
        gone |= set(range(first, min(first + dice.choice((1, 1, 2, 40)), 900)))
    erase(store, *gone)
    left = [at for at in range(900) if at not in gone]
    assert read(store) == left
    for begin in (min(gone), max(gone), dice.randrange(900)):
        assert read(store, begin) == [at for at in left if at >= begin]
    assert read(store, codes=[1]) == [at for at in left if tags[at] == 1]
    assert read(store, codes=[0, 2]) == [at for at in left if tags[at] != 1]
    assert store.reader.entries("t", 0, ALL)[0].first_offset == 0
    assert len(store.reader.entries("t", 0, ALL)[0].physical) == 900, "what goes to the archive's own jobs is all of it"


def test_read_within_an_erased_run_continues_after_it(open_store: Open, put: Put) -> None:
    store = open_store()
    for _ in range(30):
        put(store)
    erase(store, *range(5, 25))
    got = store.reader.get("t", 0, 7, 1, 1)
    assert (got.status, got.next_offset, got.min_offset, got.max_offset) == (Status.NO_MATCHED_MESSAGE, 25, 0, 30)
    before = store.reader.get("t", 0, 3, 32, 1 << 20)
    assert (before.status, before.count) == (Status.FOUND, 2 + 5)
    assert store.reader.get("t", 0, 25, 32, 1 << 20).count == 5
    erase(store, *range(25, 30))
    got = store.reader.get("t", 0, 7, 1, 1)
    assert (got.status, got.next_offset) == (Status.NO_MATCHED_MESSAGE, 30), "up to the queue's end"
    assert put(store).queue_offset == 30
    assert read(store) == [*range(5), 30]


def test_erased_messages_are_not_found_by_key_place_or_offset(open_store: Open, put: Put) -> None:
    store = open_store()
    places = [put(store, keys="k", unique_key=f"U{number}", topic="t") for number in range(5)]
    others = [put(store, keys="k", topic="other"), put(store, queue_id=1, keys="k")]
    erase(store, 1, 4)
    found = [decode_record(raw).queue_offset for raw in by_key(store, "t", "k", 10, 0, ALL)]
    assert sorted(found) == [0, 0, 2, 3], "of both queues"
    assert by_key(store, "t", "U1", 10, 0, ALL) == []
    assert len(by_key(store, "t", "U2", 10, 0, ALL)) == 1
    assert [store.reader.record_at(one.physical_offset) is None for one in places] == [False, True, False, False, True]
    assert all(store.reader.record_at(one.physical_offset) is not None for one in others)
    assert [store.reader.entry("t", 0, at) is None for at in range(5)] == [False, True, False, False, True]


def test_newest_record_is_returned_even_if_erased(open_store: Open, put: Put) -> None:
    """A promotion reads it, but no client does."""
    store = open_store()
    put(store)
    last = put(store)
    erase(store, 1)
    assert store.reader.record_at(last.physical_offset) is None
    raw = store.reader.newest_record()
    assert raw is not None and decode_record(raw).physical_offset == last.physical_offset


def test_shown_time_of_an_erased_offset_is_of_the_next_visible(open_store: Open, put: Put, clock: ManualClock) -> None:
    """A consumer at an erased offset reads the next visible message, so its lag is computed from that time."""
    store, times = open_store(), []
    for _ in range(6):
        clock.advance(10)
        times.append(put(store).store_timestamp)
    erase(store, 0, 2, 3, 5)
    assert [store.reader.shown_time("t", 0, at) for at in range(6)] == [times[at] for at in (1, 1, 4, 4, 4, 4)]
    assert [store.reader.store_time("t", 0, at) for at in range(6)] == times, "what the lifecycle asks"
    assert store.reader.shown_time("t", 0, 6) == store.reader.shown_time("gone", 0, 0) == -1
    assert store.reader.shown_near("t", 0, 2, below=False) == 4
    assert store.reader.shown_near("t", 0, 3, below=True) == 1
    erase(store, 1, 4)
    assert store.reader.shown_time("t", 0, 3) == -1, "there is none"


@pytest.mark.parametrize("end", ["stop", "kill", "power cut"])
def test_erased_messages_stay_hidden_after_restart(open_store: Open, put: Put, disk: SimDisk, end: str) -> None:
    store = open_store()
    for _ in range(6):
        put(store, keys="k")
    store.after_flush(store.visibility.flush())
    assert erase(store, 1, 2, 5) == 3
    if end == "stop":
        store.shutdown()
    elif end == "kill":
        disk.kill()
    again = open_store(disk.power_cut() if end == "power cut" else disk)
    assert read(again) == [0, 3, 4]
    assert len(by_key(again, "t", "k", 10, 0, ALL)) == 3
    assert erase(again, 1, 2, 5) == 0, "nothing new, and nothing is written"
    assert put(again).queue_offset == 6
    assert read(again) == [0, 3, 4, 6]


def test_lowered_minimum_keeps_erased_messages_hidden(open_store: Open, put: Put) -> None:
    store = open_store()
    for _ in range(6):
        put(store)
    erase(store, 1)
    store.queue_changes.set_min_offset("t", 0, 5)
    erase(store, 3)
    assert store.queue_changes.show_from("t", 0, 0) == 0
    assert read(store) == [0, 2, 4, 5]


def test_offsets_above_the_log_end_are_not_hidden(open_store: Open, put: Put) -> None:
    """The offset may be assigned to another message, because a former master may have lost the erased one."""
    store = open_store()
    put(store)
    assert erase(store, 0, 1, 2, 7) == 1
    for _ in range(3):
        put(store)
    assert read(store) == [1, 2, 3]
    assert erase(store, 0, 1, 2, 7) == 2, "they have come; of a queue that is not here there is nothing to hide"
    assert erase(store, 0, topic="none") == erase(store, 0, queue=4) == 0
    assert read(store) == [3]


def test_erased_offsets_below_the_log_start_are_forgotten(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store()
    for _ in range(10):
        put(store, body=bytes(3000))
    store.after_flush(store.visibility.flush())
    erase(store, 0, 1, 9)
    store.take_out(0)()
    low = store.queues.min_offset("t", 0)
    assert 2 <= low < 9
    assert erase(store, 0, 1, 9) == 0
    assert store.queues.records.erased_of("t", 0) == ((9, 9),)
    assert json.loads(disk.read(store.config.root / "queue_state"))["erased"] == {"t": {"0": [[9, 9]]}}
    assert read(store, low) == list(range(low, 9))


def test_erased_messages_of_a_recreated_topic_stay_hidden(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store()
    places = [put(store, keys="k").physical_offset for _ in range(4)]
    store.after_flush(store.visibility.flush())
    erase(store, 1)
    store.queue_changes.delete_topic("t")
    assert store.reader.record_at(places[0]) is not None, "as with any broker: its record is there"
    assert store.reader.record_at(places[1]) is None
    assert erase(store, 2, 9) == 1, "below where it ended"
    assert store.reader.record_at(places[2]) is None
    for _ in range(3):
        put(store, keys="k")
    assert read(store, store.queues.min_offset("t", 0)) == [4, 5, 6]
    store.shutdown()
    again = open_store()
    assert [again.reader.record_at(place) is None for place in places] == [False, True, True, False]
    assert read(again, again.queues.min_offset("t", 0)) == [4, 5, 6]
    erase(again, 5)
    assert read(again, 4) == [4, 6]


def test_topic_recreated_by_apache_master_shows_new_messages() -> None:
    """The new messages have the offsets of the erased ones."""
    pair = MasterAndSlave()
    for _ in range(3):
        pair.put(0)
    pair.pass_on()
    erase(pair.slave, 0, 2)
    assert read(pair.slave) == [1]
    pair.recreate()
    for _ in range(3):
        pair.put(0)
    pair.pass_on()
    assert read(pair.slave) == [0, 1, 2]
    pair.kill()
    assert read(pair.slave) == [0, 1, 2]


def test_messages_after_a_lost_log_end_are_not_hidden(open_store: Open, put: Put, disk: SimDisk) -> None:
    """Also after further starts. Only synced records are archived and erased, so this models a disk that lost them."""
    store = open_store()
    for _ in range(3):
        put(store)
    store.after_flush(store.visibility.flush())
    store.checkpoint()
    for _ in range(3):
        put(store)
    assert erase(store, 1, 4) == 2
    for seed in range(100):
        again = open_store(cut := disk.power_cut(seed))
        if again.queues.max_offset("t", 0) == 3:
            break
    else:
        pytest.fail("no power cut takes all that was not synced")
    for _ in range(3):
        put(again)
    assert read(again) == [0, 2, 3, 4, 5]
    again.shutdown()
    assert read(open_store(cut)) == [0, 2, 3, 4, 5]


def test_truncation_keeps_erasures_only_below_it(disk: SimDisk) -> None:
    store = short(disk, 5)
    assert erase(store, 0, 3) == 2
    lost = [decode_record(raw) for place in range(5) if (raw := store.reader.record_at(SIZE * place)) is not None]
    assert [record.queue_offset for record in lost] == [1, 2, 4]
    store.truncate(2 * SIZE, epoch=1, floor=3 * SIZE, by_operator=True)
    assert read(store) == [1]
    for place in (2, 3, 4):
        store.replica.append(short(SimDisk(), 5).log_bytes(SIZE * place, SIZE * (place + 1), SIZE)[1], SIZE * place)
    assert read(store) == [1, 2, 3, 4]
    store.shutdown()
    assert read(open_replica(disk, ManualClock(), following=True)) == [1, 2, 3, 4]


def test_erasure_on_full_disk_hides_and_is_saved_later(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store()
    for _ in range(3):
        put(store)
    store.after_flush(store.visibility.flush())
    room, disk.capacity = disk.capacity, 0
    with pytest.raises(DiskFull):
        erase(store, 1)
    assert read(store) == [0, 2]
    disk.capacity = room
    store.queue_changes.save()
    assert read(open_store(disk.power_cut())) == [0, 2]


def test_concurrent_erasures_do_not_overwrite_each_other(open_store: Open, put: Put) -> None:
    store = open_store()
    for _ in range(5):
        put(store)
    before = store.queues.records.erased_of("t", 0)
    assert store.queue_changes.set_erased("t", 0, before, ((1, 1),))
    assert not store.queue_changes.set_erased("t", 0, before, ((2, 2),))
    assert store.queues.records.erased_of("t", 0) == ((1, 1),)
    assert not store.queue_changes.set_erased("t", 0, store.queues.records.erased_of("t", 0), ((1, 5),)), (
        "above the queue's end is nothing yet"
    )
    raced: list[int] = []

    def call(work: Callable[[], Any]) -> Any:
        found = work()
        if len(raced) < 2:  # a concurrent change after the read of the queue
            raced.append(1)
            spans = store.queues.records.erased_of("t", 0)
            store.queue_changes.set_erased("t", 0, spans, erased.united(spans, [(4, 4)]))
        return found

    hide(store, [("t", 0, 3, 3)], call)
    assert store.queues.records.erased_of("t", 0) == ((1, 1), (3, 4))


# -- the file


def test_queue_state_golden_bytes(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store()
    for _ in range(9):
        put(store)
    erase(store, 1, 2, 7)
    golden = (
        b'{"floors":{},"deleted":{},"ended":{},"begins":{},"raised":{},"erased":{"t":{"0":[[1,2],[7,7]]}},"version":1}'
    )
    assert disk.read(Path("/store/queue_state")) == golden
    store.shutdown()
    assert open_store().queues.records.erased_of("t", 0) == ((1, 2), (7, 7))


def test_queue_state_of_a_newer_version_is_refused(open_store: Open, disk: SimDisk) -> None:
    store = open_store()
    store.shutdown()
    disk.write_atomic(store.config.root / "queue_state", b'{"version":2}')
    with pytest.raises(StoreCorrupt, match="has format 2, this release reads formats up to 1"):
        open_store()
