"""Random histories of a broker set's archive: failovers in any step of a round, kills, power cuts, outages, scrapes.

At the end each confirmed message is archived once and unchanged, and no offset was assigned to two messages.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from infra import failpoint
from infra.failpoint import FailpointError
from infra.objects.store import StoreUnavailable
from tests.unit.broker.archive_members import STEPS, TOPIC, ArchiveMember, ArchiveMembers
from tiered.journal.errors import Fenced

QUEUES = [(TOPIC, 0), (TOPIC, 1), ("other", 0)]
LENGTH = 60
Place = tuple[str, int, int]


class SetHistory:
    """One random history, with all confirmed messages as readers saw them first."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.both = ArchiveMembers()
        self.master, self.other = self.both.a, self.both.b
        self.is_up = True  # the other member: it follows
        self.sleeps = False  # the other member: it believes to be the master
        self.common = 0  # the common length of both logs, at least, when the other follows the present master
        self.known: dict[Place, bytes] = {}
        self.both.elect(self.master)
        self.confirm()

    def run(self) -> None:
        steps: list[tuple[int, Callable[[], None]]] = [
            (8, self.put),
            (3, self.send),
            (7, self.confirm),
            (3, self.scrape),
            (5, self.offload),
            (3, self.offload_and_die),
            (3, self.offload_and_sleep),
            (3, self.look),
            (2, self.fail_over),
            (2, self.restart_other),
            (1, self.store_goes),
            (2, self.store_comes),
        ]
        for _ in range(LENGTH):
            (step,) = self.dice.choices([step for _, step in steps], [weight for weight, _ in steps])
            step()
        self.end()

    # ---- steps of the set

    def put(self) -> None:
        topic, queue = self.dice.choice(QUEUES)
        self.master.put(self.dice.randint(1, 6), topic=topic, queue=queue)

    def send(self) -> None:
        if self.is_up:
            self.both.send(self.master, into_memory=self.dice.random() < 0.5)

    def confirm(self) -> None:
        if self.is_up:
            self.both.replicate(self.master)
        else:
            self.both.in_sync = [self.master]
            self.master.store.visibility.confirm(self.master.end)
        for topic in (TOPIC, "other"):
            for queue, offset, record in self.master.rows(topic):
                assert self.known.setdefault((topic, queue, offset), record) == record, "an offset is given twice"

    def fail_over(self) -> None:
        """Elect the in-sync member, and let the former master follow."""
        self.take_over()
        self.receive()

    def take_over(self) -> None:
        if self.other in self.both.in_sync and self.is_up:
            self.master, self.other, self.is_up, self.sleeps = self.other, self.master, False, True
            self.common = self.master.end
            self.both.in_sync = [self.master]
            self.both.elect(self.master)
            self.confirm()

    def receive(self) -> None:
        """Let the other member follow the present master."""
        if self.sleeps:
            self.both.depose(self.other)
            self.sleeps = False
        if not self.is_up and self.other.end > self.common:
            confirmed = self.other.store.visibility.confirmed
            self.other.store.truncate(self.common, epoch=self.both.master_epoch, floor=confirmed)
        self.is_up = True

    def restart(self, member: ArchiveMember) -> None:
        if self.dice.random() < 0.5:
            member.disk = member.disk.power_cut()
        else:
            member.store.abandon()
            member.disk.kill()
        member.live()

    def restart_other(self) -> None:
        self.both.in_sync = [self.master]
        self.restart(self.other)
        if self.is_up:
            self.common = self.other.end
        self.is_up = self.sleeps = False
        self.receive()

    # ---- steps of the archive

    def scrape(self) -> None:
        self.dice.choice([self.master, self.other]).archive.lifecycle.backlog()

    def offload(self) -> None:
        self.job(lambda: self.master.offload(roll=self.dice.random() < 0.5))

    def look(self) -> None:
        """Run a job of one of the members."""
        member = self.dice.choice([self.master, self.other])
        lifecycle = member.archive.lifecycle
        jobs = [lifecycle.expire.run, lifecycle.checkpoint.run, lifecycle.sweep.run]
        if self.other in self.both.in_sync:  # else the other would have to rejoin empty
            jobs += [member.evict, lifecycle.evict.run]
        self.job(self.dice.choice(jobs))

    def job(self, run: Callable[[], object]) -> None:
        try:
            run()
        except StoreUnavailable:
            assert self.both.bucket.down or not self.master.archive.journal.ownership.online
        except Fenced:
            assert self.sleeps or not self.other.archive.journal.ownership.leads, "of who is not the master"

    def offload_and_die(self) -> None:
        step, nth, former = self.dice.choice(STEPS), self.dice.randint(1, 3), self.master
        with failpoint.armed(step, nth=nth):
            try:
                self.offload()
            except FailpointError:
                self.take_over()
                self.restart(former)
                if former is self.master:  # no other member could be elected
                    self.both.elect(former)
                    self.both.in_sync = [former]
                    self.common = min(self.common, former.end)
                else:
                    self.sleeps = False
                    self.receive()

    def offload_and_sleep(self) -> None:
        """Suspend the master in a round while the set continues."""
        former = self.master

        def meanwhile(_: str) -> None:
            failpoint.disarm()
            self.take_over()
            self.put()
            self.confirm()
            if self.master is not former:  # the new master's round is running
                self.offload()

        with failpoint.armed(self.dice.choice(STEPS), meanwhile, self.dice.randint(1, 3)):
            self.job(former.offload)

    def store_goes(self) -> None:
        self.both.bucket.down = True

    def store_comes(self) -> None:
        self.both.bucket.heal()

    # ---- the end

    def end(self) -> None:
        self.store_comes()
        self.receive()
        self.put()
        self.confirm()
        self.master.offload()
        self.master.offload()
        self.confirm()
        archived = {
            (topic, queue, offset): record
            for topic in (TOPIC, "other")
            for queue, offset, record in self.both.archived(topic)
        }
        for topic, queue in QUEUES:
            following, gaps = self.both.check_tiles(topic, queue)
            assert (following, gaps) == (self.master.store.queues.max_offset(topic, queue), [])
        assert archived == self.known
        assert self.both.catalog.rounds.open_intents() == {}
        assert self.other.archive.lifecycle.evict.run() == [] and self.other.archive.journal.catalog.rounds.intent_end


@pytest.mark.parametrize("seed", range(40))
def test_confirmed_messages_are_archived_once_in_any_history(seed: int) -> None:
    SetHistory(seed).run()
