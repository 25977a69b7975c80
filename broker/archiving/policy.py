"""Lifecycle policy by configuration and topics: what is archived, and how long local data is kept."""

from __future__ import annotations

import math

from broker.config import BrokerConfig
from broker.pop.pop_book import revive_log
from broker.store.message_store import MessageStore
from broker.tables.topic_config_manager import TopicConfigManager
from lifecycle.retention import Policy
from neve.remoting import names


class ConfiguredPolicy:
    """Creates the current policy at each call, because some settings change at runtime and topics come and go."""

    def __init__(self, config: BrokerConfig, topics: TopicConfigManager, store: MessageStore) -> None:
        self._config, self._topics, self._store = config, topics, store
        # Parsed here so that an invalid value fails the start.
        self._delete_hours, self._max_ages = config.delete_hours, config.archive_max_ages
        self._delta_topics = config.delta_topics

    def __call__(self) -> Policy:
        config, topics = self._config, self._topics
        archiving = bool(config.store_url)
        crowded = config.disk_max_used_space_ratio / 100
        forced = config.disk_space_clean_forcibly_ratio / 100 if config.clean_file_forcibly_enable else math.inf
        internal = {*names.PINNED_TOPICS, names.METADATA_LOG, revive_log(config.broker_cluster_name)}
        return Policy(
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
            gone_below=self._store.gone_below,
            exists=lambda topic: topics.select(topic) is not None,
            ttl_hours=self._ttl_hours,
        )

    def max_age_of(self, topic: str) -> int | None:
        """Return the age in ms by the first matching pattern of `archiveMaxAgeByTopic`, None without a match."""
        fits = (
            age for said, age in self._max_ages if topic == said or (said.endswith("*") and topic.startswith(said[:-1]))
        )
        return next(fits, None)

    def _ttl_hours(self, topic: str) -> int | None:
        found = self._topics.select(topic)
        if found is None:
            return None  # its TTL is unknown, so its messages are kept
        hours = int(found.attributes.get(names.RESERVE_TIME, -1))
        hours = self._config.default_ttl_hours if hours == -1 else hours
        return None if hours <= 0 else hours
