"""Dashboards of conf/grafana and alert rules, evaluated by a real Prometheus that scrapes servers under traffic."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import subprocess
import textwrap
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import neve
from tests.kit.clock.waiting import wait_until
from tests.kit.server.debian_package import ensure
from tests.kit.server.neve import Serving, settings_as_options
from tests.kit.server.processes import free_ports
from tests.kit.server.prometheus import Prometheus

pytestmark = pytest.mark.servers
CONF = Path(__file__).parents[2] / "conf"
RULES = CONF / "prometheus-rules.yml"
PAGE = (CONF.parent / "docs" / "operate" / "monitor.md").read_text("utf-8")
BOARDS = sorted((CONF / "grafana").glob("*.json"))
_S = 120.0
#: Grafana's variables, replaced so that they match everything.
_VARIABLES = {"job": ".+", "instance": ".+", "cluster": ".+", "node": ".+", "top": "10", "__rate_interval": "5m"}


class Asked(NamedTuple):
    """An expression of a dashboard, as sent to Prometheus."""

    board: str
    panel: str
    expression: str


def panels(board: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", [])


def asked() -> list[Asked]:
    return [
        Asked(path.stem, panel["title"], target["expr"])
        for path in BOARDS
        for panel in panels(json.loads(path.read_text("utf-8")))
        for target in panel.get("targets", [])
    ]


def filled(text: str) -> str:
    return re.sub(r"\$(\w+)", lambda found: _VARIABLES[found[1]], text)


async def traffic(namesrv: str) -> None:
    """Create a topic with messages, and a group that has consumed some of them."""
    async with neve.connect(namesrv) as client:
        await client.admin.create_topic("orders", 2)
        for number in range(20):
            await client.send("orders", b"order %d" % number)
        async with client.consumer("billing", "orders", start="earliest") as consumer:
            for _ in range(5):
                message = await consumer.receive(_S)
                assert message is not None
                await message.ack()


@contextmanager
def connected(namesrv: str) -> Iterator[None]:
    """Keep a producer and a consumer group member connected."""
    ends = threading.Event()

    async def stay() -> None:
        async with neve.connect(namesrv) as client:
            await client.admin.create_topic("quiet", 1)
            await client.send("quiet", b"one")
            async with client.consumer("audience", "quiet"):
                await asyncio.to_thread(ends.wait)

    thread = threading.Thread(target=lambda: asyncio.run(stay()))
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def are_equal(prometheus: Prometheus, own: str, rocketmqs: str) -> bool:
    found = prometheus.value(own)
    return found is not None and found == prometheus.value(rocketmqs)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Run Prometheus on a broker, a name server and a controller, scraped before and after the traffic."""
    directory = tmp_path_factory.mktemp("boards")
    (names_port,) = free_ports(1)
    names = {"listenPort": names_port, "bindAddress": "127.0.0.1", "adminPort": 0}
    sets = {"listenPort": 0, "bindAddress": "127.0.0.1", "adminPort": 0, "controllerStorePath": directory / "sets"}
    own = {
        "brokerName": "broker-a", "namesrvAddr": f"127.0.0.1:{names_port}", "storePathRootDir": directory / "data",
        "listenPort": 0, "bindAddress": "127.0.0.1", "brokerIP1": "127.0.0.1", "adminPort": 0,
        "mappedFileSizeCommitLog": "1m", "storeUrl": f"dir:{directory / 'store'}", "diskSpaceWarningLevelRatio": 99,
        "metricsExporterType": "PROM", "metricsPromExporterHost": "127.0.0.1", "metricsPromExporterPort": 0,
    }  # fmt: skip
    with ExitStack() as stack:
        namesrv = stack.enter_context(Serving(directory / "names", "namesrv", *settings_as_options(names)))
        controller = stack.enter_context(Serving(directory / "control", "controller", *settings_as_options(sets)))
        broker = stack.enter_context(Serving(directory / "broker", "broker", *settings_as_options(own)))
        targets = {"neve": [broker.admin, namesrv.admin, controller.admin], "rocketmq": [broker.ready["metrics"]]}
        watching = stack.enter_context(Prometheus(directory / "prometheus", targets, [RULES]))
        wait_until(lambda: watching.value("sum(up)") == 4, "all are scraped", _S)
        stack.enter_context(connected(namesrv.namesrv))
        told = (
            "sum(rocketmq_producer_connections) and sum(rocketmq_consumer_connections) "
            "and sum(rate(neve_topic_messages_out_total[5m])) > 0 and sum(rate(rocketmq_messages_in_total[5m])) > 0 "
            'and sum(neve_consumer_lag_messages{group="billing"}) > 0 and sum(rocketmq_consumer_lag_messages) > 0'
        )

        def has_seen_it() -> bool:
            asyncio.run(asyncio.wait_for(traffic(namesrv.namesrv), _S))
            return bool(watching.query(told))

        wait_until(has_seen_it, "it has seen more and more of it", 2 * _S)
        yield watching


