"""Tests of the identity file of an archive in a data directory: durable over any power cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from infra.disk.filesystem import RealDisk
from infra.objects.store import StoreUnavailable
from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import Abort, AnyEntry, Expire, Intent, NewerFormat, PlannedObject, encode_entry
from neve.archive.format.keys import data_key
from tests.kit.store.sim_disk import SimDisk
from tests.unit.lifecycle.fakes import Rig
from tiered.journal.identity import ArchiveIdentity, IdentityFile, Since
from tiered.journal.local_journal import LocalJournal
from tiered.journal.named_topics import Lasts, raise_lasts

STATE = Path("/state")
WHOLE, SINCE = STATE / "identity.msgpack", STATE / "identity.since"


class PowerCut(Exception):
    """The simulated power cut."""


class CutDisk(SimDisk):
    """A disk with a power cut before, within or right after one of its writes."""

    def __init__(self, left: int, seed: int) -> None:
        super().__init__(seed=seed)
        self.left = left

    def write_atomic(self, path: Path, data: bytes) -> None:
        self._step(lambda: super(CutDisk, self).write_atomic(path, data))

    def append(self, path: Path, data: bytes) -> None:
        self._step(lambda: super(CutDisk, self).append(path, data[: len(data) // 2]))
        self._step(lambda: super(CutDisk, self).append(path, data[len(data) // 2 :]))

    def sync_file(self, path: Path, file: Any) -> None:
        self._step(lambda: super(CutDisk, self).sync_file(path, file))

    def _step(self, write: Callable[[], None]) -> None:
        self._count()
        write()
        self._count()

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise PowerCut

    def next_life(self, dice: random.Random) -> CutDisk:
        after = CutDisk(dice.randrange(20), 0)
        survivors = self.power_cut(dice.randrange(1 << 30))
        vars(after).update({name: value for name, value in vars(survivors).items() if name != "left"})
        return after


def opened(disk: SimDisk) -> tuple[IdentityFile, ArchiveIdentity | None]:
    file = IdentityFile(STATE, disk)
    return file, file.read()


def at_random(dice: random.Random) -> Lasts:
    return {f"t{dice.randrange(8)}": {dice.randrange(3): dice.randrange(1000)} for _ in range(dice.randrange(1, 4))}


def includes(known: Lasts, named: Lasts) -> bool:
    return all(known.get(topic, {}).get(queue, -1) >= last for topic, of in named.items() for queue, last in of.items())


class IdentityHistory:
    """Lower and upper bounds of the identity that one directory must have after a power cut."""

    def __init__(self) -> None:
        self.known = ArchiveIdentity("b", "u", 1, 0, {})
        self.tried: Lasts = {}
        self.high = 0

    def resume(self, file: IdentityFile, dice: random.Random) -> None:
        """Use the file like `KnownArchive` until the power cut."""
        while True:
            names, high = at_random(dice), self.known.high + dice.randrange(3)
            self.high = high
            for topic, lasts in names.items():
                raise_lasts(self.tried.setdefault(topic, {}), lasts)
            more = msgspec.msgpack.decode(msgspec.msgpack.encode(self.known), type=ArchiveIdentity)
            for topic, lasts in names.items():
                raise_lasts(more.named.setdefault(topic, {}), lasts)
            more.high, more.heard = high, more.heard + dice.randrange(2)
            if file.takes_more and dice.random() < 0.8:
                file.add(Since(more.high, more.heard, names))
            else:
                file.write(more)
            self.known = more

    def check(self, found: ArchiveIdentity | None) -> ArchiveIdentity:
        if found is None:
            assert not self.known.named, "the first one never ended"
            return self.known
        assert includes(found.named, self.known.named)
        assert includes(self.tried, found.named)
        assert self.known.high <= found.high <= self.high
        assert found.heard >= self.known.heard
        return found


@pytest.mark.parametrize("seed", range(12))
def test_power_cut_at_any_write_keeps_identity_used_by_entries(seed: int) -> None:
    for left in range(40):
        dice, history = random.Random(seed * 1000 + left), IdentityHistory()
        cut = CutDisk(left, seed)
        for _ in range(3):
            file, found = opened(cut)
            history.known = history.check(found)
            with pytest.raises(PowerCut):
                history.resume(file, dice)
            cut = cut.next_life(dice)
        history.check(opened(cut)[1])


def test_frames_older_than_the_snapshot_are_ignored() -> None:
    disk = SimDisk()
    file, _ = opened(disk)
    file.write(ArchiveIdentity("b", "u", 1, 0, {}))
    file.add(Since(5, 1, {"t": {0: 9}}))
    older = disk.read(SINCE)
    file.write(ArchiveIdentity("b", "u", 1, 0, {}))  # like an identity after an ABORT
    disk.write_atomic(SINCE, older)
    found = opened(disk)[1]
    assert found is not None
    assert (found.named, found.high, found.serial) == ({}, 0, 2)


def test_snapshot_precedes_additions_after_a_failure_and_a_start() -> None:
    disk = SimDisk()
    file, _ = opened(disk)
    assert not file.takes_more
    file.write(ArchiveIdentity("b", "u", 1, 0, {}))
    file.add(Since(5, 1, {"t": {0: 9}}))
    disk.fail_sync = lambda path: path == SINCE
    with pytest.raises(OSError, match="Input/output error"):
        file.add(Since(6, 1, {"t": {0: 10}}))
    assert not file.takes_more, "what is behind a torn frame is never read"
    disk.fail_sync = lambda path: False
    file.write(ArchiveIdentity("b", "u", 1, 6, {"t": {0: 10}}))
    assert file.takes_more
    assert not opened(disk)[0].takes_more


def test_identity_bytes_written_are_proportional_to_additions() -> None:
    disk = SimDisk()
    file, _ = opened(disk)
    known = ArchiveIdentity("b", "u", 1, 0, {f"topic-{number:05d}": {0: 1, 1: 2} for number in range(5_000)})
    file.write(known)
    size, arrived, wholes = disk.size(WHOLE), 0, 0
    for number in range(20_000):
        if file.takes_more:
            before = disk.size(SINCE)
            file.add(Since(number, 1, {"topic-00001": {0: number}}))
            arrived += disk.size(SINCE) - before
        else:
            file.write(known)
            wholes += 1
    assert 1 <= wholes <= arrived / size


def test_identity_of_a_newer_format_is_refused() -> None:
    disk = SimDisk()
    disk.make_dirs(STATE)
    disk.write_atomic(
        WHOLE, msgspec.msgpack.encode(msgspec.structs.replace(ArchiveIdentity("b", "u", 1, 0, {}), version=2))
    )
    with pytest.raises(NewerFormat, match=r"identity\.msgpack has format 2: this program knows up to 1"):
        opened(disk)


# ---- use by the journal


class WrittenBytes:
    """The number of bytes written to the two files."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        for verb in ("write_atomic", "append"):
            patch.setattr(RealDisk, verb, self._noting(getattr(RealDisk, verb)))

    def _noting(self, write: Callable[[RealDisk, Path, bytes], None]) -> Callable[[RealDisk, Path, bytes], None]:
        def noted(disk: RealDisk, path: Path, data: bytes) -> None:
            self.bytes += len(data) * path.name.startswith("identity.")
            write(disk, path, data)

        return noted

    def take(self) -> int:
        written, self.bytes = self.bytes, 0
        return written


