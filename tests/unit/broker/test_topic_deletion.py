"""Deletion of an archived topic: its tombstone hides exactly the deleted messages, however the deletion ends."""

from __future__ import annotations

import functools

import pytest

from broker.config import BrokerConfig
from broker.tables.topic_config_manager import TopicConfig
from infra.clock import ManualClock
from infra.objects.store import StoreUnavailable, UnknownOutcome
from neve.archive.catalog.catalog import Location
from neve.archive.format.journal import Topic, decode_entry
from neve.archive.format.keys import journal_key
from neve.errors import BrokerError
from neve.record.codec import iter_records
from tests.kit.store.sim_disk import SimDisk
from tests.simulation.faulty_store import URL, FaultyStore
from tests.simulation.process import BROKER, Process, make_environment
from tests.simulation.workers import SimulatedWorker

TOPIC = "orders"
HOUR_MS = 3_600_000
# One disk page each, so that a power cut affects them independently.
BODY = bytes(5000)


class BrokerMachine:
    """A broker's disk, clock and bucket, and the process that currently runs on them."""

    def __init__(self, seed: int = 0) -> None:
        self.clock, self.disk = ManualClock(1_700_000_000_000), SimDisk(seed=seed)
        self.bucket = FaultyStore(self.clock, 0)
        self.start()

    def start(self) -> None:
        config = BrokerConfig(
            broker_name=BROKER,
            broker_ip1="127.0.0.1",
            bind_address="127.0.0.1",
            admin_port=-1,
            store_path_root_dir="/store",
            store_url=URL,
            mapped_file_size_commit_log=32768,
            flush_disk_type="ASYNC_FLUSH",
            archive_min_bytes=1,
            expire_grace=HOUR_MS,
        )
        disk = self.disk
        machine = make_environment(lambda: SimulatedWorker(disk, self.bucket), lambda: self.bucket, lambda: False)
        self.process = Process(disk, self.clock, config, machine)
        self.process.start(lambda: None)

    def power_cut(self) -> None:
        self.disk = self.disk.power_cut()

    def make_topic(self) -> None:
        topics = self.process.broker.topics
        topics.update(TopicConfig(topic_name=TOPIC, read_queue_nums=2, write_queue_nums=2))
        topics.file.save_now()

    def put(self, queue: int = 0, count: int = 1) -> list[int]:
        """Append messages and return their queue offsets."""
        host = ("10.0.0.1", 1)
        put = functools.partial(
            self.process.store.put, TOPIC, queue, BODY, b"", flag=0, sys_flag=0, born_timestamp=0, born_host=host
        )
        return [put().queue_offset for _ in range(count)]

    def offload(self) -> None:
        self.process.lifecycle.offload.run(roll=True)

    def hot(self, first: int) -> list[int]:
        """Return the queue offsets in the local log from one on."""
        result = self.process.store.reader.get(TOPIC, 0, first, 32, 1 << 20)
        return [record.queue_offset for buffer in result.buffers for record in iter_records(buffer)]

    def tombstones(self) -> list[Topic]:
        found: list[Topic] = []
        seq = 0
        while (held := self.bucket.objects.get(journal_key("", BROKER, seq))) is not None:
            entry = decode_entry(held[0])
            found += [entry] if isinstance(entry, Topic) else []
            seq += 1
        return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stands", [True, False])
def test_deletion_of_unknown_outcome_hides_no_message_sent_after_it(stands: bool, seed: int) -> None:
    """No offset is assigned twice, and no message is lost if the deletion was not written."""
    machine = BrokerMachine(seed)
    machine.make_topic()
    assert machine.put(count=3) == [0, 1, 2]
    machine.offload()
    assert machine.put(count=2) == [3, 4]  # not fsynced yet
    machine.bucket.fail("put", UnknownOutcome("no answer"), after=stands, match="journal")
    machine.bucket.fail("get", StoreUnavailable("down"), match="journal")
    with pytest.raises(BrokerError, match="the outcome of the write is unknown"):
        machine.process.drop_topic(TOPIC)
    assert [entry.minimums for entry in machine.tombstones()] == ([{0: 5}] if stands else [])

    machine.power_cut()
    machine.bucket.down = True
    machine.start()
    assert not machine.process.journal.ownership.online
    assert machine.hot(3) == [3, 4], "the topic is still there"
    assert machine.put() == [5]

    machine.bucket.heal()
    machine.offload()
    catalog = machine.process.journal.catalog
    assert catalog.recorded_minimum(TOPIC, 0) == (5 if stands else 0)
    first_in_view = 5 if stands else 0
    for offset in range(first_in_view, 6):
        assert isinstance(catalog.find(TOPIC, 0, offset), Location)
    assert catalog.gap_count == 0
    assert machine.process.told_minimum(TOPIC, 0) <= 5
    assert machine.hot(5) == [5]


