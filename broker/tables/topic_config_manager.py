"""Topics of the broker: the table, its file, and automatic creation by sends."""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from broker.tables.changes import Change, TopicDeleted, TopicPut, row_of
from broker.tables.journal import NO_JOURNAL, Journal
from broker.tables.state_file import StateFile, SyncLog, TableVersion
from infra.clock import Clock
from infra.disk.filesystem import Disk
from infra.loop.parts import Parts, run_here
from infra.loop.threads import SYSTEM_THREADS, Threads
from neve.errors import BrokerError
from neve.remoting import body, names
from neve.remoting.codes import ResponseCode
from neve.remoting.names import DEFAULT_TOPIC, PERM_INHERIT, PERM_READ, PERM_WRITE

log = logging.getLogger(__name__)


class TopicConfig(body.TopicConfig, rename="camel", kw_only=True):
    """Settings of one topic, as the broker uses them."""

    @property
    def queue_nums(self) -> int:
        return max(self.read_queue_nums, self.write_queue_nums)

    def to_wire(self) -> dict[str, Any]:
        value = msgspec.to_builtins(self)
        assert isinstance(value, dict)
        return value


class TopicsImage(msgspec.Struct, frozen=True, kw_only=True):
    """Copy of the whole table."""

    topics: dict[str, TopicConfig]
    version: dict[str, int]


