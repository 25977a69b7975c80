"""docs/deploy/sizing.md: the example machines follow from its formulas, and its defaults are those of the code."""

from __future__ import annotations

import re

import pytest

from broker.config import BrokerConfig
from neve.units import parse_size_bytes
from tests.kit.docs.page import DOCS, Page

PAGE = Page("deploy/sizing.md")
GIB, MIB, HOUR_S, DAY_S = 1 << 30, 1 << 20, 3600, 86_400
CONFIG = BrokerConfig()


def number(cell: str) -> float:
    return float(re.sub(r"[^\d.]", "", cell))


def examples() -> list[dict[str, float]]:
    rows = re.findall(r"^\| (.+?) \| (\d.*?) \| (\d.*?) \| (\d.*?) \|$", PAGE.section("Example machines"), re.MULTILINE)
    return [{row[0]: number(row[column]) for row in rows} for column in (1, 2, 3)]


def measured(figure: str) -> float:
    (value,) = re.findall(rf"^\| {re.escape(figure)} \| (\d[\d,.]*)", PAGE.text, re.MULTILINE)
    return number(value)


@pytest.mark.parametrize("machine", examples())
def test_example_machine_follows_from_the_formulas(machine: dict[str, float]) -> None:
    record = measured("log bytes of a message with a body of 1 KiB")
    rate = machine["messages per second"]
    hours = machine["`fileReservedTime`"] + machine["outage of the store to survive"]
    disk = rate * (record + 20) * hours * HOUR_S / (CONFIG.disk_max_used_space_ratio / 100)
    assert machine["disk"] == pytest.approx(disk / GIB, abs=1)
    parts = CONFIG.cold_cache_bytes + CONFIG.cold_fetch_bytes + CONFIG.archive_upload_bytes
    memory = machine["brokers"] * (60 * MIB + 8 * 1024 * machine["queues in use, per broker"] + parts)
    assert machine["memory of the processes"] == pytest.approx(memory / GIB, abs=0.06)
    assert machine["page cache (`hotBytes`)"] == machine["brokers"] * CONFIG.hot_bytes / GIB
    ratio = measured("archived bytes per byte in the log")
    assert machine["bucket, 30 days"] == pytest.approx(rate * record * ratio * 30 * DAY_S / GIB, abs=1)
    assert rate / machine["brokers"] <= measured("sends of 1 KiB, one broker")


def test_defaults_are_those_of_the_code() -> None:
    shown = re.findall(r"`(\w+)` ?\((\d+ [GM]iB|[\d,]+(?: s)?)\)", PAGE.text)
    shown += re.findall(r"\(`(\w+)`\) \| (\d+ [GM]iB)", PAGE.text)
    found: dict[str, str] = dict(shown)
    values = {
        "diskMaxUsedSpaceRatio": CONFIG.disk_max_used_space_ratio,
        "diskSpaceWarningLevelRatio": CONFIG.disk_space_warning_level_ratio,
        "coldCacheDiskBytes": CONFIG.cold_cache_disk_bytes,
        "coldCacheBytes": CONFIG.cold_cache_bytes,
        "coldFetchBytes": CONFIG.cold_fetch_bytes,
        "archiveUploadBytes": CONFIG.archive_upload_bytes,
        "hotBytes": CONFIG.hot_bytes,
        "timerMaxPending": CONFIG.timer_max_pending,
        "coldReadTimeout": CONFIG.cold_read_timeout / 1000,
    }
    assert {key: in_bytes(value) for key, value in found.items()} == values


def in_bytes(text: str) -> float:
    if text.endswith("iB"):
        return parse_size_bytes(text.replace(" ", "").removesuffix("iB").lower())
    return number(text)


def test_throughput_is_that_of_the_readme() -> None:
    readme = (DOCS.parent / "README.md").read_text("utf-8")
    for figure in ("sends of 1 KiB, one broker", "the same while it archives", "sends of 1 KiB, four brokers"):
        assert f"{measured(figure):,.0f}" in readme, figure
