"""A broker's files are readable only by their owner: the log, the tables and diverged tails contain users' secrets."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.store import truncation
from infra.disk.filesystem import RealDisk
from tests.kit.broker.in_process import running, send

SECRET_HOLDERS = ("commitlog", "config", "diverged")


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(path: Path) -> bool:
    return path.stat().st_mode & 0o077 != 0


async def start_and_keep_a_diverged_tail(root: Path) -> None:
    async with running(root) as (broker, connection):
        await send(connection, "t")
        end = broker.store.max_physical_offset
        truncation.keep(broker.store.log, 0, end, epoch=1, root=root, disk=RealDisk())


def test_files_of_a_broker_are_private(tmp_path: Path) -> None:
    root = tmp_path / "data"
    asyncio.run(start_and_keep_a_diverged_tail(root))
    files = [path for path in root.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} >= set(SECRET_HOLDERS)
    assert [path for path in files if open_to_others(path)] == []
    assert [name for name in SECRET_HOLDERS if open_to_others(root / name)] == []


def test_directories_of_an_earlier_start_are_made_private(tmp_path: Path) -> None:
    root = tmp_path / "data"
    asyncio.run(start_and_keep_a_diverged_tail(root))
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    asyncio.run(start_and_keep_a_diverged_tail(root))
    assert [name for name in SECRET_HOLDERS if open_to_others(root / name)] == []
