"""The command line when servers are down: an incomplete answer names the missing part, and the exit code is not 0."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from neve import admin as neve_admin
from neve.admin.topics import TopicAt
from neve.cli import main
from neve.client import connect
from neve.errors import ClientError
from neve.remoting.names import RESERVE_TIME
from tests.kit.server.neve import Serving, settings_as_options
from tests.kit.server.requests import Up

USAGE, NOT_FOUND, CONFLICT, UNREACHABLE = 2, 3, 5, 6
STOP_S = 60


def test_unreachable_brokers_are_an_error_instead_of_an_empty_list(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    theirs = {"listenPort": 0, "bindAddress": "127.0.0.1", "kvConfigPath": tmp_path / "kv"}
    with Serving(tmp_path / "namesrv", "namesrv", *settings_as_options(theirs)) as names:
        namesrv = names.namesrv
        ours = {"namesrvAddr": namesrv, "storePathRootDir": tmp_path / "data", "listenPort": 0, "adminPort": -1}
        ours |= {"bindAddress": "127.0.0.1", "brokerIP1": "127.0.0.1", "mappedFileSizeCommitLog": "1m"}
        with Serving(tmp_path / "broker", "broker", *settings_as_options(ours)) as broker:
            assert main.run(["topic", "create", "orders", "-n", namesrv]) == 0
            assert main.run(["topic", "list", "-n", namesrv]) == 0
            assert main.run(["topic", "ttl", "list", "-n", namesrv]) == 0
            assert capfd.readouterr().out.count("orders") == 2
            broker.signal(signal.SIGSTOP)
            assert main.run(["topic", "ttl", "list", "-n", namesrv]) == UNREACHABLE
            assert "not reached: the brokers of orders" in capfd.readouterr().err
            broker.kill()
        for verb in (["topic", "list"], ["topic", "list", "--all"], ["topic", "ttl", "list"]):
            assert main.run([*verb, "-n", namesrv]) == UNREACHABLE
            said = capfd.readouterr()
            assert said.out == ""
            assert "knows no broker" in said.err


def test_archive_commands_find_the_admin_port_by_name_server(
    neve_up: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("NEVE_ADMIN", "NEVE_STORE"):
        monkeypatch.delenv(name, raising=False)
    with neve_up(tmp_path / "neve", "--set", "adminPort=0") as neve:
        asked = ["-n", neve.namesrv]
        assert main.run(["archive", "list", *asked]) == 0
        assert f"asking broker broker-a at {neve.admin}" in capfd.readouterr().err
        assert main.run(["archive", "offload", "--broker", "broker-a", *asked]) == 0
        assert main.run(["archive", "journal", "--broker", "broker-b", *asked]) == NOT_FOUND
        assert main.run(["archive", "list", "--broker", "broker-a", "--admin", neve.admin, *asked]) == USAGE
        capfd.readouterr()
        monkeypatch.setenv("NEVE_ADMIN", neve.admin)
        assert main.run(["archive", "verify"]) == 0
        assert f"asking the broker at {neve.admin} (NEVE_ADMIN)" in capfd.readouterr().err
        monkeypatch.setenv("NEVE_STORE", f"dir:{tmp_path / 'neve' / 'data' / 'archive'}")
        assert main.run(["archive", "verify"]) == 0
        assert "(NEVE_STORE); --admin asks a broker" in capfd.readouterr().err

        async def configured() -> dict[str, str]:
            async with connect(neve.namesrv) as client:
                return await client.admin.broker_config("broker-a")

        assert asyncio.run(configured())["adminPort"] == neve.admin.rpartition(":")[2]


def test_archive_commands_use_default_admin_port_without_name_server(capfd: pytest.CaptureFixture[str]) -> None:
    main.run(["archive", "list", "-n", "127.0.0.1:1"])
    assert "asking the broker at 127.0.0.1:10913: no name server" in capfd.readouterr().err


def test_topic_updates_keep_unchanged_settings(neve_up: Up, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """UPDATE_AND_CREATE_TOPIC replaces the whole row, so each writer must start from the current row."""
    with neve_up(tmp_path / "neve") as neve:
        asked = ["-n", neve.namesrv]

        async def row(topic: str) -> dict[str, Any]:
            async with neve_admin.connect(neve.namesrv) as admin:
                return dict((await admin.topics.settings_of(topic))[0].settings)

        async def odd(topic: str) -> dict[str, Any]:
            settings: dict[str, Any] = {
                "readQueueNums": 16,
                "writeQueueNums": 12,
                "perm": 4,
                "order": True,
                "topicSysFlag": 2,
            }
            async with neve_admin.connect(neve.namesrv) as admin:
                settings |= {"topicFilterType": "MULTI_TAG"}
                await admin.topics.change(topic, TopicAt("broker-a", settings), {})
            return await row(topic)

        async def create(topic: str, **arguments: Any) -> None:
            async with connect(neve.namesrv) as client:
                await client.admin.create_topic(topic, **arguments)

        present = asyncio.run(odd("orders"))
        assert (present["readQueueNums"], present["writeQueueNums"]) == (16, 12)
        assert present["order"]
        assert present["topicSysFlag"] == 2
        assert main.run(["topic", "ttl", "set", "orders", "90d", "--yes", *asked]) == 0
        assert asyncio.run(row("orders")) == {**present, "attributes": {RESERVE_TIME: "2160"}}
        assert main.run(["topic", "ttl", "unset", "orders", "--yes", *asked]) == 0
        assert asyncio.run(row("orders")) == present

        assert main.run(["topic", "create", "orders", "--broker", "broker-a", *asked]) == CONFLICT
        assert "exists already at broker-a" in capfd.readouterr().err
        asyncio.run(create("orders"))
        assert asyncio.run(row("orders")) == present
        with pytest.raises(ClientError, match="orders has 16 queues at broker-a: with 15, consumers would not see"):
            asyncio.run(create("orders", queues=15))
        assert asyncio.run(row("orders")) == present
        asyncio.run(create("orders", queues=20))
        assert asyncio.run(row("orders")) == {**present, "readQueueNums": 20, "writeQueueNums": 20}


def test_import_creates_a_topic_with_the_exported_settings(
    neve_up: Up, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with neve_up(tmp_path / "neve") as neve:
        asked = ["-n", neve.namesrv]

        async def row() -> dict[str, Any]:
            async with neve_admin.connect(neve.namesrv) as admin:
                return dict((await admin.topics.settings_of("orders"))[0].settings)

        async def closed() -> dict[str, Any]:
            async with connect(neve.namesrv) as client:
                await client.admin.create_topic("orders", 4, {RESERVE_TIME: "48"})
                for queue in range(4):
                    await client.send("orders", f"of {queue}", queue=queue)
            async with neve_admin.connect(neve.namesrv) as admin:
                at = (await admin.topics.settings_of("orders"))[0]
                await admin.topics.change("orders", at, {"writeQueueNums": "2", "perm": "4", "order": "true"})
            return await row()

        async def bodies() -> list[bytes]:
            async with connect(neve.namesrv) as client:
                return [(await client.pull("orders", queue, 0)).messages[0].body for queue in range(4)]

        before = asyncio.run(closed())
        assert main.run(["export", str(tmp_path / "out"), "-t", "orders", *asked]) == 0
        assert main.run(["topic", "delete", "orders", "--yes", *asked]) == 0
        capfd.readouterr()
        assert main.run(["import", str(tmp_path / "out"), *asked]) == 0
        said = capfd.readouterr().err
        assert asyncio.run(bodies()) == [b"of 0", b"of 1", b"of 2", b"of 3"]
        assert asyncio.run(row()) == {**before, "writeQueueNums": 4, "perm": 6}
        hints = re.findall(r"restore with: neve (.*)", said)
        for hint in hints:
            assert main.run([*hint.split(), *asked]) == 0
        assert asyncio.run(row()) == before
