"""Random traffic on a master's store, and replication to a slave's store."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from broker.store.message_store import MessageStore
from infra.clock import ManualClock
from neve.record.codec import decode_record
from neve.record.properties import tags_code
from tests.kit.store.by_key import by_key
from tests.kit.store.sim_disk import SimDisk
from tests.kit.store.small_store import put_one, small_config

TOPICS = ("orders", "payments", "käse", "t" * 130)
QUEUES = 3
KEYS = 10
IDS = ("id0", "id1", "id2", "id3", "a-b", "ü", "two words", "7F00", "x" * 200, "\x1f")

Deletion = tuple[int, str, bool]  # log end at the deletion, topic, begin_again


def open_store(
    disk: SimDisk, clock: ManualClock, *, following: bool = False, confirmed: int | None = None, **changes: Any
) -> MessageStore:
    store = MessageStore(small_config(**changes), disk, clock)
    store.load(following=following, confirmed=confirmed)
    return store


class RandomMaster:
    """A store with random broker operations. `deletions` records topic deletions, which the log does not contain."""

    def __init__(self, seed: int, **changes: Any) -> None:
        self.dice, self.clock, self.disk = random.Random(seed), ManualClock(), SimDisk(seed=seed)
        self.store = open_store(self.disk, self.clock, **changes)
        self.deletions: list[Deletion] = []
        self.deletes = True

    @classmethod
    def over(cls, other: RandomMaster, to: int, seed: int) -> RandomMaster:
        """Return a master that had the log of `other` up to the offset `to` when it was elected."""
        elected = cls(seed)
        elected.store.follow()
        LogLink(other, elected.store, seed).run(until=to)
        elected.deletions = [one for one in other.deletions if one[0] <= to]
        elected.store.lead()
        return elected

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        dice, store = self.dice, self.store
        self.clock.advance(dice.randrange(50))
        match dice.randrange(60):
            case 0:
                store.end.roll()
            case 1:
                store.restart_log_at(store.max_physical_offset + dice.choice((0, 1, 777, 40_000)))
            case 2 if self.deletes:
                self.delete(dice.choice(TOPICS))
            case 3:
                topic, queue_id = dice.choice(TOPICS), dice.randrange(QUEUES)
                store.queue_changes.create_queue_at(
                    topic, queue_id, store.queues.next_offset(topic, queue_id) + dice.randrange(1, 500)
                )
                self.put(topic, queue_id, 10)
            case 4:
                self.put(dice.choice(TOPICS), 0, dice.randrange(9_000, 14_000))
            case 5:
                self.clock.set_wall(self.clock.now_ms() + dice.choice((-7_200_000, -500, 7_200_000)))
            case 6:
                store.after_flush(store.visibility.flush())
                store.upkeep()
            case _:
                self.put(dice.choice(TOPICS), dice.randrange(QUEUES), dice.choice((0, 1, 30, 200, 1500)))

    def delete(self, topic: str) -> None:
        restart_at_zero = self.dice.random() < 0.5
        self.deletions.append((self.store.max_physical_offset, topic, restart_at_zero))
        self.store.queue_changes.delete_topic(topic, restart_at_zero=restart_at_zero)

    def put(self, topic: str, queue_id: int, size: int) -> None:
        dice = self.dice
        tag = dice.choice(("", "a", "TagB", "ü"))
        keys = " ".join(f"k{dice.randrange(KEYS)}" for _ in range(dice.choice((0, 0, 1, 2))))
        unique = dice.choice(IDS) if dice.random() < 0.7 else ""
        named = {"KEYS": keys, "TAGS": tag, "UNIQ_KEY": unique, "x": "TAGS"}
        put_one(
            self.store, topic, queue_id, dice.randbytes(size), keys=keys, unique_key=unique, tags_code=tags_code(tag),
            properties="".join(f"{name}\x01{value}\x02" for name, value in named.items() if value).encode(),
            born_host=dice.choice((("10.1.2.3", 4000), ("fe80::1", 4000))),
        )  # fmt: skip


class LogLink:
    """A stream of the master's log to a slave in pieces of any size, with deletions at their offsets."""

    def __init__(self, master: RandomMaster, slave: MessageStore, seed: int, *, padding: bool = False) -> None:
        self._master, self._slave, self._dice, self._padding = master, slave, random.Random(seed), padding
        end = slave.max_physical_offset
        self._deleted = sum(at <= end for at, *_ in master.deletions) if end else 0

    def run(self, *, until: int = 1 << 62) -> None:
        """Transfer the log of the master up to the offset `until`."""
        while self.pass_on(self._dice.choice((1, 7, 100, 3000, 40_000)), until=until):
            pass

    def pass_on(self, size: int, *, until: int = 1 << 62) -> bool:
        """Transfer one piece, and return whether there was one."""
        master, slave = self._master.store, self._slave
        start = slave.replica.next_offset if slave.reader.segments() else master.min_physical_offset
        deletions = self._master.deletions[self._deleted :]
        border = deletions[0][0] if deletions else 1 << 62
        at, data = master.log_bytes(start, min(border, until), size, padding=self._padding)
        if data:
            if at > max(start, slave.max_physical_offset) and slave.reader.segments():
                slave.replica.continue_at(at)
            slave.replica.append(data, at)
        elif deletions and border <= until:
            _, topic, restart_at_zero = deletions[0]
            slave.queue_changes.delete_topic(topic, restart_at_zero=restart_at_zero)
            # these tests have no metadata log that repeats deletions after a crash
            slave.queue_changes.save_deletions()
            self._deleted += 1
        else:
            return False
        return True


def log_of(store: MessageStore) -> Iterator[tuple[int, bytes]]:
    at = store.min_physical_offset
    while True:
        at, data = store.log_bytes(at, 1 << 62, 1 << 30)
        if not data:
            return
        yield at, bytes(data)
        at += len(data)


def told(store: MessageStore) -> dict[str, Any]:
    """Return everything that a store reports about its messages."""
    table = store.queues
    queues = [(topic, queue) for topic, ids in table.names().items() for queue in ids]
    queues = [one for one in queues if table.min_offset(*one) < table.next_offset(*one)]
    return {
        "log": list(log_of(store)),
        "bounds": {one: (table.min_offset(*one), table.max_offset(*one), table.next_offset(*one)) for one in queues},
        "following": {
            (topic, queue): table.next_offset(topic, queue) for topic in TOPICS for queue in range(QUEUES)
        },
        "entries": {
            one: [store.reader.entry(*one, offset) for offset in range(table.min_offset(*one), table.max_offset(*one))]
            for one in queues
        },
        "keys": {
            (topic, key): by_key(store, topic, key, 64, 0, 1 << 60)
            for topic in TOPICS
            for key in (*(f"k{number}" for number in range(KEYS)), *" ".join(IDS).split())
        },
        "tables": [
            (segment.base, {topic: place for topic, (place, _) in segment.topics.items()})
            for segment in store.reader.segments()
            if segment.topics
        ],
    }  # fmt: skip


def assert_same(slave: MessageStore, master: MessageStore) -> None:
    theirs, own = told(master), told(slave)
    for what, value in theirs.items():
        assert own[what] == value, what
    for mine, its in zip(slave.reader.segments(), master.reader.segments(), strict=False):
        for topic, (place, newest) in mine.topics.items():
            record = decode_record(slave.reader.record_at(place) or b"")
            # A master that rolls for a record counts the time of that record in the file that ends.
            assert record.store_timestamp <= newest <= its.topics[topic][1]
            assert newest <= mine.newest_store_time <= its.newest_store_time
