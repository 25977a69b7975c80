"""Tests of parallel uploads within a round: bounded, few requests, and a definite state after every end."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.objects.store import ObjectStoreError, PreconditionFailed, StoreUnavailable
from infra.state_table import ImpossibleTransition
from lifecycle.lifecycle import ArchiveLifecycle
from lifecycle.retention import RetentionPolicy, worker_priority
from lifecycle.safe_clock import SafeClock
from neve.archive.format.journal import Commit, CommittedObject, PlannedObject
from tests.kit.archive.deferred_uploads import DeferredUploads, Files, in_order
from tests.unit.lifecycle.compact_rig import FAULTS
from tests.unit.lifecycle.fakes import RECORD, Rig
from tiered.journal.errors import Fenced
from tiered.write.round_names import TRANSITIONS, Event, Limits, RoundNames, State
from tiered.write.uploader import NamedEntries

TOPICS = 9


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "state", RetentionPolicy(archive_min_bytes=1))


class Watched(DeferredUploads):
    """Uploads that record the requests and the maximum in flight."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(lambda one, files: self.make(one), self._chosen)
        self.rig = rig
        self.requests: list[int] = []
        self.most = self.most_bytes = self.made = 0
        self.given_up = 0
        self.choose: Callable[[int], list[int]] = in_order

    def _chosen(self, waiting: int) -> list[int]:
        return self.choose(waiting)

    def make(self, one: NamedEntries) -> Any:
        self.made += 1
        self.on_upload(self.made, one)
        return self.rig.worker.encode_upload(one.name, one.entries)

    def on_upload(self, number: int, one: NamedEntries) -> None:
        """Called during each upload."""

    def begin(self, objects: Sequence[NamedEntries], files: Files) -> None:
        self.requests.append(len(objects))
        super().begin(objects, files)
        self.most = max(self.most, len(self._waiting))
        self.most_bytes = max(self.most_bytes, sum(one.wire_bytes for one, _ in self._waiting))

    def give_up(self) -> None:
        self.given_up += 1
        super().give_up()


def watch(rig: Rig, limits: Limits | None = None) -> Watched:
    """Make the next rounds of the rig use recorded uploads."""
    watched = Watched(rig)
    rig.worker.uploads = lambda store_url, metadata: watched  # type: ignore[method-assign]
    if limits is not None:
        policy = lambda: rig.policy  # noqa: E731
        rig.lifecycle = ArchiveLifecycle(
            rig.hot, rig.journal, rig.worker, policy, rig.clock, SafeClock(rig.clock), limits=limits
        )
    return watched


def fill(rig: Rig, topics: int, count: int = 1) -> None:
    for topic in range(topics):
        rig.hot.put(f"t{topic}", count=count)


def commits(rig: Rig) -> list[int]:
    found: list[int] = []
    append = rig.journal.append

    def noting(entry: Any, **more: Any) -> int:
        if isinstance(entry, Commit):
            found.append(len(entry.names))
        return append(entry, **more)

    rig.journal.append = noting  # type: ignore[method-assign]
    return found


def test_hundred_small_objects_take_two_requests_and_one_commit_per_round(rig: Rig) -> None:
    fill(rig, 100)
    watched, committed = watch(rig), commits(rig)
    before = rig.store.requests.copy()
    rig.offload()
    assert sum(watched.requests) == 100
    assert max(watched.requests) == 64
    # Each round writes an INTENT and a COMMIT. It covers one segment of each topic.
    rounds = len(committed)
    assert rig.store.requests["put"] - before["put"] == 100 + 2 * rounds
    assert sum(committed) == 100


def test_uploads_in_flight_are_bounded_by_number_and_bytes(rig: Rig) -> None:
    fill(rig, 30)
    watched = watch(rig, Limits(group=4, names=6))
    rig.offload()
    assert watched.most == 6
    assert max(watched.requests) == 4
    fill(rig, 30, count=2)
    watched = watch(rig, Limits(bytes=5 * RECORD))
    rig.offload()
    assert watched.most_bytes <= 5 * RECORD + 2 * RECORD, "one may go beyond"
    assert [rig.check_tiles(f"t{topic}") for topic in range(30)] == [3] * 30


def test_commits_are_batched_by_number(rig: Rig) -> None:
    for topic in range(9):
        rig.hot.put(f"t{topic}")
    committed = commits(rig)
    watch(rig, Limits(commit_names=4))
    rig.lifecycle.offload.run()
    assert committed == [4, 4, 1]


