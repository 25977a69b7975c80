"""Waiting pops: their timeout by the broker's clock, their order, and the permissions at the time of the answer."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.broker_controller import BrokerController
from broker.long_polling.message_arriving import MessageArriving
from broker.long_polling.pop_long_polling import ANY_QUEUE, PopLongPolling, Waiter
from broker.long_polling.pull_request_hold import HeldPull, PullRequestHold
from broker.role import Role
from infra.clock import ManualClock
from infra.loop.supervisor import Faults
from neve.errors import BrokerError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from tests.kit.broker.in_process import ask, running, send
from tests.kit.broker.pop_member import PopMember


def with_member(root: Path, work: Callable[[PopMember], Awaitable[None]]) -> None:
    async def main() -> None:
        async with running(root, clock=ManualClock()) as (broker, connection):
            await send(connection, "t", b"first")
            member = PopMember(broker, connection)
            await member.ack(*await member.pop())
            await work(member)

    asyncio.run(main())


@pytest.mark.parametrize("skew_ms", [-86_400_000, -20_000, 20_000, 86_400_000])
def test_client_with_a_skewed_clock_waits_its_full_time(tmp_path: Path, skew_ms: int) -> None:
    async def work(member: PopMember) -> None:
        born = ManualClock().now_ms() + skew_ms
        waiting = asyncio.create_task(
            ask(
                member.connection, Code.POP_MESSAGE, consumerGroup="g", topic="t", queueId=-1, maxMsgNums=1,
                invisibleTime=60_000, pollTime=15_000, bornTime=born, initMode=0,
            )
        )  # fmt: skip
        await member.until_in_line()
        await send(member.connection, "t", b"second")
        assert [one.body for one in member.taken(await waiting)] == [b"second"]

    with_member(tmp_path, work)


async def topic_without_reading(member: PopMember) -> int:
    answer = await ask(
        member.connection, Code.UPDATE_AND_CREATE_TOPIC, topic="t", defaultTopic="TBW102", readQueueNums=1,
        writeQueueNums=1, perm=2, topicFilterType="SINGLE_TAG", order="false",
    )  # fmt: skip
    assert answer.code == 0, answer.remark
    await send(member.connection, "t", b"secret")
    return ResponseCode.NO_PERMISSION


async def group_without_consumption(member: PopMember) -> int:
    body = b'{"groupName":"g","consumeEnable":false}'
    answer = await ask(member.connection, Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body)
    assert answer.code == 0, answer.remark
    await send(member.connection, "t", b"secret")
    return ResponseCode.NO_PERMISSION


async def topic_is_gone(member: PopMember) -> int:
    answer = await ask(member.connection, Code.DELETE_TOPIC_IN_BROKER, topic="t")
    assert answer.code == 0, answer.remark
    return ResponseCode.TOPIC_NOT_EXIST


@pytest.mark.parametrize("change", [topic_without_reading, group_without_consumption, topic_is_gone])
def test_permission_revoked_during_a_waiting_pop_applies_to_it(
    tmp_path: Path, change: Callable[[PopMember], Awaitable[int]]
) -> None:
    async def work(member: PopMember) -> None:
        waiting = asyncio.create_task(member.ask_pop(poll=50_000))
        await member.until_in_line()
        code = await change(member)
        assert (await waiting).code == code

    with_member(tmp_path, work)


@pytest.mark.parametrize("change", [topic_without_reading, group_without_consumption, topic_is_gone])
def test_permission_revoked_during_a_suspended_pull_applies_to_it(
    tmp_path: Path, change: Callable[[PopMember], Awaitable[int]]
) -> None:
    async def work(member: PopMember) -> None:
        held = asyncio.create_task(
            ask(
                member.connection, Code.PULL_MESSAGE, consumerGroup="g", topic="t", queueId=0, queueOffset=1,
                maxMsgNums=32, sysFlag=6, commitOffset=0, suspendTimeoutMillis=30_000, subVersion=0, subscription="*",
                expressionType="TAG",
            )
        )  # fmt: skip
        while not member.broker.hold.count:
            await ask(member.connection, Code.GET_BROKER_HA_STATUS)
        code = await change(member)
        assert (await held).code == code

    with_member(tmp_path, work)


def test_waiting_pop_of_a_broker_that_becomes_a_slave_returns_nothing(tmp_path: Path) -> None:
    """Only the master may log what a pop delivers."""

    async def work(member: PopMember) -> None:
        waiting = asyncio.create_task(member.ask_pop(poll=50_000))
        await member.until_in_line()
        role = member.broker.role
        role.become(Role.FENCED)
        role.become(Role.SLAVE)
        assert (await waiting).code == ResponseCode.SYSTEM_BUSY

    with_member(tmp_path, work)


def in_line(polling: PopLongPolling, *waiters: Waiter) -> None:
    for waiter in waiters:
        polling.add(waiter)


async def test_arrival_wakes_waiters_of_its_queue_or_of_any_queue() -> None:
    polling = PopLongPolling()
    zero, one, any_queue = (Waiter("g", "t", (), queue) for queue in (0, 1, ANY_QUEUE))
    in_line(polling, zero, one, any_queue)
    polling.arrived("t", 2)
    assert [waiter.future.done() for waiter in (zero, one, any_queue)] == [False, False, True]
    polling.arrived("t", 1)
    assert [waiter.future.done() for waiter in (zero, one)] == [False, True]
    polling.arrived("t", 1)
    assert not zero.future.done()


async def test_wakeup_of_a_gone_waiter_is_passed_to_the_next() -> None:
    polling = PopLongPolling()
    first, second = (Waiter("g", "t", ("r",), ANY_QUEUE) for _ in range(2))
    in_line(polling, first, second)
    polling.pass_on(first)
    assert not second.future.done()  # it had not been woken
    polling.arrived("r", 0)
    polling.pass_on(first)
    assert second.future.done()
    for waiter in (first, second):
        polling.remove(waiter)
    assert polling.count == 0
    polling.arrived("t", 0)


def fail_once(monkeypatch: pytest.MonkeyPatch, part: object, name: str) -> None:
    """Let the next call raise a BrokerError. Later calls succeed."""
    whole = getattr(part, name)

    def failing(*args: object) -> object:
        monkeypatch.setattr(part, name, whole)
        raise BrokerError(ResponseCode.SYSTEM_ERROR, "injected")

    monkeypatch.setattr(part, name, failing)


def in_broker(broker: BrokerController, failing: str) -> tuple[object, str]:
    return (broker.guard, "require") if failing == "permission" else (broker.pop_service, failing)


@pytest.mark.parametrize("failing", ["pop", "permission"])
def test_pop_that_fails_after_it_was_woken_wakes_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    async def work(member: PopMember) -> None:
        first = asyncio.create_task(member.ask_pop(poll=50_000))
        await member.until_in_line(1)
        second = asyncio.create_task(member.ask_pop(poll=50_000))
        await member.until_in_line(2)
        fail_once(monkeypatch, *in_broker(member.broker, failing))
        await send(member.connection, "t", b"second")
        assert (await first).remark == "injected"
        assert [one.body for one in member.taken(await second)] == [b"second"]

    with_member(tmp_path, work)


@pytest.mark.parametrize("failing", ["has_message", "permission"])
def test_notification_that_fails_after_it_was_woken_wakes_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    async def work(member: PopMember) -> None:
        first = asyncio.create_task(member.ask_notification(poll=50_000))
        await member.until_in_line(1)
        second = asyncio.create_task(member.ask_notification(poll=50_000))
        await member.until_in_line(2)
        fail_once(monkeypatch, *in_broker(member.broker, failing))
        await send(member.connection, "t", b"second")
        assert (await first).remark == "injected"
        assert (await second).ext["hasMsg"] == "true"

    with_member(tmp_path, work)


async def test_wakeup_for_one_group_wakes_no_other_group() -> None:
    polling = PopLongPolling()
    ours, theirs, told = Waiter("g", "t", (), 0), Waiter("h", "t", (), 0), Waiter("g", "t", (), 0, takes=False)
    in_line(polling, ours, theirs, told)
    assert (polling.waiting_for("g", "t", 0), polling.waiting_for("g", "t", 1)) == (1, 0)
    polling.wake("g", "t", 0)
    assert [waiter.future.done() for waiter in (ours, theirs, told)] == [True, False, True]
    polling.wake_group("h", "t")
    assert theirs.future.done()


async def test_message_answers_all_matching_pulls_and_one_pop_per_group() -> None:
    faults, answered = Faults(), list[str]()
    hold, polling = PullRequestHold(ManualClock(), 10, faults), PopLongPolling()
    arriving = MessageArriving(hold, polling, faults)
    queue = SimpleNamespace(topic="t", queue_id=0)

    def held(name: str, codes: frozenset[int] | None = None) -> HeldPull:
        def resume(last: bool) -> None:
            answered.append(name)

        nobody: Any = object
        return HeldPull(nobody, "t", 0, 1, 100.0, codes, resume)

    for pull in (held("all"), held("fitting", frozenset({7})), held("other", frozenset({8})), held("also all")):
        hold.hold(pull)
    waiters = [Waiter(group, "t", (), 0) for group in ("g", "g", "h")]
    in_line(polling, *waiters)
    shown: Any = [(queue, 1, 7)]
    arriving.appended(shown)
    await asyncio.gather(waiters[0].future, waiters[2].future)
    assert sorted(answered) == ["all", "also all", "fitting"] and hold.count == 1
    assert [waiter.future.done() for waiter in waiters] == [True, False, True]
    arriving.release_topic("t")
    assert (answered[-1], waiters[1].future.done()) == ("other", True)