def test_every_dashboard_expression_returns_series(prometheus: Prometheus) -> None:
    empty = [one for one in asked() if not prometheus.query(filled(one.expression))]
    assert empty == []


def test_expressions_of_the_monitoring_page_return_series(prometheus: Prometheus) -> None:
    expressions = [
        line for block in re.findall(r"^```promql\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()
    ]
    assert len(expressions) > 8
    assert [one for one in expressions if not prometheus.query(one)] == []


def test_scrape_configuration_of_the_monitoring_page_is_valid(tmp_path: Path) -> None:
    found = re.search(r"^( *)```yaml\n( *scrape_configs:.*?)^\1```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    config = tmp_path / "prometheus.yml"
    config.write_text(textwrap.dedent(found[2]))
    (tmp_path / RULES.name).write_text(RULES.read_text())
    check = [str(ensure("promtool")), "check", "config", str(config)]
    done = subprocess.run(check, capture_output=True, text=True, timeout=_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dashboard_variables_have_values(prometheus: Prometheus) -> None:
    for path in BOARDS:
        for variable in json.loads(path.read_text("utf-8"))["templating"]["list"]:
            if variable["type"] == "query":
                found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
                assert found, variable["definition"]
                assert all(found[2] in one["metric"] for one in prometheus.query(filled(found[1])))
                assert prometheus.query(filled(found[1])), variable["name"]


def test_neve_and_rocketmq_metric_names_have_equal_values(prometheus: Prometheus) -> None:
    """Each page is scraped at a different time."""
    for own, rocketmqs in (
        ('sum(neve_topic_messages_in_total{topic="orders"})', 'sum(rocketmq_messages_in_total{topic="orders"})'),
        ('sum(neve_topic_bytes_in_total{topic="orders"})', 'sum(rocketmq_throughput_in_total{topic="orders"})'),
        ('sum(neve_topic_messages_out_total{topic="orders"})', 'sum(rocketmq_messages_out_total{topic="orders"})'),
        (
            'neve_consumer_lag_messages{group="billing",topic="orders"}',
            'rocketmq_consumer_lag_messages{consumer_group="billing",topic="orders"}',
        ),
        ("neve_topics", "rocketmq_topic_number"),
    ):
        wait_until(partial(are_equal, prometheus, own, rocketmqs), own, _S)


def test_prometheus_loads_all_alerts_and_none_fires_in_normal_operation(prometheus: Prometheus) -> None:
    wait_until(lambda: all(rule["health"] == "ok" for rule in prometheus.rules()), "all are evaluated", _S)
    assert {rule["name"]: rule["state"] for rule in prometheus.rules() if rule["state"] != "inactive"} == {}
    done = subprocess.run(
        [ensure("promtool"), "check", "rules", str(RULES)], capture_output=True, text=True, timeout=_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_dashboard_layout_is_complete_and_valid(path: Path) -> None:
    """Panels do not overlap, ids are unique, and each panel has a title, a unit, a data source and known variables."""
    board = json.loads(path.read_text("utf-8"))
    all_panels = list(panels(board))
    assert len({panel["id"] for panel in all_panels}) == len(all_panels)
    assert board["uid"]
    assert board["id"] is None
    places = [panel["gridPos"] for panel in all_panels]
    for one, other in itertools.combinations(places, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
    assert all(place["x"] + place["w"] <= 24 for place in places)
    names = {variable["name"] for variable in board["templating"]["list"]} | {"__rate_interval"}
    for panel in all_panels:
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= names, target["expr"]
            assert target["legendFormat"] or panel["type"] == "table"
