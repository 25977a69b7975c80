"""Ordered pops: one batch of a queue is in flight at a time, and unacknowledged messages are delivered first."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from infra.clock import ManualClock
from neve.remoting.codes import ResponseCode
from tests.kit.broker.in_process import running, send
from tests.kit.broker.pop_member import PopMember, offsets

MESSAGES = 8


def with_member(root: Path, work: Callable[[PopMember, ManualClock], Awaitable[None]]) -> None:
    async def main() -> None:
        clock = ManualClock()
        async with running(root, clock=clock) as (broker, connection):
            for number in range(MESSAGES):
                await send(connection, "t", b"m%d" % number)
            await work(PopMember(broker, connection, order=True), clock)

    asyncio.run(main())


def test_same_attempt_gets_its_batch_again_and_another_gets_none(tmp_path: Path) -> None:
    async def work(member: PopMember, clock: ManualClock) -> None:
        first = await member.pop(3, attempt="A")
        assert offsets(first) == [0, 1, 2]
        assert await member.pop(3, attempt="B") == []
        assert await member.pop(3) == []
        again = await member.pop(3, attempt="A")
        assert offsets(again) == [0, 1, 2]
        # the lost answer does not count, and its receipts are void
        await member.ack(*first)
        assert await member.offset() == 0
        await member.ack(again[0])
        assert offsets(await member.pop(3, attempt="A")) == [1, 2, 3]

    with_member(tmp_path, work)


def test_repeated_attempt_does_not_count_as_a_redelivery(tmp_path: Path) -> None:
    async def work(member: PopMember, clock: ManualClock) -> None:
        await member.pop(2, attempt="A")
        answer = await member.ask_pop(2, attempt="A")
        assert answer.ext["orderCountInfo"] == "0 0 0;0 qo0%0 0;0 qo0%1 0"
        clock.advance(60_001)
        await member.broker.revive.run_due()
        answer = await member.ask_pop(3, attempt="B")
        assert answer.ext["orderCountInfo"] == "0 0 0;0 qo0%0 1;0 qo0%1 1;0 qo0%2 0"
        clock.advance(60_001)
        answer = await member.ask_pop(2, attempt="C")
        assert answer.ext["orderCountInfo"] == "0 0 2;0 qo0%0 2;0 qo0%1 2"

    with_member(tmp_path, work)


def test_message_visible_early_waits_for_the_rest_of_its_batch(tmp_path: Path) -> None:
    """Delivered at once, it would precede messages that another member is still processing."""

    async def work(member: PopMember, clock: ManualClock) -> None:
        batch = await member.pop(4, invisible=30_000)
        await member.ack(batch[0])
        await member.hide(batch[2], 1000)
        clock.advance(2000)
        assert await member.broker.revive.run_due() == 0
        assert await member.pop(4) == []
        # the first member's other messages are still its own
        await member.ack(batch[1], batch[3])
        assert await member.offset() == 2
        assert offsets(await member.pop(4)) == [2, 3, 4, 5]

    with_member(tmp_path, work)


def test_message_hidden_longer_blocks_the_queue_until_it_is_visible(tmp_path: Path) -> None:
    async def work(member: PopMember, clock: ManualClock) -> None:
        batch = await member.pop(4, invisible=10_000)
        await member.ack(batch[0], batch[1])
        longer = await member.hide(batch[2], 50_000)
        clock.advance(20_000)
        assert await member.broker.revive.run_due() == 0
        assert await member.pop(4) == []
        clock.advance(30_001)
        assert await member.broker.revive.run_due() == 2
        assert await member.offset() == 2
        again = await member.pop(2)
        assert offsets(again) == [2, 3]
        await member.ack(longer)
        assert await member.offset() == 2

    with_member(tmp_path, work)


def test_returned_message_is_delivered_at_once(tmp_path: Path) -> None:
    async def work(member: PopMember, clock: ManualClock) -> None:
        batch = await member.pop(2)
        await member.ack(batch[0])
        waiting = asyncio.create_task(member.pop(2, poll=50_000))
        await member.until_in_line()
        await member.hide(batch[1], 0)
        assert offsets(await waiting) == [1, 2]

    with_member(tmp_path, work)


def test_notification_is_sent_only_while_the_queue_is_not_blocked(tmp_path: Path) -> None:
    async def work(member: PopMember, clock: ManualClock) -> None:
        assert await member.is_request_in_flight()
        batch = await member.pop(2, attempt="A")
        assert not await member.is_request_in_flight()
        assert not await member.is_request_in_flight(attempt="B")
        assert await member.is_request_in_flight(attempt="A")
        waiting = asyncio.create_task(member.is_request_in_flight(poll=50_000))
        await member.until_in_line()
        await member.ack(*batch)
        assert await waiting
        await member.pop(2)
        waiting = asyncio.create_task(member.is_request_in_flight(poll=50_000))
        await member.until_in_line()
        clock.advance(60_001)
        await member.broker.revive.run_due()
        assert await waiting

    with_member(tmp_path, work)


def test_notification_reports_the_attempts_own_batch_at_its_deadline(tmp_path: Path) -> None:
    """RocketMQ's NotificationIT: the message wakes one notification; its attempt's batch is free at the deadline."""

    async def work(member: PopMember, clock: ManualClock) -> None:
        taken = await member.pop(MESSAGES)
        told = [asyncio.create_task(member.is_request_in_flight(attempt=attempt, poll=500)) for attempt in "AAB"]
        await member.until_in_line(len(told))
        await member.ack(*taken)
        await send(member.connection, "t", b"next")
        assert [one.body for one in await member.pop(1, attempt="A")] == [b"next"]
        assert (await told[0], await told[1], await told[2]) == (True, True, False)

    with_member(tmp_path, work)


def test_pop_gets_the_attempts_own_batch_at_its_deadline(tmp_path: Path) -> None:
    async def work(member: PopMember, clock: ManualClock) -> None:
        taken = await member.pop(MESSAGES)
        waiting = [asyncio.create_task(member.pop(1, attempt="A", poll=500)) for _ in range(2)]
        await member.until_in_line(len(waiting))
        await member.ack(*taken)
        await send(member.connection, "t", b"next")
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        clock.advance(500)
        assert [one.body for got in await asyncio.gather(*waiting) for one in got] == [b"next", b"next"]

    with_member(tmp_path, work)


def test_notification_does_not_consume_the_wakeup_of_a_pop(tmp_path: Path) -> None:
    async def work(member: PopMember, clock: ManualClock) -> None:
        batch = await member.pop(MESSAGES)
        told = asyncio.create_task(member.is_request_in_flight(poll=50_000))
        await member.until_in_line()
        popped = asyncio.create_task(member.pop(1, poll=50_000))
        await member.until_in_line(2)
        await member.ack(*batch)
        await send(member.connection, "t", b"next")
        assert [one.body for one in await popped] == [b"next"]
        told.cancel()

    with_member(tmp_path, work)


def test_group_that_gives_up_order_gets_its_unacknowledged_messages(tmp_path: Path) -> None:
    async def work(member: PopMember, clock: ManualClock) -> None:
        batch = await member.pop(4, invisible=1000)
        await member.ack(batch[0])
        clock.advance(1001)
        await member.broker.revive.run_due()
        member.order = False
        assert offsets(await member.pop()) == [1, 2, 3, 4, 5, 6, 7]

    with_member(tmp_path, work)


def test_batch_and_its_delivery_counts_survive_a_restart(tmp_path: Path) -> None:
    async def before(member: PopMember, clock: ManualClock) -> None:
        await member.pop(2, attempt="A")
        clock.advance(60_001)
        await member.pop(2, attempt="B")

    async def after() -> None:
        clock = ManualClock(ManualClock().now_ms() + 60_002)
        async with running(tmp_path, clock=clock) as (broker, connection):
            member = PopMember(broker, connection, order=True)
            assert await member.pop(2, attempt="C") == []
            assert (await member.ask_pop(2, attempt="B")).ext["orderCountInfo"] == "0 0 1;0 qo0%0 1;0 qo0%1 1"

    with_member(tmp_path, before)
    asyncio.run(after())


def test_overlong_attempt_id_is_refused(tmp_path: Path) -> None:
    async def work(member: PopMember, clock: ManualClock) -> None:
        assert (await member.ask_pop(attempt="a" * 256)).code == ResponseCode.INVALID_PARAMETER
        assert offsets(await member.pop(1, attempt="a" * 255)) == [0]

    with_member(tmp_path, work)
