"""`docs/reference` lists each key with its default and range, and each metric."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from access.config import SecurityConfig
from broker.broker_controller import BrokerController
from broker.config import BrokerConfig
from controller.command import made
from controller.controller_config import ControllerConfig
from infra.clock import SystemClock
from infra.config.properties import ConfigError, load, wire_name
from infra.disk.filesystem import RealDisk
from namesrv.namesrv_config import NamesrvConfig
from namesrv.namesrv_controller import NamesrvController
from tests.kit.broker.in_process import running, send

T = TypeVar("T")
DOCS = Path(__file__).parents[3] / "docs"
KEY_ROW = re.compile(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (live)? \| (.+) \|$", re.MULTILINE)
METRIC_ROW = re.compile(r"^\| `((?:neve|process)_\w+)` \| (\w+) \| (.+) \|$", re.MULTILINE)
ROCKETMQ_ROW = re.compile(r"^\| `(rocketmq_\w+)` \| (\w+) \| (.*?) ?\| (.+) \|$", re.MULTILINE)
TRANSCRIPT = DOCS.parent / "tests" / "transcripts" / "golden" / "operator-neve.txt"
ALARMS = DOCS.parent / "conf" / "prometheus-rules.yml"
SECTIONS: list[tuple[str, type[Any]]] = [
    ("Broker", BrokerConfig),
    ("Name server", NamesrvConfig),
    ("Controller", ControllerConfig),
    ("All servers: TLS, users and policies", SecurityConfig),
]


def page(name: str) -> str:
    return (DOCS / name).read_text("utf-8").replace("\N{MINUS SIGN}", "-")


def section(name: str, title: str) -> str:
    """Return a section of a page of the reference, with its subsections."""
    return page(f"reference/{name}").split(f"\n## {title}\n")[1].split("\n## ")[0]


def fields_of(config: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields by key. Keys of both servers are in a section of their own."""
    shared = {item.name for item in dataclasses.fields(SecurityConfig)} if config is not SecurityConfig else set()
    return {
        item.metadata["name"] or wire_name(item.name): item
        for item in dataclasses.fields(config)
        if item.name not in shared
    }


def set_to(config: type[Any], key: str, text: str, attribute: str) -> Any:
    """Return the value that a line of the configuration file with this text sets."""
    beside = ["replication=sync"] if key.endswith("InSyncReplicas") or key == "inSyncReplicas" else []
    beside += ["brokerRole=SLAVE"] if key == "brokerId" else []
    return getattr(load(config, None, [*beside, f"{key}={text}"]), attribute)


@pytest.mark.parametrize(("title", "config"), SECTIONS)
def test_each_key_is_on_the_page_with_its_default_and_range(title: str, config: type[Any]) -> None:
    rows = {row[0]: row[1:] for row in KEY_ROW.findall(section("configuration.md", title))}
    fields = fields_of(config)
    assert sorted(rows) == sorted(fields)
    for key, (default, allowed, live, meaning) in rows.items():
        item, rules = fields[key], fields[key].metadata
        assert set_to(config, key, default, item.name) == item.default, key
        assert bool(live) == rules["live"], key
        assert rules["alias"] in meaning, key
        if rules["choices"]:
            assert allowed == ", ".join(rules["choices"]), key
        elif isinstance(item.default, bool):
            assert allowed == "true, false", key
        elif isinstance(item.default, int):
            low, high = allowed.split(" … ")
            assert (set_to(config, key, low, item.name), set_to(config, key, high, item.name)) == (
                rules["low"],
                rules["high"],
            )
            for beyond in (rules["low"] - 1, rules["high"] + 1):
                with pytest.raises(ConfigError, match=r"allowed|is refused"):
                    set_to(config, key, str(beyond), item.name)


def test_example_of_a_change_is_in_a_transcript() -> None:
    command, output = re.findall(r"^```(?:text)?\n(.+)\n^```$", page("reference/configuration.md"), re.MULTILINE)
    assert f"$ {command}\n! {output}\n" in TRANSCRIPT.read_text("utf-8").replace("{broker}", "broker-a")


def with_archive(root: Path, look: Callable[[BrokerController], Awaitable[T]]) -> T:
    async def main() -> T:
        async with running(root / "data", f"storeUrl=dir:{root / 'archive'}") as (broker, _):
            return await look(broker)

    return asyncio.run(main())


async def scraped(broker: BrokerController) -> str:
    assert broker.admin_address is not None
    return await at(broker.admin_address)


