"""Tests of journal checkpoints: the broker writes them; its next start and readers of the store use them."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from infra import failpoint
from infra.failpoint import FailpointError
from infra.objects.store import StoreUnavailable, UnknownOutcome
from neve.archive.catalog.journal_reader import read_catalog
from neve.archive.format.checkpoint import CheckpointHead, decode_checkpoint
from neve.archive.format.journal import Checkpoint, Deleted, decode_entry
from neve.archive.format.keys import journal_key, pack_key
from tests.kit.archive.catalog_state import state_of
from tests.unit.lifecycle.fakes import Rig, rounds
from tiered.journal.errors import ArchiveRefused, Fenced
from tiered.journal.writer import JournalWriter


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(
        JournalWriter, "__init__", functools.partialmethod(JournalWriter.__init__, checkpoint_entries=4)
    )
    return Rig(tmp_path / "state")


def checkpoints(rig: Rig) -> list[str]:
    return sorted(key for key in rig.store.objects if key.endswith(".catalog"))


def packs(rig: Rig) -> set[str]:
    return {key for key in rig.store.objects if key.endswith(".pack")}


def named_packs(rig: Rig) -> set[str]:
    """Return the packs that the remaining checkpoints refer to."""
    heads = [decode_checkpoint(rig.store.objects[key][0]) for key in checkpoints(rig)]
    return {pack_key("", "b", *name) for head in heads if isinstance(head, CheckpointHead) for name in head.sizes()}


def journal_reads(rig: Rig) -> list[str]:
    found: list[str] = []
    rig.store.on_call = lambda verb, key: found.append(key) if verb == "get" and "/journal/" in key else None
    return found


def same_as_replayed(rig: Rig) -> bool:
    entries = sorted(key for key in rig.store.objects if "/journal/" in key)
    whole = type(rig.journal.catalog)()
    for seq, key in enumerate(entries):
        whole.apply(seq, decode_entry(rig.store.objects[key][0]))
    return state_of(whole) == state_of(rig.journal.catalog) == state_of(read_catalog(rig.store, "b"))


def test_entries_name_the_newest_checkpoint_and_old_ones_are_deleted(rig: Rig) -> None:
    rounds(rig, 20)
    assert len(checkpoints(rig)) == 3
    last = decode_entry(rig.store.objects[journal_key("", "b", rig.journal.catalog.next_seq - 1)][0])
    newest = last.through_seq if isinstance(last, Checkpoint) else last.checkpoint
    assert checkpoints(rig)[-1].endswith(f"{newest:020d}.catalog")
    assert packs(rig) == named_packs(rig)
    assert same_as_replayed(rig)
    assert rig.check_tiles("t") == 60


def test_start_reads_and_mirrors_only_the_journal_since_a_checkpoint(rig: Rig, tmp_path: Path) -> None:
    rounds(rig, 20)
    mirror = tmp_path / "state" / "journal.mirror"
    assert mirror.stat().st_size < 8000
    read = journal_reads(rig)
    rig.restart()
    assert len(read) <= 4
    assert same_as_replayed(rig)
    for name in ("journal.mirror", "journal.checkpoint"):
        (tmp_path / "state" / name).unlink()
    read.clear()
    rig.restart()
    assert len(read) <= 10
    assert same_as_replayed(rig)
    rounds(rig, 3)
    assert rig.check_tiles("t") == 69


def test_start_without_store_restores_catalog_from_local_checkpoint(rig: Rig) -> None:
    rounds(rig, 7)
    state = state_of(rig.journal.catalog)
    rig.store.fail("*", StoreUnavailable("down"), times=1000)
    rig.restart()
    assert not rig.attachment.online
    assert state_of(rig.journal.catalog) == state
    rig.store.faults.clear()
    rounds(rig, 1)
    assert same_as_replayed(rig)


@pytest.mark.parametrize(
    "files", [["journal.checkpoint"], ["journal.mirror"], ["journal.checkpoint", "journal.mirror"]]
)
def test_damaged_local_journal_copy_is_completed_from_the_store(rig: Rig, tmp_path: Path, files: list[str]) -> None:
    rounds(rig, 7)
    rig.restart()
    for name in files:
        path = tmp_path / "state" / name
        path.write_bytes(path.read_bytes()[:-5])
    rig.restart()
    assert same_as_replayed(rig)
    for name in files:
        path = tmp_path / "state" / name
        path.write_bytes(b"")
    rig.store.objects.clear()
    with pytest.raises(ArchiveRefused, match="storeUrl"):
        rig.restart()


@pytest.mark.parametrize("place", ["put", "packs", "entry", "local"])
def test_crash_around_a_checkpoint_loses_nothing(rig: Rig, place: str) -> None:
    rounds(rig, 1)
    rig.hot.put("t", count=3)
    rig.offload()
    if place == "put":
        rig.store.fail("put", UnknownOutcome("timeout"), match="checkpoint", times=9)
        assert not rig.lifecycle.checkpoint.run()
    else:
        places = {"packs": "journal.after_packs", "entry": "journal.after_checkpoint", "local": "journal.before_put"}
        name = places[place]
        with failpoint.armed(name), pytest.raises(FailpointError):
            rig.lifecycle.checkpoint.run()
    rig.store.faults.clear()
    rig.restart()
    rounds(rig, 14)
    assert same_as_replayed(rig)
    assert len(checkpoints(rig)) == 3
    assert packs(rig) == named_packs(rig), "what the crash left goes with the checkpoints that are dropped"


@pytest.mark.parametrize("small", [1, 32])
def test_checkpoint_without_entry_gets_it_without_a_rewrite(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    monkeypatch.setattr("neve.archive.catalog.topic_parts.SMALL_PACKS", small)
    for count in (0, 1, 3):
        rounds(rig, count)
        for number in range(3):
            rig.hot.put(f"other-{count}-{number}", count=3)
            rig.hot.put("t", count=3)
            rig.offload()
        rig.store.fail("put", StoreUnavailable("down"), match="/journal/", times=2)
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                rig.lifecycle.checkpoint.run()
        before = dict(rig.store.objects)
        assert rig.lifecycle.checkpoint.run()
        (entry,) = rig.store.objects.keys() - before.keys()
        assert isinstance(decode_entry(rig.store.objects[entry][0]), Checkpoint)
        assert same_as_replayed(rig)
    rig.restart()
    rounds(rig, 14)
    assert same_as_replayed(rig)
    assert packs(rig) == named_packs(rig)


@pytest.mark.parametrize("harm", ["gone", "cut", "flipped"])
@pytest.mark.parametrize("where", ["store", "local", "both"])
def test_damaged_pack_slows_the_start_and_next_checkpoint_is_complete(
    rig: Rig, tmp_path: Path, harm: str, where: str
) -> None:
    rig.hot.put("other", count=3)
    rounds(rig, 9)
    state = tmp_path / "state"
    if where != "store":
        for path in (state / "packs").glob("*"):
            data = path.read_bytes()
            path.unlink()
            if harm != "gone":
                path.write_bytes(_harmed(harm, data))
    else:
        (state / "journal.checkpoint").unlink()
        (state / "journal.mirror").unlink()
    if where != "local":
        for key in packs(rig):
            data, when = rig.store.objects.pop(key)
            if harm != "gone":
                rig.store.objects[key] = (_harmed(harm, data), when)
    rig.restart()
    assert same_as_replayed(rig)
    rounds(rig, 10)
    assert packs(rig) == named_packs(rig)
    for name in ("journal.checkpoint", "journal.mirror"):
        (state / name).unlink()
    read = journal_reads(rig)
    rig.restart()
    assert len(read) <= 10, "by a checkpoint again"
    assert same_as_replayed(rig)


def _harmed(harm: str, data: bytes) -> bytes:
    return data[:-1] if harm == "cut" else bytes([data[0] ^ 1]) + data[1:]


def test_checkpoint_writes_only_changes_since_the_previous_one(rig: Rig) -> None:
    for number in range(20):
        rig.hot.put(f"quiet-{number}", count=3)
    rounds(rig, 2)
    whole = max(len(rig.store.objects[key][0]) for key in packs(rig))
    before = packs(rig)
    rounds(rig, 4)
    rig.restart()
    rounds(rig, 4)
    later = packs(rig) - before
    assert len(later) >= 2
    assert all(len(rig.store.objects[key][0]) < whole // 3 for key in later), "also after a start"
    assert before & packs(rig), "what did not change stays where it was written"
    assert same_as_replayed(rig)


def test_superseded_broker_writes_no_checkpoint(rig: Rig) -> None:
    for _ in range(6):
        rig.journal.append(Deleted(keys=[]))
    zombie = rig.journal
    rig.restart()
    before = dict(rig.store.objects)
    with pytest.raises(Fenced):
        zombie.checkpoint_if_due()
    assert [key for key in rig.store.objects.keys() - before.keys() if "/journal/" in key] == []
    rig.restart()
    assert same_as_replayed(rig)
