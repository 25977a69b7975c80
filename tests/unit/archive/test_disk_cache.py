"""Tests of the disk cache: bounded, verified at each read, and failures only disable it."""

import errno
from pathlib import Path

import pytest

from infra.disk.filesystem import Disk
from tests.kit.store.sim_disk import SimDisk
from tiered.worker.disk_cache import DiskCache

DIRECTORY = Path("/data/coldcache")
BLOCK = b"x" * 10_000


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()


def files(disk: Disk) -> list[Path]:
    return [DIRECTORY / name for name in disk.list_dir(DIRECTORY)]


def test_disk_cache_keeps_entries_over_a_restart_within_its_bound(disk: SimDisk) -> None:
    cache = DiskCache(disk, DIRECTORY, 100_000)
    for number in range(30):
        cache.put(f"n{number}", BLOCK)
        assert cache.nbytes <= 100_000
    assert (cache.get("n29"), cache.get("n0"), len(files(disk))) == (BLOCK, None, 9)
    again = DiskCache(disk, DIRECTORY, 100_000)
    assert (again.get("n29"), again.get("n28"), again.nbytes) == (BLOCK, BLOCK, cache.nbytes)
    smaller = DiskCache(disk, DIRECTORY, 50_000)
    assert smaller.nbytes <= 50_000 and len(files(disk)) == 4


def test_scan_does_not_evict_reused_entries(disk: SimDisk) -> None:
    cache = DiskCache(disk, DIRECTORY, 100_000)
    cache.put("again", BLOCK)
    assert cache.get("again") == BLOCK
    for number in range(50):
        cache.put(f"scan{number}", BLOCK)
    assert cache.get("again") == BLOCK


@pytest.mark.parametrize("position", [0, 9, 13, 16, 18, 500, 10_000])
def test_damaged_file_is_a_miss_and_deleted(disk: SimDisk, position: int) -> None:
    cache = DiskCache(disk, DIRECTORY, 1 << 20)
    cache.put("name", BLOCK)
    (file,) = files(disk)
    raw = bytearray(disk.read(file))
    raw[position] ^= 1
    disk.write_atomic(file, bytes(raw[:-1] if position == 500 else raw))
    assert (cache.get("name"), files(disk), cache.nbytes) == (None, [], 0)
    cache.put("name", BLOCK)
    assert cache.get("name") == BLOCK


def test_file_under_a_wrong_name_is_a_miss(disk: SimDisk) -> None:
    cache = DiskCache(disk, DIRECTORY, 1 << 20)
    cache.put("one", BLOCK)
    (one,) = files(disk)
    cache.put("two", BLOCK[:100])
    (two,) = [file for file in files(disk) if file != one]
    disk.rename(one, two)
    assert cache.get("one") is None and cache.get("two") is None


def test_files_of_a_dead_process_are_removed(disk: SimDisk) -> None:
    disk.make_dirs(DIRECTORY)
    disk.append(DIRECTORY / ("a" * 64 + ".0.part"), BLOCK)
    cache = DiskCache(disk, DIRECTORY, 1 << 20)
    assert (files(disk), cache.nbytes) == ([], 0)


class FailingCacheDisk(SimDisk):
    """A disk that fails at one kind of call, like a full or failing disk."""

    fails = ""

    def append(self, path: Path, data: bytes) -> None:
        if self.fails == "append":
            super().append(path, data[:10])
            raise OSError(errno.ENOSPC, "full")
        super().append(path, data)

    def read(self, path: Path) -> bytes:
        if self.fails == "read":
            raise OSError(errno.EIO, "broken")
        return super().read(path)

    def make_dirs(self, path: Path) -> None:
        if self.fails == "make_dirs":
            raise OSError(errno.EROFS, "read-only")
        super().make_dirs(path)


@pytest.mark.parametrize("fails", ["append", "read", "make_dirs"])
def test_failing_disk_only_disables_the_cache(fails: str) -> None:
    disk = FailingCacheDisk()
    disk.fails = fails if fails == "make_dirs" else ""
    cache = DiskCache(disk, DIRECTORY, 1 << 20)
    cache.put("before", BLOCK)
    disk.fails = fails
    cache.put("name", BLOCK)
    assert cache.get("name") is None
    assert cache.broken is not None
    disk.fails = ""
    cache.put("later", BLOCK)
    assert cache.get("later") is None
    if fails != "make_dirs":
        assert not any(file.suffix for file in files(disk))


def test_cache_shrinks_on_a_full_disk() -> None:
    disk = SimDisk(capacity=200_000)
    cache = DiskCache(disk, DIRECTORY, 150_000)
    for number in range(10):
        cache.put(f"n{number}", BLOCK)
    while cache.nbytes:
        held = cache.nbytes
        disk.append(Path("/data/log"), bytes(disk.room(DIRECTORY).available))
        cache.put(f"with {held}", BLOCK)
        assert cache.nbytes < held
        assert not cache.nbytes or disk.room(DIRECTORY).available >= 20_000
    assert cache.broken is None
