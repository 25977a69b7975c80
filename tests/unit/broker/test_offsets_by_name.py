"""Committed offsets by group and by topic."""

from __future__ import annotations

import asyncio
from pathlib import Path

from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from infra.loop.in_steps import at_once
from tests.kit.store.sim_disk import SimDisk


async def _synced() -> None:
    """Do nothing: the log is fsynced."""


def _manager(disk: SimDisk) -> ConsumerOffsetManager:
    return ConsumerOffsetManager(disk, Path("/data/consumerOffset.json"), _synced)


def _told(offsets: ConsumerOffsetManager) -> tuple[set[str], set[str], set[tuple[str, str]]]:
    return set(offsets.topics_of("g")), set(offsets.groups_of("T")), set(offsets.pairs())


def test_groups_and_topics_stay_indexed_through_changes_and_a_restart() -> None:
    disk = SimDisk()
    disk.make_dirs(Path("/data"))
    offsets = _manager(disk)
    offsets.commit("g", "T", 0, 5)
    offsets.commit("g", "U", 1, 6)
    offsets.reset("h", "T", 0, 7)
    at_once(offsets.clone("g", "copy", "U"))
    everything = {("T", "g"), ("U", "g"), ("T", "h"), ("U", "copy")}
    assert _told(offsets) == ({"T", "U"}, {"g", "h"}, everything)
    asyncio.run(offsets.file.save())
    again = _manager(disk)
    again.load()
    assert _told(again) == ({"T", "U"}, {"g", "h"}, everything)
    again.delete_topic("T")
    assert _told(again) == ({"U"}, set(), {("U", "g"), ("U", "copy")})
    assert again.query("h", "T", 0) == -1
    again.delete_group("g")
    assert _told(again) == (set(), set(), {("U", "copy")})
    assert again.table() == {"U@copy": {1: 6}}


def test_deletion_of_a_topic_or_group_drops_its_resets_and_pull_offsets() -> None:
    offsets = _manager(SimDisk())
    offsets.commit_pull("g", "T", 0, 9)
    offsets.commit_pull("g", "U", 0, 9)
    offsets.reset("g", "U", 0, 3)
    offsets.delete_topic("T")
    assert (offsets.query_pull("g", "T", 0), offsets.query_pull("g", "U", 0)) == (-1, 9)
    offsets.delete_group("g")
    assert offsets.query_pull("g", "U", 0) == -1
    assert offsets.take_reset("g", "U", 0) is None
