"""Pop over the wire: acknowledged messages stay acknowledged and others are redelivered, also after a kill."""

import asyncio
import base64
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from infra.net.remoting_server import Connection, open_connection
from neve.record.codec import MessageRecord, iter_records
from neve.remoting.body import dumps
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from tests.kit.clock.waiting import until

NeveUp = Callable[..., AbstractContextManager[Any]]


def run(address: str, work: Callable[[Connection], Any]) -> Any:
    async def main() -> Any:
        host, _, port = address.rpartition(":")
        connection = await open_connection(host, int(port))
        try:
            return await work(connection)
        finally:
            connection.close()

    return asyncio.run(main())


async def ask(connection: Connection, code: int, ext: dict[str, str], body: bytes = b"") -> RemotingCommand:
    return await connection.invoke(RemotingCommand(code, ext=ext, body=body), 30)


async def send(connection: Connection, body: bytes, reconsume_times: int = 0) -> None:
    ext = {
        "a": "p", "b": "jobs", "c": "TBW102", "d": "1", "e": "0", "f": "0",
        "g": "1700000000000", "h": "0", "i": "", "j": str(reconsume_times), "k": "false", "m": "false",
    }  # fmt: skip
    answer = await ask(connection, Code.SEND_MESSAGE_V2, ext, body)
    assert answer.code == ResponseCode.SUCCESS, answer.remark


async def pop(
    connection: Connection, *, invisible: int, poll: int = 0, count: int = 32, order: bool = False
) -> RemotingCommand:
    ext = {
        "consumerGroup": "workers", "topic": "jobs", "queueId": "-1", "maxMsgNums": str(count),
        "invisibleTime": str(invisible), "pollTime": str(poll), "bornTime": "0", "initMode": "0",
        "order": str(order).lower(),
    }  # fmt: skip
    return await ask(connection, Code.POP_MESSAGE, ext)


async def notified(connection: Connection, **more: str) -> str:
    ext = {"consumerGroup": "workers", "topic": "jobs", "queueId": "0", "pollTime": "0", "bornTime": "0", **more}
    return (await ask(connection, Code.NOTIFICATION, ext)).ext["hasMsg"]


async def until_one_waits(connection: Connection) -> None:
    ext = {"consumerGroup": "workers", "topic": "jobs", "queueId": "0"}

    async def waits() -> bool:
        return (await ask(connection, Code.POLLING_INFO, ext)).ext["pollingNum"] == "1"

    await until(waits)


def records(answer: RemotingCommand) -> list[MessageRecord]:
    return list(iter_records(answer.body))


async def ack(connection: Connection, answer: RemotingCommand, record: MessageRecord) -> None:
    start = answer.ext["startOffsetInfo"].split(";")[0].split(" ")[2]
    info = f"{start} {answer.ext['popTime']} {answer.ext['invisibleTime']} {answer.ext['reviveQid']} 0 broker-a 0"
    ext = {
        "consumerGroup": "workers", "topic": "jobs", "queueId": "0", "offset": str(record.queue_offset),
        "extraInfo": f"{info} {record.queue_offset}",
    }  # fmt: skip
    done = await ask(connection, Code.ACK_MESSAGE, ext)
    assert done.code == ResponseCode.SUCCESS, done.remark


async def pop_until(connection: Connection, number: int) -> list[MessageRecord]:
    found: list[MessageRecord] = []
    while len(found) < number:
        answer = await pop(connection, invisible=60_000, poll=10_000)
        assert answer.code == ResponseCode.SUCCESS, answer.code
        found += records(answer)
    return found


def test_unacknowledged_messages_are_redelivered_after_a_kill(neve_up: NeveUp, tmp_path: Path) -> None:
    async def first(connection: Connection) -> None:
        for number in range(6):
            await send(connection, b"job %d" % number)
        answer = await pop(connection, invisible=3000)
        got = records(answer)
        assert answer.ext["msgOffsetInfo"] == "0 0 0,1,2,3,4,5"
        for record in (got[0], got[2], got[5]):
            await ack(connection, answer, record)
        assert (await pop(connection, invisible=3000)).code == ResponseCode.POLLING_TIMEOUT

    async def second(connection: Connection) -> list[MessageRecord]:
        return await pop_until(connection, 3)

    with neve_up(tmp_path) as neve:
        run(neve.broker, first)
        neve.kill()
    with neve_up(tmp_path) as neve:
        again = run(neve.broker, second)
    assert sorted(record.body for record in again) == [b"job 1", b"job 3", b"job 4"]
    assert {(record.topic, record.reconsume_times) for record in again} == {("jobs", 1)}
    fields = again[0].properties["POP_CK"].split(" ")
    assert (len(fields), fields[4:7]) == (8, ["1", "broker-a", "0"])


def test_batch_ack_advances_the_group_and_waiting_pop_gets_next_message(neve_up: NeveUp, tmp_path: Path) -> None:
    async def work(connection: Connection) -> None:
        for number in range(3):
            await send(connection, b"job %d" % number)
        answer = await pop(connection, invisible=60_000)
        item = {
            "c": "workers", "t": "jobs", "r": "0", "so": 0, "q": 0, "rq": 0,
            "pt": int(answer.ext["popTime"]), "it": 60_000, "b": base64.b64encode(b"\x07").decode(),
        }  # fmt: skip
        done = await ask(connection, Code.BATCH_ACK_MESSAGE, {}, dumps({"brokerName": "broker-a", "acks": [item]}))
        assert done.code == ResponseCode.SUCCESS
        ext = {"consumerGroup": "workers", "topic": "jobs", "queueId": "0"}
        assert (await ask(connection, Code.QUERY_CONSUMER_OFFSET, ext)).ext["offset"] == "3"
        waiting = asyncio.create_task(pop(connection, invisible=60_000, poll=15_000))
        while (await ask(connection, Code.POLLING_INFO, ext)).ext["pollingNum"] != "1":
            assert not waiting.done()
        await send(connection, b"late")
        assert [record.body for record in records(await waiting)] == [b"late"]

    with neve_up(tmp_path) as neve:
        run(neve.broker, work)