async def at(address: tuple[str, int]) -> str:
    url = "http://{}:{}/metrics".format(*address)
    with await asyncio.to_thread(urllib.request.urlopen, url, timeout=20) as answer:
        return str(answer.read(), "utf-8")


def test_each_metric_is_on_the_page_with_its_help_text(tmp_path: Path) -> None:
    text = with_archive(tmp_path, scraped)
    helps = dict(re.findall(r"^# HELP (\w+) (.+)$", text, re.MULTILINE))
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    assert {name: about for name, *about in METRIC_ROW.findall(section("metrics.md", "Metrics of a broker"))} == {
        name: [types[name], helps[name]] for name in helps
    }


def told(text: str) -> dict[str, list[str]]:
    """Return type and help of each metric."""
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    return {name: [types[name], text] for name, text in re.findall(r"^# HELP (\w+) (.+)$", text, re.MULTILINE)}


def test_each_rocketmq_metric_is_on_the_page_with_its_labels(tmp_path: Path) -> None:
    async def main() -> str:
        settings = ("metricsExporterType=PROM", "metricsPromExporterHost=127.0.0.1", "metricsPromExporterPort=0")
        async with running(tmp_path / "data", *settings) as (broker, connection):
            await send(connection, "orders")
            broker.stats.got("orders", "g", 1, 10)
            broker.stats.put("%DLQ%g", 10)
            broker.offsets.commit("g", "orders", 0, 0)
            assert broker.metrics_address is not None
            return await at(broker.metrics_address)

    text, rows = asyncio.run(main()), ROCKETMQ_ROW.findall(section("metrics.md", "RocketMQ's metrics"))
    assert {name: [kind, about] for name, kind, _, about in rows} == told(text)
    always = {"cluster", "node_type", "node_id", "le"}
    seen = {
        re.sub("_(bucket|count|sum)$", "", name): sorted(set(re.findall(r"(\w+)=", labels)) - always)
        for name, labels in re.findall(r"^(\w+){(.+)} ", text, re.MULTILINE)
    }
    assert len(seen) > 20
    assert {name: sorted(filter(None, labels.split(", "))) for name, _, labels, _ in rows if name in seen} == seen


def test_each_metric_of_name_servers_and_controllers_is_on_the_page(tmp_path: Path) -> None:
    async def main() -> dict[str, list[str]]:
        names = NamesrvConfig(
            listen_port=0, bind_address="127.0.0.1", kv_config_path=f"{tmp_path}/kv.json", admin_port=0
        )
        sets = ControllerConfig(
            listen_port=0, bind_address="127.0.0.1", controller_store_path=f"{tmp_path}/sets", admin_port=0
        )
        found: dict[str, list[str]] = {}
        for server in (NamesrvController(names, SystemClock(), RealDisk()), made(sets)):
            await server.start()
            try:
                assert server.admin_address is not None
                found |= told(await at(server.admin_address))
            finally:
                await server.shutdown()
        return found

    rows = METRIC_ROW.findall(section("metrics.md", "Metrics of name servers and controllers"))
    assert {name: about for name, *about in rows} == asyncio.run(main())


def test_exactly_the_monotonic_metrics_are_counters(tmp_path: Path) -> None:
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", with_archive(tmp_path, scraped), re.MULTILINE))
    assert {name for name, kind in types.items() if kind == "counter"} == {
        name for name in types if name.endswith("_total")
    }
    for name in ("messages_in", "bytes_out", "cold_reads", "job_failures", "archive_rows", "flush_rounds"):
        assert types[f"neve_{name}_total"] == "counter"
    for name in ("flush_lag_bytes", "disk_used_ratio", "archive_backlog_bytes", "held_pulls"):
        assert types[f"neve_{name}"] == "gauge"


def test_each_alert_queries_an_existing_metric_according_to_its_type(tmp_path: Path) -> None:
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", with_archive(tmp_path, scraped), re.MULTILINE))
    asked = re.findall(r"(?:\b(\w+)\()?\b(neve_\w+)", "\n".join(re.findall(r"expr: (.+)", ALARMS.read_text("utf-8"))))
    assert len(asked) > 10
    for function, name in asked:
        kind = types.get(name) or types[name.removesuffix("_bucket")]
        assert (kind != "gauge") == (function in ("rate", "increase")), (function, name)


def test_each_job_is_on_the_monitor_page(tmp_path: Path) -> None:
    async def names(broker: BrokerController) -> list[str]:
        return broker.archive.jobs.names()

    table = page("operate/monitor.md").split("| job | every |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| ([a-z-]+) \|", table, re.MULTILINE)) == with_archive(tmp_path, names)
