"""The broker writes checkpoints, and its own start and the store's readers go by them."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from infra import failpoint
from infra.failpoint import FailpointError
from infra.object_store.protocol import StoreUnavailable, UnknownOutcome
from neve.archive.follow import read_catalog
from neve.archive.journal import Checkpoint, Deleted, decode_entry
from neve.archive.keys import journal_key
from tests.unit.lifecycle.fakes import Rig
from tiered.journal.errors import ArchiveRefused, Fenced
from tiered.journal.writer import JournalWriter


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(
        JournalWriter, "__init__", functools.partialmethod(JournalWriter.__init__, checkpoint_entries=4)
    )
    return Rig(tmp_path / "state")


def rounds(rig: Rig, count: int) -> None:
    for _ in range(count):
        rig.hot.put("t", count=3)
        rig.offload()
        rig.lifecycle.checkpoint.run()


def checkpoints(rig: Rig) -> list[str]:
    return sorted(key for key in rig.store.objects if "/checkpoint/" in key)


def journal_reads(rig: Rig) -> list[str]:
    found: list[str] = []
    rig.store.on_call = lambda verb, key: found.append(key) if verb == "get" and "/journal/" in key else None
    return found


def same_as_replayed(rig: Rig) -> bool:
    entries = sorted(key for key in rig.store.objects if "/journal/" in key)
    whole = type(rig.journal.catalog)()
    for seq, key in enumerate(entries):
        whole.apply(seq, decode_entry(rig.store.objects[key][0]))
    return whole.state("b") == rig.journal.catalog.state("b") == read_catalog(rig.store, "b").state("b")


def test_each_entry_names_the_newest_checkpoint_and_old_ones_go(rig: Rig) -> None:
    rounds(rig, 20)
    assert len(checkpoints(rig)) == 3
    last = decode_entry(rig.store.objects[journal_key("", "b", rig.journal.catalog.next_seq - 1)][0])
    newest = last.through_seq if isinstance(last, Checkpoint) else last.checkpoint
    assert checkpoints(rig)[-1].endswith(f"{newest:020d}.catalog")
    assert same_as_replayed(rig)
    assert rig.check_tiles("t") == 60


def test_a_start_reads_neither_the_whole_journal_nor_keeps_it_locally(rig: Rig, tmp_path: Path) -> None:
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


def test_a_start_without_the_store_knows_all_from_its_own_checkpoint(rig: Rig) -> None:
    rounds(rig, 7)
    state = rig.journal.catalog.state("b")
    rig.store.fail("*", StoreUnavailable("down"), times=1000)
    rig.restart()
    assert not rig.attachment.online
    assert rig.journal.catalog.state("b") == state
    rig.store.faults.clear()
    rounds(rig, 1)
    assert same_as_replayed(rig)


@pytest.mark.parametrize(
    "files", [["journal.checkpoint"], ["journal.mirror"], ["journal.checkpoint", "journal.mirror"]]
)
def test_a_damaged_local_copy_is_completed_from_the_store_and_another_store_still_refused(
    rig: Rig, tmp_path: Path, files: list[str]
) -> None:
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


@pytest.mark.parametrize("place", ["put", "entry", "local"])
def test_a_crash_around_a_checkpoint_costs_nothing(rig: Rig, place: str) -> None:
    rounds(rig, 1)
    rig.hot.put("t", count=3)
    rig.offload()
    if place == "put":
        rig.store.fail("put", UnknownOutcome("timeout"), match="checkpoint", times=9)
        assert not rig.lifecycle.checkpoint.run()
    else:
        name = "journal.after_checkpoint" if place == "entry" else "journal.before_put"
        with failpoint.armed(name), pytest.raises(FailpointError):
            rig.lifecycle.checkpoint.run()
    rig.store.faults.clear()
    rig.restart()
    rounds(rig, 4)
    assert same_as_replayed(rig)
    assert checkpoints(rig)


def test_a_zombie_writes_no_checkpoint(rig: Rig) -> None:
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