def test_maximum_reconsume_count_does_not_prevent_redelivery(neve_up: NeveUp, tmp_path: Path) -> None:
    async def work(connection: Connection) -> None:
        await send(connection, b"worn", reconsume_times=2**31 - 1)
        await send(connection, b"fresh")
        assert len(records(await pop(connection, invisible=1))) == 2
        again = await pop_until(connection, 2)
        assert {(r.body, r.reconsume_times) for r in again} == {(b"worn", 2**31 - 1), (b"fresh", 1)}
        back = {"group": "workers", "offset": str(again[0].physical_offset), "delayLevel": "-1"}
        assert (await ask(connection, Code.CONSUMER_SEND_MSG_BACK, back)).code == ResponseCode.SUCCESS

    with neve_up(tmp_path) as neve:
        run(neve.broker, work)
        assert "Traceback" not in neve.log()


def test_message_with_maximum_properties_size_is_redelivered(neve_up: NeveUp, tmp_path: Path) -> None:
    async def work(connection: Connection) -> None:
        ext = {
            "a": "p", "b": "jobs", "c": "TBW102", "d": "1", "e": "0", "f": "0",
            "g": "1700000000000", "h": "0", "i": "k\x01" + "v" * 32_765, "j": "0", "k": "false", "m": "false",
        }  # fmt: skip
        refused = await ask(connection, Code.SEND_MESSAGE_V2, ext, b"large")
        match = re.search(r"have (\d+) bytes, the limit is (\d+)", refused.remark or "")
        assert match is not None, refused.remark
        ext["i"] = ext["i"][: int(match[2]) - int(match[1])]
        sent = await ask(connection, Code.SEND_MESSAGE_V2, ext, b"large")
        assert sent.code == ResponseCode.SUCCESS, sent.remark
        await send(connection, b"small")
        assert len(records(await pop(connection, invisible=1))) == 2
        again = await pop_until(connection, 2)
        assert sorted(record.body for record in again) == [b"large", b"small"]
        assert {record.properties["k"] for record in again if record.body == b"large"} == {ext["i"][2:]}

    with neve_up(tmp_path) as neve:
        run(neve.broker, work)
        assert "Traceback" not in neve.log()


def test_ordered_pop_waits_until_all_popped_messages_are_acknowledged(neve_up: NeveUp, tmp_path: Path) -> None:
    async def work(connection: Connection) -> None:
        for number in range(4):
            await send(connection, b"step %d" % number)
        answer = await pop(connection, invisible=60_000, count=2, order=True)
        first, second = records(answer)
        assert (first.body, second.body, answer.ext["reviveQid"]) == (b"step 0", b"step 1", "999")
        assert answer.ext["orderCountInfo"] == "0 0 0;0 qo0%0 0;0 qo0%1 0"
        assert (await pop(connection, invisible=60_000, order=True)).code == ResponseCode.POLLING_TIMEOUT
        assert await notified(connection, order="true") == "false"
        await ack(connection, answer, first)
        assert (await pop(connection, invisible=60_000, order=True)).code == ResponseCode.POLLING_TIMEOUT
        waiting = asyncio.create_task(pop(connection, invisible=1000, poll=15_000, order=True))
        await until_one_waits(connection)
        await ack(connection, answer, second)
        rest = await waiting
        assert [record.body for record in records(rest)] == [b"step 2", b"step 3"]
        await ack(connection, rest, records(rest)[0])
        again = await pop(connection, invisible=60_000, poll=15_000, order=True)
        # The unacknowledged message is redelivered in its place, with its delivery count.
        assert [record.body for record in records(again)] == [b"step 3"]
        assert "0 qo0%3 1" in again.ext["orderCountInfo"]

    with neve_up(tmp_path) as neve:
        run(neve.broker, work)


def test_peek_takes_no_message_and_notification_waits_for_the_next(neve_up: NeveUp, tmp_path: Path) -> None:
    async def peek(connection: Connection) -> RemotingCommand:
        ext = {"consumerGroup": "workers", "topic": "jobs", "queueId": "0", "maxMsgNums": "8"}
        return await ask(connection, Code.PEEK_MESSAGE, ext)

    async def work(connection: Connection) -> None:
        await send(connection, b"one")
        for _ in range(2):
            assert [record.body for record in records(await peek(connection))] == [b"one"]
        assert await notified(connection) == "true"
        assert [record.body for record in records(await pop(connection, invisible=60_000))] == [b"one"]
        assert (await peek(connection)).code == ResponseCode.PULL_NOT_FOUND
        assert await notified(connection) == "false"
        waiting = asyncio.create_task(notified(connection, pollTime="15000"))
        # This peek was sent after the notification request, so the latter waits by now.
        assert (await peek(connection)).code == ResponseCode.PULL_NOT_FOUND
        assert not waiting.done()
        await send(connection, b"two")
        assert await waiting == "true"
        assert [record.body for record in records(await peek(connection))] == [b"two"]

    with neve_up(tmp_path) as neve:
        run(neve.broker, work)
