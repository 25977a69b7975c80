"""Resets of a popping group with messages in flight: the new offset applies, and old receipts are void."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from infra.clock import ManualClock
from neve.remoting.codes import RequestCode as Code
from tests.kit.broker.in_process import ask, running, send
from tests.kit.broker.pop_member import PopMember, offsets

MESSAGES = 10
ordinary_and_orderly = pytest.mark.parametrize("order", [False, True], ids=["ordinary", "orderly"])
with_and_without_acks = pytest.mark.parametrize("acks", [False, True], ids=["unanswered", "acknowledged late"])


def with_member(
    root: Path, work: Callable[[PopMember], Awaitable[None]], *, order: bool = False, clock: ManualClock | None = None
) -> None:
    async def main() -> None:
        async with running(root, clock=clock or ManualClock()) as (broker, connection):
            for number in range(MESSAGES):
                await send(connection, "t", b"m%d" % number)
            await work(PopMember(broker, connection, order=order))

    asyncio.run(main())


async def rest(member: PopMember) -> list[int]:
    """Pop and acknowledge until the group gets nothing. Return the offsets."""
    found: list[int] = []
    while taken := await member.pop(4):
        found += offsets(taken)
        await member.ack(*taken)
    return found


@ordinary_and_orderly
@with_and_without_acks
@pytest.mark.parametrize(
    "to",
    [[2], [8], [10], [3, 9, 1], [5, 5], [10, 0], [0]],
    ids=["back", "forward", "end", "thrice", "same", "0", "start"],
)
def test_group_gets_exactly_the_messages_from_its_new_offset_on(
    tmp_path: Path, order: bool, acks: bool, to: list[int]
) -> None:
    async def work(member: PopMember) -> None:
        old = await member.pop(5)
        await member.ack(old[0])
        for offset in to:
            await member.reset(offset)
            if acks:
                await member.ack(*old)
            assert await member.offset() == offset
        assert await rest(member) == list(range(to[-1], MESSAGES))
        assert await member.offset() == MESSAGES
        member.broker.clock.advance(120_000)  # type: ignore[attr-defined]
        assert await member.broker.revive.run_due() == 0
        assert await member.pop() == []

    with_member(tmp_path, work, order=order)


@ordinary_and_orderly
def test_old_receipt_is_void_even_if_the_message_is_in_flight_again(tmp_path: Path, order: bool) -> None:
    async def work(member: PopMember) -> None:
        old = await member.pop(5)
        await member.reset(0)
        new = await member.pop(5)
        assert offsets(new) == offsets(old)
        await member.ack(*old)
        await member.hide(old[0], 1)
        assert await member.offset() == 0
        await member.ack(*new)
        assert await member.offset() == 5

    with_member(tmp_path, work, order=order)


def test_reset_group_continues_after_its_acknowledgements(tmp_path: Path) -> None:
    async def work(member: PopMember) -> None:
        await member.ack(*await member.pop())
        await member.reset(5)
        assert await rest(member) == [5, 6, 7, 8, 9]
        assert await rest(member) == []

    with_member(tmp_path, work)


@ordinary_and_orderly
def test_waiting_pop_gets_messages_after_a_reset(tmp_path: Path, order: bool) -> None:
    async def work(member: PopMember) -> None:
        await member.ack(*await member.pop())
        waiting = asyncio.create_task(member.pop(poll=50_000))
        await member.until_in_line()
        await member.reset(7)
        assert offsets(await waiting) == [7, 8, 9]

    with_member(tmp_path, work, order=order)


@pytest.mark.parametrize("by", ["an administrator", "a commit", "a copy of another group"])
@ordinary_and_orderly
def test_changed_offset_survives_a_clean_restart(tmp_path: Path, by: str, order: bool) -> None:
    async def before(member: PopMember) -> None:
        other = PopMember(member.broker, member.connection, group="other")
        await other.ack(*await other.pop(2))
        await member.ack(*await member.pop())
        if by == "an administrator":
            await member.reset(2)
        elif by == "a commit":
            answer = await ask(
                member.connection, Code.UPDATE_CONSUMER_OFFSET, consumerGroup="g", topic="t", queueId=0, commitOffset=2
            )
            assert answer.code == 0, answer.remark
        else:
            answer = await ask(
                member.connection, Code.CLONE_GROUP_OFFSET, srcGroup="other", destGroup="g", topic="t", offline="true"
            )
            assert answer.code == 0, answer.remark

    async def after() -> None:
        async with running(tmp_path) as (broker, connection):
            assert await rest(PopMember(broker, connection, order=order)) == list(range(2, MESSAGES))

    with_member(tmp_path, before, order=order)
    asyncio.run(after())


def test_message_due_for_redelivery_is_not_redelivered_after_a_reset(tmp_path: Path) -> None:
    """It was due, and the reset skipped it before it reached the retry topic."""

    async def work(member: PopMember) -> None:
        await member.pop(5, invisible=1000)
        member.broker.clock.advance(2000)  # type: ignore[attr-defined]
        await member.reset(5)
        assert await member.broker.revive.run_due() == 0
        assert await rest(member) == [5, 6, 7, 8, 9]

    with_member(tmp_path, work)


def test_recreated_group_begins_at_its_committed_offsets(tmp_path: Path) -> None:
    async def work(member: PopMember) -> None:
        await member.pop(5)
        answer = await ask(member.connection, Code.DELETE_SUBSCRIPTIONGROUP, groupName="g", cleanOffset="true")
        assert answer.code == 0, answer.remark
        assert await rest(member) == list(range(MESSAGES))

    with_member(tmp_path, work)


def test_group_lost_from_its_table_in_a_crash_keeps_its_pop_state(tmp_path: Path) -> None:
    """An automatically created group is saved some seconds later. Only a deletion of the group drops its pop state."""

    async def work(member: PopMember) -> None:
        taken = await member.pop(5)
        await member.ack(*taken[:3])
        groups, clock = member.broker.groups.groups, member.broker.clock
        row = groups.pop(member.group)
        clock.advance(120_000)  # type: ignore[attr-defined]
        assert await member.broker.revive.run_due() == 0
        groups[member.group] = row
        clock.advance(20_000)  # type: ignore[attr-defined]
        assert await member.broker.revive.run_due() == 2
        assert sorted(await rest(member)) == [0, 1, 5, 6, 7, 8, 9]  # two of them are offsets of the retry topic

    with_member(tmp_path, work)
