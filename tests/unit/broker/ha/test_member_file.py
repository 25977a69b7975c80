"""A member's state file survives its process, and a copy of its directory is recognized."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from broker.ha.member_events import SavedMember
from broker.ha.member_file import MemberFile, MemberFileDamaged
from tests.kit.store.sim_disk import SimDisk

ROOT = Path("/store")
SAVED = SavedMember(
    broker_id=2, check_code="a;1", incarnation="i", starts=3, master_epoch=4, sync_state_set=(1, 2), confirm=9
)


def loaded(disk: SimDisk) -> tuple[MemberFile, bool]:
    file = MemberFile(disk, ROOT)
    return file, file.load()


def test_saved_state_and_followed_epoch_survive_a_power_cut() -> None:
    disk = SimDisk()
    file, is_copy = loaded(disk)
    assert not is_copy
    assert not file.is_there
    file.save(SAVED)
    file.follows(7, "the archive's name of it")
    again, is_copy = loaded(disk.power_cut())
    assert (again.saved, again.followed_epoch, is_copy) == (SAVED, 7, False)
    again.save(msgspec.structs.replace(SAVED, confirm=10))
    again.follows(8, "")  # a master without an archive sends an empty name
    assert (again.followed_epoch, again.log_name) == (8, "the archive's name of it")


def test_copied_directory_is_recognized_until_it_saves_its_own_state() -> None:
    disk = SimDisk()
    loaded(disk)[0].save(SAVED)
    copy = disk.copy()
    file, is_copy = loaded(copy)
    assert is_copy
    file.save(SavedMember())
    assert not loaded(copy)[1]
    assert not loaded(disk)[1], "the copied one is what it was"


def test_damaged_file_raises_instead_of_a_default() -> None:
    disk = SimDisk()
    file, _ = loaded(disk)
    file.save(SAVED)
    path = file.directory / "member.json"
    for damaged in (b"", b"{", b'{"version":2}', b'{"saved":{"broker_id":"x"}}'):
        disk.write_atomic(path, damaged)
        with pytest.raises(MemberFileDamaged):
            loaded(disk)
