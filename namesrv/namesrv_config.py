"""The configuration of a name server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from access.config import SecurityConfig
from infra.config import rocketmq_keys
from infra.config.properties import GIB, MIB, SECOND, key


@dataclass
class NamesrvConfig(SecurityConfig):
    """The keys, with RocketMQ's names."""

    rocketmq_classes: ClassVar[tuple[str, ...]] = rocketmq_keys.NAMESRV

    listen_port: int = key(9876, low=0, high=65535)
    bind_address: str = key("0.0.0.0")
    kv_config_path: str = key("~/namesrv/kvConfig.json")
    scan_not_active_broker_interval: int = key(10 * SECOND, low=100, high=600 * SECOND, unit="time")
    order_message_enable: bool = key(False, live=True)
    return_order_topic_config_to_broker: bool = key(True, live=True)
    delete_topic_with_broker_registration: bool = key(False, live=True)
    enable_all_topic_list: bool = key(True, live=True)
    cluster_name: str = key("DefaultCluster")  # the name of this cluster in policies (`Cluster:name`)
    max_topics_per_broker: int = key(50_000, low=1, high=1_000_000, live=True)
    max_brokers: int = key(10_000, low=1, high=1_000_000, live=True)
    max_topic_routes: int = key(1_000_000, low=1, high=100_000_000, live=True)
    max_connections: int = key(10_000, low=1, high=1_000_000)
    max_unfinished_bytes: int = key(256 * MIB, low=16 * MIB, high=1024 * GIB, unit="size")
    admin_port: int = key(-1, low=-1, high=65535)
    log_level: str = key("INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"), live=True)

    @property
    def kv_path(self) -> Path:
        return Path(self.kv_config_path).expanduser()
