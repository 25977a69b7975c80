"""A promotion with much state does a bounded amount of work in each turn of the event loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.intake.message import NewMessage
from broker.pop.pop_book import PopBook
from broker.pop.pop_log import PopCheckPoint
from broker.store.queue_table import QueueTable
from broker.waiting.half_messages import Half, HalfMessages
from broker.waiting.timer_message import TimerMessages
from tests.kit.broker.in_process import running, send
from tests.kit.broker.set_in_process import broker_set
from tests.kit.clock.calls_per_turn import CallsPerTurn
from tests.kit.clock.turns import CALLS_IN_A_TURN, calls_in_turns
from tests.kit.clock.waiting import until
from tests.unit.broker.role_changes import hand_to, put

TOPIC = "orders"
QUEUES, HALVES, TIMERS, OFFSETS = 2_500, 350, 1_200, 5_000
HALF = "TRAN_MSG\x01true\x02PGROUP\x01p\x02"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str], CallsPerTurn]:
    def count(owner: type, name: str) -> CallsPerTurn:
        counter = CallsPerTurn(getattr(owner, name))

        def method(*args: Any) -> Any:
            return counter(*args)

        monkeypatch.setattr(owner, name, method)
        return counter

    return count


async def test_promotion_loads_a_bounded_amount_of_state_per_turn(
    tmp_path: Path, counted: Callable[[type, str], CallsPerTurn]
) -> None:
    async with broker_set(tmp_path, members=2) as brokers:
        former, (heir,) = await brokers.master(), await brokers.slaves()
        broker, now = former.broker, former.broker.clock.now_ms()
        await put(former, b"first", topic=TOPIC)
        for queue in range(QUEUES):
            broker.pops.record(PopCheckPoint("g", TOPIC, queue, 1, now, now + 60_000, False, [0]))
        for number in range(TIMERS):
            named = {"TIMER_DELAY_SEC": "3600", "UNIQ_KEY": f"id-{number}"}
            broker.timers.take(NewMessage(topic=TOPIC, queue_id=0, body=b"timer", born_timestamp=now), named)
        for number in range(HALVES):
            named = {"UNIQ_KEY": f"id-{number}"}
            broker.transactions.take(NewMessage(topic=TOPIC, queue_id=0, body=b"half", born_timestamp=now), named)
        await put(former, b"last", topic=TOPIC)
        await until(lambda: heir.broker.store.visibility.confirmed == former.end, "it has all of that")
        await until(lambda: len(heir.broker.pops.queues) == QUEUES, "its book follows")
        for number in range(OFFSETS):
            heir.broker.offsets.commit("pulling", "others", number, 0)
        clipped, read = counted(PopBook, "_clip"), counted(HalfMessages, "_load_half")
        added, compared = counted(TimerMessages, "_add"), counted(QueueTable, "max_offset")
        await hand_to(brokers, heir)
        assert (clipped.all, read.all, added.all) == (QUEUES, HALVES, TIMERS)
        assert compared.all >= OFFSETS
        assert len(heir.broker.transactions) == HALVES
        assert len(heir.broker.timers) == TIMERS
        most = {"popped": clipped.most, "halves": read.most, "timers": added.most, "offsets": compared.most}
        assert most["popped"] <= 500, most
        assert most["halves"] <= 100, most
        assert most["timers"] <= 250, most
        assert most["offsets"] <= 2_100, most


async def test_deposed_master_frees_its_timers_and_half_messages_in_turns(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, _):
        for number in range(20_000):
            broker.timers._add((1, number, number))
            broker.transactions._pending[number] = Half(number, number, 0, None, 0)
        turns = calls_in_turns(broker.timers.forget_parts()) + calls_in_turns(broker.transactions.forget_parts())
        assert max(turns) <= CALLS_IN_A_TURN, turns
        assert (len(broker.timers), len(broker.transactions)) == (0, 0)


class WithoutAWalk(OrderedDict[int, Half]):
    """A table that does not permit iteration over its values."""

    def values(self) -> Any:
        raise AssertionError("all that wait were looked at")


async def test_half_messages_are_loaded_without_a_scan_of_all_pending_ones(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, connection):
        for number in range(10):
            await send(connection, TOPIC, b"%d" % number, HALF)
        halves = broker.transactions
        halves._pending = WithoutAWalk()
        halves.load()
        assert len(halves) == 10
        halves._pending = OrderedDict()  # the broker itself iterates over it
