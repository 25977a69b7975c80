"""Second phase: the log, its flusher and its replication."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from broker.ha.settings import is_slave, settings_of
from broker.intake.acknowledgement import Acknowledgement
from broker.intake.flusher import Flusher
from broker.intake.log_sync import LogSync
from broker.intake.log_writer import LogWriter
from broker.intake.replication import STANDS_ALONE, BrokerSetState, GroupTransfer, Replication
from broker.membership import SetMembership
from broker.metadata.metadata_journal import MetadataJournal
from broker.store.config import StoreConfig
from broker.store.message_store import MessageStore
from broker.waiting.timer_message import CODED_TOPICS, code_of_entry
from broker.wiring.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The log and the parts that write, sync and replicate it."""

    store: MessageStore
    #: Membership in a set; None: a single broker.
    membership: SetMembership | None
    #: Queue of answers that wait for the set; None: a single broker.
    group_transfer: GroupTransfer | None
    replication: Replication
    writer: LogWriter
    journal: MetadataJournal
    flusher: Flusher
    answers: Acknowledgement
    sync: LogSync

    def log_end(self) -> int:
        """Return the physical offset at which the log ends."""
        return self.store.max_physical_offset


def make_storage(
    runtime: Runtime, store_config: Callable[..., StoreConfig], broker_set: BrokerSetState | None = None
) -> Storage:
    """Create the log and the parts around it.

    `store_config` creates the store's settings. `broker_set` replaces the set of the configuration.
    """
    config, clock = runtime.config, runtime.clock
    store = _make_store(runtime, store_config)
    membership = _make_membership(runtime, store)
    if membership is not None:
        broker_set = membership.admission
    transfer = None
    if broker_set is not None:
        transfer = GroupTransfer(broker_set, clock, runtime.faults, slave_timeout=config.slave_timeout / 1000)
    replication: Replication = STANDS_ALONE if transfer is None else transfer
    writer = LogWriter(store, replication)
    flusher = Flusher(
        store,
        clock,
        interval_ms=lambda: config.flush_interval_commit_log,
        on_failure=runtime.life.sync_failed,
        faults=runtime.faults,
        threads=runtime.threads,
        then=None if transfer is None else transfer.wait,
    )
    return Storage(
        store=store,
        membership=membership,
        group_transfer=transfer,
        replication=replication,
        writer=writer,
        journal=MetadataJournal(store, writer, clock),
        flusher=flusher,
        answers=Acknowledgement(config, clock, flusher, replication),
        sync=LogSync(store, flusher, STANDS_ALONE if membership is None else replication, runtime.threads),
    )


def _make_store(runtime: Runtime, store_config: Callable[..., StoreConfig]) -> MessageStore:
    config = runtime.config
    return MessageStore(
        store_config(
            config.root,
            commit_log_file_size=config.mapped_file_size_commit_log,
            flush_disk_type=config.flush_disk_type,
            store_host=runtime.address,
            mapped_queue_files=runtime.descriptors.queue_files,
            code_of=code_of_entry,
            coded_topics=CODED_TOPICS,
            queues_may_restart_at_zero=is_slave(config),
        ),
        runtime.disk,
        runtime.clock,
        runtime.threads.lock,
    )


def _make_membership(runtime: Runtime, store: MessageStore) -> SetMembership | None:
    settings = settings_of(runtime.config)
    if settings is None:
        return None
    return SetMembership(
        settings,
        runtime.config,
        runtime.address,
        ha_port=runtime.ha_port,
        store=store,
        disk=runtime.disk,
        clock=runtime.clock,
        threads=runtime.threads,
    )
