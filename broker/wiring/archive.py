"""Fifth phase: the archive's local side, and the parts that follow a master.

The pins of a slave depend on its master, so that both belong to one phase.
"""

from __future__ import annotations

from dataclasses import dataclass

from broker.archiving.deletion import PendingDeletions
from broker.archiving.local_side import LocalSide
from broker.archiving.pins import Pins, SetPins, WaitingMessages
from broker.archiving.restore import RestoredTables
from broker.clients.master_api import MasterApi
from broker.ha.plain_slave import PlainSlave
from broker.ha.settings import is_slave
from broker.membership import MasterPins, NoPins, plain_slave
from broker.metadata.slave_synchronize import SlaveSynchronize
from broker.wiring.messages import MessageParts
from broker.wiring.opened_archive import OpenedArchive
from broker.wiring.runtime import Runtime
from broker.wiring.storage import Storage
from broker.wiring.tables import BrokerTables


@dataclass(frozen=True, kw_only=True)
class ArchiveParts:
    """Parts around the archive, which the start opens, and parts that follow a master."""

    opened: OpenedArchive
    local_side: LocalSide
    #: Pins of a member of a set; None: a single broker.
    set_pins: SetPins | None
    #: Deletions of topics that a set has not confirmed; None: a single broker.
    pending_deletions: PendingDeletions | None
    #: Synchronization of tables with a master; None: this broker never has one.
    synchronize: SlaveSynchronize | None
    #: Slave of an Apache master without a controller; None: this broker is not one.
    plain_slave: PlainSlave | None

    def frontier(self) -> int:
        """Return the offset below which no member of the set needs the log; 0: a single broker."""
        return 0 if self.set_pins is None else self.set_pins.frontier()


def make_archive(
    runtime: Runtime, storage: Storage, tables: BrokerTables, messages: MessageParts, pins: Pins | None = None
) -> ArchiveParts:
    """Create the parts. `pins` replaces the pins of waiting messages, which keep segments of the log."""
    config, store, membership = runtime.config, storage.store, storage.membership
    opened = OpenedArchive()
    pins = pins or WaitingMessages(
        messages.schedule, messages.timers, messages.transactions, messages.pops, messages.metadata
    )
    set_pins: SetPins | None = None
    if membership is not None:
        pins = set_pins = SetPins(store, pins)
    synchronize = _make_synchronize(runtime, storage, messages, set_pins)
    slave: PlainSlave | None = None
    if is_slave(config):
        assert synchronize is not None
        slave = plain_slave(
            config,
            runtime.role,
            synchronize,
            store=store,
            disk=runtime.disk,
            clock=runtime.clock,
            threads=runtime.threads,
            archive=opened.get,
            forget_poll=messages.last_poll.forget,
            sync_log=storage.flusher.flush_now,
        )
        pins = MasterPins(slave, is_crowded=runtime.is_crowded) if config.store_url else NoPins()
    local_side = LocalSide(
        config,
        store,
        storage.flusher,
        RestoredTables(tables.topics, tables.groups, tables.offsets),
        pins,
        runtime.clock,
        runtime.disk,
        runtime.environment,
        broker_set=None if membership is None else membership.admission,
        follows=is_slave(config),
        journal=storage.journal,
    )
    return ArchiveParts(
        opened=opened,
        local_side=local_side,
        set_pins=set_pins,
        pending_deletions=None if membership is None else PendingDeletions(store, storage.replication),
        synchronize=synchronize,
        plain_slave=slave,
    )


def _make_synchronize(
    runtime: Runtime, storage: Storage, messages: MessageParts, set_pins: SetPins | None
) -> SlaveSynchronize | None:
    if storage.membership is None and not is_slave(runtime.config):
        return None
    store = storage.store
    return SlaveSynchronize(
        messages.metadata,
        MasterApi(runtime.config),
        confirmed=lambda: store.visibility.confirmed,
        on_frontier=_ignore_frontier if set_pins is None else set_pins.set_frontier,
        on_unreadable=messages.events.can_not_follow,
        on_stock=messages.last_poll.take,
    )


def _ignore_frontier(frontier: int) -> None:
    """Ignore the eviction frontier of a master: this broker is in no set."""