@pytest.mark.parametrize("expired_before", [True, False])
def test_topic_that_is_deleted_twice_keeps_its_first_messages_hidden(expired_before: bool) -> None:
    """Also in a queue without a message since the first deletion: its objects are deleted and cannot be unexpired."""
    machine = BrokerMachine()
    machine.make_topic()
    assert machine.put(queue=0) == machine.put(queue=1) == [0]
    machine.offload()
    machine.process.drop_topic(TOPIC)
    if expired_before:
        assert machine.process.lifecycle.expire.run()["expired"] == 1
    machine.make_topic()
    assert machine.put(queue=1) == [1]
    machine.process.drop_topic(TOPIC)
    assert [entry.minimums for entry in machine.tombstones()] == [{0: 1, 1: 1}, {0: 1, 1: 2}]
    machine.process.lifecycle.expire.run()
    catalog = machine.process.journal.catalog
    assert catalog.objects(TOPIC) == [], "what nobody can read stays in the bucket"
    assert machine.process.lifecycle.unexpire.run()["objects"] == 0
    assert catalog.min_offset(TOPIC, 0) is None, "a deleted message is in view"


def archived(machine: BrokerMachine) -> list[int]:
    """Return the queue offsets that the archive has objects of."""
    find = machine.process.journal.catalog.find
    return [offset for offset in range(10) if isinstance(find(TOPIC, 0, offset), Location)]


def forgotten(machine: BrokerMachine) -> None:
    """Delete a topic of five messages and let both tiers drop everything of it."""
    machine.make_topic()
    assert machine.put(count=5) == [0, 1, 2, 3, 4]
    machine.offload()
    machine.process.drop_topic(TOPIC)
    assert machine.process.lifecycle.expire.run()["expired"] == 1
    machine.clock.advance(8 * 24 * HOUR_MS)
    assert machine.process.lifecycle.expire.run()["deleted"] == 1
    machine.process.lifecycle.offload.run(roll=True, evict=True)
    assert machine.process.lifecycle.forget.run() == 1
    assert TOPIC not in machine.process.journal.named and not machine.process.store.queues.records.ended()


@pytest.mark.parametrize("how", ["goes on", "power cut after FORGET", "power cut after messages"])
def test_topic_created_again_after_a_forget_begins_at_0(
    how: str,
) -> None:
    machine = BrokerMachine()
    forgotten(machine)
    if how == "power cut after FORGET":
        machine.power_cut()
        machine.start()
    machine.make_topic()
    assert machine.put(count=2) == [0, 1], "as a topic that never was"
    machine.offload()
    if how == "power cut after messages":
        machine.power_cut()
        machine.start()
    catalog = machine.process.journal.catalog
    assert archived(machine) == [0, 1] and catalog.gap_count == 0
    assert machine.process.told_minimum(TOPIC, 0) == 0, "no tombstone of the first life hides the second"
    assert machine.hot(0) == [0, 1]
    assert machine.put() == [2]

    machine.process.lifecycle.offload.run(roll=True)
    machine.process.drop_topic(TOPIC)
    machine.make_topic()
    assert machine.put() == [3], "it was archived in this life: it goes on above its tombstone"


def test_crash_between_a_forget_and_the_local_state_reuses_no_offset() -> None:
    machine = BrokerMachine()
    machine.make_topic()
    machine.put(count=5)
    machine.offload()
    machine.process.drop_topic(TOPIC)
    machine.process.lifecycle.expire.run()
    machine.clock.advance(8 * 24 * HOUR_MS)
    machine.process.lifecycle.expire.run()
    machine.process.lifecycle.offload.run(roll=True, evict=True)
    assert machine.process.journal.forget([TOPIC]) == [TOPIC]  # and the process ends here
    machine.power_cut()
    machine.start()
    machine.make_topic()
    assert machine.put(count=2) == [5, 6]
    machine.process.lifecycle.forget.run()
    machine.offload()
    assert machine.put() == [7]
    assert archived(machine) == [5, 6]
    assert machine.process.told_minimum(TOPIC, 0) == 5
