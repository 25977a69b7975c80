"""Settings of consumer groups: the table, its file, and automatic creation."""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from broker.tables.changes import Change, GroupDeleted, GroupForbidden, GroupPut, row_of
from broker.tables.journal import NO_JOURNAL, Journal
from broker.tables.state_file import StateFile, SyncLog, TableVersion
from infra.clock import Clock
from infra.disk.filesystem import Disk
from infra.loop.parts import Parts, run_here
from infra.loop.threads import SYSTEM_THREADS, Threads
from neve.errors import BrokerError
from neve.remoting import names
from neve.remoting.codes import ResponseCode
from neve.remoting.headers import Int32, Int64

log = logging.getLogger(__name__)

# Bit of RocketMQ's forbidden table that revokes the right to read.
_FORBIDDEN_READ = 4


class SubscriptionGroupConfig(msgspec.Struct, rename="camel", kw_only=True):
    """Settings of one group, by RocketMQ's field names; fields that neve does not use are preserved."""

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


class GroupsImage(msgspec.Struct, frozen=True, kw_only=True):
    """Copy of the whole table; `forbidden` maps groups to the topics that they may not read."""

    groups: dict[str, SubscriptionGroupConfig]
    forbidden: dict[str, list[str]]
    version: dict[str, int]


class SubscriptionGroupManager:
    """Table of consumer groups and its file (RocketMQ's SubscriptionGroupManager).

    A change is in the metadata log before it is in the table. It applies immediately and is saved periodically. Raises
    BrokerError for a missing group, or if the log refuses the record. Nothing has changed then.
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
        journal: Journal = NO_JOURNAL,
        sync_log: SyncLog | None = None,
    ) -> None:
        """Create the table; `auto_create` returns whether unknown groups are created with default settings."""
        self._clock, self._limit, self._auto_create, self._journal = clock, limit, auto_create, journal
        self.groups: dict[str, SubscriptionGroupConfig] = {}
        # Group → topics that it may not read (request 353).
        self._forbidden: dict[str, set[str]] = {}
        self.data_version = TableVersion(clock.now_ms())
        self.file = StateFile(disk, path, self._snapshot, sync_log=sync_log, threads=threads, journal=journal)

    def load(self) -> None:
        """Load the file at a start."""
        run_here(self.load_parts())
        self.file.resume()

    def load_parts(self) -> Parts[None]:
        """Run `load` in parts when a master becomes a slave; the file stays suspended.

        The dictionary `groups` is refilled and not replaced, because other objects reference it.
        """
        value = yield from self.file.load_parts(
            subscriptionGroupTable=dict[str, SubscriptionGroupConfig],
            forbiddenTable=dict[str, dict[str, int]],
            dataVersion=dict[str, int],
        )
        self.groups.clear()
        self._forbidden.clear()
        self.groups |= value.get("subscriptionGroupTable", {})
        for name, topics in value.get("forbiddenTable", {}).items():
            self._forbidden[name] = {topic for topic, bits in topics.items() if bits}
        self.data_version.read(value.get("dataVersion", {}))
        for name in names.SYSTEM_GROUPS:
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
        """Number of groups that clients may still create."""
        return self._limit() - len(self.groups)

    def find(self, group: str) -> SubscriptionGroupConfig | None:
        """Return a group's settings; create the group with default settings if automatic creation is enabled.

        If the log refuses the record, the settings are returned but not stored: clients may read from a broker with a
        full disk, or from a slave.
        """
        found = self.groups.get(group)
        if found is None and self._auto_create() and self.room > 0 and names.group_fault(group) is None:
            found = SubscriptionGroupConfig(group_name=group)
            try:
                self.update(found)
            except BrokerError as error:
                log.debug("the group %s is not saved: %s", group, error.remark)
        return found

    def require(self, group: str) -> SubscriptionGroupConfig:
        """Return a group's settings as `find` does. Raises BrokerError if there is no such group."""
        config = self.find(group)
        if config is None:
            raise BrokerError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{group}] does not exist")
        return config

    def update(self, config: SubscriptionGroupConfig) -> None:
        """Log and store a group's settings. Raises BrokerError if the log refuses the record."""
        self._record(GroupPut(config=config.to_wire(), version=self._next_version()))

    def deletion(self, group: str, *, with_offsets: bool) -> GroupDeleted:
        """Return the change that deletes a group. The caller logs it and applies it to all tables."""
        return GroupDeleted(group=group, with_offsets=with_offsets, version=self._next_version())

    def put_back(self, config: SubscriptionGroupConfig) -> None:
        """Store a group's settings without logging a change, as a restore does."""
        self.groups[config.group_name] = config
        self._put_back()

    def _next_version(self) -> dict[str, int]:
        return self.data_version.after(self._clock.now_ms())

    def _record(self, change: Change) -> None:
        self._journal.record(change)
        self.apply(change)

    def apply(self, change: Change) -> None:
        """Apply a change that is in the log. Raises UnreadableChange."""
        match change:
            case GroupPut():
                config = row_of(change.config, SubscriptionGroupConfig)
                self.groups[config.group_name] = config
            case GroupDeleted():
                self.groups.pop(change.group, None)
                self._forbidden.pop(change.group, None)
            case GroupForbidden():
                self._forbid(change.group, change.topic, forbidden=change.forbidden)
            case _:
                return
        self._changed(change.version)

    def image(self) -> GroupsImage:
        """Return a copy of the whole table, in the form that `install` accepts."""
        return GroupsImage(groups=dict(self.groups), forbidden=self.forbidden(), version=self.data_version.to_wire())

    def install(self, image: GroupsImage) -> None:
        """Replace the table by that of another broker."""
        self.groups.clear()  # other parts reference the dictionary itself
        self.groups.update(image.groups)
        self._forbidden = {group: set(topics) for group, topics in image.forbidden.items()}
        self._changed(image.version)

    def is_forbidden(self, group: str, topic: str) -> bool:
        return bool(self._forbidden) and topic in self._forbidden.get(group, ())

    def set_forbidden(self, group: str, topic: str, *, forbidden: bool) -> None:
        self._record(GroupForbidden(group=group, topic=topic, forbidden=forbidden, version=self._next_version()))

    def _forbid(self, group: str, topic: str, *, forbidden: bool) -> None:
        topics = self._forbidden.setdefault(group, set())
        if forbidden:
            topics.add(topic)
        else:
            topics.discard(topic)
        if not topics:
            del self._forbidden[group]

    def forbidden(self) -> dict[str, list[str]]:
        """Return the forbidden topics of each group."""
        return {group: sorted(topics) for group, topics in sorted(self._forbidden.items())}

    def forbid(self, table: Mapping[str, Iterable[str]]) -> None:
        """Add a whole table, as returned by `forbidden`, without logging a change."""
        self._forbidden.update({group: set(topics) for group, topics in table.items()})
        self._put_back()

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

    def _changed(self, version: Mapping[str, int]) -> None:
        self.data_version.read(version)
        self.file.touch_logged()

    def _put_back(self) -> None:
        self.data_version.read(self._next_version())
        self.file.touch()
