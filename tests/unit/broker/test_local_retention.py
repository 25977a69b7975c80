"""A running broker frees its disk: by RocketMQ's rules without an archive, of archived segments with one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from broker.archiving.archive import BrokerArchive
from broker.archiving.local_side import ConfiguredPolicy
from broker.broker_controller import BrokerController
from broker.config import BrokerConfig
from broker.store.message_store import MessageStore
from broker.tables.topic_config_manager import TopicConfigManager
from infra.config.properties import ConfigError
from infra.disk.filesystem import Room
from lifecycle.lifecycle import ArchiveLifecycle
from tests.kit.broker.in_process import running, send

SEGMENTS = 4


def fill(broker: BrokerController, monkeypatch: pytest.MonkeyPatch, percent: int) -> None:
    monkeypatch.setattr(type(broker.store.disk), "room", lambda self, path: Room(percent, 100 - percent))


@pytest.mark.parametrize(
    ("percent", "setting", "evicted"),
    [
        (84, "", 0),
        (86, "", SEGMENTS),
        (86, "cleanFileForciblyEnable=false", 0),
        (86, "diskSpaceCleanForciblyRatio=95", 0),
    ],
)
async def test_oldest_segments_are_deleted_on_a_full_disk_without_an_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, percent: int, setting: str, evicted: int
) -> None:
    async with running(tmp_path / "data", *filter(None, [setting])) as (broker, connection):
        for _ in range(SEGMENTS + 1):
            await send(connection, "orders", b"x" * 900_000)
        fill(broker, monkeypatch, percent)
        assert broker.archive.lifecycle is not None
        await asyncio.to_thread(broker.archive.lifecycle.evict.run)
        assert broker.store.queues.min_offset("orders", 0) == evicted


async def test_trace_messages_do_not_keep_archived_segments_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"storeUrl=dir:{tmp_path / 'store'}"
    async with running(tmp_path / "data", store, "archivePeriod=1d", "archiveMinBytes=1") as (broker, connection):
        fill(broker, monkeypatch, 50)
        for _ in range(SEGMENTS + 1):
            await send(connection, "RMQ_SYS_TRACE_TOPIC", b"trace")
            await send(connection, "orders", b"x" * 900_000)
        lifecycle = broker.archive.lifecycle
        assert isinstance(lifecycle, ArchiveLifecycle)
        await asyncio.to_thread(lifecycle.offload.run)
        await asyncio.to_thread(lifecycle.evict.run)
        assert broker.store.queues.min_offset("orders", 0) == 0
        fill(broker, monkeypatch, 76)
        await asyncio.to_thread(lifecycle.evict.run)
        assert broker.store.queues.min_offset("orders", 0) >= SEGMENTS


@pytest.mark.parametrize(("text", "hours"), [("04", {4}), ("4;16", {4, 16}), ("", set())])
def test_delete_when_is_parsed_in_rocketmqs_format(text: str, hours: set[int]) -> None:
    assert BrokerConfig(delete_when=text).delete_hours == hours


@pytest.mark.parametrize("text", ["24", "night", "-1"])
def test_invalid_hour_of_delete_when_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="deleteWhen"):
        BrokerConfig(delete_when=text).delete_hours  # noqa: B018


def test_first_matching_maximum_age_applies_to_a_topic() -> None:
    config = BrokerConfig(archive_max_age_by_topic="pay*=30s; pay_late=2d ;audit=1d;*=6h")
    assert config.archive_max_ages == [
        ("pay*", 30_000),
        ("pay_late", 172_800_000),
        ("audit", 86_400_000),
        ("*", 21_600_000),
    ]
    policy = ConfiguredPolicy(config, cast(TopicConfigManager, None), cast(MessageStore, None))
    assert [policy.max_age_of(topic) for topic in ("pay_late", "audit", "audits")] == [30_000, 86_400_000, 21_600_000]
    none = ConfiguredPolicy(BrokerConfig(), cast(TopicConfigManager, None), cast(MessageStore, None))
    assert none.max_age_of("audit") is None


@pytest.mark.parametrize(
    "text", ["audit", "audit=", "=1d", "a*b=1d", "a,b=1d", "a=1d,b=1d", "audit=1x", "audit=31d", "audit=0"]
)
def test_malformed_maximum_age_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"archiveMaxAgeByTopic.*with ;"):
        BrokerConfig(archive_max_age_by_topic=text).archive_max_ages  # noqa: B018


def test_delta_topics_are_names_or_prefixes_separated_by_semicolons() -> None:
    config = BrokerConfig(archive_delta_topics="orders; audit_*;%RETRY%billing;*")
    assert config.delta_topics == ("orders", "audit_*", "%RETRY%billing", "*")
    assert BrokerConfig().delta_topics == ()


@pytest.mark.parametrize("text", ["orders,audit", "orders audit", "a*b", "**", "x" * 128, "orders,audit*"])
def test_delta_topic_that_no_topic_matches_is_refused(text: str) -> None:
    """It would name no table, and the user would look for the cause in the archive."""
    config = BrokerConfig(archive_delta_topics=f"flights;{text}")
    with pytest.raises(ConfigError, match=r"archiveDeltaTopics: .* separate topics with ;"):
        ConfiguredPolicy(config, cast(TopicConfigManager, None), cast(MessageStore, None))


async def test_objects_are_encoded_in_the_data_directory_and_leftovers_deleted(tmp_path: Path) -> None:
    """A `/tmp` in memory can be too small for large objects."""
    left = tmp_path / "data/archive/encode/neve-offload-x"
    left.mkdir(parents=True)
    (left / "object.parquet").write_bytes(b"half of it")

    async with running(tmp_path / "data", f"storeUrl=dir:{tmp_path / 'store'}") as (broker, connection):
        assert list(left.parent.iterdir()) == []
        assert isinstance(broker.archive, BrokerArchive)
        uploader = broker.archive.uploader
        assert uploader._work_dir == str(left.parent)
        await send(connection, "orders")
        lifecycle = broker.archive.lifecycle
        assert isinstance(lifecycle, ArchiveLifecycle)
        (report,) = await asyncio.to_thread(lifecycle.offload.run, roll=True)
        assert len(report.committed) == 1