class TopicConfigManager:
    """Table of topics and its file (RocketMQ's TopicConfigManager).

    A read is one dictionary lookup. A change advances the version and marks the file as dirty.

    A new topic must be on disk before anything that depends on it is acknowledged: see `is_saved`, `keep` and
    `create_saved`. A change is in the metadata log before it is in the table. Raises BrokerError if the log refuses the
    record. Nothing has changed then.
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        clock: Clock,
        limit: Callable[[], int] = lambda: sys.maxsize,
        *,
        threads: Threads = SYSTEM_THREADS,
        journal: Journal = NO_JOURNAL,
        sync_log: SyncLog | None = None,
        sync_changes: SyncLog | None = None,
    ) -> None:
        """Create the table.

        `limit` applies to topics that clients create, not to the broker's own topics or to a restore. `sync_changes`
        fsyncs the log, which makes changes as durable as `save` does; without it, the file is written instead.
        """
        self._clock, self._limit, self._journal, self._waits_for_set = clock, limit, journal, sync_log is not None
        self._sync_changes = sync_changes
        self.topics: dict[str, TopicConfig] = {}
        self.data_version = TableVersion(clock.now_ms())
        self.system: set[str] = set()
        # Topics created since the file was written and not known to be saved: topic → its change number.
        self.unsaved: dict[str, int] = {}
        self.file = StateFile(disk, path, self._snapshot, sync_log=sync_log, threads=threads, journal=journal)

    def load(self) -> None:
        """Load the file at a start."""
        run_here(self.load_parts())
        self.file.resume()

    def load_parts(self) -> Parts[None]:
        """Run `load` in parts when a master becomes a slave; the file stays suspended.

        The dictionary `topics` is refilled and not replaced, because other objects reference it.
        """
        value = yield from self.file.load_parts(topicConfigTable=dict[str, TopicConfig], dataVersion=dict[str, int])
        self.topics.clear()
        self.unsaved.clear()
        self.topics |= _visible(value.get("topicConfigTable", {}))
        self.data_version.read(value.get("dataVersion", {}))

    def _snapshot(self) -> Mapping[str, Any]:
        return {
            "topicConfigTable": dict(self.topics),
            "dataVersion": self.data_version.to_wire(),
        }

    @property
    def room(self) -> int:
        """Number of topics that clients may still create."""
        return self._limit() - len(self.topics)

    def is_saved(self, topic: str) -> bool:
        """Return whether the topic would exist after a restart."""
        change = self.unsaved.get(topic)
        if change is not None and self.file.is_saved(change):
            del self.unsaved[topic]
            change = None
        return change is None

    async def keep(self) -> None:
        """Make all changes so far durable by fsyncing their log records, which a start replays.

        The file is saved periodically: it contains all topics, so it is not written for each new one.
        """
        if self._sync_changes is None:
            await self.file.save()
            return
        wanted = dict(self.unsaved)
        await self._sync_changes()
        for topic, change in wanted.items():
            if self.unsaved.get(topic) == change:
                del self.unsaved[topic]

    def select(self, topic: str) -> TopicConfig | None:
        return self.topics.get(topic)

    def read_queues(self, topic: str) -> int | None:
        """Return how many queues consumers read, or None if there is no such topic."""
        config = self.topics.get(topic)
        return None if config is None else config.read_queue_nums

    def require(self, topic: str) -> TopicConfig:
        """Return a topic's settings. Raises BrokerError if there is no such topic."""
        config = self.topics.get(topic)
        if config is None:
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please!")
        return config

    def ensure_system(self, configs: Iterable[TopicConfig]) -> None:
        """Create the system topics of a RocketMQ broker; existing ones keep their settings.

        Each member of a broker set creates its own.
        """
        for config in configs:
            self.system.add(config.topic_name)
            if config.topic_name not in self.topics:
                self.put_back(config)

    def is_system(self, topic: str) -> bool:
        return topic in self.system or names.is_system_topic(topic)

    def update(self, config: TopicConfig) -> bool:
        """Store a topic's settings; return whether anything changed."""
        if self.topics.get(config.topic_name) == config:
            return False
        change = TopicPut(config=config.to_wire(), version=self.data_version.after(self._clock.now_ms()))
        self._journal.record(change)
        self._put(config, change.version)
        return True

    def put_back(self, config: TopicConfig) -> None:
        """Store a topic's settings without logging a change, as a start or a restore does."""
        if names.is_hidden(config.topic_name):
            return
        self.topics[config.topic_name] = config
        self.data_version.read(self.data_version.after(self._clock.now_ms()))
        self.file.touch()

    def deletion(self, topic: str, ends: Mapping[int, int], *, begins_again: bool) -> TopicDeleted:
        """Return the change that deletes a topic. The caller logs it and applies it to all tables."""
        version = self.data_version.after(self._clock.now_ms())
        return TopicDeleted(topic=topic, ends=dict(ends), begins_again=begins_again, version=version)

    def apply(self, change: Change) -> None:
        """Apply a change that is in the log. Raises UnreadableChange."""
        if isinstance(change, TopicPut):
            self._put(row_of(change.config, TopicConfig), change.version)
        elif isinstance(change, TopicDeleted):
            self.topics.pop(change.topic, None)
            self.unsaved.pop(change.topic, None)
            self._changed(change.version)

    def _put(self, config: TopicConfig, version: Mapping[str, int]) -> None:
        is_new = config.topic_name not in self.topics
        if not names.is_hidden(config.topic_name):
            self.topics[config.topic_name] = config
        self._changed(version)
        if is_new and config.topic_name in self.topics:
            self.unsaved[config.topic_name] = self.file.changes

    def lead(self, epoch: int) -> None:
        """Advance the version to a new master's epoch, because name servers accept the table with the highest one."""
        version = self.data_version.after(self._clock.now_ms())
        self.data_version.read({**version, "stateVersion": max(epoch, self.data_version.state_version)})
        self.file.touch()

    def image(self) -> TopicsImage:
        """Return a copy of the whole table, in the form that `install` accepts."""
        return TopicsImage(topics=dict(self.topics), version=self.data_version.to_wire())

    def install(self, image: TopicsImage) -> None:
        """Replace the table by that of another broker."""
        self.topics.clear()  # other parts reference the dictionary itself
        self.topics.update(_visible(image.topics))
        self.unsaved.clear()
        self._changed(image.version)
        self.unsaved.update(dict.fromkeys(self.topics, self.file.changes))

    def create_in_send(self, topic: str, default_topic: str, queue_nums: int, *, enabled: bool) -> TopicConfig | None:
        """Create a topic for a send by the settings of the default topic; None if that does not allow inheritance."""
        default = self.topics.get(default_topic)
        if default is None or not default.perm & PERM_INHERIT or (default_topic == DEFAULT_TOPIC and not enabled):
            return None
        queues = max(min(queue_nums, default.write_queue_nums), 0)
        config = TopicConfig(
            topic_name=topic,
            read_queue_nums=queues,
            write_queue_nums=queues,
            perm=default.perm & ~PERM_INHERIT,
            topic_filter_type=default.topic_filter_type,
            topic_sys_flag=default.topic_sys_flag,
        )
        self.update(config)
        return config

    def create_plain(self, topic: str, queue_nums: int, sys_flag: int = 0) -> TopicConfig:
        """Return a retry or dead-letter topic, created when it is first needed."""
        found = self.topics.get(topic)
        if found is not None:
            return found
        config = TopicConfig(
            topic_name=topic, read_queue_nums=queue_nums, write_queue_nums=queue_nums, topic_sys_flag=sys_flag
        )
        self.update(config)
        return config

    def grow(self, topic: str, queue_nums: int) -> bool:
        """Raise the queue numbers of an existing topic to at least `queue_nums`; return whether one was lower."""
        found = self.require(topic)
        read, write = max(found.read_queue_nums, queue_nums), max(found.write_queue_nums, queue_nums)
        return self.update(msgspec.structs.replace(found, read_queue_nums=read, write_queue_nums=write))

    def create_now(self, topic: str, queue_nums: int) -> TopicConfig:
        """Create a topic synchronously and return when it is on disk, in a broker set when it is in the log.

        It blocks the event loop, so use it only for topics that a broker creates once.
        """
        config = self.create_plain(topic, queue_nums)
        if not self.is_saved(topic) and not self._waits_for_set:
            self.file.save_now()
        return config

    async def create_saved(self, topic: str, queue_nums: int) -> TopicConfig:
        """Create a topic and return when it is on disk."""
        config = self.create_plain(topic, queue_nums)
        if not self.is_saved(topic):
            await self.file.save()
        return config

    def to_wire(self) -> dict[str, Any]:
        """Return the table for encoding in a thread, because that is slow with thousands of topics."""
        return {
            "dataVersion": self.data_version.to_wire(),
            "mappingDataVersion": TableVersion(0).to_wire(),
            "topicConfigTable": dict(self.topics),
            "topicQueueMappingDetailMap": {},
            "topicQueueMappingInfoMap": {},
        }

    def _changed(self, version: Mapping[str, int]) -> None:
        self.data_version.read(version)
        self.file.touch_logged()


