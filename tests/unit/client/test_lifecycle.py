"""The lifecycle of a consumer, with a source that records its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from neve.client.consumers.lifecycle import Jobs, Lifecycle
from neve.client.group.delivery import DeliveryBuffer
from neve.client.group.failures import Failures
from neve.client.group.group_requests import RunningState
from neve.client.group.member import GroupMember
from neve.client.group.ownership import Owner, PendingWork, current_owner
from neve.client.group.rebalance import Rebalancer
from neve.client.model import MessageQueue
from neve.client.net.session import Session
from neve.errors import ClientError

LIFE = ["open", "join", "share", "jobs", "no more rounds", "stop", "jobs ended", "finish", "leave"]


class ConsumerParts:
    """The source of one consumer, and the group, the rebalancer and the session around it."""

    def __init__(self, *, fails_at: str = "") -> None:
        self.seen: list[str] = []
        self.fails_at = fails_at
        self.workers: list[Owner] = []
        self.job_begun, self.stopped = asyncio.Event(), asyncio.Event()
        self.buffer = DeliveryBuffer(lambda: None)
        self.failures = Failures(self.buffer.wake)
        self.pending = PendingWork(self.spawn, "g")
        session = SimpleNamespace(spawn=self.spawn, options=SimpleNamespace(now_ms=lambda: 0))
        member = SimpleNamespace(group="g", join=self.join, leave=self.leave)
        rebalancer = SimpleNamespace(once=self.share, forever=asyncio.Event().wait, stop=self.end_rounds)
        self.life = Lifecycle(
            cast(Session, session),
            cast(GroupMember, member),
            cast(Rebalancer, rebalancer),
            self,
            self.pending,
            close_timeout=60,
        )

    def spawn(self, work: Coroutine[Any, Any, None], _: str) -> asyncio.Task[None]:
        return asyncio.create_task(work)

    def note(self, what: str) -> None:
        self.seen.append(what)
        if what == self.fails_at:
            raise ClientError(what)

    async def open(self) -> None:
        self.note("open")

    async def join(self, _: object) -> None:
        self.note("join")

    async def share(self) -> None:
        self.note("share")

    def jobs(self) -> Jobs:
        self.note("jobs")
        yield "job", self._job()

    async def _job(self) -> None:
        self.job_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.note("jobs ended")

    async def end_rounds(self, rounds: asyncio.Task[None], patience: float) -> None:
        assert (rounds.done(), patience) == (False, 60)
        rounds.cancel()
        self.note("no more rounds")

    async def stop(self) -> None:
        self.note("stop")
        self.stopped.set()

    def owners(self) -> Iterable[Owner]:
        return self.workers

    async def finish(self, closer: Owner) -> None:
        assert closer is not None
        self.note("finish")

    async def leave(self) -> None:
        self.note("leave")

    def wake(self) -> None:
        raise AssertionError("no broker asks")

    async def reset(self, offsets: Mapping[MessageQueue, int]) -> None:
        raise AssertionError("no broker asks")

    def positions(self, topic: str) -> dict[MessageQueue, int]:
        raise AssertionError("no broker asks")

    def running_state(self) -> RunningState:
        raise AssertionError("no broker asks")


async def started(world: ConsumerParts) -> None:
    await world.life.enter()
    await world.job_begun.wait()


async def test_lifecycle_runs_from_open_to_leave_and_closes_once() -> None:
    world = ConsumerParts()
    await started(world)
    await world.life.start()  # idempotent
    await asyncio.gather(*(world.life.close(current_owner()) for _ in range(3)))
    assert world.seen == LIFE
    assert world.life.is_closed


async def test_close_waits_for_owned_messages_and_settlements_before_jobs_end() -> None:
    world = ConsumerParts()
    await started(world)
    handled, told = asyncio.Event(), asyncio.Event()

    async def then(event: asyncio.Event, what: str) -> None:
        await event.wait()
        world.note(what)

    world.workers = [asyncio.create_task(then(handled, "handled"))]
    settling = asyncio.create_task(world.pending.finish(then(told, "the broker told")))
    closing = asyncio.create_task(world.life.close(current_owner()))
    await world.stopped.wait()
    handled.set()
    await asyncio.wait(cast("list[asyncio.Task[None]]", world.workers))
    told.set()
    await asyncio.gather(closing, settling)
    at = LIFE.index("jobs ended")
    assert world.seen == [*LIFE[:at], "handled", "the broker told", *LIFE[at:]]


@pytest.mark.parametrize("at", ["open", "join", "share"])
async def test_failed_start_leaves_the_group(at: str) -> None:
    world = ConsumerParts(fails_at=at)
    with pytest.raises(ClientError, match=at):
        await world.life.enter()
    assert world.seen == [*LIFE[: LIFE.index(at) + 1], "stop", "finish", "leave"]
