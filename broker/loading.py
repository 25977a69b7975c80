"""Loading of the data directory at a start, and errors for directories that can't be used."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Protocol

from broker import rocketmqs_store
from broker.config import BrokerConfig
from broker.ha.member_file import MemberFile
from broker.store.errors import StoreError, StoreFull, StoreLocked
from broker.store.message_store import MessageStore
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager, system_topics
from infra.disk.filesystem import Disk
from infra.process.startup import EXIT_CONFIG, EXIT_DISK, EXIT_FAILED, EXIT_IN_USE, StartupError

log = logging.getLogger(__name__)

# A log file, its successor and the first queue files must fit.
_MIN_FREE_FILES = 2


class Loaded(Protocol):
    """A table, or a store of waiting messages."""

    def load(self) -> object:
        """Load the state. Raise ValueError if it is unreadable."""


def check_directory(config: BrokerConfig, disk: Disk) -> None:
    """Create the data directory if it is missing. Raise StartupError if it is another program's, or too small."""
    root = config.root
    try:
        disk.make_dirs(root / "config")
    except OSError as error:
        raise StartupError(f"storePathRootDir={root}: {error.strerror or error}", EXIT_DISK) from error
    if (foreign := rocketmqs_store.refusal(disk, root)) is not None:
        raise StartupError(foreign, EXIT_CONFIG)
    needed = _MIN_FREE_FILES * config.mapped_file_size_commit_log
    free = disk.room(root).available
    if free < needed and not disk.exists(root / "commitlog"):
        raise StartupError(
            f"{root}: {free >> 20} MiB free, {needed >> 20} MiB needed; set mappedFileSizeCommitLog smaller",
            EXIT_DISK,
        )


def recover_log(
    config: BrokerConfig, store: MessageStore, *, following: bool = False, confirmed: int | None = None
) -> None:
    """Recover the log, its queues and its end. Raise StartupError, and leave nothing locked.

    `following`: the log accepts no own records. `confirmed` is the stored confirm offset of a set's member, which
    follows until it is elected.
    """
    root = config.root
    try:
        report = store.load(following=following or confirmed is not None, confirmed=confirmed)
    except StoreLocked as error:
        raise StartupError(f"data directory {root} is in use by another broker", EXIT_IN_USE) from error
    except StoreFull as error:
        raise StartupError(f"{root}: {error}", EXIT_DISK) from error
    except (StoreError, OSError) as error:
        raise StartupError(f"{root}: {error}", EXIT_FAILED) from error
    log.info("log recovered: %s", " ".join(f"{name}={value}" for name, value in dataclasses.asdict(report).items()))


def refuse_members(config: BrokerConfig, disk: Disk) -> None:
    """Raise StartupError if a member's directory is configured as a single broker's.

    Its set may continue, and both would assign the same offsets.
    """
    path = MemberFile(disk, config.root)
    if path.is_there:
        raise StartupError(
            f"{config.root} belongs to a member of a broker set, and replication=none: its set may go on without it, "
            f"and both would assign the same offsets. To leave the set for good, take {path.directory} away",
            EXIT_CONFIG,
        )


def load_all(parts: Sequence[Loaded]) -> None:
    """Load the parts in this order. Raise StartupError if one is unreadable."""
    try:
        for part in parts:
            part.load()
    except ValueError as error:
        raise StartupError(str(error), EXIT_FAILED) from error


def add_system_tables(config: BrokerConfig, topics: TopicConfigManager, groups: SubscriptionGroupManager) -> None:
    """Create and save the rows that a stock broker has at its start, before any client asks for them."""
    topics.ensure_system(
        system_topics(
            config.broker_name,
            config.broker_cluster_name,
            auto_create=config.auto_create_topic_enable,
            queues=config.default_topic_queue_nums,
            trace=config.trace_topic_enable,
        )
    )
    topics.file.save_now()
    groups.file.save_now()
