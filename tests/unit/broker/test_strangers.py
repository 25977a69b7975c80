"""What a stranger may ask of a broker without harm to others, over its wire."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from infra.remoting_server import Connection, open_connection
from neve.errors import BrokerError
from neve.message import iter_records
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from tests.broker_in_process import ask, running, send
from tests.waiting import until

SUSPEND, SUBSCRIPTION = 2, 4


def heartbeat(client: str, *groups: str, topics: tuple[str, ...] = ("T",)) -> bytes:
    subscriptions = [{"topic": topic} for topic in topics]
    consumers = [{"groupName": group, "subscriptionDataSet": subscriptions} for group in groups]
    return json.dumps({"clientID": client, "consumerDataSet": consumers}).encode()


async def send_with(connection: Connection, properties: str, serialize_type: int = 0) -> RemotingCommand:
    ext = dict(zip("abcdefghi", ("p", "T", "TBW102", "1", "0", "0", "1", "0", properties), strict=True))
    command = RemotingCommand(Code.SEND_MESSAGE_V2, ext=ext, body=b"x", serialize_type=serialize_type)
    return await connection.invoke(command, 30)


async def pull(connection: Connection, offset: int, **more: object) -> RemotingCommand:
    ext = {
        "consumerGroup": "g", "topic": "T", "queueId": 0, "queueOffset": offset, "maxMsgNums": 32,
        "sysFlag": SUSPEND | SUBSCRIPTION, "commitOffset": 0, "suspendTimeoutMillis": 20_000, "subVersion": 1,
        "subscription": "*", "expressionType": "TAG",
    }  # fmt: skip
    return await ask(connection, Code.PULL_MESSAGE, **(ext | more))


def test_a_long_header_is_answered_and_the_connection_lives(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as (broker, connection):
            await send(connection, "T")
            fits = "".join(f"p{number}\x01v\x02" for number in range(4000))
            assert (await send_with(connection, fits)).code == ResponseCode.SUCCESS
            for serialize_type in (0, 1):
                for long in ("k\x01" + "雪" * 20_000, "k\x01" + "v" * 5_000_000, "\x02" * 2_000_000):
                    answer = await send_with(connection, long, serialize_type)
                    assert answer.code == ResponseCode.MESSAGE_ILLEGAL, answer.remark
            batch = await ask(connection, Code.SEND_BATCH_MESSAGE, a="p", b="T", c="TBW102", d=1, e=0, f=0, g=1, h=0,
                              i="k\x01" + "v" * 70_000, m="true")  # fmt: skip
            assert batch.code == ResponseCode.MESSAGE_ILLEGAL
            assert broker.context.store.max_offset("T", 0) == 2

    asyncio.run(main())


def test_a_client_takes_out_only_what_came_over_its_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as (broker, connection):
            await send(connection, "T")
            assert (await ask(connection, Code.HEART_BEAT, heartbeat("A", "g"))).code == 0
            stranger = await open_connection(*broker.context.address)
            assert (await ask(stranger, Code.UNREGISTER_CLIENT, clientID="A", consumerGroup="g")).code == 0
            assert broker.context.clients.consumers["g"].client_ids() == ["A"]
            assert (await ask(connection, Code.UNREGISTER_CLIENT, clientID="A", consumerGroup="g")).code == 0
            assert "g" not in broker.context.clients.consumers
            stranger.close()

    asyncio.run(main())


@pytest.mark.parametrize("taken", ["topic", "group", "broker"])
def test_a_held_pull_is_told_when_its_permission_has_gone(tmp_path: Path, taken: str) -> None:
    async def main() -> None:
        async with running(tmp_path) as (broker, connection):
            await send(connection, "T")
            waiting = asyncio.create_task(pull(connection, 1))
            await until(lambda: broker.context.hold.count == 1)
            context = broker.context
            if taken == "topic":
                context.topics.topics["T"].perm = 2
            elif taken == "group":
                context.groups.groups["g"].consume_enable = False
            else:
                context.config.broker_permission = 2
            await send(connection, "T", b"secret")
            answer = await waiting
            assert answer.code == ResponseCode.NO_PERMISSION
            assert not answer.body

    asyncio.run(main())


def test_a_held_pull_of_a_user_who_may_no_more_delivers_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as (broker, connection):
            await send(connection, "T")
            waiting = asyncio.create_task(pull(connection, 1))
            await until(lambda: broker.context.hold.count == 1)

            def refuse(_: Connection, command: RemotingCommand) -> None:
                raise BrokerError(ResponseCode.NO_PERMISSION, f"not {command.code} any more")

            broker.context.require = refuse
            await send(connection, "T", b"secret")
            assert (await waiting).remark == "not 11 any more"

    asyncio.run(main())


def test_a_pull_that_is_large_is_answered_and_not_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as (broker, connection):
            await send(connection, "T")
            answer = await pull(connection, 1, subscription="a || " * 10_000 + "b")
            assert answer.code == ResponseCode.PULL_NOT_FOUND
            assert broker.context.hold.count == 0
            waiting = asyncio.create_task(pull(connection, 1, subscription=" || ".join(f"t{n}" for n in range(500))))
            await until(lambda: broker.context.hold.count == 1)
            await send(connection, "T", b"tagged", properties="TAGS\x01t7\x02")
            assert [record.body for record in iter_records((await waiting).body)] == [b"tagged"]

    asyncio.run(main())
