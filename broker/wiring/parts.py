"""The phases of a broker's construction that precede its ports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from broker.archiving.pins import Pins
from broker.config import BrokerConfig
from broker.intake.replication import BrokerSetState
from broker.loading import Loaded
from broker.machine import Machine
from broker.store.config import StoreConfig
from broker.wiring.archive import ArchiveParts, make_archive
from broker.wiring.messages import MessageParts, make_messages
from broker.wiring.replication import Replicas, make_replicas
from broker.wiring.runtime import Runtime, make_runtime
from broker.wiring.service import Service, make_service
from broker.wiring.storage import Storage, make_storage
from broker.wiring.tables import BrokerTables, make_tables


@dataclass(frozen=True, kw_only=True)
class BrokerParts:
    """Finished parts of a broker, by phase. Only the composition uses this; no part does."""

    runtime: Runtime
    storage: Storage
    tables: BrokerTables
    messages: MessageParts
    archive: ArchiveParts
    service: Service
    replicas: Replicas

    @property
    def tables_of_log(self) -> tuple[Loaded, ...]:
        """The tables that a start loads, in this order, before the metadata log."""
        tables = self.tables
        return (tables.topics, tables.groups, tables.offsets, self.messages.schedule, tables.modes)


def make_parts(
    config: BrokerConfig,
    machine: Machine,
    *,
    store_config: Callable[..., StoreConfig] = StoreConfig,
    pins: Pins | None = None,
    broker_set: BrokerSetState | None = None,
) -> BrokerParts:
    """Create all parts, phase by phase. The arguments are those of `BrokerController`."""
    runtime = make_runtime(config, machine)
    storage = make_storage(runtime, store_config, broker_set)
    tables = make_tables(runtime, storage)
    messages = make_messages(runtime, storage, tables)
    archive = make_archive(runtime, storage, tables, messages, pins)
    service = make_service(runtime, storage, tables, messages, archive)
    return BrokerParts(
        runtime=runtime,
        storage=storage,
        tables=tables,
        messages=messages,
        archive=archive,
        service=service,
        replicas=make_replicas(runtime, storage, tables, messages=messages, archive=archive, service=service),
    )
