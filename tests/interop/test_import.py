"""Import the directory of a stopped Apache broker: no message is lost or duplicated, and the source is only read."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench.wire import Client
from tests.interop.in_flight import GROUP, InFlight
from tests.interop.promoted import ApacheAndSlave, apache_alone
from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import NEVE, Serving

pytestmark = pytest.mark.servers
_S = 120.0


def importing(pair: ApacheAndSlave, directory: Path) -> list[str]:
    return ["broker", *pair.settings("ASYNC_MASTER"), "--import-from", str(directory)]


def refusal(pair: ApacheAndSlave, directory: Path, *options: str) -> str:
    done = subprocess.run(
        [NEVE, *importing(pair, directory), *options], capture_output=True, text=True, timeout=_S, check=False
    )
    assert done.returncode not in {0, -9}, done.stdout
    return done.stderr


def files(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(directory)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_messages_in_flight_at_a_killed_broker_survive_an_import(tmp_path: Path) -> None:
    with apache_alone(tmp_path) as pair:
        store = tmp_path / "apache" / "store"
        in_flight = InFlight(pair.master.broker)
        positions = store / "config" / "consumerOffset.json"
        wait_until(
            lambda: positions.exists() and f"plain@{GROUP}" in positions.read_text(),
            "a killed broker has lost what it has not saved",
        )
        in_flight.more_before_the_end()
        in_flight.assert_is_on_its_way()
        pair.master.kill()
        before = files(store)
        told = subprocess.run(
            [NEVE, *importing(pair, store), "--dry-run"], capture_output=True, text=True, timeout=_S, check=True
        )
        report = json.loads(told.stdout)
        assert report["was_killed"]
        assert report["log_end"] > 0
        with Serving(pair.directory, *importing(pair, store)) as broker:
            assert files(store) == before, "the source is only read"
            broker.kill()
        with Serving(pair.directory, "broker", *pair.settings("ASYNC_MASTER")) as broker:
            in_flight.assert_goes_on_at(broker)
        assert "is not empty" in refusal(pair, store)


def test_import_rejects_a_running_broker(tmp_path: Path) -> None:
    with apache_alone(tmp_path) as pair:
        with Client(pair.master.broker) as client:
            client.create_topic("orders", 1)
            client.send("orders", 0, b"m")
        assert "answers: stop it first" in refusal(pair, tmp_path / "apache" / "store")
        assert not (pair.directory / "store").exists(), "what it takes until it is stopped is not missed"
