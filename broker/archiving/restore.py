"""State of a broker in its bucket: its capture, and the restore of a broker from it (`--restore-from URL`).

The state is captured on the event loop in slices, with other requests in between. A concurrent change of a topic is
included or not, as if the capture had been a moment later or earlier. A restore uses the highest offset of each queue
that any part contains. Topics are captured after their offsets, so that the state has no offset of an unknown topic.

A restore fills an empty data directory from the bucket alone.

    <root>/restore.json   {version, store, broker, plan}: a restore is in progress; its last step removes the file

Steps: marker → EPOCH under the new log's id (fences the old broker) → close the old broker's open intents → plan,
stored in the marker → log, queues, tables → GAPs → remove the marker. Each step is idempotent, so the same command
resumes an interrupted restore. No message is downloaded: archived messages are readable cold immediately.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

import msgspec

from broker.archiving.environment import LoopCaller
from broker.archiving.pins import Pins
from broker.config import BrokerConfig
from broker.store.data_directory import clear_store
from broker.store.errors import StoreError
from broker.store.message_store import MessageStore
from broker.tables import topic_config_manager
from broker.tables.consumer_offset_manager import SEPARATOR, ConsumerOffsetManager
from broker.tables.subscription_group_manager import SubscriptionGroupConfig, SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfig, TopicConfigManager
from infra import failpoint
from infra.clock import Clock
from infra.config.properties import ConfigError
from infra.disk.filesystem import Disk, DiskLocked
from infra.disk.versioned_file import VersionedFile
from infra.loop.in_steps import at_once
from infra.objects.open import open_store
from infra.objects.store import BadStoreUrl, ObjectStoreError
from infra.process import collector
from infra.process.startup import EXIT_ARCHIVE, EXIT_DISK, EXIT_IN_USE, StartupError
from neve.archive.catalog.journal_reader import catalogs
from neve.archive.format.broker_state import BrokerState
from neve.archive.format.journal import MalformedEntry, NewerFormat
from neve.remoting import names
from neve.remoting.names import METADATA_LOG, SYSTEM_GROUPS
from tiered.journal.restore_plan import RestorePlan, gaps_of, plan_restore, read_basis
from tiered.journal.writer import JournalWriter

log = logging.getLogger(__name__)
_NAME = "restore.json"


# Topics, or committed offsets of a topic and group, per slice: less than a millisecond.
_SLICE = 200


class RestoredTables(NamedTuple):
    """Tables that the bucket stores and a restore recovers."""

    topics: TopicConfigManager
    groups: SubscriptionGroupManager
    offsets: ConsumerOffsetManager


class StateCapture:
    """Captures the state of one broker."""

    def __init__(self, broker: str, store: MessageStore, tables: RestoredTables, pins: Pins) -> None:
        self._broker, self._store, self._tables, self._pins = broker, store, tables, pins

    def at_once(self) -> BrokerState:
        """Capture the state without yielding: at a start and at a stop."""
        return at_once(self.in_slices())

    def from_thread(self, ask: LoopCaller) -> BrokerState:
        """Capture the state from a job's thread while the broker serves requests."""
        capture = self.in_slices()
        while (state := ask.call(lambda: next_slice(capture))) is None:
            pass
        return state

    def in_slices(self) -> Generator[None, None, BrokerState]:
        """Capture the state; each step is atomic, and the broker may serve requests between two steps."""
        store, tables = self._store, self._tables
        offsets: dict[str, dict[int, int]] = {}
        for number, (topic, group) in enumerate(tables.offsets.pairs()):
            if positions := tables.offsets.queues_of(group, topic):
                offsets[topic + SEPARATOR + group] = positions
            if number % _SLICE == _SLICE - 1:
                if number < _SLICE:
                    collector.freeze_new()  # the capture grows to one row for each topic and group
                yield
        queues: dict[str, dict[int, int]] = {}
        following = store.queues.following_topics()
        yield
        for number, topic in enumerate(following):
            if topic != METADATA_LOG:  # a restored log begins with the tables as they are restored
                queues[topic] = store.queues.following_of(topic)
            if number % _SLICE == _SLICE - 1:
                yield
        topics = []
        for number, topic in enumerate(list(tables.topics.topics)):
            if (config := tables.topics.select(topic)) is not None:
                topics.append(config.to_wire())
            if number % _SLICE == _SLICE - 1:
                yield
        return BrokerState(
            broker=self._broker,
            log_uuid=store.log_uuid,
            log_end=store.max_physical_offset,
            topics=topics,
            groups=[config.to_wire() for config in tables.groups.groups.values() if not is_stock(config)],
            forbidden=tables.groups.forbidden(),
            offsets=offsets,
            queues=queues,
            pending=self._pins.counts(),
        )


def next_slice(capture: Generator[None, None, BrokerState]) -> BrokerState | None:
    """Run one slice; return the state after the last one, None after the others."""
    try:
        next(capture)
    except StopIteration as end:
        assert isinstance(end.value, BrokerState)
        return end.value
    return None


