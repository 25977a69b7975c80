"""A scrape reports the latencies of clients, and the process's identity and resources."""

from __future__ import annotations

import asyncio
import re
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import ProcessCollector

from broker.broker_controller import BrokerController
from neve.remoting.codes import RequestCode
from tests.kit.broker.in_process import ask, running, send
from tests.unit.broker.apache_slave import bodies


async def scraped(broker: BrokerController) -> dict[str, float]:
    assert broker.admin_address is not None
    url = "http://{}:{}/metrics".format(*broker.admin_address)
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=20).read().decode())
    return {name: float(value) for name, value in re.findall(r"^(\S+) (\S+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_each_send_and_each_pull_that_found_messages_is_timed(tmp_path: Path, flush: str) -> None:
    async def scenario() -> dict[str, float]:
        async with running(tmp_path, f"flushDiskType={flush}") as (broker, connection):
            for number in range(5):
                await send(connection, "t", b"%d" % number)
            await send(connection, "t", b"later", "DELAY\x011\x02")
            assert len(await bodies(connection)) == 5
            assert await bodies(connection, 5) == []
            return await scraped(broker)

    found = asyncio.run(scenario())
    assert found["neve_send_seconds_count"] == 6
    assert found["neve_pull_seconds_count"] == 1
    for name in ("send", "pull"):
        assert 0 < found[f"neve_{name}_seconds_sum"] < 60
        assert found[f'neve_{name}_seconds_bucket{{le="+Inf"}}'] == found[f"neve_{name}_seconds_count"]
    assert found["process_resident_memory_bytes"] > 1 << 20
    assert found["process_cpu_seconds_total"] > 0
    assert any(name.startswith("neve_build_info{") and 'version="' in name for name in found)


def test_process_metrics_are_collected_outside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector lists all open files: 20,000 of them take 15 ms."""
    looked, collect = list[threading.Thread](), ProcessCollector.collect

    def noted(self: ProcessCollector) -> Any:
        looked.append(threading.current_thread())
        return collect(self)

    monkeypatch.setattr(ProcessCollector, "collect", noted)

    async def scenario() -> None:
        async with running(tmp_path) as (broker, _):
            assert (await scraped(broker))["process_open_fds"] > 1

    asyncio.run(scenario())
    assert len(looked) == 1
    assert looked[0] is not threading.main_thread()


def test_unsigned_request_is_counted_as_refused(tmp_path: Path) -> None:
    user = 'initAuthenticationUser={"username":"admin","password":"secret"}'

    async def scenario() -> dict[str, float]:
        async with running(tmp_path, "authenticationEnabled=true", user) as (broker, connection):
            assert (await ask(connection, RequestCode.GET_BROKER_RUNTIME_INFO)).code == 16
            return await scraped(broker)

    assert asyncio.run(scenario())["neve_requests_refused_total"] == 1