def _visible(rows: Mapping[str, TopicConfig]) -> Mapping[str, TopicConfig]:
    """Drop rows of hidden topics, wherever the table comes from: with a row, clients could read their records."""
    hidden = [name for name in rows if names.is_hidden(name)]
    if hidden:
        log.warning("row of a hidden topic dropped: topics=%s", ",".join(hidden))
    return {name: row for name, row in rows.items() if not names.is_hidden(name)} if hidden else rows


def system_topics(broker: str, cluster: str, *, auto_create: bool, queues: int, trace: bool) -> list[TopicConfig]:
    """Return the system topics that a RocketMQ broker has at its start."""

    def plain(name: str, nums: int, perm: int = PERM_READ | PERM_WRITE) -> TopicConfig:
        return TopicConfig(topic_name=name, read_queue_nums=nums, write_queue_nums=nums, perm=perm, attributes={})

    inherit = PERM_READ | PERM_WRITE | PERM_INHERIT
    topics = [
        plain(names.SELF_TEST_TOPIC, 1),
        plain(names.BENCHMARK_TOPIC, 1024),
        plain(cluster, 16, inherit),
        plain(broker, 1, inherit),
        plain(names.OFFSET_MOVED_TOPIC, 1),
        plain(names.SCHEDULE_TOPIC, 18),
        plain(f"{cluster}_REPLY_TOPIC", 1),
        plain(f"rmq_sys_REVIVE_LOG_{cluster}", 8),
        plain(f"rmq_sys_SYNC_BROKER_MEMBER_{broker}", 1, PERM_INHERIT),
        plain(names.HALF_TOPIC, 1),
        plain(names.OP_HALF_TOPIC, 1),
        plain(names.WHEEL_TIMER_TOPIC, 1),
    ]
    if auto_create:
        topics.append(plain(DEFAULT_TOPIC, queues, inherit))
    if trace:
        topics.append(plain(names.TRACE_TOPIC, 1))
    return topics
