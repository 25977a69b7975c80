"""The promises of a broker set, and their verification.

kept        each acknowledged message, and in the modes that wait for slaves each visible one, is in the log of every
            master elected afterwards. Exception: power cuts took it from each member that was trusted to have it.
            `async`: an acknowledged message is in the last master's log, or in some `diverged/`, or all its copies were
            lost in power cuts
once        no offset of a queue has two messages, among those that were acknowledged or visible copies      `sync`: an
acknowledged message is on at least minInSyncReplicas members, synced under SYNC_FLUSH one         at most one member
acknowledges in an epoch order       a queue's offsets ascend in each log, without a gap except where a master resumed
above the archive archive     contains the log's records, each offset of a queue once and without gaps; every elected
master has them all,
            because each eligible member had synced them. Exception: lost disks; but even then no archived offset is
            assigned to another message
groups      a group's offset is never beyond its queue's end, and is one that a client committed
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.ha.confirm import ReplicationMode
from tests.simulation.replicas.log import NO_QUEUE, QUEUES, Record
from tests.simulation.world import BrokenInvariant

if TYPE_CHECKING:
    from tests.simulation.replicas.broker import SimulatedBroker
    from tests.simulation.replicas.world import ReplicasWorld


class Promises:
    def __init__(self, world: ReplicasWorld) -> None:
        self.world = world
        self.acked: set[Record] = set()
        self.seen: set[Record] = set()
        self.excused: set[Record] = set()
        self._gone: set[Record] = set()  # With a disk.
        self._at: dict[tuple[int, int], Record] = {}
        self._who: dict[int, int] = {}  # epoch -> members that acknowledged in it
        self._committed: set[tuple[int, int]] = set()
        self._went: dict[Record, set[str]] = {}  # Lost in a power cut, perhaps after it was reported.
        self._raised: set[tuple[int, int]] = set()  # Queues and the offsets at which they resumed.

    @property
    def must_keep(self) -> set[Record]:
        both = self.acked | self.seen if self.world.waits else self.acked
        return both - self.excused

    def fail(self, what: str) -> None:
        raise BrokenInvariant(what)

    # ---- recording of promises

    def appended(self, record: Record) -> None:
        """Record an appended message, which is not promised yet."""

    def acknowledged(self, broker: SimulatedBroker, record: Record) -> None:
        epoch, who = broker.member.role.master_epoch, broker.member.broker_id
        if self._who.setdefault(epoch, who) != who:
            self.fail(f"one: {self._who[epoch]} and {who} acknowledge in epoch {epoch}")
        if not broker.log.has(record):
            self.fail(f"kept: {broker.host} acknowledges {record}, which it does not have")
        rules = self.world.confirm_rules
        if rules.replication is ReplicationMode.SYNC:
            copies = [
                machine.host
                for machine in self.world.machines.values()
                if machine.host in self._went.get(record, ())
                or (
                    (end := machine.disk.log.end_of(record)) is not None
                    and (broker.from_memory or end <= machine.disk.log.synced)
                )
            ]
            if len(copies) < rules.min_in_sync:
                self.fail(f"copies: {record} is acknowledged and only with {copies}")
        self.acked.add(record)
        self._once(record)
        if self.world.waits:
            self._not_archived(broker, record)
        self.world.counts["acknowledged"] += 1

    def _not_archived(self, broker: SimulatedBroker, record: Record) -> None:
        """Check that an acknowledged message does not have the place of another archived one."""
        there = next((one for one in self.world.bucket.archived if _place(one) == _place(record)), record)
        if there is not record:
            self.fail(f"archive: {broker.host} acknowledges {record}, and {there} is archived there")

    def raised(self, queue: int, offset: int) -> None:
        """Record the queues raised by a master that resumes above the archive."""
        self._raised.add((queue, offset))
        self.world.counts["queues raised"] += 1

    def shown(self, broker: SimulatedBroker, record: Record) -> None:
        self.seen.add(record)
        self.world.counts["shown"] += 1
        if self.world.waits:
            self._once(record)

    def _once(self, record: Record) -> None:
        key = record.queue, record.queue_offset
        other = self._at.setdefault(key, record)
        if other is record:
            return
        if other in self.excused or not self.world.waits:
            self._at[key] = record
            return
        if record in self.excused:
            # A power cut took it from the in-sync replicas, and a member that does not know that still exposes it.
            return
        self.fail(f"once: {key} is {other} and {record}")

    def committed(self, queue: int, offset: int) -> None:
        self._committed.add((queue, offset))

    # ---- faults

    def cut(self, broker: SimulatedBroker, gone: list[Record]) -> None:
        """Record a truncation: `diverged/` keeps the messages for `async`; otherwise a master must have them."""

    def lost(self, host: str, gone: list[Record], *, with_disk: bool = False) -> None:
        """Record records lost in a power cut or with a disk."""
        for record in gone:
            self._went.setdefault(record, set()).add(host)
        trusted = self.world.trusted() if self.world.waits else list(self.world.machines.values())
        others = [machine for machine in trusted if machine.host != host]
        for record in gone:  # Also an unpromised message: a report that covers it may be on its way.
            diverged = not self.world.waits and any(record in machine.disk.diverged for machine in others)
            if not diverged and not any(machine.disk.log.has(record) for machine in others):
                self.excused.add(record)
                if with_disk:
                    self._gone.add(record)

    # ---- verification

    def promoted(self, broker: SimulatedBroker) -> None:
        """Check a master that begins to serve. One that the register no longer names cannot acknowledge alone."""
        self._order(broker)
        value = self.world.register.value
        role = broker.member.role
        self.world.counts["promoted"] += 1
        if value is None or (value.master, value.master_epoch) != (role.master, role.master_epoch):
            return
        if self.world.waits:
            missing = [record for record in self.must_keep if not broker.log.has(record)]
            if missing:
                self.fail(f"kept: {broker.host} is master {role.pair} without {_told(missing)}")
        archived = self.world.bucket.archived
        lacking = [record for record in archived if record not in self._gone and not broker.log.has(record)]
        if lacking:
            self.fail(f"archive: {broker.host} is master {role.pair} without {_told(lacking)}, which are archived")
        for queue, offset in broker.disk.groups.items():
            if offset > len(broker.log.queues[queue]):
                end = len(broker.log.queues[queue])
                self.fail(f"groups: {broker.host} is master, queue {queue} ends at {end}, the group is at {offset}")

    def at_rest(self, master: SimulatedBroker) -> None:
        """Check after all faults are healed: nothing may be missing."""
        missing = [record for record in self.must_keep if not master.log.has(record)]
        if not self.world.waits:
            kept = {record for machine in self.world.machines.values() for record in machine.disk.diverged}
            missing = [record for record in missing if record not in kept]
        if missing:
            self.fail(f"kept: the master {master.host} lacks {_told(missing)}")
        self._order(master)
        self.archive()
        self.world.counts["archived"] += len(self.world.bucket.archived)

    def archive(self) -> None:
        """Check the archive's own order."""
        following = [0] * QUEUES
        for record in self.world.bucket.archived:
            if record.queue_offset < following[record.queue]:
                self.fail(f"archive: {record} is archived, and all below {following[record.queue]} was before")
            if record.queue_offset != following[record.queue] and not self._gone:
                self.fail(f"archive: {record} is archived, and {following[record.queue]} were to come")
            following[record.queue] = record.queue_offset + 1

    def _order(self, broker: SimulatedBroker) -> None:
        following = [0] * QUEUES
        for record in broker.log.records:
            if record.queue == NO_QUEUE:
                continue
            expected = following[record.queue]
            is_above = record.queue_offset > expected and _place(record) in self._raised
            if record.queue_offset != expected and not is_above:
                self.fail(f"order: {broker.host} has {record}, and {expected} were to come")
            following[record.queue] = record.queue_offset + 1


def _place(record: Record) -> tuple[int, int]:
    return record.queue, record.queue_offset


def _told(records: list[Record]) -> str:
    return ", ".join(str(record) for record in sorted(records, key=lambda record: record.uid)[:5]) + (
        f" and {len(records) - 5} more" if len(records) > 5 else ""
    )
