"""Fixtures of a store on a simulated disk, with files so small that a few messages roll them."""

from __future__ import annotations

from typing import Any

import pytest

from broker.store.message_store import MessageStore
from infra.clock import ManualClock
from infra.disk.filesystem import Disk
from tests.kit.store.sim_disk import SimDisk
from tests.kit.store.small_store import OpenStore, PutOne, put_one, small_config


@pytest.fixture
def put() -> PutOne:
    return put_one


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def open_store(disk: SimDisk, clock: ManualClock) -> OpenStore:
    def open_one(on: Disk = disk, **changes: Any) -> MessageStore:
        store = MessageStore(small_config(**changes), on, clock)
        store.load()
        return store

    return open_one
