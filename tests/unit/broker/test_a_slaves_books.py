"""What waits in a slave's log is its master's: the slave brings nothing on its way, carries nothing and ends well."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from broker.broker_controller import BrokerController
from broker.waiting.half_messages import TRANSACTION_BITS
from infra.clock import ManualClock
from neve.record.codec import iter_records
from neve.record.layout import TRANSACTION_COMMIT
from neve.remoting.names import CHECK_MAX_TOPIC, OP_HALF_TOPIC
from tests.broker_in_process import running, send
from tests.popping import Member

HALF = "TRAN_MSG\x01true\x02PGROUP\x01p\x02"
DAYS_MS = 100 * 3_600_000  # longer than anybody waits for the end of a transaction


def bodies(broker: BrokerController, topic: str) -> list[bytes]:
    got = broker.store.get(topic, 0, 0, 100, 1 << 20)
    return sorted(record.body for buffer in got.buffers for record in iter_records(buffer))


async def all_books(broker: BrokerController) -> int:
    """One round of whatever is due; how many messages came."""
    await broker.check_back.run()
    return broker.schedule.deliver_due() + broker.timers.deliver_due() + await broker.revive.run_due()


def test_what_is_due_waits_while_the_broker_is_a_slave_and_comes_when_it_is_master(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()

    async def scenario() -> None:
        async with running(tmp_path / "broker", clock=clock) as (broker, connection):
            store = broker.store
            await send(connection, "popped", b"popped")
            member = Member(broker, connection, "popped")
            assert [taken.body for taken in await member.pop(1, invisible=10_000)] == [b"popped"]
            await send(connection, "orders", b"delayed", "DELAY\x011\x02")
            await send(connection, "orders", b"timer", "TIMER_DELAY_MS\x015000\x02")
            await send(connection, "orders", b"half", HALF)
            store.roll()
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

    asyncio.run(scenario())


def test_a_mark_that_a_crash_kept_from_the_log_is_not_the_slaves_to_write(tmp_path: Path) -> None:
    """Its master has written it, behind the end of what the slave has, or the next one will."""

    async def scenario() -> None:
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
            assert broker.store.max_offset(OP_HALF_TOPIC, 0) == 0
            broker.store.lead()
            await send(connection, "orders", b"next")
            assert broker.store.max_offset(OP_HALF_TOPIC, 0) == 0

    asyncio.run(scenario())
