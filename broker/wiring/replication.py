"""Seventh phase: the membership in a broker set, and the registration at the name servers, which depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from broker.change_of_role import ChangeOfRole
from broker.clients.registration import Registration
from broker.ha.replicas_manager import ReplicasManager
from broker.wiring.archive import ArchiveParts
from broker.wiring.messages import MessageParts
from broker.wiring.runtime import Runtime
from broker.wiring.service import Service
from broker.wiring.storage import Storage
from broker.wiring.tables import BrokerTables


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Membership in a broker set."""

    #: Switches the role-dependent state; None: a single broker.
    change_of_role: ChangeOfRole | None
    #: Driver of the membership; None: a single broker.
    manager: ReplicasManager | None
    registration: Registration

    def leads_in(self) -> int | None:
        """Return the epoch in which this broker is the master of its set; None: it is not."""
        return None if self.manager is None else self.manager.term.leads_in


def make_replicas(
    runtime: Runtime,
    storage: Storage,
    tables: BrokerTables,
    *,
    messages: MessageParts,
    archive: ArchiveParts,
    service: Service,
) -> Replicas:
    """Create the membership. It receives the events of the tables from now on."""
    change_of_role = _make_change_of_role(runtime, storage, tables, messages=messages, archive=archive, service=service)
    manager: ReplicasManager | None = None
    membership, transfer, supervisor = storage.membership, storage.group_transfer, runtime.supervisor
    if change_of_role is not None:
        assert membership is not None and transfer is not None
        manager = membership.manager(
            runtime.role,
            change_of_role,
            archive.opened.get,
            on_confirmed=transfer.confirmed,
            stop_acknowledging=storage.answers.stop,
            spawn=supervisor.spawn,
            keep=supervisor.keep,
            sync_log=storage.flusher.flush_now,
        )
        messages.events.subscribe(manager)
    return Replicas(
        change_of_role=change_of_role,
        manager=manager,
        registration=Registration(service.name_servers, tables.topics, service.registration_requested, manager),
    )


def _make_change_of_role(
    runtime: Runtime,
    storage: Storage,
    tables: BrokerTables,
    *,
    messages: MessageParts,
    archive: ArchiveParts,
    service: Service,
) -> ChangeOfRole | None:
    membership = storage.membership
    if membership is None:
        return None
    assert archive.synchronize is not None and archive.pending_deletions is not None
    state = (tables.topics, tables.groups, tables.offsets, tables.modes, messages.schedule, messages.pops)
    return ChangeOfRole(
        storage.store,
        membership.admission,
        journal=storage.journal,
        metadata=messages.metadata,
        synchronize=archive.synchronize,
        topics=tables.topics,
        pops=messages.pops,
        timers=messages.timers,
        transactions=messages.transactions,
        pending_deletions=archive.pending_deletions,
        register_soon=service.registration_requested.set,
        files=[table.file for table in state],
        resume_log=archive.opened.resume_log,
        threads=runtime.threads,
    )
