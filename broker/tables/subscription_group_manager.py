"""Consumer groups' settings: the table, its file, automatic creation."""

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from broker.tables.state_file import DataVersion, StateFile
from infra.clock import Clock
from infra.disk import Disk
from infra.threads import SYSTEM_THREADS, Threads
from neve.errors import BrokerError
from neve.remoting import names
from neve.remoting.codes import ResponseCode
from neve.remoting.headers import Int32, Int64

SYSTEM_GROUPS = (
    "TOOLS_CONSUMER", "FILTERSRV_CONSUMER", "SELF_TEST_C_GROUP", "CID_ONSAPI_OWNER",
    "CID_ONSAPI_PERMISSION", "CID_ONSAPI_PULL", "CID_ONS-HTTP-PROXY", "CID_RMQ_SYS_TRANS",
)  # fmt: skip


# Bit of RocketMQ's forbidden table that takes the right to read.
_FORBIDDEN_READ = 4


class SubscriptionGroupConfig(msgspec.Struct, rename="camel", kw_only=True):
    """One group, by RocketMQ's field names; fields that neve doesn't act on are kept as they came."""

    group_name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool = False
    retry_queue_nums: Int32 = 1
    retry_max_times: Int32 = 16
    group_retry_policy: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "CUSTOMIZED"})
    broker_id: Int64 = 0
    which_broker_when_consume_slowly: Int64 = 1
    notify_consumer_ids_changed_enable: bool = True
    group_sys_flag: Int32 = 0
    consume_timeout_minute: Int32 = 15
    subscription_data_set: list[dict[str, Any]] | None = None
    attributes: dict[str, str] = msgspec.field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        value = msgspec.to_builtins(self)
        assert isinstance(value, dict)
        return {name: item for name, item in value.items() if item is not None}


class SubscriptionGroupManager:
    """The table of consumer groups and its file (RocketMQ's SubscriptionGroupManager).

    A change holds at once and is saved by the next persist. Raises BrokerError for a group that is not there.
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        clock: Clock,
        limit: Callable[[], int] = lambda: sys.maxsize,
        *,
        auto_create: Callable[[], bool] = lambda: True,
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        """`auto_create`: whether a group that a client names is made with the defaults."""
        self._clock, self._limit, self._auto_create = clock, limit, auto_create
        self.groups: dict[str, SubscriptionGroupConfig] = {}
        # group → topics it may not read (request 353).
        self._forbidden: dict[str, set[str]] = {}
        self.data_version = DataVersion(clock.now_ms())
        self.file = StateFile(disk, path, self._snapshot, threads=threads)

    def load(self) -> None:
        value = self.file.load(
            subscriptionGroupTable=dict[str, SubscriptionGroupConfig],
            forbiddenTable=dict[str, dict[str, int]],
            dataVersion=dict[str, int],
        )
        self.groups |= value.get("subscriptionGroupTable", {})
        for name, topics in value.get("forbiddenTable", {}).items():
            self._forbidden[name] = {topic for topic, bits in topics.items() if bits}
        self.data_version.read(value.get("dataVersion", {}))
        for name in SYSTEM_GROUPS:
            if name not in self.groups:
                self.groups[name] = SubscriptionGroupConfig(group_name=name)

    def _snapshot(self) -> Mapping[str, Any]:
        return {
            "subscriptionGroupTable": dict(self.groups),
            "forbiddenTable": self._forbidden_table(),
            "dataVersion": self.data_version.to_wire(),
        }

    @property
    def room(self) -> int:
        """So many groups more may clients name."""
        return self._limit() - len(self.groups)

    def find(self, group: str) -> SubscriptionGroupConfig | None:
        """The group's settings; made with the defaults where the broker creates groups by itself."""
        found = self.groups.get(group)
        if found is None and self._auto_create() and self.room > 0 and names.group_fault(group) is None:
            found = SubscriptionGroupConfig(group_name=group)
            self.update(found)
        return found

    def require(self, group: str) -> SubscriptionGroupConfig:
        """As `find`; BrokerError where there is no such group."""
        config = self.find(group)
        if config is None:
            raise BrokerError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{group}] does not exist")
        return config

    def update(self, config: SubscriptionGroupConfig) -> None:
        self.groups[config.group_name] = config
        self._changed()

    def delete(self, group: str) -> bool:
        if self.groups.pop(group, None) is None:
            return False
        self._forbidden.pop(group, None)
        self._changed()
        return True

    def is_forbidden(self, group: str, topic: str) -> bool:
        return bool(self._forbidden) and topic in self._forbidden.get(group, ())

    def set_forbidden(self, group: str, topic: str, *, forbidden: bool) -> None:
        topics = self._forbidden.setdefault(group, set())
        if forbidden:
            topics.add(topic)
        else:
            topics.discard(topic)
        if not topics:
            del self._forbidden[group]
        self._changed()

    def forbidden(self) -> dict[str, list[str]]:
        """Group → topics that it may not read."""
        return {group: sorted(topics) for group, topics in sorted(self._forbidden.items())}

    def forbid(self, table: Mapping[str, Iterable[str]]) -> None:
        """Take a whole table, as `forbidden` gave it."""
        self._forbidden.update({group: set(topics) for group, topics in table.items()})
        self._changed()

    def _forbidden_table(self) -> dict[str, dict[str, int]]:
        return {
            group: dict.fromkeys(sorted(topics), _FORBIDDEN_READ) for group, topics in sorted(self._forbidden.items())
        }

    def to_wire(self) -> dict[str, Any]:
        return {
            "dataVersion": self.data_version.to_wire(),
            "forbiddenTable": self._forbidden_table(),
            "subscriptionGroupTable": {name: config.to_wire() for name, config in self.groups.items()},
        }

    def _changed(self) -> None:
        self.data_version.advance(self._clock.now_ms())
        self.file.touch()
