"""Local side of an archive: the store, tables and files that are archived, and the policy by configuration."""

from __future__ import annotations

import functools
import math

from broker.archiving.archivable_limit import ArchivableLimit, ArchivedSet, DivergenceFile, FollowedMaster
from broker.archiving.environment import Environment
from broker.archiving.hot_store import LoopHotStore
from broker.archiving.pins import Pins
from broker.archiving.restore import RestoredTables, StateCapture
from broker.config import BrokerConfig
from broker.intake.flusher import Flusher
from broker.pop.pop_book import revive_log
from broker.store.message_store import MessageStore
from broker.tables.journal import NO_JOURNAL, Journal
from broker.tables.topic_config_manager import TopicConfigManager
from infra.clock import Clock
from infra.disk.filesystem import Disk
from lifecycle.retention import RetentionPolicy
from lifecycle.safe_clock import ClockMark, SafeClock
from neve.remoting import names


class ConfiguredPolicy:
    """Creates the current policy at each call, because some settings change at runtime and topics come and go."""

    def __init__(self, config: BrokerConfig, topics: TopicConfigManager, store: MessageStore) -> None:
        self._config, self._topics, self._store = config, topics, store
        # Parsed here so that an invalid value fails the start.
        self._delete_hours, self._max_ages = config.delete_hours, config.archive_max_ages
        self._delta_topics = config.delta_topics

    def __call__(self) -> RetentionPolicy:
        config, topics = self._config, self._topics
        archiving = bool(config.store_url)
        crowded = config.disk_max_used_space_ratio / 100
        forced = config.disk_space_clean_forcibly_ratio / 100 if config.clean_file_forcibly_enable else math.inf
        internal = {*names.PINNED_TOPICS, names.METADATA_LOG, revive_log(config.broker_cluster_name)}
        return RetentionPolicy(
            archive_min_bytes=config.archive_min_bytes,
            archive_max_age_ms=config.archive_max_age,
            own_max_age_ms=self.max_age_of,
            reserved_ms=config.file_reserved_time * 3_600_000,
            delete_hours=None if archiving else self._delete_hours,
            disk_mark=crowded,
            force_mark=crowded if archiving else forced,
            grace_ms=config.expire_grace,
            replaced_grace_ms=config.archive_replaced_grace,
            journal_retention_ms=config.archive_journal_retention,
            upload_bytes_per_second=config.archive_upload_bytes_per_second,
            compaction=config.archive_compaction_enable,
            compaction_bytes_per_second=config.archive_compaction_bytes_per_second,
            delta_topics=self._delta_topics,
            worker_priority=config.archive_worker_priority,
            archived=lambda topic: archiving and not topics.is_system(topic),
            internal=internal.__contains__,
            deleted_up_to=self._store.queues.deleted_up_to,
            exists=lambda topic: topics.select(topic) is not None,
            ttl_hours=self._ttl_hours,
        )

    def max_age_of(self, topic: str) -> int | None:
        """Return the age in ms by the first matching pattern of `archiveMaxAgeByTopic`, None without a match."""
        fits = (
            age
            for pattern, age in self._max_ages
            if topic == pattern or (pattern.endswith("*") and topic.startswith(pattern[:-1]))
        )
        return next(fits, None)

    def _ttl_hours(self, topic: str) -> int | None:
        found = self._topics.select(topic)
        if found is None:
            return None  # its TTL is unknown, so its messages are kept
        hours = int(found.attributes.get(names.RESERVE_TIME, -1))
        hours = self._config.default_ttl_hours if hours == -1 else hours
        return None if hours <= 0 else hours


class LocalSide:
    """Parts of a broker that its archive uses, with `storeUrl` or without."""

    def __init__(  # noqa: PLR0917
        self,
        config: BrokerConfig,
        store: MessageStore,
        flusher: Flusher,
        tables: RestoredTables,
        pins: Pins,
        clock: Clock,
        disk: Disk,
        environment: Environment | None = None,
        broker_set: ArchivedSet | None = None,
        *,
        follows: bool = False,
        journal: Journal = NO_JOURNAL,
    ) -> None:
        """Create the parts.

        `broker_set` is the set of which the broker is a member. `follows`: the log is the copy of an Apache master's
        log.
        """
        self._journal = journal
        self.config, self.store, self.tables, self.clock, self.disk = config, store, tables, clock, disk
        self.environment = environment or Environment()
        self.root = config.root
        self.archive_files = config.root / "archive"  # the journal's local copy, and objects being encoded
        self.policy = ConfiguredPolicy(config, tables.topics, store)
        self.capture = StateCapture(config.broker_name, store, tables, pins)
        self.divergence_file = DivergenceFile(disk, self.archive_files)
        self.followed = FollowedMaster(config, clock, self.divergence_file) if follows else None
        self.broker_set, self.limit = broker_set, ArchivableLimit(store, broker_set or self.followed)
        self._flusher, self._pins = flusher, pins

    def hot_store(self) -> LoopHotStore:
        """Create a hot store for job threads. Call on the event loop."""
        ratio = functools.partial(self.environment.disk_ratio, self.disk, self.root)
        grown = None if self.broker_set is None else self.broker_set.appended
        ask = self.environment.ask_loop()
        return LoopHotStore(self.store, self._pins, ask, self._flusher, ratio, self.limit, grown, self._journal)

    def safe_clock(self) -> SafeClock:
        """Create the clock after the log's recovery: the newest store time is a lower bound of the current time."""
        mark = ClockMark(self.root / "clock", self.disk)
        return SafeClock(self.clock, mark, self.store.end.last_time)