def is_stock(config: SubscriptionGroupConfig) -> bool:
    """Return whether a group is one that every broker creates itself, with unchanged settings."""
    name = config.group_name
    return name in SYSTEM_GROUPS and config == SubscriptionGroupConfig(group_name=name)


class RestoreMarker(msgspec.Struct):
    """Content of `restore.json`: the store and broker of a restore in progress, and its plan once it is made."""

    store: str
    broker: str
    plan: RestorePlan | None = None
    version: int = 1


class _Topics(msgspec.Struct):
    """The part of `config/topics.json` that a restore reads."""

    topics: dict[str, Any] = msgspec.field(default_factory=dict, name="topicConfigTable")


class Restore:
    """Restore of a broker from its bucket, from the marker to its removal. Errors are raised as StartupError.

    Invariant: while the marker exists, no request was served, so each step can be repeated.
    """

    def __init__(self, config: BrokerConfig, disk: Disk) -> None:
        self._config, self._disk = config, disk
        self._file = _marker_file(config, disk)
        self._marker = RestoreMarker(config.store_url, config.broker_name)

    # ---- the steps, in order

    def begin(self) -> None:
        """Check the directory before anything in it is opened. Raises StartupError if it is not empty."""
        found = read_marker(self._config, self._disk)
        if found is not None:
            self._marker = found
            self._begin_again()
        else:
            refuse_occupied(self._config, self._disk)

    def _begin_again(self) -> None:
        """Clear the partial store of an interrupted restore; no message was accepted while the marker existed."""
        root = self._config.root
        try:
            release = self._disk.lock(root / "lock")
        except DiskLocked as error:
            raise StartupError(f"data directory {root} is in use by another broker", EXIT_IN_USE) from error
        try:
            clear_store(root, self._disk)
        finally:
            release()
        log.warning("resuming the restore from %s", root)

    def claim(self) -> None:
        """Write the marker right before the archive is taken over."""
        self._write()
        failpoint.hit("restore.after_claim")

    @property
    def takes_over(self) -> bool:
        """Whether the restore takes the archive over from its owner.

        False once a plan was made: the archive was this directory's then, and a later owner keeps it.
        """
        return self._marker.plan is None

    def plan(self, journal: JournalWriter) -> RestorePlan:
        """Return the plan, made after the EPOCH: from then on the fenced broker can't change the archive."""
        failpoint.hit("restore.after_epoch")
        if self._marker.plan is None:
            config = self._config
            basis = read_basis(journal.store, journal.broker, journal.prefix)
            self._marker.plan = plan_restore(
                journal.catalog,
                basis,
                config.broker_name,
                segment=config.mapped_file_size_commit_log,
                archived=_archived(config),
            )
            self._write()
        failpoint.hit("restore.after_plan")
        return self._marker.plan

    def apply(self, store: MessageStore, tables: RestoredTables, plan: RestorePlan) -> None:
        """Restore log, queues and tables; on the event loop, before requests are served."""
        store.end.reach_time(plan.newest_ms)
        try:
            if store.max_physical_offset < plan.log_start:
                store.restart_log_at(plan.log_start)
            failpoint.hit("restore.after_log")
            store.queue_changes.restore_queues(plan.queues, plan.ended)
            failpoint.hit("restore.after_queues")
            for topic in plan.topics:
                tables.topics.put_back(msgspec.convert(topic, TopicConfig))
            for group in plan.groups:
                tables.groups.put_back(msgspec.convert(group, SubscriptionGroupConfig))
            tables.groups.forbid(plan.forbidden)
            tables.offsets.restore(plan.offsets)
            for file in (tables.topics.file, tables.groups.file, tables.offsets.file):
                file.save_now()
        except (StoreError, OSError) as error:
            raise StartupError(
                f"{self._config.root}: the restore stopped: {error}; it can be resumed", EXIT_DISK
            ) from error
        failpoint.hit("restore.after_tables")

    @property
    def report(self) -> dict[str, Any]:
        return self._marker.plan.report if self._marker.plan is not None else {}

    def record_gaps(self, journal: JournalWriter, plan: RestorePlan) -> None:
        """Record offsets that were assigned but not archived as GAPs in the journal."""
        archived = _archived(self._config)
        queues = {topic: ends for topic, ends in plan.queues.items() if archived(topic)}
        for gap in gaps_of(journal.catalog, queues):
            journal.append(gap)
        failpoint.hit("restore.after_gaps")

    def end(self) -> None:
        """Remove the marker and log the report."""
        assert self._marker.plan is not None
        self._file.remove()
        log.warning("restored: store=%s %s", self._config.store_url, _fields(self.report))

    def _write(self) -> None:
        self._file.write(self._marker)


def with_store(config: BrokerConfig, url: str) -> None:
    """Set `storeUrl` to the restored archive. Raises ConfigError if another one is configured."""
    if config.store_url not in {"", url}:
        raise ConfigError(
            f"storeUrl is {config.store_url}, not {url}: a restored broker continues in the archive of its restore"
        )
    config.store_url = url


