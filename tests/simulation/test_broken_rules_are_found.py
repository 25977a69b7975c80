"""One rule of journal truncation, forgetting or erasure is broken here at a time, and some seeds find it.

The worlds below meet these interleavings more often than the full one. The first test checks that the same seeds with
the correct rules break nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from broker.intake.internal_records import InternalRecords
from broker.store import erased
from broker.store.erased_offsets import ErasedOffsets
from broker.store.erased_rows import HiddenRows
from broker.store.queue_table import QueueTable
from infra import failpoint
from lifecycle.erase import EraseKey
from lifecycle.hot_erasure import HotErasure, Row
from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import Topic
from tests.simulation import traffic
from tests.simulation.world import TOPICS, BrokenInvariant, StorageWorld
from tiered.journal.tail import JournalTail

SEEDS = range(24)
STEPS = 40


class Sleepers(StorageWorld):
    """A world of superseded processes that wake after the journal was truncated."""

    def steps(self) -> dict[Callable[[], None], int]:
        return {self._puts: 10, self._offload: 4, self._fork: 6}


class Buried(StorageWorld):
    """A world in which a topic is deleted, recreated and forgotten, at times while the names of a round are open."""

    def steps(self) -> dict[Callable[[], None], int]:
        return {
            self._puts: 8,
            self._offload: 8,
            self._arm: 6,
            self._delete_topic: 12,
            self._bury: 8,
            self._power_off: 1,
        }

    def _put_some(self, count: int) -> None:
        for _ in range(count):
            traffic.put(self, TOPICS[0], self.random.randrange(2))

    def _arm(self) -> None:
        self.tell("armed: the next round ends behind its intent")
        failpoint.arm("offload.after_intent", "error", 1)

    def _evict_all(self) -> None:
        """Evict without a round, which would close open names."""
        self._roll()
        self._retention()


class Erasers(StorageWorld):
    """A world in which an operator erases messages from a log that keeps its segments."""

    def steps(self) -> dict[Callable[[], None], int]:
        return {self._puts: 10, self._offload: 2, self._erase: 6, self._arm: 2, self._power_off: 4, self._ttl: 1}


class ErasersOfDeleted(StorageWorld):
    """A world of erasures from a topic that is deleted and recreated, at times with unreadable queue files."""

    def steps(self) -> dict[Callable[[], None], int]:
        return {
            self._puts: 10,
            self._offload: 1,
            self._delete_topic: 3,
            self._erase: 4,
            self._hide_erased: 1,
            self._power_off: 3,
        }


class FailingHides(StorageWorld):
    """A world in which messages are archived before a start, so that an erasure must look up their queues to hide."""

    def steps(self) -> dict[Callable[[], None], int]:
        return {self._puts: 3, self._offload_all: 4, self._erase: 6, self._power_off: 4}


def first_found(world: type[StorageWorld], seeds: Iterable[int]) -> BrokenInvariant | None:
    for seed in seeds:
        try:
            world(seed).run(STEPS)
        except BrokenInvariant as violation:
            return violation
    return None


@pytest.mark.parametrize("world", [Sleepers, Buried, Erasers, ErasersOfDeleted, FailingHides])
def test_worlds_with_correct_rules_break_no_invariant(world: type[StorageWorld]) -> None:
    assert first_found(world, SEEDS) is None


class Followers(StorageWorld):
    """A world in which foreign masters write into the log."""

    def steps(self) -> dict[Callable[[], None], int]:
        return {self._puts: 5, self._foreign: 3, self._offload: 1, self._power_off: 1}


def test_simulation_finds_executed_foreign_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_found(Followers, range(3)) is None
    monkeypatch.setattr(InternalRecords, "is_own", lambda self, record: True)
    assert first_found(Followers, range(3)) is not None


def test_simulation_finds_a_put_that_skips_the_previous_entry_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that slept takes an entry for its own that it wrote where the journal's next entry had been deleted."""
    monkeypatch.setattr(JournalTail, "_check_before", lambda tail, seq: None)
    assert first_found(Sleepers, SEEDS) is not None


def test_simulation_finds_a_forget_that_ignores_open_intents(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgettable(catalog: Catalog) -> list[Topic]:
        found = [of.entry for of in catalog._each() if not of.blocks and not of.expiring]
        return [entry for entry in found if entry is not None and entry.deleted]

    monkeypatch.setattr(Catalog, "forgettable", forgettable)
    assert first_found(Buried, SEEDS) is not None


def test_simulation_finds_an_erasure_that_does_not_hide_local_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HotErasure, "hide", lambda job, more=(): 0)
    assert first_found(Erasers, SEEDS) is not None


def test_simulation_finds_hiding_that_is_not_persisted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start without the store has lost the information, which the journal's local copy does not contain either."""

    def forget(offsets: ErasedOffsets) -> None:
        offsets._records._state.erased = {}
        for queue in offsets._queues.by_name.values():
            queue.erased = erased.NONE

    monkeypatch.setattr(ErasedOffsets, "cut", forget)
    monkeypatch.setattr(
        "broker.archiving.log_resume.erased_rows.hide", lambda *_: HiddenRows(0, is_changed=False, failed={})
    )
    assert first_found(Erasers, SEEDS) is not None


def test_simulation_finds_a_read_that_skips_unerased_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erased, "united", lambda spans, more: ((0, max(last for _, last in (*spans, *more))),))
    assert first_found(Erasers, SEEDS) is not None


def test_simulation_finds_a_returned_record_of_a_deleted_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QueueTable, "shows", lambda *_: True)
    assert first_found(ErasersOfDeleted, SEEDS) is not None


def test_simulation_finds_a_certificate_that_ignores_a_hiding_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The erasure does not look at the queues again, and the job does not retry."""
    hide = HotErasure.hide

    def hidden(job: HotErasure, more: Iterable[Row] = ()) -> int:
        runs = hide(job, more)
        job.failed, job._hidden_through = {}, job._journal.catalog.next_seq
        return runs

    monkeypatch.setattr(HotErasure, "hide", hidden)
    monkeypatch.setattr(EraseKey, "_local_queues", lambda *_: {})
    assert first_found(FailingHides, SEEDS) is not None
