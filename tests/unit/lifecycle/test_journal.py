"""Tests of the journal writer: fencing, identity, unknown outcomes, and a start without the store."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from infra.disk.filesystem import RealDisk
from infra.objects.store import ProbeFailed, PutOutcome, StoreUnavailable, UnknownOutcome
from neve.archive.format import keys
from neve.archive.format.journal import Abort, Deleted, NewerFormat, decode_entry
from tests.kit.store.memory_store import MemoryStore
from tests.unit.lifecycle.fakes import Rig
from tiered.journal.errors import ArchiveRefused, Fenced, NotAttached
from tiered.journal.store_format import check_format
from tiered.journal.writer import JournalWriter


def test_attach_takes_an_epoch_each_time(rig: Rig) -> None:
    assert (rig.attachment.online, rig.attachment.epoch) == (True, 1)
    rig.restart()
    assert rig.attachment.epoch == 2
    assert rig.journal.catalog.next_seq == 2
    assert len([key for key in rig.store.objects if "journal" in key]) == 2


def test_superseded_writer_is_fenced_at_its_next_append(rig: Rig) -> None:
    zombie = rig.journal
    rig.restart()
    with pytest.raises(Fenced, match="epoch 2"):
        zombie.append(Abort(round=1))
    before = dict(rig.store.objects)
    with pytest.raises(Fenced):
        zombie.append(Abort(round=1))
    with pytest.raises(Fenced):
        zombie.ownership.ensure_online()
    assert rig.store.objects == before
    rig.journal.append(Abort(round=1))


def test_superseded_writer_is_fenced_by_following(rig: Rig) -> None:
    zombie = rig.journal
    rig.restart()
    with pytest.raises(Fenced):
        zombie.ownership.follow()


def test_jobs_of_superseded_writer_change_nothing(rig: Rig) -> None:
    rig.hot.put("t", count=30)
    zombie = rig.lifecycle
    rig.restart()
    before = dict(rig.store.objects)
    for job in (lambda: zombie.offload.run(roll=True, evict=True), zombie.evict.run, zombie.expire.run):
        with pytest.raises(Fenced):
            job()
    assert rig.store.objects == before
    assert rig.hot.evicted == []


@pytest.mark.parametrize("after", [False, True])
def test_unknown_outcome_is_read_back(rig: Rig, after: bool) -> None:
    rig.store.fail("put", UnknownOutcome("timeout"), after=after, match="journal")
    seq = rig.journal.append(Deleted(keys=["x"]))
    assert seq == 1
    assert rig.journal.catalog.next_seq == 2


def test_unknown_append_is_resolved_when_the_store_is_back(rig: Rig) -> None:
    rig.store.fail("put", UnknownOutcome("timeout"), after=True, match="journal")
    rig.store.fail("get", StoreUnavailable("down"), match="journal")
    with pytest.raises(UnknownOutcome):
        rig.journal.append(Deleted(keys=["x"]))
    assert rig.journal.append(Deleted(keys=["y"])) == 2
    entries = [decode_entry(rig.store.objects[keys.journal_key("", "b", seq)][0]) for seq in (1, 2)]
    assert [entry.keys for entry in entries if isinstance(entry, Deleted)] == [["x"], ["y"]]


def test_other_log_is_refused(rig: Rig, tmp_path: Path) -> None:
    rig.hot.put("t", count=3)
    rig.offload()
    stranger = rig.new_journal(tmp_path / "other", "log-2")
    with pytest.raises(
        ArchiveRefused,
        match=r"archive of broker b reaches \d+.*data directory back, use --restore-from.* another brokerName",
    ):
        stranger.ownership.attach(0)
    with pytest.raises(ArchiveRefused, match="another brokerName"):
        rig.new_journal(log_uuid="log-3").ownership.attach(0)  # the log was replaced, but not its state directory


def test_other_store_is_refused(rig: Rig) -> None:
    rig.store.objects.clear()
    with pytest.raises(ArchiveRefused, match="storeUrl"):
        rig.restart()


@pytest.mark.parametrize("entries", [2, 256])
def test_data_directory_of_another_broker_name_is_refused(rig: Rig, entries: int) -> None:
    """The refusal covers the first epoch, and local copies that begin with a checkpoint or with entry 0."""
    rig.journal._checkpoints.period = entries
    rig.hot.put("t", count=3)
    rig.offload()
    rig.lifecycle.checkpoint.run()
    before = dict(rig.store.objects)

    def renamed() -> JournalWriter:
        disk, clock = RealDisk(), rig.clock
        return JournalWriter(rig.store, "", "z", rig.log_uuid, local=rig.directory, disk=disk, clock=clock)

    with pytest.raises(ArchiveRefused, match="name it b again"):
        renamed().ownership.attach(rig.hot.tail)
    assert rig.store.objects == before
    rig.restart()
    assert [(run.first, run.last) for run in rig.journal.catalog.queue("t", 0).runs()] == [(0, 2)]


def test_empty_store_is_refused_in_first_epoch_without_local_copy(rig: Rig) -> None:
    rig.hot.put("t", count=3)
    rig.offload()
    rig.store.objects.clear()
    (rig.directory / "journal.mirror").unlink()
    with pytest.raises(ArchiveRefused, match="storeUrl"):
        rig.restart()


def test_other_cluster_and_newer_format_are_refused(rig: Rig) -> None:
    key = keys.format_key("")
    rig.store.put(key, msgspec.msgpack.encode({"version": 1, "cluster": "other"}))
    with pytest.raises(ArchiveRefused, match="cluster other"):
        rig.restart()
    rig.store.put(key, msgspec.msgpack.encode({"version": 99, "cluster": "DefaultCluster"}))
    with pytest.raises(NewerFormat, match="99"):
        rig.restart()


def _without_condition(put: Callable[..., PutOutcome], key: str, data: bytes, **_: object) -> PutOutcome:
    return put(key, data)


def test_first_attachment_needs_the_probe(rig: Rig, tmp_path: Path) -> None:
    put = rig.store.put
    rig.store.put = partial(_without_condition, put)  # type: ignore[method-assign]
    with pytest.raises(ProbeFailed):
        rig.new_journal(tmp_path / "new").ownership.attach(0)
    del rig.store.put
    rig.store.fail("*", StoreUnavailable("down"))
    with pytest.raises(StoreUnavailable):
        rig.new_journal(tmp_path / "new").ownership.attach(0)
    assert isinstance(rig.store.put("x", b""), PutOutcome)


def test_start_without_the_store_serves_and_takes_its_epoch_later(rig: Rig) -> None:
    rig.hot.put("t", count=25)
    rig.offload()
    objects = rig.journal.catalog.objects()
    rig.store.fail("*", StoreUnavailable("down"), times=1000)
    rig.restart()
    assert not rig.attachment.online
    assert rig.journal.catalog.objects() == objects
    for job in (rig.offload, rig.lifecycle.evict.run, rig.lifecycle.expire.run):
        with pytest.raises(StoreUnavailable):
            job()
    with pytest.raises(NotAttached):
        rig.journal.append(Abort(round=0))
    assert rig.hot.evicted == []
    rig.store.faults.clear()
    rig.hot.put("t", count=5)
    rig.offload()
    assert rig.journal.ownership.epoch == 2
    assert rig.check_tiles("t") == 30


def test_diverged_older_copy_archives_nothing(rig: Rig, tmp_path: Path) -> None:
    """Its offsets may denote other messages in the archive. It is refused, now and at its next start."""
    rig.hot.put("t", count=5)
    rig.offload()
    copy = tmp_path / "copy"
    shutil.copytree(rig.directory, copy)
    end = rig.hot.tail
    rig.hot.put("t", count=5)
    rig.offload()
    entries = rig.journal.catalog.next_seq
    rig.hot.lose_above(end)
    rig.directory = copy
    rig.store.fail("*", StoreUnavailable("down"), times=1000)
    rig.restart()
    rig.hot.put("t", count=25)  # other messages at the offsets 5 to 9
    rig.store.faults.clear()
    for job in (rig.offload, rig.lifecycle.evict.run, rig.lifecycle.expire.run):
        with pytest.raises(ArchiveRefused, match="older copy"):
            job()
    with pytest.raises(ArchiveRefused, match="older copy"):
        rig.restart()
    assert rig.hot.evicted == []
    assert rig.new_journal(tmp_path / "reader").catalog.next_seq == 0
    assert len([key for key in rig.store.objects if "/journal/" in key]) == entries


def test_older_copy_not_behind_its_archive_resumes(rig: Rig, tmp_path: Path) -> None:
    rig.hot.put("t", count=5)
    rig.offload()
    copy = tmp_path / "copy"
    shutil.copytree(rig.directory, copy)
    rig.directory = copy
    rig.store.fail("*", StoreUnavailable("down"), times=1000)
    rig.restart()
    rig.hot.put("t", count=5)
    rig.store.faults.clear()
    rig.offload()
    assert rig.check_tiles("t") == 10
    rig.restart()
    assert rig.attachment.online


def test_torn_mirror_is_truncated_and_completed_from_the_store(rig: Rig, tmp_path: Path) -> None:
    rig.hot.put("t", count=3)
    rig.offload()
    mirror = tmp_path / "state" / "journal.mirror"
    mirror.write_bytes(mirror.read_bytes()[:-7])
    rig.restart()
    assert rig.check_tiles("t") == 3
    mirror.unlink()
    rig.restart()
    assert rig.check_tiles("t") == 3


def test_log_below_its_archive_resumes_above_it(rig: Rig) -> None:
    rig.hot.put("t", count=12)
    rig.offload()
    rig.hot.lose_above(500)
    rig.restart()
    assert rig.attachment.resume_at == 2000
    assert rig.attachment.queue_next == {("t", 0): 12}
    rig.hot.put("t", count=3)
    assert rig.hot.records[-1][3] == 14
    rig.offload()
    assert rig.check_tiles("t") == 15


def test_put_of_the_format_with_unknown_outcome_is_repeated() -> None:
    """A conditional PUT that S3 answers with 409 has an unknown outcome, too."""
    store = MemoryStore()
    store.fail("put", UnknownOutcome("no answer"), times=2)
    check_format(store, "", "DefaultCluster")
    with pytest.raises(ArchiveRefused, match="cluster DefaultCluster"):
        check_format(store, "", "other")
    lost = MemoryStore()
    lost.fail("put", UnknownOutcome("no answer"), times=1000)
    with pytest.raises(UnknownOutcome, match="is not stored after 3 attempts"):
        check_format(lost, "", "DefaultCluster")
