"""The command line when servers are gone: an answer that lacks something says what, and its exit code is not 0."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from neve.cli import main
from neve.client import connect
from tests.server_process import Up
from tests.servers.neve import Serving, settings_as_options

USAGE, NOT_FOUND, UNREACHABLE = 2, 3, 6
STOP_S = 60


def test_brokers_that_are_frozen_or_gone_are_no_empty_list(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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


def test_archive_verbs_find_the_admin_port_of_the_name_servers_broker(
    neve_up: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("NEVE_ADMIN", "NEVE_STORE"):
        monkeypatch.delenv(name, raising=False)
    with neve_up(tmp_path / "neve", "--set", "adminPort=0") as neve:
        asked = ["-n", neve.namesrv]
        assert main.run(["archive", "ls", *asked]) == 0
        assert f"asking broker broker-a at {neve.admin}" in capfd.readouterr().err
        assert main.run(["archive", "offload", "--broker", "broker-a", *asked]) == 0
        assert main.run(["archive", "journal", "--broker", "broker-b", *asked]) == NOT_FOUND
        assert main.run(["archive", "ls", "--broker", "broker-a", "--admin", neve.admin, *asked]) == USAGE
        capfd.readouterr()
        monkeypatch.setenv("NEVE_ADMIN", neve.admin)
        assert main.run(["archive", "verify"]) == 0
        assert f"asking the broker at {neve.admin} (NEVE_ADMIN)" in capfd.readouterr().err
        monkeypatch.setenv("NEVE_STORE", f"dir:{tmp_path / 'neve' / 'data' / 'archive'}")
        assert main.run(["archive", "verify"]) == 0
        assert "(NEVE_STORE); --admin asks a broker" in capfd.readouterr().err

        async def configured() -> dict[str, str]:
            async with connect(neve.namesrv) as client:
                return await client.broker_config("broker-a")

        assert asyncio.run(configured())["adminPort"] == neve.admin.rpartition(":")[2]


def test_without_a_name_server_the_usual_admin_port_is_asked(capfd: pytest.CaptureFixture[str]) -> None:
    main.run(["archive", "ls", "-n", "127.0.0.1:1"])
    assert "asking the broker at 127.0.0.1:10913: no name server" in capfd.readouterr().err
