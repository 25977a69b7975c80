"""Pending timers, transactions and pops belong to the master: a slave delivers none and writes nothing to its log."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from broker.broker_controller import BrokerController
from broker.intake.internal_records import WRITTEN_BY_NEVE
from broker.intake.message import NewMessage
from broker.pop.pop_log import PopCheckPoint, encode_event
from broker.waiting.half_messages import TRANSACTION_BITS
from infra.clock import ManualClock
from infra.loop.in_steps import at_once
from neve.record.codec import iter_records
from neve.record.layout import TRANSACTION_COMMIT
from neve.remoting.names import CHECK_MAX_TOPIC, OP_HALF_TOPIC
from tests.kit.broker.in_process import running, send
from tests.kit.broker.pop_member import PopMember

HALF = "TRAN_MSG\x01true\x02PGROUP\x01p\x02"
DAYS_MS = 100 * 3_600_000  # longer than the timeout of a transaction check


def bodies(broker: BrokerController, topic: str) -> list[bytes]:
    got = broker.store.reader.get(topic, 0, 0, 100, 1 << 20)
    return sorted(record.body for buffer in got.buffers for record in iter_records(buffer))


async def all_books(broker: BrokerController) -> int:
    """Run each periodic delivery once and return the number of delivered messages."""
    await broker.check_back.run()
    return broker.schedule.deliver_due() + broker.timers.deliver_due() + await broker.revive.run_due()


async def test_due_messages_are_delivered_by_a_master_and_never_by_a_slave(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()

    async with running(tmp_path / "broker", clock=clock) as (broker, connection):
        store = broker.store
        await send(connection, "popped", b"popped")
        member = PopMember(broker, connection, "popped")
        assert [taken.body for taken in await member.pop(1, invisible=10_000)] == [b"popped"]
        await send(connection, "orders", b"delayed", "DELAY\x011\x02")
        await send(connection, "orders", b"timer", "TIMER_DELAY_MS\x015000\x02")
        await send(connection, "orders", b"half", HALF)
        store.end.roll()
        await broker.flusher.flush_now()
        store.follow()
        clock.advance(DAYS_MS)
        end, caplog.records[:] = store.max_physical_offset, []
        for _ in range(3):
            assert await all_books(broker) == 0
        assert store.max_physical_offset == end
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
        store.lead()
        assert await all_books(broker) == 3
        assert bodies(broker, "orders") == [b"delayed", b"timer"]
        assert bodies(broker, CHECK_MAX_TOPIC) == [b"half"]


async def test_slave_does_not_write_a_transaction_mark_that_a_crash_lost(tmp_path: Path) -> None:
    """Its master has written the mark behind the end of the slave's log, or the next master will."""

    async with running(tmp_path / "broker") as (broker, connection):
        await send(connection, "orders", b"m", HALF)
        (half,) = broker.transactions.waiting()
        broker.store.put(
            "orders", 0, b"m", b"", flag=0, sys_flag=TRANSACTION_COMMIT & TRANSACTION_BITS, born_timestamp=1,
            born_host=("127.0.0.1", 1), prepared_transaction_offset=half.physical_offset,
        )  # fmt: skip
        broker.store.follow()
        broker.transactions.load()
        assert len(broker.transactions) == 0
        assert broker.store.queues.max_offset(OP_HALF_TOPIC, 0) == 0
        broker.store.lead()
        await send(connection, "orders", b"next")
        assert broker.store.queues.max_offset(OP_HALF_TOPIC, 0) == 0


async def test_pops_whose_records_are_truncated_are_delivered_again(tmp_path: Path) -> None:
    """The next master does not know of them and may have other messages there, which would be skipped otherwise."""

    async with running(tmp_path / "broker") as (broker, connection):
        store, pops = broker.store, broker.pops
        for number in range(6):
            await send(connection, "popped", b"%d" % number)
        member = PopMember(broker, connection, "popped")
        (first,) = await member.pop(1)
        await member.ack(first)
        shared = store.max_physical_offset
        await member.ack(*await member.pop(4))
        assert broker.offsets.query("g", "popped", 0) == 5
        await pops.save()
        store.follow()
        pops.load()
        store.truncate(shared, epoch=1, floor=shared)
        for _ in range(2):  # the second start reads what the first one wrote
            pops.load()
            assert not pops.queues
        broker.offsets.follow("g", "popped", 0, 1)  # as in the next master's log
        store.lead()
        at_once(pops.lead_steps())
        pops.lead()
        assert [taken.body for taken in await member.pop()] == [b"1", b"2", b"3", b"4", b"5"]
        await pops.save()
        pops.load()
        assert pops.queues["g", "popped", 0].next_offset == 6, "it is whole again"


async def test_master_with_partial_pop_records_redelivers_unacked_messages(tmp_path: Path) -> None:
    """No record behind the truncation names the messages popped before."""

    async with running(tmp_path / "broker") as (broker, connection):
        store, pops = broker.store, broker.pops
        for number in range(6):
            await send(connection, "popped", b"%d" % number)
        member = PopMember(broker, connection, "popped")
        await member.pop(2)
        shared = store.max_physical_offset
        await member.pop(1)
        await pops.save()
        store.follow()
        store.truncate(shared, epoch=1, floor=shared)
        pops.load()
        store.lead()  # acts as the next master
        taken = PopCheckPoint("g", "popped", 0, 4, 7, 1 << 60, False, [2, 3])
        event = NewMessage(
            topic=pops._topic,
            queue_id=0,
            body=encode_event(taken),
            born_timestamp=1,
            prepared_transaction_offset=WRITTEN_BY_NEVE,
        )
        broker.writer.put(event, internal=True)
        foreign = msgspec.structs.replace(event, body=b'["r","g","popped",0,6]', prepared_transaction_offset=0)
        broker.writer.put(foreign, internal=True)
        store.follow()
        while pops.follow(10):
            pass
        assert pops.queues["g", "popped", 0].next_offset == 4
        broker.offsets.follow("g", "popped", 0, 0)
        store.lead()
        at_once(pops.lead_steps())
        pops.lead()
        assert [one.body for one in await member.pop()] == [b"0", b"1", b"2", b"3", b"4", b"5"]
