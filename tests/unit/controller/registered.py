"""Values and a runner for tests of registers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from controller.broker_set import BrokerSet, Member

T = TypeVar("T")


def value(name: str = "b", epoch: int = 1) -> BrokerSet:
    return BrokerSet(
        cluster="c",
        name=name,
        next_broker_id=2,
        members=(Member(id=1, address="h:1"),),
        master=1,
        master_epoch=epoch,
        sync_state_set=(1,),
        sync_state_set_epoch=epoch,
    )


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return asyncio.run(work())
