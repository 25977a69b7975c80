"""Tests of FileRegister: one writer per revision wins, writes are durable, damage is detected."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec.structs import replace

from controller.register import MAX_BROKER_SETS, NEVER, FileRegister, RegisterUnavailable, Revision, StoredSet
from infra.disk.filesystem import Disk, RealDisk
from infra.loop.threads import SYSTEM_THREADS
from infra.process.startup import EXIT_DISK, EXIT_IN_USE, StartupError
from tests.kit.store.gated_disk import GatedDisk
from tests.kit.store.sim_disk import SimDisk
from tests.unit.controller.registered import run, value

PATH = Path("/controller/register.json")
T = TypeVar("T")


async def opened(disk: Disk, path: Path = PATH) -> FileRegister:
    register = FileRegister(path, disk, SYSTEM_THREADS)
    await register.open()
    return register


async def test_concurrent_writes_of_one_revision_have_one_winner() -> None:
    register = await opened(SimDisk())
    assert await register.get("b") == StoredSet(None, NEVER)
    first = await register.put(value(), NEVER)
    assert first is not None
    assert await register.put(value(epoch=2), NEVER) is None
    results = await asyncio.gather(*(register.put(value(epoch=epoch), first) for epoch in (2, 3, 4)))
    assert [result is None for result in results] == [False, True, True] and results[0] is not None
    assert await register.get("b") == StoredSet(value(epoch=2), results[0])
    assert list(await register.all()) == ["b"]


async def test_revision_is_not_reused_after_set_is_removed_and_recreated() -> None:
    disk = SimDisk()
    register = await opened(disk)
    old = await register.put(value(), NEVER)
    assert old is not None
    assert not await register.remove("b", Revision(old.number + 1))
    assert await register.remove("b", old)
    assert not await register.remove("b", old)
    await register.close()
    register = await opened(disk)
    new = await register.put(value(), NEVER)
    assert new is not None and new > old
    assert await register.put(value(epoch=2), old) is None
    assert not await register.remove("b", old)


@pytest.mark.parametrize("seed", range(10))
async def test_acknowledged_write_survives_power_cut(seed: int) -> None:
    disk = SimDisk()
    register = await opened(disk)
    revisions: dict[str, Revision] = {}
    for name in ("a", "b", "c"):
        revisions[name] = await register.put(value(name), NEVER) or NEVER
    again = await opened(disk.power_cut(seed))
    for name, revision in revisions.items():
        assert await again.get(name) == StoredSet(value(name), revision)


async def test_second_process_cannot_open_register() -> None:
    disk = SimDisk()

    register = await opened(disk)
    with pytest.raises(StartupError) as refused:
        await opened(disk)
    assert refused.value.exit_code == EXIT_IN_USE
    await register.close()
    await opened(disk)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data.replace(b"register 1", b"register 2"),
        lambda data: data.replace(b'"master":1', b'"master":2'),
        lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:],
        lambda data: b"{}",
    ],
)
def test_damaged_register_fails_to_open(damage: Callable[[bytes], bytes]) -> None:
    async def main() -> SimDisk:
        disk = SimDisk()
        register = await opened(disk)
        await register.put(value(), NEVER)
        await register.close()
        return disk

    disk = run(main)
    disk.write_atomic(PATH, damage(disk.read(PATH)))
    with pytest.raises(StartupError, match="is damaged") as refused:
        asyncio.run(opened(disk))
    assert refused.value.exit_code == EXIT_DISK
    with pytest.raises(StartupError, match="is damaged"):  # the failed open has released the lock
        asyncio.run(opened(disk))


async def test_write_on_full_disk_changes_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    disk = GatedDisk()
    register = await opened(disk, tmp_path / "register.json")
    revision = await register.put(value(), NEVER)
    assert revision is not None
    disk.fault = OSError(errno.ENOSPC, "full")
    with pytest.raises(RegisterUnavailable):
        await register.put(value(epoch=2), revision)
    assert await register.get("b") == StoredSet(value(), revision)
    disk.fault = None
    assert await register.put(value(epoch=2), revision) is not None
    assert not register.broken


async def test_register_refuses_writes_after_an_io_error(tmp_path: Path) -> None:
    disk = GatedDisk()
    register = await opened(disk, tmp_path / "register.json")
    disk.fault = OSError(errno.EIO, "broken")
    with pytest.raises(RegisterUnavailable):
        await register.put(value(), NEVER)
    disk.fault = None
    with pytest.raises(RegisterUnavailable):
        await register.put(value(), NEVER)
    assert await register.get("b") == StoredSet(None, NEVER)
    assert "broken" in register.broken


async def test_cancelled_write_completes_before_the_next_write(tmp_path: Path) -> None:
    disk = GatedDisk()
    register = await opened(disk, tmp_path / "register.json")
    disk.go.clear()
    first = asyncio.create_task(register.put(value("a"), NEVER))
    await asyncio.to_thread(disk.began.wait, 20)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(register.put(value("b"), NEVER))
    await asyncio.sleep(0)
    disk.go.set()
    assert await second is not None
    await register.close()
    again = await opened(RealDisk(), tmp_path / "register.json")
    assert list(await again.all()) == ["a", "b"] == list(await register.all())


async def test_register_limits_the_number_of_broker_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_BROKER_SETS == 1_000
    monkeypatch.setattr("controller.register.MAX_BROKER_SETS", 2)

    register = await opened(SimDisk())
    for name in ("a", "b"):
        await register.put(value(name), NEVER)
    with pytest.raises(RegisterUnavailable, match="full"):
        await register.put(value("c"), NEVER)
    held, revision, _ = await register.get("a")
    assert held is not None
    assert await register.put(replace(held, next_broker_id=3), revision) is not None
