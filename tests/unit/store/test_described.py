"""Tests of described appends: a slave that uses the master's description stores the same as one that parses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from broker.store import described
from broker.store.errors import LogMismatch, StoreNotWritable
from broker.store.key_index import IndexFile
from broker.store.log_end import LogEnd
from broker.store.message_store import MessageStore
from infra.clock import ManualClock
from neve.record.properties import tags_code
from tests.kit.store.by_key import by_key
from tests.kit.store.replicas import IDS, KEYS, TOPICS, RandomMaster, assert_same, log_of, open_store
from tests.kit.store.sim_disk import SimDisk

LARGE = 1 << 20  # size of a log file, so that few rolls happen
QUEUES = 3


def append(master: RandomMaster, count: int, topics: tuple[str, ...] = TOPICS) -> None:
    """Append messages of one sender as one batch."""
    dice, store, sends = master.dice, master.store, list[Any]()
    for _ in range(count):
        tag = dice.choice(("", "a", "TagB", "ü"))
        keys = " ".join(f"k{dice.randrange(KEYS)}" for _ in range(dice.choice((0, 0, 1, 2))))
        unique = dice.choice(IDS) if dice.random() < 0.7 else ""
        named = {"KEYS": keys, "TAGS": tag, "UNIQ_KEY": unique}
        text = "".join(f"{name}\x01{value}\x02" for name, value in named.items() if value).encode()
        words = " ".join(filter(None, (unique, keys)))
        queue = store.queue_for(dice.choice(topics), dice.randrange(QUEUES))
        body = dice.randbytes(dice.choice((0, 1, 30, 200)))
        sends.append((queue, body, text, tags_code(tag), words, 0, 0, 1, 0, 0))
    host = dice.choice((("10.1.2.3", 4000), ("fe80::1", 4000)))
    while sends:
        sends = sends[len(store.append(sends, host, master.clock.now_ms())) :]


def pass_on(master: MessageStore, slave: MessageStore, limit: int, *, tells: bool) -> bool | None:
    """Transfer one frame, and return whether it was described, or None if there was none."""
    start = slave.replica.next_offset if slave.reader.segments() else master.min_physical_offset
    one = master.described.at(start) if tells else None
    if one is not None:
        data = one.records or bytes(master.log_bytes(start, one.end, 1 << 30)[1])
        slave.replica.append(data, start, one.description)
        return True
    at, some = master.log_bytes(start, 1 << 62, limit)
    if not some:
        return None
    if at > max(start, slave.max_physical_offset) and slave.reader.segments():
        slave.replica.continue_at(at)
    slave.replica.append(some, at)
    return False


def files_of(disk: SimDisk) -> dict[str, bytes]:
    """Return the bytes of all files that a store keeps for its records."""
    kinds = ("commitlog/", "commitlogcrc/", "consumequeue/", "index/")
    paths = [path for path in disk._names if any(kind in str(path) for kind in kinds)]
    return {str(path): disk.read(path) for path in paths}


class TwoSlaves:
    """Two slaves of one master: the first gets descriptions, the second one parses the records."""

    def __init__(self, seed: int, **changes: Any) -> None:
        self.master = RandomMaster(seed, commit_log_file_size=LARGE, **changes)
        self.master.deletes = False
        self.master.store.described.want(True)
        self.disks = SimDisk(), SimDisk()
        self.told, self.looking = (
            open_store(disk, ManualClock(), following=True, commit_log_file_size=LARGE, confirmed=0, **changes)
            for disk in self.disks
        )
        self.heard: tuple[list[Any], list[Any]] = [], []
        for store, heard in zip((self.told, self.looking), self.heard, strict=True):
            store.visibility.subscribe(heard.extend)

    def catch_up(self) -> int:
        """Transfer the log to both slaves, and return the number of described appends."""
        told = 0
        for store in (self.told, self.looking):
            while (was_told := pass_on(self.master.store, store, 40_000, tells=store is self.told)) is not None:
                told += was_told
        return told

    def confirm(self, offset: int) -> None:
        for store in (self.told, self.looking):
            store.visibility.confirm(offset)
            store.after_flush(store.visibility.flush())

    def assert_equal(self) -> None:
        assert list(log_of(self.told)) == list(log_of(self.looking))
        mine, theirs = ([(queue.topic, queue.queue_id, *what) for queue, *what in heard] for heard in self.heard)
        assert mine == theirs
        assert self.told.end.table() == self.looking.end.table()
        assert (self.told.end.last_time, self.told.end.high_time) == (
            self.looking.end.last_time,
            self.looking.end.high_time,
        )
        for queue, other in zip(self.told.queues.by_name.items(), self.looking.queues.by_name.items(), strict=True):
            assert queue[0] == other[0]
            assert (queue[1].end, queue[1].visible, queue[1].position) == (
                other[1].end,
                other[1].visible,
                other[1].position,
            )
        kept, others = (files_of(disk) for disk in self.disks)
        assert kept.keys() == others.keys()
        for path, data in kept.items():
            assert "index/" in path or data == others[path], path


@pytest.mark.parametrize("seed", range(12))
def test_described_and_parsed_appends_write_identical_bytes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, dice, told = TwoSlaves(seed), random.Random(seed), 0
    unseen, write = list[bool](), LogEnd.write

    def written(end: LogEnd, records: bytes, marks: list[int] | bytes) -> None:
        unseen.append(isinstance(marks, bytes))
        write(end, records, marks)

    monkeypatch.setattr(LogEnd, "write", written)
    for _ in range(30):
        match dice.randrange(6):
            case 0:
                pair.master.run(dice.randrange(12))  # rolls, holes, raised queue offsets, clock steps
            case 1:
                pair.master.clock.advance(dice.randrange(5_000))
            case _:
                append(pair.master, dice.choice((1, 4, 20, 64)), TOPICS[: dice.randrange(1, 5)])
        told += pair.catch_up()
        pair.confirm(dice.randrange(pair.told.max_physical_offset + 1))
        pair.assert_equal()
    assert told > 8
    assert sum(unseen) > 4, "stored without a look at each"
    pair.confirm(pair.told.max_physical_offset)
    assert_same(pair.told, pair.master.store)
    assert_same(pair.looking, pair.master.store)
    for disk, before in zip(pair.disks, (pair.told, pair.looking), strict=True):
        disk.kill()
        again = open_store(disk, ManualClock(), following=True, commit_log_file_size=LARGE)
        assert again.max_physical_offset == before.max_physical_offset
        assert_same(again, pair.master.store)


@pytest.mark.parametrize("part", ["description", "records"])
def test_damaged_description_or_records_are_refused_and_not_stored(part: str) -> None:
    pair = TwoSlaves(1)
    append(pair.master, 20)
    pair.catch_up()
    append(pair.master, 20)
    start = pair.told.max_physical_offset
    one = pair.master.store.described.at(start)
    assert one is not None
    queues = {name: queue.end for name, queue in pair.told.queues.by_name.items()}
    whole = {"description": one.description, "records": one.records}
    for place in range(0, len(whole[part]), 1 if part == "description" else 37):
        wrong = bytearray(whole[part])
        wrong[place] ^= 1 << place % 8
        sent = whole | {part: bytes(wrong)}
        with pytest.raises(LogMismatch, match=f"at {start} the master sent"):
            pair.told.replica.append(sent["records"], start, sent["description"])
    for cut in (1, 3, 17, 200):
        with pytest.raises(LogMismatch):
            pair.told.replica.append(one.records, start, one.description[:-cut])
        with pytest.raises(LogMismatch):
            pair.told.replica.append(one.records[:-cut], start, one.description)
    assert (pair.told.max_physical_offset, pair.told.replica.next_offset) == (start, start)
    assert {name: queue.end for name, queue in pair.told.queues.by_name.items()} == queues
    pair.catch_up()
    pair.assert_equal()


def test_description_with_wrong_record_places_is_refused() -> None:
    """The CRC of the description is valid, but its content is wrong."""
    pair = TwoSlaves(1)
    append(pair.master, 20, ("orders",))
    pair.catch_up()
    append(pair.master, 4, ("orders",))
    start = pair.told.max_physical_offset
    one = pair.master.store.described.at(start)
    assert one is not None
    told = described.parse_description(one.description, one.records)
    queues = [(name.decode(), queue_id, first) for name, queue_id, first in told.queues]
    entries = [told.crc_entries[at : at + 16] for at in range(0, 64, 16)]
    swapped = b"".join((entries[0], entries[2], entries[1], entries[3]))
    for crc_entries, keys in ((swapped, told.keys), (told.crc_entries, [one.end])):
        hashes = [7] * len(keys)
        made = described.describe(one.records, crc_entries, told.whose, queues, keys, hashes, told.store_time)
        assert made is not None
        with pytest.raises(LogMismatch, match="differ from the description"):
            pair.told.replica.append(one.records, start, made)
        assert pair.told.max_physical_offset == start


@pytest.mark.parametrize("what", ["whose", "queues", "shorter"])
def test_description_that_contradicts_the_records_is_overruled(what: str) -> None:
    """The CRC is valid, but the queue of a record or the end of one is wrong."""
    pair = TwoSlaves(5)
    for topics in (("orders",), ("orders",)):
        append(pair.master, 40, topics)
        pair.catch_up()
    append(pair.master, 12, ("orders",))
    start = pair.told.max_physical_offset
    one = pair.master.store.described.at(start)
    assert one is not None
    told = described.parse_description(one.description, one.records)
    whose, entries = list(told.whose), told.crc_entries
    queues = [(name.decode(), queue_id, first) for name, queue_id, first in told.queues]
    match what:
        case "whose":
            last = {number: 11 - whose[::-1].index(number) for number in set(whose)}
            whose[last[0]], whose[last[1]] = 1, 0
        case "queues":
            (topic, number, first), (_, other, its) = queues[:2]
            queues[:2] = [(topic, other, its), (topic, number, first)]
        case "shorter":  # the start of the last record is wrong
            entries = entries[:-16] + (int.from_bytes(entries[-16:-12]) - 1).to_bytes(4) + entries[-12:]
    made = described.describe(one.records, entries, whose, queues, told.keys, told.hashes, told.store_time)
    assert made is not None
    assert made != one.description
    pair.told.replica.append(one.records, start, made)
    pair.looking.replica.append(one.records, start)
    pair.confirm(pair.told.max_physical_offset)
    pair.assert_equal()
    assert_same(pair.told, pair.master.store)


def test_failed_write_keeps_no_described_state() -> None:
    pair = TwoSlaves(2)
    append(pair.master, 20)
    pair.catch_up()
    append(pair.master, 20)
    end, ends = pair.told.max_physical_offset, {name: q.end for name, q in pair.told.queues.by_name.items()}
    pair.disks[0].fail_write = lambda _path: True
    with pytest.raises(StoreNotWritable, match="a write to the log failed"):
        pass_on(pair.master.store, pair.told, 1 << 20, tells=True)
    assert pair.told.max_physical_offset == end
    assert {name: queue.end for name, queue in pair.told.queues.by_name.items()} == ends


def test_master_keeps_bounded_descriptions_while_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(described, "_KEPT_MAX", 4_000)
    monkeypatch.setattr(described, "_BYTES_MAX", 10_000)
    pair = TwoSlaves(3)
    store, starts = pair.master.store, list[int]()
    for _ in range(30):
        starts.append(store.max_physical_offset)
        append(pair.master, 8, ("orders",))
    kept = [one for start in starts if (one := store.described.at(start)) is not None]
    assert 1 < len(kept) < 30
    assert store.described.at(starts[-1]) == kept[-1], "the newest"
    assert sum(len(one.description) for one in kept) <= 4_000
    assert 0 < sum(len(one.records) for one in kept) <= 10_000
    assert pair.catch_up() == 0, "of those that were let go nothing is told"
    pair.assert_equal()
    store.described.want(False)
    append(pair.master, 8)
    assert all(store.described.at(start) is None for start in starts)
    assert not store.described._by_start


def test_keys_of_described_and_parsed_appends_are_indexed_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index takes batches of 128 keys in log order, hashed by either member."""
    added, add = list[list[int]](), IndexFile.add

    def counted(file: IndexFile, hashes: Sequence[int], places: Sequence[int], times: Sequence[int]) -> int:
        added.append(list(places))
        return add(file, hashes, places, times)

    monkeypatch.setattr(IndexFile, "add", counted)
    pair = TwoSlaves(6, index_entries=100_000)
    for _ in range(40):
        append(pair.master, 20)
        append(pair.master, 1)
    by_key(pair.master.store, "orders", "k1", 1, 0, 1)
    places = [place for batch in added for place in batch]
    assert len(places) > 500
    assert places == sorted(places)
    assert len(added) <= len(places) // 128 + 1


def test_slave_drops_the_descriptions_it_made_as_master() -> None:
    """The next master may have other records at these offsets."""
    pair = TwoSlaves(4)
    append(pair.master, 8)
    assert pair.master.store.described.at(0) is not None
    pair.master.store.follow()
    assert pair.master.store.described.at(0) is None