def intent(number: int, topics: list[str]) -> Intent:
    start, end = number * 64, number * 64 + 64
    names = [
        PlannedObject(
            key=data_key("", topic, "2026-07-05", "b", start=start, end=end, epoch=1),
            topic=topic, day="2026-07-05", start=start, end=end,
            queues=dict.fromkeys(range(4), (number * 10, number * 10 + 9)),
        )
        for topic in topics
    ]  # fmt: skip
    return Intent(round=number, names=names)


def test_intent_cost_is_independent_of_the_number_of_topics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path / "state")
    topics = [f"topic-{number:05d}" for number in range(10_000)]
    rig.journal.append(intent(0, topics))
    rig.restart()
    written = WrittenBytes(monkeypatch)
    for number in range(1, 6):
        rig.journal.append(intent(number, topics[:1]))
        assert 0 < written.take() < 300
    rig.journal.append(Expire(keys=[], minimums={topics[1]: {0: 7}}, delete_after_ms=0), plan=rig.journal.named.mark())
    assert 0 < written.take() < 300
    rig.restart()
    assert rig.journal.ownership.reaches == 6 * 64
    following = rig.attachment.queue_next
    assert (following[topics[0], 3], following[topics[1], 0], len(following)) == (60, 10, 40_000)


def test_start_without_the_store_knows_offsets_of_unwritten_entries(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "state")
    rig.journal.append(intent(0, ["t"]))
    rig.store.fail("*", StoreUnavailable("down"), times=1000)
    with pytest.raises(StoreUnavailable):
        rig.journal.append(intent(1, ["t", "u"]))
    rig.restart()
    assert not rig.attachment.online
    assert rig.attachment.resume_at == 128
    assert (rig.attachment.queue_next["t", 0], rig.attachment.queue_next["u", 3]) == (20, 20)


def test_mirror_of_a_first_start_survives_a_power_cut() -> None:
    """Without the store, only the mirror records what was archived, so its directory must be synced."""
    for seed in range(20):
        disk = SimDisk(seed=seed)
        disk.make_dirs(STATE)
        journal = LocalJournal(STATE, disk)
        for seq in range(3):
            journal.append(seq, encode_entry(Abort(round=seq)))
        applied: list[int] = []
        catalog = Catalog()
        after = disk.power_cut()

        def apply(
            seq: int, entry: AnyEntry, _: bytes, catalog: Catalog = catalog, applied: list[int] = applied
        ) -> None:
            catalog.apply(seq, entry)
            applied.append(seq)

        LocalJournal(STATE, after).replay(catalog, "b", apply)
        assert applied == [0, 1, 2]