def test_fenced_round_commits_nothing_and_cancels_queued_uploads(rig: Rig, tmp_path: Path) -> None:
    fill(rig, 9)
    watched, committed = watch(rig, Limits(commit_names=2)), commits(rig)

    def overtaken(number: int, one: NamedEntries) -> None:
        if number == 4:
            rig.new_journal(tmp_path / "state").ownership.attach(rig.hot.tail)

    watched.on_upload = overtaken  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        rig.lifecycle.offload.run()
    assert (watched.made, watched.given_up) == (4, 1), "the COMMIT of the second two was refused"
    assert committed == [2, 2]  # attempted sizes
    rig.restart()
    rig.offload()
    assert len(rig.journal.catalog.objects()) == 9
    assert [rig.check_tiles(f"t{topic}") for topic in range(9)] == [1] * 9
    assert rig.journal.catalog.gaps() == []


def test_stop_commits_uploads_in_flight_and_leaves_the_rest_open(rig: Rig) -> None:
    fill(rig, 9)
    watched = watch(rig)
    watched.on_upload = lambda number, one: rig.lifecycle.stop() if number == 3 else None  # type: ignore[method-assign]
    (report,) = rig.lifecycle.offload.run()
    assert (len(report.committed), report.failed) == (3, {})
    assert watched.given_up == 1
    (open_names,) = rig.journal.catalog.rounds.open_intents().values()
    assert len(open_names) == 6


def test_unavailable_store_ends_the_round_and_cancels_queued_uploads(rig: Rig) -> None:
    fill(rig, 9)
    watched = watch(rig)

    def away(number: int, one: NamedEntries) -> None:
        if number == 3:
            rig.store.fail("*", StoreUnavailable("gone"), times=1000)

    watched.on_upload = away  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        rig.lifecycle.offload.run()
    assert (watched.made, watched.given_up) == (3, 1)


def test_ttl_and_eviction_run_during_uploads(rig: Rig) -> None:
    fill(rig, 3)
    rig.hot.roll()
    watched = watch(rig)
    ran: list[str] = []

    def jobs(number: int, one: NamedEntries) -> None:
        rig.lifecycle.expire.run()  # would deadlock if the round held the turn
        rig.lifecycle.evict.run()
        ran.append(one.name.topic)

    watched.on_upload = jobs  # type: ignore[method-assign]
    rig.lifecycle.offload.run()
    assert sorted(ran) == ["t0", "t1", "t2"]


def small_round(root: Path) -> Rig:
    """Return a rig with nine topics of two messages, four uploads in flight, and LIFO completion."""
    rig = Rig(root / "state", RetentionPolicy(archive_min_bytes=1))
    watched = watch(rig, Limits(group=2, names=4, commit_names=3))
    watched.choose = lambda waiting: [waiting - 1] if waiting % 2 else [waiting - 1, 0]
    fill(rig, TOPICS, count=2)
    rig.hot.roll()
    return rig


def calls_of_one(root: Path) -> Counter[str]:
    rig, calls = small_round(root), Counter[str]()
    rig.store.on_call = lambda verb, key: calls.update([verb])
    rig.lifecycle.offload.run()
    rig.store.on_call = None
    assert calls["put"] == TOPICS + 1 + 3, "objects, an INTENT and three COMMITs"
    return calls


def check_end(rig: Rig) -> None:
    """Assert that each message is in exactly one object and that there are no orphan objects."""
    catalog = rig.journal.catalog
    assert [rig.check_tiles(f"t{topic}") for topic in range(TOPICS)] == [2] * TOPICS
    assert catalog.gaps() == []
    assert not catalog.rounds.open_intents()
    assert {key for key in rig.store.objects if "topic=" in key} == {one.key for one in catalog.objects()}


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("kind", [kind for kind, (error, _) in FAULTS.items() if error is not None])
def test_each_fault_of_each_call_with_parallel_uploads(tmp_path: Path, kind: str, crash: bool) -> None:
    error, after = FAULTS[kind]
    assert error is not None
    calls = calls_of_one(tmp_path / "whole")
    verbs = ["put"] if isinstance(error, PreconditionFailed) else sorted(calls)
    cases = [(verb, nth) for verb in verbs for nth in range(calls[verb])]
    for verb, nth in cases:
        rig = small_round(tmp_path / f"{verb}-{nth}")
        rig.store.fail(verb, error, after=after, skip=nth)
        with contextlib.suppress(ObjectStoreError):  # the job failed and runs again
            rig.lifecycle.offload.run()
        rig.store.faults.clear()
        if crash:
            rig.restart()
        rig.lifecycle.offload.run(roll=True)
        check_end(rig)


