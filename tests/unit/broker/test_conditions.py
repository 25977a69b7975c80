"""A broker reports each condition that limits it, with its start time and its meaning."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from broker.broker_controller import BrokerController
from infra.disk.filesystem import Room
from infra.objects.store import StoreUnavailable
from neve.remoting.codes import RequestCode
from tests.kit.broker.in_process import ask, offload, running, send
from tests.kit.clock.waiting import until
from tests.kit.wire.admin_port import post_request


async def page(broker: BrokerController, path: str) -> str:
    assert broker.admin_address is not None
    url = "http://{}:{}/{}".format(*broker.admin_address, path)

    def read() -> str:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(read)


def gone(*_: object, **__: object) -> Any:
    raise StoreUnavailable("connection refused")


async def test_store_outage_is_reported_on_each_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path / "data", f"storeUrl=dir:{tmp_path / 'store'}") as (broker, _):
        jobs, journal = broker.archive.jobs, broker.archive.journal
        assert journal is not None
        assert "neve_archive_online 1.0" in await page(broker, "metrics")
        with monkeypatch.context() as patch:
            patch.setattr(journal.ownership, "follow", gone)
            jobs.run_now("state")
            await until(lambda: "state" in jobs.failing())
            ready = await page(broker, "readyz")
            assert ready.startswith("ready\n"), "hot traffic goes on"
            assert "archive unreachable since 2" in ready
            assert "connection refused; messages that are not on the local disk can't be read" in ready
            status = json.loads(await page(broker, "archive/status"))
            assert status["archive"] == "unreachable"
            assert [one["name"] for one in status["conditions"]] == ["archive unreachable"]
            assert "neve_archive_online 0.0" in await page(broker, "metrics")
        jobs.run_now("state")
        await until(lambda: not jobs.failing())
        assert "unreachable" not in await page(broker, "readyz")
        assert json.loads(await page(broker, "archive/status"))["archive"] == "online"


async def test_failed_sweep_is_reported_for_the_job_but_not_for_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next sweep runs hours later. Jobs that poll the store would report an outage before."""

    async with running(tmp_path / "data", f"storeUrl=dir:{tmp_path / 'store'}") as (broker, _):
        jobs, journal = broker.archive.jobs, broker.archive.journal
        assert journal is not None
        with monkeypatch.context() as patch:
            patch.setattr(journal.store, "list_prefixes", gone)
            jobs.run_now("sweep")
            await until(lambda: "sweep" in jobs.failing())
        assert "job sweep: StoreUnavailable: connection refused" in await page(broker, "readyz")
        status = json.loads(await page(broker, "archive/status"))
        assert (status["archive"], status["conditions"]) == ("online", [])
        assert "neve_archive_online 1.0" in await page(broker, "metrics")


async def test_full_disk_is_reported_on_each_page_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path / "data", "diskSpaceWarningLevelRatio=90") as (broker, connection):
        with monkeypatch.context() as patch:
            patch.setattr(type(broker.store.disk), "room", lambda self, path: Room(96, 4))
            await until(lambda: "disk full: " in caplog.text)
            ready = await page(broker, "readyz")
            assert "disk full since 2" in ready
            assert 'neve_condition{condition="disk full"} 1.0' in await page(broker, "metrics")
            runtime = await ask(connection, RequestCode.GET_BROKER_RUNTIME_INFO)
            assert "disk full: " in json.loads(bytes(runtime.body))["table"]["conditions"]
            assert "96% used, mark 90%; sends are refused with code 14" in ready
            assert json.loads(await page(broker, "archive/status"))["conditions"][0]["name"] == "disk full"
            patch.setattr(type(broker.store.disk), "room", lambda self, path: Room(50, 50))
            await until(lambda: "disk full: ended after" in caplog.text)
            assert "disk full" not in await page(broker, "readyz")
            assert 'neve_condition{condition="disk full"} 0.0' in await page(broker, "metrics")
    assert caplog.text.count("disk full: ") == 2, "once each"


async def test_untrusted_clock_is_reported_and_can_be_confirmed(tmp_path: Path) -> None:
    async with running(tmp_path / "data") as (broker, _):
        (tmp_path / "data" / "clock").write_text('{"version":1,"trusted_ms":1000000000000}')
    async with running(tmp_path / "data") as (broker, _):
        assert "clock not trusted since 2" in await page(broker, "readyz")
        assert "neve_clock_trusted 0.0" in await page(broker, "metrics")
        assert broker.admin_address is not None
        url = "http://{}:{}/clock/confirm".format(*broker.admin_address)
        answer = await asyncio.to_thread(lambda: urllib.request.urlopen(post_request(url), timeout=30).read())
        assert json.loads(answer)["before"]["trusted"] is False
        assert await page(broker, "readyz") == "ready\n"


async def test_offload_without_a_backlog_reports_the_archived_objects(tmp_path: Path) -> None:
    async with running(tmp_path / "data", f"storeUrl=dir:{tmp_path / 'store'}") as (broker, connection):
        await send(connection, "orders")
        first = json.loads((await offload(broker)).splitlines()[-1])
        second = json.loads((await offload(broker)).splitlines()[-1])
        assert (first["objects"], second["objects"]) == (1, 0)
        assert (second["archived_objects"], second["backlog_bytes"]) == (1, 0)
        assert second["last_round"]["objects"] == 1


def test_broker_without_a_name_server_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with running(tmp_path / "data"):
            pass

    with caplog.at_level(logging.WARNING, "broker.broker_controller"):
        asyncio.run(scenario())
    assert "namesrvAddr is empty" in caplog.text
