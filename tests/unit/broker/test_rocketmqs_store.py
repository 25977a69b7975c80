"""A store of Apache RocketMQ is recognized and left unchanged."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import pytest

from broker import rocketmqs_store
from broker.doctor import checks
from broker.tables.state_file import StateFile
from infra.disk.filesystem import RealDisk
from infra.process.startup import StartupError
from tests.kit.broker.in_process import running, send

# consumerOffset.json in fastjson's format
OFFSETS = b'{\n\t"dataVersion":{"counter":3},\n\t"offsetTable":{"orders@billing":{0:41,1:7\n\t\t}\n\t}\n}'


def store_of_rocketmqs(root: Path) -> Path:
    (root / "commitlog").mkdir(parents=True)
    (root / "commitlog" / ("0" * 20)).write_bytes(bytes(4096))
    (root / "checkpoint").write_bytes(
        struct.pack(">5q", 1_764_000_000_000, 1_764_000_000_000, 0, 9 << 40, 9 << 40).ljust(4096, b"\0")
    )
    (root / "config").mkdir()
    (root / "config" / "consumerOffset.json").write_bytes(OFFSETS)
    return root


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def start(root: Path) -> str:
    async def main() -> None:
        async with running(root):
            raise AssertionError("it started")

    with pytest.raises(StartupError) as refused:
        asyncio.run(main())
    return str(refused.value)


def test_start_on_a_rocketmq_store_is_refused_without_a_change(tmp_path: Path) -> None:
    root = store_of_rocketmqs(tmp_path / "store")
    before = contents(root)
    told = start(root)
    assert "a store of Apache RocketMQ's" in told
    assert "docs/migrate/overview.md" in told
    assert contents(root) == before
    conf = tmp_path / "broker.conf"
    conf.write_text(f"storePathRootDir={root}\n")
    found = next(check for check in checks(conf, ()) if check.check == "data directory")
    assert (found.state, "a store of Apache RocketMQ's" in found.found) == ("fail", True)


def test_neves_own_store_is_not_taken_for_rocketmqs(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as (_, connection):
            await send(connection, "orders")

    asyncio.run(main())
    assert (tmp_path / "checkpoint").exists()
    assert not rocketmqs_store.is_one(RealDisk(), tmp_path)
    (tmp_path / "checkpoint").write_bytes(b'{"physical":1}'.ljust(4096))
    assert not rocketmqs_store.is_one(RealDisk(), tmp_path)


def test_rocketmq_table_of_offsets_is_distinguished_from_a_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / "consumerOffset.json"
    table = StateFile(RealDisk(), path, dict)
    path.write_bytes(OFFSETS)
    with pytest.raises(ValueError, match=r"consumerOffset\.json: a table of Apache RocketMQ's"):
        table.load()
    path.write_bytes(b'{"neveFormat":1,"offsetTable":{"orders@billing":{"0":41')
    with pytest.raises(ValueError, match="damaged"):
        table.load()