def name(key: str) -> PlannedObject:
    return PlannedObject(key, key, "2026-01-02", 0, 1, {0: (0, 0)})


def test_transition_table_is_complete_and_final_states_have_no_exit() -> None:
    assert set(TRANSITIONS) == set(State)
    assert all(set(row) == set(Event) for row in TRANSITIONS.values())
    for state in (State.COMMITTED, State.FAILED, State.CLOSED):
        assert not any(TRANSITIONS[state].values())
    committing = [state for state in State if TRANSITIONS[state][Event.COMMITTED] is not None]
    assert committing == [State.UPLOADED], "nothing is published that is not in the store"


def test_object_cannot_be_begun_twice() -> None:
    names = RoundNames([name("a")])
    taken = names.next()
    assert taken is not None
    names.started(taken, 1)
    with pytest.raises(ImpossibleTransition):
        names.started(taken, 1)


def of_one_topic(count: int) -> list[PlannedObject]:
    return [PlannedObject(f"k{at}", "t", "2026-01-02", at, at + 1, {0: (at, at)}) for at in range(count)]


def in_store(one: PlannedObject) -> CommittedObject:
    return CommittedObject(
        key=one.key, topic=one.topic, day=one.day, start=one.start, end=one.end, size=1, footer=1, etag="",
        checksum=("", ""), sha256="", rows=1, wire_bytes=1, min_time=0, max_time=0, queues={}, row_groups=[],
    )  # fmt: skip


def published(names: RoundNames) -> list[str]:
    ready = list(names.to_commit(0.0, at_end=True))
    names.committed(ready)
    return [one.key for one in ready]


def test_objects_of_a_topic_are_committed_in_log_order() -> None:
    intended = of_one_topic(5)
    other = name("other")
    names = RoundNames([*intended, other])
    while (taken := names.next()) is not None:
        names.started(taken, 1)
    for number in (3, 1, 4):
        names.uploaded(in_store(intended[number]), 1.0)
    names.uploaded(in_store(other), 2.0)
    assert published(names) == ["other"], "another topic's waits for none of them"
    names.uploaded(in_store(intended[0]), 3.0)
    assert published(names) == ["k0", "k1"]
    names.failed(intended[2])
    assert published(names) == ["k3", "k4"], "it may be long until that one comes"


def test_no_object_is_committed_after_a_cancelled_one() -> None:
    intended = of_one_topic(2)
    names = RoundNames(intended)
    for one in intended:
        assert names.next() is one
        names.started(one, 1)
    names.uploaded(in_store(intended[1]), 1.0)
    names.given_up(intended[0])
    assert published(names) == []


HOURS = 3_600_000


@pytest.mark.parametrize(
    ("oldest_ms", "disk", "priority"),
    [
        (-1, 0.1, "idle"),  # no backlog
        (8 * HOURS, 0.1, "idle"),
        (8 * HOURS - 1, 0.1, "normal"),  # a backlog older than two hours
        (10 * HOURS, 0.75, "idle"),
        (10 * HOURS, 0.76, "normal"),
    ],
)
def test_worker_priority_rises_with_backlog_age_and_disk_use(oldest_ms: int, disk: float, priority: str) -> None:
    policy = RetentionPolicy(archive_max_age_ms=HOURS, disk_mark=0.75, worker_priority="idle")
    assert worker_priority(policy, oldest_ms, 10 * HOURS, disk, is_awaited=False) == priority
    assert worker_priority(policy, oldest_ms, 10 * HOURS, disk, is_awaited=True) == "normal"


def test_requested_round_raises_the_worker_priority(rig: Rig) -> None:
    rig.policy = RetentionPolicy(archive_min_bytes=1, worker_priority="idle")
    told = list[str]()

    def set_priority(priority: str) -> None:
        told.append(priority)

    rig.worker.set_priority = set_priority  # type: ignore[method-assign]
    fill(rig, 1)
    rig.lifecycle.offload.run(roll=True)
    assert set(told[:-1]) == {"normal"}, "from before its first object on"
    assert told[-1] == "idle", "the rounds that nobody waits for give way again"


def test_worker_priority_is_adjusted_during_a_round(rig: Rig) -> None:
    rig.policy = RetentionPolicy(archive_min_bytes=1, worker_priority="low")
    fill(rig, 1)
    rig.lifecycle.offload.run()
    assert rig.worker.priority == "low"
    rig.hot.disk = 0.9
    rig.lifecycle.throttle.adjust()
    assert rig.worker.priority == "normal"