def refuse_unfinished(config: BrokerConfig, disk: Disk) -> None:
    """Raise StartupError if a start without `--restore-from` finds an unfinished restore."""
    marker = read_marker(config, disk)
    if marker is not None:
        raise StartupError(
            f"{config.root}: a restore has not finished here; start again with --restore-from '{marker.store}'",
            EXIT_ARCHIVE,
        )


def _marker_file(config: BrokerConfig, disk: Disk) -> VersionedFile[RestoreMarker]:
    return VersionedFile(disk, config.root / _NAME, RestoreMarker, partial(StartupError, exit_code=EXIT_ARCHIVE))


def read_marker(config: BrokerConfig, disk: Disk) -> RestoreMarker | None:
    """Return the marker of an unfinished restore, None without one.

    Raises StartupError if the configuration names another store or broker.
    """
    marker = _marker_file(config, disk).read()
    if marker is None:
        return None
    if config.store_url and (marker.store, marker.broker) != (config.store_url, config.broker_name):
        raise StartupError(
            f"{config.root}: a restore of broker {marker.broker} from {marker.store} has not ended here; "
            "go on with that, or take another directory",
            EXIT_ARCHIVE,
        )
    return marker


def refuse_occupied(config: BrokerConfig, disk: Disk, option: str = "--restore-from") -> None:
    """Raise StartupError unless the directory is empty.

    Files of a refused start are accepted: without messages, committed offsets or user topics.
    """
    root, found = config.root, ""
    for name in ("commitlog", "consumequeue"):
        entries = disk.list_dir(root / name) if disk.exists(root / name) else []
        found = found or (f"{name}/{entries[0]}" if entries else "")
    for name in ("archive/identity.msgpack", "config/consumerOffset.json", "config/delayOffset.json"):
        found = found or (name if disk.exists(root / name) else "")
    topics = [] if found else _users_topics(config, disk)
    if found or topics:
        raise StartupError(
            f"{root} is not empty ({found or f'topic {topics[0]}'}): {option} fills an empty data directory; "
            "start without it to go on with this one",
            EXIT_ARCHIVE,
        )


def _users_topics(config: BrokerConfig, disk: Disk) -> list[str]:
    path = config.root / "config" / "topics.json"
    if not disk.exists(path):
        return []
    try:
        table = msgspec.json.decode(disk.read(path), type=_Topics).topics
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} can't be read: {error}", EXIT_ARCHIVE) from error
    return [name for name in table if _archived(config)(name)]


def _archived(config: BrokerConfig) -> Callable[[str], bool]:
    made = topic_config_manager.system_topics(
        config.broker_name, config.broker_cluster_name, auto_create=True, queues=1, trace=True
    )
    own = {topic.topic_name for topic in made}
    return lambda topic: topic not in own and not names.is_system_topic(topic)


# ---- dry run


def dry_run(config: BrokerConfig, disk: Disk, clock: Clock) -> dict[str, Any]:
    """Report what a restore would recover and what is lost. Reads the bucket and writes nothing."""
    refuse_occupied(config, disk)
    try:
        store = open_store(config.store_url)
        catalog = catalogs(store, config.broker_name, whole=True)[config.broker_name]
        basis = read_basis(store, config.broker_name)
    except FileNotFoundError as error:
        raise StartupError(f"archive {config.store_url}: {error}", EXIT_ARCHIVE) from error
    except (BadStoreUrl, ObjectStoreError, NewerFormat, MalformedEntry) as error:
        raise StartupError(f"archive {config.store_url}: {error}", EXIT_ARCHIVE) from error
    plan = plan_restore(
        catalog,
        basis,
        config.broker_name,
        segment=config.mapped_file_size_commit_log,
        archived=_archived(config),
    )
    return {
        "dry_run": True,
        "broker": config.broker_name,
        "store": config.store_url,
        **plan.report,
        "state": _readable(plan.report["state"], clock),
        "open_names": sum(map(len, catalog.rounds.open_intents().values())),
        "log_start": plan.log_start,
    }


def _readable(state: Mapping[str, Any] | None, clock: Clock) -> dict[str, Any] | None:
    if state is None:
        return None
    written = int(state["time_ms"])
    age = max(clock.now_ms() - written, 0) // 1000
    return {
        "written": datetime.fromtimestamp(written / 1000, UTC).isoformat(timespec="seconds"),
        "age_seconds": age,
        "clean_stop": state["clean_stop"],
    }


def _fields(report: Mapping[str, Any], prefix: str = "") -> str:
    """Format the numbers and texts of a report as key=value, those of an inner report as outer.key=value."""
    inner = (
        _fields(value, f"{prefix}{name}.") if isinstance(value, Mapping) else f"{prefix}{name}={value}"
        for name, value in report.items()
    )
    return " ".join(filter(None, inner))
