"""Tests of journal shortening: no loss, and no entry is accepted at the position of a deleted one."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from infra import failpoint
from infra.failpoint import FailpointError
from infra.objects.store import AccessDenied, ObjectStoreError, StoreUnavailable, UnknownOutcome
from lifecycle.retention import RetentionPolicy
from neve.archive.catalog.journal_reader import (
    checkpoints,
    entries,
    first_remaining,
    following,
    is_shortened,
    read_catalog,
)
from neve.archive.format.broker_state import BrokerState, encode_state
from neve.archive.format.journal import Deleted, EntriesDeleted, decode_entry
from neve.archive.format.keys import checkpoint_key, journal_key, pack_key, parse_journal_key, state_key
from neve.archive.policy.ttl import HOUR_MS as HOUR
from neve.archive.read.verify import tiling_faults
from tests.kit.archive.catalog_state import state_of
from tests.unit.lifecycle.fakes import Rig, rounds
from tiered.journal.errors import ArchiveRefused, Fenced
from tiered.journal.writer import JournalWriter

DAY = 24 * HOUR


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(
        JournalWriter, "__init__", functools.partialmethod(JournalWriter.__init__, checkpoint_entries=4)
    )
    return Rig(tmp_path / "state", RetentionPolicy(ttl_hours=lambda topic: None))


def aged(rig: Rig, count: int = 12) -> None:
    """Run rounds and let them become older than the retention of the journal."""
    rounds(rig, count)
    rig.clock.advance(8 * DAY)


def numbers(rig: Rig) -> list[int]:
    """Return the numbers of the stored entries."""
    found = [parse_journal_key(key) for key in rig.store.objects if "/journal/" in key]
    return sorted(number for number in found if number is not None)


def oldest_kept(rig: Rig) -> int:
    return checkpoints(rig.store, "b")[-1]


def is_whole(rig: Rig, end: int) -> bool:
    """Check that readers and starts with and without a local copy find each offset once."""
    known = state_of(rig.journal.catalog)
    for whole in (False, True):
        catalog = read_catalog(rig.store, "b", whole=whole)
        spans = [(run.first, run.last) for run in catalog.queue("t", 0).runs()]
        assert list(tiling_faults(spans, 0)) == []
        assert state_of(catalog) == known
    return rig.check_tiles("t") == end


def other_broker(rig: Rig, tmp_path: Path, name: str = "other") -> JournalWriter:
    """Start another broker with a copy of the directory, which takes over the archive of the same log."""
    shutil.copytree(rig.directory, tmp_path / name)
    journal = rig.new_journal(tmp_path / name)
    journal.ownership.attach(rig.hot.tail)
    return journal


def append(journal: JournalWriter, count: int) -> None:
    for _ in range(count):
        journal.append(Deleted(keys=[]))
        journal.checkpoint_if_due()


def shorten(rig: Rig, journal: JournalWriter) -> list[int]:
    due = journal.entries_to_delete(rig.clock.now_ms(), 7 * DAY)
    journal.delete_entries(due)
    return due


def from_here(rig: Rig, tmp_path: Path) -> Callable[[], None]:
    """Return a function that restores the present state and restarts the broker."""
    stored, copy = dict(rig.store.objects), shutil.copytree(rig.directory, tmp_path / "copy")

    def anew() -> None:
        rig.store.objects.clear()
        rig.store.objects.update(stored)
        shutil.rmtree(rig.directory)
        shutil.copytree(copy, rig.directory)
        rig.restart()

    return anew


# ---- deletion


def test_shorten_deletes_old_checkpointed_entries_and_keeps_the_catalog(rig: Rig, tmp_path: Path) -> None:
    aged(rig)
    end = rig.journal.catalog.next_seq
    assert rig.lifecycle.shorten.run() == oldest_kept(rig) - 1
    assert numbers(rig) == [0, *range(oldest_kept(rig), end)]
    assert is_shortened(rig.store, "b") and first_remaining(rig.store, "b") == oldest_kept(rig)
    assert [seq for seq, _ in entries(rig.store, "b")] == list(range(oldest_kept(rig), end))
    assert is_whole(rig, 36)
    rig.restart()
    assert is_whole(rig, 36)
    shutil.rmtree(tmp_path / "state")
    rig.restart()
    assert is_whole(rig, 36)
    rounds(rig, 12)
    assert is_whole(rig, 72)
    old = rig.lifecycle.shorten.run()
    assert old < 20 and rig.lifecycle.shorten.run() == 0, "the others are young"
    rig.clock.advance(8 * DAY)
    assert rig.lifecycle.shorten.run() > 10
    assert is_whole(rig, 72)


@pytest.mark.parametrize("why", ["young", "two checkpoints", "no pack", "cut", "a state slot", "few"])
def test_shorten_keeps_entries_that_are_still_needed(rig: Rig, why: str) -> None:
    if why == "young":
        rounds(rig, 12)
        rig.clock.advance(7 * DAY - 1)
    elif why == "few":
        rounds(rig, 4)
        rig.clock.advance(8 * DAY)
        for seq in range(1, oldest_kept(rig) - 2):
            del rig.store.objects[journal_key("", "b", seq)]
    else:
        aged(rig)
    if why == "two checkpoints":
        del rig.store.objects[checkpoint_key("", "b", oldest_kept(rig))]
    elif why == "no pack":
        seq = oldest_kept(rig)
        del rig.store.objects[pack_key("", "b", seq, 0)]
    elif why == "cut":
        key = checkpoint_key("", "b", checkpoints(rig.store, "b")[1])
        rig.store.put(key, rig.store.objects[key][0][:-3])
    elif why == "a state slot":
        rig.store.put(state_key("", "b", 1), encode_state(BrokerState(broker="b", next_seq=3)))
    before = numbers(rig)
    assert rig.lifecycle.shorten.run() == 0
    assert numbers(rig) == before
    assert why == "few" or not is_shortened(rig.store, "b")


# ---- brokers and readers that were suspended


def test_put_of_superseded_broker_at_a_deleted_entry_is_ignored(rig: Rig, tmp_path: Path) -> None:
    rounds(rig, 2)
    position = rig.journal.catalog.next_seq
    other = other_broker(rig, tmp_path)
    append(other, 40)
    rig.clock.advance(8 * DAY)
    assert position in shorten(rig, other)
    known = state_of(other.catalog)
    with pytest.raises(Fenced):
        rig.journal.append(Deleted(keys=["a"]))
    assert position in numbers(rig), "its PUT had succeeded"
    assert rig.journal.ownership.fenced
    assert state_of(rig.journal.catalog) == known == state_of(read_catalog(rig.store, "b"))
    other.ownership.follow()
    assert other.ownership.online and state_of(other.catalog) == known
    assert next(seq for seq, _ in entries(rig.store, "b")) > position
    append(other, 40)
    rig.clock.advance(8 * DAY)
    assert position in shorten(rig, other), "it is an old entry like any other"


@pytest.mark.parametrize("outcome", ["lost", "lost and late"])
def test_unknown_put_of_superseded_broker_at_a_deleted_entry_is_ignored(rig: Rig, tmp_path: Path, outcome: str) -> None:
    rounds(rig, 2)
    position = rig.journal.catalog.next_seq
    other = other_broker(rig, tmp_path)
    append(other, 40)
    rig.clock.advance(8 * DAY)
    shorten(rig, other)
    rig.store.fail("put", UnknownOutcome("timeout"), after=outcome == "lost")
    with pytest.raises(Fenced):
        rig.journal.append(Deleted(keys=["a"]))
    assert position in numbers(rig)
    assert state_of(read_catalog(rig.store, "b")) == state_of(other.catalog)


def test_follower_ignores_a_put_at_a_deleted_entry(rig: Rig, tmp_path: Path) -> None:
    rounds(rig, 2)
    second = tmp_path / "second"
    shutil.copytree(rig.directory, second)
    sleeper = rig.new_journal(second)
    sleeper.ownership.attach_following()
    sleeper.ownership.follow()
    other = other_broker(rig, tmp_path)
    append(other, 40)
    rig.clock.advance(8 * DAY)
    shorten(rig, other)
    with pytest.raises(Fenced):
        rig.journal.append(Deleted(keys=["a"]))
    sleeper.ownership.follow()
    assert state_of(sleeper.catalog) == state_of(other.catalog)


def test_superseded_broker_is_fenced_by_reading_a_shortened_journal(rig: Rig, tmp_path: Path) -> None:
    rounds(rig, 2)
    other = other_broker(rig, tmp_path)
    append(other, 40)
    rig.clock.advance(8 * DAY)
    shorten(rig, other)
    with pytest.raises(Fenced):
        rig.lifecycle.expire.run()


def test_start_with_an_outdated_copy_resumes_at_a_checkpoint(rig: Rig, tmp_path: Path) -> None:
    rounds(rig, 2)
    shutil.copytree(rig.directory, tmp_path / "copy")
    aged(rig)
    rig.lifecycle.shorten.run()
    late = rig.new_journal(tmp_path / "copy")
    late.ownership.attach(rig.hot.tail)
    assert late.ownership.online and late.catalog.checkpoint >= oldest_kept(rig)
    assert state_of(late.catalog) == state_of(read_catalog(rig.store, "b"))
    shutil.copytree(tmp_path / "copy", tmp_path / "again")
    for key in [key for key in rig.store.objects if "/checkpoint/" in key]:
        del rig.store.objects[key]
    rig.store.objects.pop(journal_key("", "b", late.catalog.next_seq - 1))
    with pytest.raises(ArchiveRefused, match="does not hold the journal"):
        rig.new_journal(tmp_path / "again").ownership.attach(rig.hot.tail)


def test_start_with_a_wrong_store_leaves_the_local_copy_unchanged(rig: Rig, tmp_path: Path) -> None:
    """The wrong journal may be longer and shortened. After storeUrl is corrected, the broker resumes its archive."""
    rounds(rig, 2)
    own, log_uuid = rig.store, rig.journal.catalog.log_uuid
    other = Rig(tmp_path / "other", rig.policy, "log-2")
    aged(other)
    assert other.lifecycle.shorten.run() > rig.journal.catalog.next_seq
    rig.store = other.store
    with pytest.raises(ArchiveRefused, match="does not hold the journal"):
        rig.new_journal().ownership.attach(rig.hot.tail)
    rig.store = own
    back = rig.new_journal()
    back.ownership.attach(rig.hot.tail)
    assert back.ownership.online and back.catalog.objects("t") == read_catalog(own, "b").objects("t")
    assert back.catalog.log_uuid == log_uuid


def test_reader_at_a_deleted_position_gets_entries_deleted(rig: Rig) -> None:
    rounds(rig, 2)
    position, before = rig.journal.catalog.next_seq, rig.journal.catalog.anchor
    aged(rig)
    assert len(list(following(rig.store, "b", "", position, before))) > 10
    rig.lifecycle.shorten.run()
    with pytest.raises(EntriesDeleted):
        list(following(rig.store, "b", "", position, before))
    catalog = rig.journal.catalog
    assert list(following(rig.store, "b", "", catalog.next_seq, catalog.anchor)) == []


@pytest.mark.parametrize("whole", [True, False])
def test_reader_overtaken_by_shorten_at_any_call_reads_the_full_catalog(rig: Rig, tmp_path: Path, whole: bool) -> None:
    aged(rig, 20)
    rounds(rig, 1)
    known = state_of(rig.journal.catalog)
    anew = from_here(rig, tmp_path)
    calls = Counter[str]()
    rig.store.on_call = lambda verb, key: calls.update(["all"])
    state_of(read_catalog(rig.store, "b", whole=whole))
    for nth in range(calls["all"]):
        anew()
        left = [nth]

        def shorten_then(verb: str, key: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                rig.store.on_call = None
                append(rig.journal, 30)
                rig.clock.advance(8 * DAY)
                shorten(rig, rig.journal)

        rig.store.on_call = shorten_then
        catalog = read_catalog(rig.store, "b", whole=whole)
        assert state_of(catalog).names == known.names, f"overtaken at call {nth}"


# ---- faults

FAULTS: dict[str, tuple[Exception, bool]] = {
    "refused": (StoreUnavailable("connection refused"), False),
    "5xx before": (StoreUnavailable("503"), False),
    "5xx after the effect": (StoreUnavailable("500"), True),
    "timeout before": (UnknownOutcome("timeout"), False),
    "timeout after": (UnknownOutcome("timeout"), True),
    "reset": (UnknownOutcome("connection reset"), True),
    "403": (AccessDenied("403"), False),
}


def in_order(rig: Rig) -> bool:
    """Check that entries were deleted in ascending order."""
    standing = numbers(rig)
    return standing[0] == 0 and standing[1:] == list(range(standing[1], standing[-1] + 1))


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("kind", list(FAULTS))
def test_shorten_survives_each_fault_of_each_store_call(rig: Rig, tmp_path: Path, kind: str, crash: bool) -> None:
    error, after = FAULTS[kind]
    aged(rig)
    anew = from_here(rig, tmp_path)
    anew()
    calls = Counter[str]()
    rig.store.on_call = lambda verb, key: calls.update([verb])
    rig.lifecycle.shorten.run()
    rig.store.on_call = None
    assert calls["delete"] > 10 and calls["put"] == 1
    for verb, count in calls.items():
        for nth in range(count) if verb != "delete" else (0, 1, count - 1):
            anew()
            rig.store.fail(verb, error, after=after, skip=nth)
            with contextlib.suppress(ObjectStoreError):
                rig.lifecycle.shorten.run()
            rig.store.faults.clear()
            assert in_order(rig), f"{kind} of {verb} {nth}"
            assert is_whole(rig, 36)
            if crash:
                rig.restart()
            rig.lifecycle.shorten.run()
            assert in_order(rig) and 0 <= oldest_kept(rig) - numbers(rig)[1] < 4, f"{kind} of {verb} {nth}"
            assert is_whole(rig, 36)


@pytest.mark.parametrize("place", ["journal.before_shortening", "journal.after_entry_deleted"])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_shorten_resumes_after_a_crash(rig: Rig, place: str, nth: int) -> None:
    aged(rig)
    nth = 1 if place == "journal.before_shortening" else nth
    with failpoint.armed(place, "error", nth), pytest.raises(FailpointError):
        rig.lifecycle.shorten.run()
    assert in_order(rig) and is_shortened(rig.store, "b")
    assert is_whole(rig, 36)
    rig.restart()
    rig.lifecycle.shorten.run()
    assert numbers(rig) == [0, *range(oldest_kept(rig), rig.journal.catalog.next_seq)]
    assert is_whole(rig, 36)


def test_concurrent_shortens_delete_in_order_at_every_step(rig: Rig, tmp_path: Path) -> None:
    aged(rig)
    late = rig.journal
    due = late.entries_to_delete(rig.clock.now_ms(), 7 * DAY)
    other = other_broker(rig, tmp_path)
    append(other, 12)
    rig.clock.advance(8 * DAY)
    steps = [functools.partial(late.delete_entries, [number]) for number in due]
    more = other.entries_to_delete(rig.clock.now_ms(), 7 * DAY)
    assert more[: len(due)] == due and len(more) > len(due)

    def between(verb: str, key: str) -> None:
        if verb == "delete" and steps:
            rig.store.on_call = None
            steps.pop(0)()
            assert in_order(rig)
            rig.store.on_call = between

    rig.store.on_call = between
    other.delete_entries(more)
    rig.store.on_call = None
    assert in_order(rig)
    assert state_of(read_catalog(rig.store, "b")) == state_of(other.catalog)


def test_repeated_put_of_an_entry_has_different_bytes(rig: Rig) -> None:
    """A late PUT must not recreate a deleted entry: a reader that knows its bytes would take it as the journal's."""
    put: list[bytes] = []
    inner: Callable[..., object] = rig.store.put

    def lost(key: str, data: bytes, **options: bool) -> object:
        put.append(data)
        if len(put) < 3:
            raise UnknownOutcome("timeout")
        return inner(key, data, **options)

    rig.store.put = lost  # type: ignore[assignment,method-assign]
    rig.journal.append(Deleted(keys=["a"]))
    assert len(set(put)) == 3
    assert len({decode_entry(data).attempt for data in put}) == 1
