"""Settings of a broker."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from access.config import SecurityConfig
from infra.config import rocketmq_keys
from infra.config.properties import (
    DAY,
    GIB,
    HOUR,
    KIB,
    MIB,
    MINUTE,
    SECOND,
    ConfigError,
    key,
    load,
    time_ms,
)
from neve.remoting import names

# Labels of RocketMQ's metrics.
_OWN_LABELS = frozenset(
    (
        *(
            "cluster",
            "node_type",
            "node_id",
            "topic",
            "consumer_group",
            "message_type",
            "is_system",
            "is_retry",
            "language",
        ),
        *("version", "consume_mode", "processor", "protocol_type", "storage_type", "storage_medium", "request_code"),
        *("response_code", "is_long_polling", "result", "le"),
    )
)
GRACE_MAX_MS = 365 * DAY  # the longest time in ms that an expired object is kept


@dataclass
class BrokerConfig(SecurityConfig):
    """Configuration of one broker. Sizes take k, m, g; times are milliseconds or take ms, s, m, h, d."""

    rocketmq_classes: ClassVar[tuple[str, ...]] = rocketmq_keys.BROKER

    broker_name: str = key("broker-a")
    broker_cluster_name: str = key("DefaultCluster")
    broker_id: int = key(0, low=0, high=(1 << 31) - 1)
    broker_role: str = key("ASYNC_MASTER", choices=("ASYNC_MASTER", "SYNC_MASTER", "SLAVE"))
    broker_ip1: str = key("", name="brokerIP1")
    listen_port: int = key(10911, low=0, high=65535)
    bind_address: str = key("0.0.0.0")
    namesrv_addr: str = key("")
    broker_permission: int = key(6, low=0, high=7, live=True)
    auto_create_topic_enable: bool = key(True, live=True)
    auto_create_subscription_group: bool = key(True, live=True)
    default_topic_queue_nums: int = key(8, low=1, high=1024)
    trace_topic_enable: bool = key(False)
    message_delay_level: str = key("1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h")
    slave_read_enable: bool = key(False, live=True)
    long_polling_enable: bool = key(True, live=True)
    register_name_server_period: int = key(30 * SECOND, low=10 * SECOND, high=60 * SECOND, unit="time")
    flush_consumer_offset_interval: int = key(5 * SECOND, low=100, high=10 * MINUTE, unit="time")
    enable_property_filter: bool = key(True, live=True)
    enable_retry_topic_v2: bool = key(False, live=True)
    max_pop_polling_size: int = key(100_000, low=1, high=10_000_000, live=True)
    max_message_size: int = key(4 * MIB, low=1 * KIB, high=15 * MIB, unit="size", live=True)
    transaction_check_interval: int = key(30 * SECOND, low=100, high=DAY, unit="time")
    transaction_time_out: int = key(6 * SECOND, low=0, high=DAY, unit="time", live=True)
    transaction_check_max: int = key(15, low=1, high=100_000, live=True)
    reject_transaction_message: bool = key(False, live=True)
    timer_wheel_enable: bool = key(True, live=True)
    timer_max_pending: int = key(1_000_000, low=1, high=100_000_000, live=True)
    max_queues_per_topic: int = key(4096, low=1, high=65535, live=True)
    max_topics: int = key(100_000, low=1, high=10_000_000, live=True)
    max_groups: int = key(100_000, low=1, high=10_000_000, live=True)
    max_consumer_offsets: int = key(2_000_000, low=1000, high=1_000_000_000, live=True)
    max_client_bytes: int = key(256 * MIB, low=MIB, high=1024 * GIB, unit="size", live=True)
    max_queue_locks: int = key(1_000_000, low=1, high=100_000_000, live=True)
    timer_max_delay_sec: int = key(259_200, low=1, high=31_536_000, live=True)
    recall_message_enable: bool = key(True, live=True)
    store_reply_message_enable: bool = key(True, live=True)
    max_connections: int = key(10_000, low=1, high=1_000_000)
    max_unfinished_bytes: int = key(256 * MIB, low=16 * MIB, high=1024 * GIB, unit="size")
    max_held_pulls: int = key(100_000, low=1, high=10_000_000)

    replication: str = key("none", choices=("none", "async", "sync", "sync-available"))
    controller_addr: str = key("")
    ha_listen_port: int = key(0, low=0, high=65535)
    min_in_sync_replicas: int = key(1, low=1, high=64)
    in_sync_replicas: int = key(1, low=1, high=64)
    all_ack_in_sync_state_set: bool = key(False)
    apache_members: bool = key(False)
    broker_set_exists: bool = key(False)
    slave_timeout: int = key(3 * SECOND, low=100, high=60 * SECOND, unit="time")
    ha_max_time_slave_not_catchup: int = key(3 * SECOND, low=500, high=10 * MINUTE, unit="time")
    ha_transfer_batch_size: int = key(32 * KIB, low=KIB, high=MIB, unit="size")
    ha_flow_control_enable: bool = key(False)
    max_ha_transfer_byte_in_second: int = key(100 * MIB, low=KIB, high=1024 * GIB, unit="size")
    broker_heartbeat_interval: int = key(SECOND, low=100, high=60 * SECOND, unit="time")
    controller_heart_beat_timeout_mills: int = key(3 * SECOND, low=500, high=10 * MINUTE, unit="time")
    broker_election_priority: int = key(2**31 - 1, low=0, high=2**31 - 1)

    store_path_root_dir: str = key("~/store")
    mapped_file_size_commit_log: int = key(GIB, low=64 * KIB, high=GIB, unit="size")
    hot_bytes: int = key(2 * GIB, low=0, high=1 << 50, unit="size", live=True)
    flush_disk_type: str = key("ASYNC_FLUSH", choices=("ASYNC_FLUSH", "SYNC_FLUSH"))
    flush_interval_commit_log: int = key(500, low=10, high=60 * SECOND, unit="time", live=True)
    sync_flush_timeout: int = key(5 * SECOND, low=100, high=60 * SECOND, unit="time", live=True)
    file_reserved_time: int = key(72, low=1, high=1_000_000, live=True)
    delete_when: str = key("04")
    disk_max_used_space_ratio: int = key(75, low=10, high=95, live=True)
    disk_space_clean_forcibly_ratio: int = key(85, low=30, high=99, live=True)
    clean_file_forcibly_enable: bool = key(True, live=True)
    disk_space_warning_level_ratio: int = key(90, low=35, high=99, live=True)

    store_url: str = key("")
    archive_min_bytes: int = key(8 * MIB, low=1, high=GIB, unit="size", live=True)
    archive_max_age: int = key(HOUR, low=SECOND, high=30 * DAY, unit="time", live=True)
    archive_max_age_by_topic: str = key("")
    archive_upload_bytes_per_second: int = key(0, low=0, high=1024 * GIB, unit="size", live=True)
    archive_compaction_enable: bool = key(False, live=True)
    archive_compaction_bytes_per_second: int = key(16 * MIB, low=0, high=1024 * GIB, unit="size", live=True)
    archive_compaction_period: int = key(10 * MINUTE, low=SECOND, high=DAY, unit="time")
    archive_delta_topics: str = key("")
    archive_delta_period: int = key(MINUTE, low=SECOND, high=DAY, unit="time")
    archive_uploads: int = key(32, low=1, high=256)
    archive_upload_bytes: int = key(256 * MIB, low=MIB, high=64 * GIB, unit="size")
    archive_worker_priority: str = key("idle", choices=("idle", "low", "normal"), live=True)
    archive_period: int = key(10 * SECOND, low=SECOND, high=DAY, unit="time")
    tiered_storage_level: str = key("NOT_IN_DISK", choices=("DISABLE", "NOT_IN_DISK", "NOT_IN_MEM", "FORCE"), live=True)
    state_period: int = key(10 * SECOND, low=100, high=DAY, unit="time")
    journal_checkpoint_entries: int = key(256, low=2, high=1_000_000)
    archive_journal_retention: int = key(7 * DAY, low=HOUR, high=3650 * DAY, unit="time", live=True)
    cold_cache_bytes: int = key(256 * MIB, low=MIB, high=1024 * GIB, unit="size")
    cold_cache_disk_bytes: int = key(GIB, low=0, high=1 << 50, unit="size")
    # Less than the 30 s that a stock push consumer waits for its pull: it gets the error, and retries.
    cold_read_timeout: int = key(20 * SECOND, low=10, high=HOUR, unit="time", live=True)
    cold_fetch_bytes: int = key(64 * MIB, low=MIB, high=16 * GIB, unit="size")
    cold_read_priority: str = key("low", choices=("idle", "low", "normal"))
    expire_grace: int = key(DAY, low=0, high=GRACE_MAX_MS, unit="time")
    archive_replaced_grace: int = key(HOUR, low=0, high=GRACE_MAX_MS, unit="time")
    default_ttl_hours: int = key(-1, low=-1, high=1_000_000_000)

    admin_port: int = key(10913, low=-1, high=65535)
    metrics_max_series: int = key(1_000, low=0, high=100_000, live=True)
    metrics_exporter_type: str = key("DISABLE", choices=("DISABLE", "OTLP_GRPC", "PROM", "LOG"))
    metrics_prom_exporter_host: str = key("")
    metrics_prom_exporter_port: int = key(5557, low=0, high=65535)
    metrics_label: str = key("")
    log_level: str = key("INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"), live=True)

    @property
    def root(self) -> Path:
        return Path(self.store_path_root_dir).expanduser()

    @property
    def ha_port(self) -> int:
        """Return the port for slaves: `haListenPort`, or the one above `listenPort`; 0: any free port."""
        return self.ha_listen_port or (self.listen_port + 1 if self.listen_port else 0)

    @property
    def name_servers(self) -> list[str]:
        return [part.strip() for part in re.split(r"[;,]", self.namesrv_addr) if part.strip()]

    @property
    def delete_hours(self) -> frozenset[int]:
        """Return the hours of the day in `deleteWhen`: `04`, or several with `;`. Raise ConfigError."""
        hours = [part.strip() for part in self.delete_when.split(";") if part.strip()]
        if not all(hour.isdecimal() and int(hour) < 24 for hour in hours):
            raise ConfigError(
                f"deleteWhen: {self.delete_when!r} is not an hour of the day (00 to 23; separate several with ;)"
            )
        return frozenset(map(int, hours))

    @property
    def archive_max_ages(self) -> list[tuple[str, int]]:
        """Return (topic, or a prefix and `*`; ms) of `archiveMaxAgeByTopic`: `a=10m;b*=1d`. Raise ConfigError."""
        found = []
        for part in filter(None, (part.strip() for part in self.archive_max_age_by_topic.split(";"))):
            topic, _, age = (word.strip() for word in part.partition("="))
            if fault := _topic_pattern_fault(topic):
                raise ConfigError(f"archiveMaxAgeByTopic: {part!r} is not TOPIC=TIME: {fault}; separate them with ;")
            try:
                found.append((topic, time_ms(age, SECOND, 30 * DAY)))
            except ValueError as error:
                raise ConfigError(f"archiveMaxAgeByTopic: {part!r}: {error}; separate several with ;") from error
        return found

    @property
    def delta_topics(self) -> tuple[str, ...]:
        """Return topics, or prefixes and `*`, of `archiveDeltaTopics`: `a;b*`. Raise ConfigError."""
        found = tuple(filter(None, (part.strip() for part in self.archive_delta_topics.split(";"))))
        for pattern in found:
            if fault := _topic_pattern_fault(pattern):
                raise ConfigError(f"archiveDeltaTopics: {pattern!r} is not a topic: {fault}; separate topics with ;")
        return found

    @property
    def metrics_labels(self) -> dict[str, str]:
        """Return the labels of `metricsLabel` for RocketMQ's metrics: `name:value,name:value`. Raise ConfigError."""
        found = {}
        for part in filter(None, (part.strip() for part in self.metrics_label.split(","))):
            name, _, value = (word.strip() for word in part.partition(":"))
            if not re.fullmatch(r"[a-zA-Z_]\w*", name, re.ASCII) or not value or ":" in value:
                raise ConfigError(f"metricsLabel: {part!r} is not NAME:VALUE")
            if name in _OWN_LABELS:
                raise ConfigError(f"metricsLabel: {name} is a label of the metrics themselves")
            found[name] = value
        return found

    @property
    def sync_flush(self) -> bool:
        return self.flush_disk_type == "SYNC_FLUSH"

    @classmethod
    def load(cls, path: Path | None = None, overrides: Iterable[str] = ()) -> Self:
        return load(cls, path, overrides)


def _topic_pattern_fault(pattern: str) -> str | None:
    """Return why no topic can match the name, or the prefix with a final `*`; None: one can."""
    return None if pattern == "*" else names.topic_fault(pattern.removesuffix("*"))
