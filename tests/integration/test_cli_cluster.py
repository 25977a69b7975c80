"""The command line when servers are gone: an answer that lacks something says what, and its exit code is not 0."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from neve.cli import main
from tests.server_process import NEVE

UNREACHABLE = 6
STOP_S = 60


@contextlib.contextmanager
def server(verb: str, *settings: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    """A server in its own process, and its line on stdout."""
    options = [part for setting in settings for part in ("--set", setting)]
    process = subprocess.Popen([NEVE, verb, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait(STOP_S)
        assert process.stdout is not None
        process.stdout.close()


def test_brokers_that_are_frozen_or_gone_are_no_empty_list(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with server("namesrv", "listenPort=0", "bindAddress=127.0.0.1", f"kvConfigPath={tmp_path}/kv") as (_, names):
        namesrv = names["namesrv"]
        ours = [f"namesrvAddr={namesrv}", f"storePathRootDir={tmp_path}/data", "listenPort=0", "adminPort=-1"]
        ours += ["bindAddress=127.0.0.1", "brokerIP1=127.0.0.1", "mappedFileSizeCommitLog=1m"]
        with server("broker", *ours) as (broker, _):
            assert main.run(["topic", "create", "orders", "-n", namesrv]) == 0
            assert main.run(["topic", "list", "-n", namesrv]) == 0
            assert main.run(["topic", "ttl", "list", "-n", namesrv]) == 0
            assert capfd.readouterr().out.count("orders") == 2
            broker.send_signal(signal.SIGSTOP)
            assert main.run(["topic", "ttl", "list", "-n", namesrv]) == UNREACHABLE
            assert "not reached: the brokers of orders" in capfd.readouterr().err
            broker.send_signal(signal.SIGKILL)
            broker.wait(STOP_S)
        for verb in (["topic", "list"], ["topic", "list", "--all"], ["topic", "ttl", "list"]):
            assert main.run([*verb, "-n", namesrv]) == UNREACHABLE
            said = capfd.readouterr()
            assert said.out == ""
            assert "knows no broker" in said.err
