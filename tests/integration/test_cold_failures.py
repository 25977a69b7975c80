"""The archive's store hangs, or an object is lost or damaged.

Hot traffic continues, and cold consumers wait without skipping messages.
"""

import asyncio
import errno
import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from pyarrow.parquet import read_table

from broker.broker_controller import BrokerController
from broker.pop.pop_log import Ack, PopCheckPoint
from infra.net.remoting_server import Connection, open_connection
from neve.record.codec import iter_records
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.names import RETRY_V1, real_topic
from tests.kit.broker.in_process import ask, offload, running, send
from tests.kit.clock.waiting import until

COUNT = 50
PULLS = 300
COLD_GROUPS = 40  # More than the number of read lanes.

Check = Callable[[BrokerController, Connection, Path], Awaitable[None]]


async def pull(connection: Connection, offset: int, group: str = "g") -> RemotingCommand:
    return await ask(
        connection, Code.PULL_MESSAGE, consumerGroup=group, topic="T", queueId=0, queueOffset=offset, maxMsgNums=32,
        sysFlag=4, commitOffset=0, suspendTimeoutMillis=0, subVersion=0, subscription="*", expressionType="TAG",
    )  # fmt: skip


def let_go(pipe: Path) -> bool:
    """Make a reader that is blocked at the pipe fail; return False if none is blocked yet."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return False
    return True


def with_archive(tmp_path: Path, check: Check) -> None:
    """Run `check` on a broker with COUNT messages in the archive only, in one object, and one more in the log.

    `check` gets the path of the object.
    """

    async def main() -> None:
        archive = tmp_path / "archive"
        settings = (f"storeUrl=dir:{archive}", "coldReadTimeout=5m")
        async with running(tmp_path / "data", *settings) as (broker, connection):
            for n in range(COUNT):
                await send(connection, "T", b"%d" % n)
            await offload(broker)
            assert broker.store.queues.min_offset("T", 0) == COUNT
            await send(connection, "T", b"%d" % COUNT)
            (path,) = (archive / "topic=T").rglob("*.parquet")
            await check(broker, connection, path)

    asyncio.run(main())


def test_hanging_store_delays_cold_pulls_but_not_hot_traffic(tmp_path: Path) -> None:
    async def check(broker: BrokerController, connection: Connection, path: Path) -> None:
        tiered = broker.tiered
        kept = path.with_suffix(".kept")
        path.rename(kept)
        os.mkfifo(path)  # A reader that opens the pipe blocks until there is a writer.
        other = await open_connection(*broker.address)
        waiting = [asyncio.create_task(pull(other, n % COUNT, f"g{n % 7}")) for n in range(PULLS)]
        patient = asyncio.create_task(pull(connection, 3))
        await until(lambda: tiered.cold_parked == PULLS + 1)
        assert threading.active_count() < 60
        for via in (other, connection):
            async with asyncio.timeout(10):
                await send(via, "T", b"%d" % COUNT)
                hot = await pull(via, COUNT)
            assert next(iter_records(hot.body)).body == b"%d" % COUNT
        assert tiered.cold_parked == PULLS + 1
        other.close()
        await asyncio.wait(waiting)
        assert all(isinstance(task.exception(), Exception) for task in waiting)
        await until(lambda: tiered.cold_parked == 1)
        pipe = path.with_suffix(".pipe")
        path.rename(pipe)
        kept.rename(path)
        await until(lambda: patient.done() or let_go(pipe))
        answer = await patient
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        assert next(iter_records(answer.body)).queue_offset == 3

    with_archive(tmp_path, check)


def test_damaged_object_blocks_its_readers_until_repaired(tmp_path: Path) -> None:
    async def check(broker: BrokerController, connection: Connection, path: Path) -> None:
        whole = path.read_bytes()
        place = read_table(path, columns=["commit_log_offset"])["commit_log_offset"][0].as_py()
        assert broker.archive.journal is not None
        (name,) = broker.archive.journal.catalog.objects("T")
        middle = name.row_groups[0].offset + name.row_groups[0].length // 2
        flipped = bytearray(whole)
        for position in range(middle - 32, middle + 32):
            flipped[position] ^= 1
        for spoilt in (None, bytes(flipped), whole[: len(whole) // 2], b""):
            if spoilt is None:
                path.unlink()
            else:
                path.write_bytes(spoilt)
            answer = await pull(connection, 7)
            assert (answer.code, bytes(answer.body)) == (ResponseCode.SYSTEM_BUSY, b"")
            assert "nextBeginOffset" not in answer.ext
            assert (await pull(connection, COUNT)).code == ResponseCode.SUCCESS
        for code, what in ((Code.QUERY_MESSAGE, {"key": "x"}), (Code.VIEW_MESSAGE_BY_ID, {"offset": place})):
            asked: dict[str, object] = {"topic": "T", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 1 << 60, **what}
            answer = await ask(connection, code, **asked)
            assert answer.code == ResponseCode.SYSTEM_BUSY and "1 row groups stored from" in (answer.remark or "")
            path.write_bytes(whole)
            answer = await ask(connection, code, **asked)
            assert answer.code == (ResponseCode.QUERY_NOT_FOUND if code == Code.QUERY_MESSAGE else ResponseCode.SUCCESS)
            path.write_bytes(b"")
        path.write_bytes(whole)
        answer = await pull(connection, 7)
        assert [record.queue_offset for record in iter_records(answer.body)] == list(range(7, 39))
        assert broker.tiered.cold_failures == 4

    with_archive(tmp_path, check)


def take_out(broker: BrokerController, group: str, offsets: list[int]) -> int:
    """Put messages in flight as if they had been popped and were due at once; return the pop time."""
    context = broker
    context.groups.require(group)
    context.pops.open(group, "T", 0, offsets[0])
    now = context.clock.now_ms()
    context.pops.record(PopCheckPoint(group, "T", 0, offsets[-1] + 1, now, now, False, offsets))
    return now


def test_hanging_store_delays_redelivery_of_cold_popped_messages_only(tmp_path: Path) -> None:
    async def check(broker: BrokerController, connection: Connection, path: Path) -> None:
        context, revive = broker, broker.revive
        kept, pipe = path.with_suffix(".kept"), path.with_suffix(".pipe")
        path.rename(kept)
        os.mkfifo(path)

        def back(group: str) -> list[bytes]:
            got = context.store.reader.get(real_topic("T", group, RETRY_V1), 0, 0, COUNT * 2, 1 << 20)
            return [bytes(record.body) for buffer in got.buffers for record in iter_records(buffer)]

        popped = take_out(broker, "long", list(range(COUNT)))
        for n in range(COLD_GROUPS):
            take_out(broker, f"cold{n}", [n])
        await until(lambda: revive.waiting == COUNT + COLD_GROUPS)
        for n in range(2):
            take_out(broker, f"hot{n}", [COUNT])
            await until(partial(lambda n: back(f"hot{n}") == [b"%d" % COUNT], n))
        assert (revive.revived, revive.waiting) == (2, COUNT + COLD_GROUPS)
        assert 0 < context.tiered.cold_parked <= 32 and threading.active_count() < 60
        context.pops.record(Ack("long", "T", 0, popped, [0, 7]))
        context.offsets.commit("cold3", "T", 0, 20)  # Committed by hand: the messages in flight are dropped.
        del context.groups.groups["cold5"]
        context.pops.drop(group="cold5")
        path.rename(pipe)
        kept.rename(path)
        await until(lambda: revive.waiting == 0 or (let_go(pipe) and False))
        assert back("long") == [b"%d" % n for n in range(COUNT) if n not in (0, 7)]
        assert [back(f"cold{n}") for n in range(COLD_GROUPS)] == [
            [b"%d" % n] if n not in (3, 5) else [] for n in range(COLD_GROUPS)
        ]
        assert context.offsets.query("cold3", "T", 0) == 20
        assert context.topics.select(real_topic("T", "cold5", RETRY_V1)) is None
        assert not [(q.key, len(q.flights), q.next_offset, q.low()) for q in context.pops.queues.values() if q.flights]

    with_archive(tmp_path, check)


def test_popped_messages_of_a_missing_object_are_redelivered_on_its_return(tmp_path: Path) -> None:
    async def check(broker: BrokerController, connection: Connection, path: Path) -> None:
        context = broker
        kept = path.with_suffix(".kept")
        path.rename(kept)
        take_out(broker, "g", [4, 5])
        await until(lambda: context.tiered.cold_failures > 0 and not broker.revive.waiting)
        queue = context.pops.find("g", "T", 0)
        assert queue is not None
        now = context.clock.now_ms()
        assert {offset: flight.visible_at > now for offset, flight in queue.flights.items()} == {4: True, 5: True}
        assert context.tiered.cold_failures == 1, "one failure puts off the whole line"
        kept.rename(path)
        for offset, flight in list(queue.flights.items()):
            context.pops.put_off(queue, offset, flight, now)
        await until(lambda: not queue.flights)
        assert context.store.queues.max_offset(real_topic("T", "g", RETRY_V1), 0) == 2

    with_archive(tmp_path, check)
