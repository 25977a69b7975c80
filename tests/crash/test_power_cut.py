"""Power cuts at any moment: whatever pages survive, no confirmed message is lost and no offset is assigned twice."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from broker.store.config import StoreConfig
from broker.store.layout import END_SIZE
from broker.store.message_store import MessageStore
from infra import failpoint
from infra.clock import ManualClock
from infra.failpoint import FailpointError
from neve.record.codec import iter_records
from tests.kit.store.by_key import by_key
from tests.kit.store.sim_disk import SimDisk

TOPICS = ("orders", "payments")
QUEUES = 3


class StoreUnderPowerCuts:
    """A store that survives power cuts, and the knowledge of its clients."""

    def __init__(self, seed: int, flush_disk_type: str) -> None:
        self.random = random.Random(seed)
        self.disk = SimDisk(seed=seed)
        self.clock = ManualClock()
        self.config = StoreConfig(
            root=Path("/store"),
            commit_log_file_size=32768,
            queue_first_step=4096,
            queue_file_size=8000,
            index_slots=64,
            index_entries=200,
            checkpoint_bytes=8000,
            flush_disk_type=flush_disk_type,
        )
        self.flushed: dict[tuple[str, int], dict[int, bytes]] = {}
        self.unflushed: list[tuple[str, int, int, bytes, int]] = []
        self.number = 0
        self.deleted_at = dict.fromkeys(TOPICS, 0)  # The newest message at the topic's last deletion.
        # For topics whose last deletion is not on the disk: `deleted_at` and `flushed` from before it.
        self.undeleted: dict[str, tuple[int, dict[int, dict[int, bytes]]]] = {}
        self.store = self.start()

    def start(self) -> MessageStore:
        store = MessageStore(self.config, self.disk, self.clock)
        store.load()
        return store

    def step(self) -> None:
        """Perform one random operation of a broker."""
        choice = self.random.random()
        if choice < 0.9:
            self.put()
        elif choice < 0.98:
            self.flush()
            if self.random.random() < 0.5:
                self.store.upkeep()
        elif choice < 0.984:
            self.store.upkeep()
        elif choice < 0.988:
            self.store.end.roll()
        elif choice < 0.991:
            self.delete()
        elif choice < 0.994:
            self.evict()
        else:
            self.store.prepare_next()
        if not self.store.queues.records.has_unsaved_deletions:
            self.undeleted.clear()

    def put(self) -> None:
        topic, queue_id = self.random.choice(TOPICS), self.random.randrange(QUEUES)
        self.number += 1
        body = b"%d:" % self.number + self.random.randbytes(self.random.choice((0, 10, 300, 3000)))
        self.clock.advance(self.random.randrange(3))
        stored = self.store.put(
            topic, queue_id, body, b"KEYS\x01k%d\x02" % self.number,
            flag=0, sys_flag=0, born_timestamp=0, born_host=("10.0.0.1", 1), keys=f"k{self.number}",
        )  # fmt: skip
        end = stored.physical_offset + stored.size
        self.unflushed.append((topic, queue_id, stored.queue_offset, body, end))

    def flush(self) -> None:
        offset = self.store.visibility.flush()
        self.store.after_flush(offset)
        for topic, queue_id, queue_offset, body, end in self.unflushed:
            assert end <= offset
            self.flushed.setdefault((topic, queue_id), {})[queue_offset] = body
        self.unflushed.clear()

    def evict(self) -> None:
        self.flush()
        oldest = self.store.reader.segments()[0] if self.store.reader.segments() else None
        if oldest is None or not oldest.sealed:
            return
        self.store.take_out(oldest.base)()
        for topic, (deleted_at, _) in self.undeleted.items():
            self.undeleted[topic] = deleted_at, {}
        for (topic, queue_id), promised in self.flushed.items():
            low = self.store.queues.min_offset(topic, queue_id)
            self.flushed[topic, queue_id] = {offset: body for offset, body in promised.items() if offset >= low}

    def delete(self) -> None:
        """Delete the topic; its next message creates it again at offset 0."""
        topic = self.random.choice(TOPICS)
        before = {queue_id: self.flushed.get((topic, queue_id), {}) for queue_id in range(QUEUES)}
        self.undeleted.setdefault(topic, (self.deleted_at[topic], before))
        self.deleted_at[topic] = self.number
        self.unflushed = [message for message in self.unflushed if message[0] != topic]
        for queue_id in range(QUEUES):
            self.flushed.pop((topic, queue_id), None)
        self.store.queue_changes.delete_topic(topic, restart_at_zero=True)
        if self.random.random() < 0.7:
            self.store.queue_changes.save_deletions()

    def power_cut(self) -> None:
        if self.store.queues.records.has_unsaved_deletions:
            for topic, (deleted_at, before) in self.undeleted.items():
                self.deleted_at[topic] = deleted_at
                self.flushed.update({(topic, queue_id): found for queue_id, found in before.items()})
        self.undeleted.clear()
        self.disk = self.disk.power_cut()
        self.unflushed.clear()
        self.store = self.start()
        self.check()
        # Messages read here are promised from now on, because recovery has synced them.
        for topic in TOPICS:
            for queue_id in range(QUEUES):
                self.flushed[topic, queue_id] = self.read(topic, queue_id)

    def read(self, topic: str, queue_id: int) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        offset = self.store.queues.min_offset(topic, queue_id)
        while True:
            result = self.store.reader.get(topic, queue_id, offset, 32, 1 << 20)
            if result.status != "FOUND":
                assert offset == self.store.queues.max_offset(topic, queue_id)
                return found
            for buffer in result.buffers:
                for record in iter_records(buffer):
                    assert (record.topic, record.queue_id, record.queue_offset) == (topic, queue_id, offset)
                    offset += 1
                    assert int(record.body.partition(b":")[0]) > self.deleted_at[topic], "a deleted message is back"
                    found[record.queue_offset] = record.body

    def check(self) -> None:
        for (topic, queue_id), promised in self.flushed.items():
            found = self.read(topic, queue_id)
            for queue_offset, body in promised.items():
                assert found.get(queue_offset) == body, (topic, queue_id, queue_offset)
        if self.flushed:
            (topic, _), promised = self.random.choice(list(self.flushed.items()))
            for body in list(promised.values())[-3:]:
                key = "k" + body.partition(b":")[0].decode()
                assert len(by_key(self.store, topic, key, 1, 0, 1 << 60)) == 1


@pytest.mark.parametrize("flush_disk_type", ["SYNC_FLUSH", "ASYNC_FLUSH"])
@pytest.mark.parametrize("seed", range(12))
def test_flushed_messages_survive_power_cuts(seed: int, flush_disk_type: str) -> None:
    world = StoreUnderPowerCuts(seed, flush_disk_type)
    for _ in range(6):
        for _ in range(world.random.randrange(120)):
            world.step()
        world.power_cut()


@pytest.mark.parametrize(
    "place",
    [
        "store.allocate",
        "store.roll",
        "store.flush",
        "store.checkpoint",
        "store.queues_moved",
        "store.queue_unlinked",
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_flushed_messages_survive_a_power_cut_at_each_failpoint(seed: int, place: str) -> None:
    world = StoreUnderPowerCuts(seed, "SYNC_FLUSH")
    with failpoint.armed(place, action=_cut, nth=2 + seed), pytest.raises(_PowerCut):
        for _ in range(5000):
            world.step()
    world.power_cut()
    for _ in range(50):
        world.step()
    world.flush()
    world.check()


def room_in_file(store: MessageStore) -> int:
    """Return the space for records; the end mark of a file takes the rest."""
    file = store.log.at(store.newest_segment_base)
    return file.end - END_SIZE - store.max_physical_offset if file is not None else 0


@pytest.mark.parametrize("filled", ["a record", "to the brim"])
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("place", ["store.allocate", "store.roll", "store.flush", "store.checkpoint"])
def test_power_cut_while_the_log_restarts_above_its_archive(place: str, nth: int, filled: str) -> None:
    world = StoreUnderPowerCuts(7, "SYNC_FLUSH")
    for _ in range(30 if filled == "a record" else 1):
        world.put()
    while filled == "to the brim" and room_in_file(world.store) > 400:
        world.put()
    world.flush()
    with contextlib.suppress(_PowerCut), failpoint.armed(place, action=_cut, nth=nth):
        world.store.restart_log_at(1_000_000)
    world.power_cut()
    if world.store.max_physical_offset < 1_000_000:
        world.store.restart_log_at(1_000_000)
    world.put()
    world.flush()
    world.power_cut()
    assert world.store.max_physical_offset > 1_000_000


def test_readable_messages_survive_a_power_cut_with_sync_flush() -> None:
    """With SYNC_FLUSH a message that was once readable is readable after any power cut."""
    for seed in range(10):
        world = StoreUnderPowerCuts(seed, "SYNC_FLUSH")
        for _ in range(80):
            world.step()
        seen = {(t, q): world.read(t, q) for t in TOPICS for q in range(QUEUES)}
        world.power_cut()
        for (topic, queue_id), messages in seen.items():
            assert messages.items() <= world.read(topic, queue_id).items()


class _PowerCut(Exception):
    """Raised to leave the store at once, as in a power cut."""


def _cut(name: str) -> None:
    raise _PowerCut(name)


def test_armed_failpoint_fails_once() -> None:
    with failpoint.armed("here", "error", nth=2):
        failpoint.hit("here")
        with pytest.raises(FailpointError, match="here"):
            failpoint.hit("here")
        failpoint.hit("here")
