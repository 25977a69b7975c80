"""Members of a set, reduced to their tables. Each has its own log, tables and users, and follows the master's log.

Records are copied one by one in log order, to the queue offsets that their master assigned. A restarted member gets
the records that its log lacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from access.store import AuthStore, AuthTables
from broker.archiving.deletion import GroupDeletion, NoTombstones, TopicDeletion
from broker.archiving.restore import RestoredTables
from broker.intake.internal_records import WRITTEN_BY_NEVE
from broker.intake.log_writer import LogWriter
from broker.intake.message import NewMessage
from broker.metadata.metadata_journal import MetadataJournal
from broker.metadata.metadata_log import MetadataLog
from broker.metadata.user_changes import FollowedUsers, UserJournal
from broker.pop.assignment import RequestModes
from broker.pop.pop_book import PopBook, revive_log
from broker.store.config import StoreConfig
from broker.store.message_store import MessageStore
from broker.tables.changes import CHANGES, QueuesRaised
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.retry_names import RetryNames
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from broker.waiting.schedule_message import ScheduleMessage
from infra.clock import ManualClock
from infra.disk.filesystem import RealDisk
from infra.loop.supervisor import Faults
from neve.record.codec import MessageRecord, decode_record, parse_host
from neve.remoting.names import METADATA_LOG
from tests.kit.store.sim_disk import SimDisk
from tests.simulation.process import InLine, drive

ROOT = Path("/store")
CONFIG = ROOT / "config"
DELAY_MS = 1000


async def _nothing() -> None:
    """Confirm at once, as a broker without a set does."""


class TablesMember:
    """One broker's log and tables. `users` is a real directory of its own."""

    def __init__(self, users: Path, clock: ManualClock, seed: int = 0) -> None:
        self.clock, self.disk, self._users = clock, SimDisk(seed=seed), users
        self.start()

    def start(self) -> None:
        clock, disk, threads = self.clock, self.disk, InLine()
        config = StoreConfig(ROOT, commit_log_file_size=1 << 16, index_slots=64, index_entries=200)
        self.store = store = MessageStore(config, disk, clock)
        store.load()
        self._records: list[MessageRecord] = []
        self.settled: list[int] = []  # the epochs of masters that reported a settled archive in this life
        self.lost: list[list[int | None]] = []  # log positions that the table files claimed beyond the log's end
        disk.make_dirs(CONFIG)
        self.writer = LogWriter(store)
        self.journal = journal = MetadataJournal(store, self.writer, clock)
        keep: dict[str, Any] = {"threads": threads, "journal": journal, "sync_log": self._save_deletions}
        self.topics = TopicConfigManager(disk, CONFIG / "topics.json", clock, **keep)
        self.groups = SubscriptionGroupManager(disk, CONFIG / "groups.json", clock, **keep)
        self.offsets = ConsumerOffsetManager(disk, CONFIG / "offsets.json", self._sync, threads, journal)
        self.modes = RequestModes(disk, CONFIG / "modes.json", threads, journal, self._save_deletions)
        path = CONFIG / "delays.json"
        self.schedule = ScheduleMessage(
            store,
            self.writer,
            clock,
            [DELAY_MS],
            disk,
            path,
            self._sync,
            Faults(),
            threads,
            journal,
            read_queues=self.topics.read_queues,
        )
        path = CONFIG / "pops.json"
        self.pops = PopBook(store, self.writer, self.offsets, clock, disk, path, revive_log("c"), self._sync, threads)
        log_uuid = lambda: store.log_uuid  # noqa: E731
        self.users = AuthStore(self._users / "auth.json", RealDisk(), UserJournal(journal, log_uuid, _nothing))
        self.users.open()
        self.metadata = MetadataLog(
            journal,
            store,
            disk,
            CONFIG / "metadataImage.json",
            topics=self.topics,
            groups=self.groups,
            offsets=self.offsets,
            modes=self.modes,
            users=FollowedUsers(self.users, journal, log_uuid),
            delays=self.schedule,
            pops=self.pops,
            on_settled=self.settled.append,
            on_lost=lambda: self.lost.append([table.file.log_offset for table in (self.topics, self.groups)]),
        )
        for manager, path in ((self.topics, CONFIG / "topics.json"), (self.groups, CONFIG / "groups.json")):
            if not disk.exists(path):
                manager.file.save_now()
        for part in (self.topics, self.groups, self.offsets, self.schedule, self.modes, self.metadata, self.pops):
            part.load()
        self.metadata.settle()
        self._make_deletions()

    def _make_deletions(self) -> None:
        told: Any = SimpleNamespace(release_topic=lambda topic: None, now=_nothing)
        names = RetryNames(self.topics.topics, self.groups.groups, self.offsets.has_offsets, lambda: False)
        self._topic_deletion = TopicDeletion(
            store=self.store,
            journal=self.journal,
            sync_log=self._sync,
            tombstones=lambda: NoTombstones(self.disk, ROOT / "archive"),
            tables=RestoredTables(self.topics, self.groups, self.offsets),
            retry_names=names,
            pops=self.pops,
            arriving=told,
            registration=told,
            threads=InLine(),
        )
        self._group_deletion = GroupDeletion(
            journal=self.journal, groups=self.groups, offsets=self.offsets, pops=self.pops
        )

    async def _sync(self) -> None:
        self.store.after_flush(self.store.visibility.flush())
        self.store.queue_changes.save_deletions()

    async def _save_deletions(self) -> None:
        self.store.queue_changes.save_deletions()

    def sync(self) -> None:
        drive(self._sync())

    def kill(self) -> None:
        """Kill the process. The machine survives, so all written bytes are kept."""
        self.store.abandon()
        self.start()

    def power_cut(self) -> None:
        self.disk = self.disk.power_cut()
        self.start()

    # ---- as a master

    def put(self, topic: str, body: bytes = b"m", queue: int = 0) -> int:
        """Append a message and return its queue offset."""
        return self.writer.put(NewMessage(topic=topic, queue_id=queue, body=body, born_timestamp=0)).queue_offset

    def put_change(self, body: bytes, queue: int = CHANGES) -> None:
        """Append to the metadata log what a neve master wrote."""
        self._put_into_log(body, queue, WRITTEN_BY_NEVE)

    def put_foreign(self, body: bytes, queue: int = CHANGES) -> None:
        """Append to the metadata log what a client of an Apache master sent there."""
        self._put_into_log(body, queue, 0)

    def _put_into_log(self, body: bytes, queue: int, proof: int) -> None:
        message = NewMessage(
            topic=METADATA_LOG, queue_id=queue, body=body, born_timestamp=0, prepared_transaction_offset=proof
        )
        self.writer.put(message, internal=True)

    def put_delayed(self, topic: str) -> None:
        message = NewMessage(topic=topic, queue_id=0, body=b"later", properties=b"DELAY\x011\x02", born_timestamp=0)
        assert self.schedule.take(message, {"DELAY": "1"}) is not None

    def delete_topic(self, topic: str) -> None:
        drive(self._topic_deletion.delete(topic))

    def delete_group(self, group: str, *, with_offsets: bool) -> None:
        drive(self._group_deletion.delete(group, with_offsets=with_offsets))

    def raise_queue(self, topic: str, queue: int, by: int) -> None:
        """Raise the end of a queue, as a master does that resumes above its archive."""
        store = self.store
        store.queue_changes.raise_queues({topic: {queue: store.queues.next_offset(topic, queue) + by}})
        self.journal.record(QueuesRaised(queues={topic: {queue: store.queues.next_offset(topic, queue)}}))
        store.queue_changes.save()

    def change_users(self, edit: Callable[[AuthTables], None]) -> None:
        asyncio.run(self.users.change(edit))

    def save(self) -> None:
        """Save every table that is newer than its file, as a broker's periodic task does."""
        for file in (self.topics.file, self.groups.file, self.offsets.file, self.modes.file, self.schedule.file):
            if file.dirty:
                drive(file.save())

    # ---- the log

    def records(self) -> list[MessageRecord]:
        """Return all records of the log."""
        found, end = self._records, self.store.max_physical_offset
        position = found[-1].physical_offset + found[-1].size if found else 0
        while position < end:
            raw = self.store.reader.record_at(position)
            if raw is None:  # a file ends with its last record
                file = self.store.log.at(position)
                assert file is not None
                position = file.end
                continue
            found.append(decode_record(bytes(raw)))
            position += len(raw)
        return list(found)

    def receive(self, record: MessageRecord, *, follows: bool = True) -> None:
        """Store a master's record at the master's offset. Without `follows`, only deletions are applied."""
        stored = self.store.put(
            record.topic, record.queue_id, record.body, record.properties_raw, flag=0, sys_flag=record.sys_flag,
            born_timestamp=record.born_timestamp, born_host=parse_host(record.born_host),
            prepared_transaction_offset=record.prepared_transaction_offset,
        )  # fmt: skip
        assert stored.queue_offset == record.queue_offset, f"{record.topic}/{record.queue_id}"
        if follows and record.topic == METADATA_LOG and (b'"topic gone"' in record.body or b'"raised"' in record.body):
            # A queue that begins again or is raised changes behind this record. If a power cut took the record and
            # kept the queue's old state, the old records would be sent again, and a put cannot assign them their old
            # offsets.
            self.sync()
            self.metadata.catch_up()
            self.store.queue_changes.save_deletions()  # a start that repeats it begins no queue at 0

    # ---- state

    def tables(self) -> dict[str, object]:
        """Return everything that a slave must have in common with its master."""
        users = self.users.tables
        return {
            "topics": {name: config.to_wire() for name, config in self.topics.topics.items()},
            "topic version": self.topics.data_version.to_wire(),
            "groups": {name: config.to_wire() for name, config in self.groups.groups.items()},
            "forbidden": self.groups.forbidden(),
            "group version": self.groups.data_version.to_wire(),
            "modes": self.modes.image(),
            "offsets": self.offsets.table(),
            "resets": self.offsets.resets(),
            "users": users.users,
            "policies": users.policies,
            "delays": self.schedule.positions(),
            "ended": self.store.queues.records.ended(),
            "queues": {topic: self.store.queues.following_of(topic) for topic in self.topics.topics},
        }
