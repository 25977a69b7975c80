"""Requests of an arbitrary client cannot harm other clients."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from infra.net.remoting_server import Connection, open_connection
from neve.errors import BrokerError
from neve.record.codec import iter_records
from neve.remoting.body import lenient_loads
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from tests.kit.broker.in_process import ask, running, send
from tests.kit.clock.waiting import until

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


async def test_overlong_header_is_refused_and_the_connection_stays_open(tmp_path: Path) -> None:
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
        assert broker.store.queues.max_offset("T", 0) == 2


async def test_client_is_unregistered_only_by_its_own_connection(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, connection):
        await send(connection, "T")
        assert (await ask(connection, Code.HEART_BEAT, heartbeat("A", "g"))).code == 0
        stranger = await open_connection(*broker.address)
        assert (await ask(stranger, Code.UNREGISTER_CLIENT, clientID="A", consumerGroup="g")).code == 0
        assert broker.clients.consumers["g"].client_ids() == ["A"]
        assert (await ask(connection, Code.UNREGISTER_CLIENT, clientID="A", consumerGroup="g")).code == 0
        assert "g" not in broker.clients.consumers
        stranger.close()


@pytest.mark.parametrize("taken", ["topic", "group", "broker"])
async def test_suspended_pull_is_answered_when_its_permission_is_revoked(tmp_path: Path, taken: str) -> None:
    async with running(tmp_path) as (broker, connection):
        await send(connection, "T")
        waiting = asyncio.create_task(pull(connection, 1))
        await until(lambda: broker.hold.count == 1)
        context = broker
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


async def test_suspended_pull_of_a_user_without_permission_returns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as (broker, connection):
        await send(connection, "T")
        waiting = asyncio.create_task(pull(connection, 1))
        await until(lambda: broker.hold.count == 1)

        def refuse(_: Connection, command: RemotingCommand) -> None:
            raise BrokerError(ResponseCode.NO_PERMISSION, f"not {command.code} any more")

        monkeypatch.setattr(broker.guard, "require", refuse)
        await send(connection, "T", b"secret")
        assert (await waiting).remark == "not 11 any more"


def counted(owner: object, method: str) -> list[object]:
    """Record the arguments of calls to a method."""
    calls: list[object] = []
    inner = getattr(owner, method)

    def call(argument: object) -> None:
        calls.append(argument)
        inner(argument)

    setattr(owner, method, call)
    return calls


async def test_large_pull_is_answered_and_not_suspended(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, connection):
        await send(connection, "T")
        kept = counted(broker.hold, "hold")
        answer = await pull(connection, 1, subscription="a || " * 10_000 + "b", suspendTimeoutMillis=5_000)
        assert (answer.code, kept) == (ResponseCode.PULL_NOT_FOUND, [])
        waiting = asyncio.create_task(pull(connection, 1, subscription=" || ".join(f"t{n}" for n in range(500))))
        await until(lambda: broker.hold.count == 1)
        await send(connection, "T", b"tagged", properties="TAGS\x01t7\x02")
        assert [record.body for record in iter_records((await waiting).body)] == [b"tagged"]


async def test_large_pop_is_answered_and_does_not_wait(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, connection):
        await send(connection, "T")
        ext = {
            "consumerGroup": "g", "topic": "T", "queueId": 0, "maxMsgNums": 8, "invisibleTime": 60_000,
            "initMode": 1, "pollTime": 5_000, "bornTime": 0, "expType": "TAG",
        }  # fmt: skip
        kept = counted(broker.polling, "add")
        answer = await ask(connection, Code.POP_MESSAGE, exp="a || " * 10_000 + "b", **ext)
        assert (answer.code, kept) == (ResponseCode.POLLING_TIMEOUT, [])
        waiting = asyncio.create_task(ask(connection, Code.POP_MESSAGE, exp="a || b", **ext))
        await until(lambda: broker.polling.count == 1)
        await send(connection, "T", b"tagged", properties="TAGS\x01b\x02")
        assert [record.body for record in iter_records((await waiting).body)] == [b"tagged"]


async def make_group(connection: Connection, **settings: object) -> int:
    return (await ask(connection, Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, json.dumps(settings).encode())).code


async def test_retry_queues_of_a_group_are_limited_like_a_topics_queues(tmp_path: Path) -> None:
    async with running(tmp_path, "maxQueuesPerTopic=8") as (broker, connection):
        for wrong in (2_000_000_000, 9, -1):
            assert await make_group(connection, groupName="g", retryQueueNums=wrong) == 29
        for wrong in (10**30, 2**31):
            assert await make_group(connection, groupName="g", retryQueueNums=wrong) == 1
        assert await make_group(connection, groupName="g", attributes={"x": "y" * 20_000}) == 29
        assert "g" not in broker.groups.groups
        assert await make_group(connection, groupName="g", retryQueueNums=8) == 0
        broker.groups.groups["g"].retry_queue_nums = 2_000_000_000  # as accepted by an older version
        assert (await ask(connection, Code.HEART_BEAT, heartbeat("A", "g"))).code == 0
        assert broker.topics.topics["%RETRY%g"].read_queue_nums == 8
        for body in (b"[]", b'{"groupConfigList":7}', b"null", b"{'topicConfigList':{}}"):
            for code in (Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, Code.UPDATE_AND_CREATE_TOPIC_LIST):
                assert (await ask(connection, code, body)).code in {0, 29}


async def test_new_topics_and_groups_are_limited_and_known_ones_still_work(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, connection):
        await send(connection, "T")
        context = broker
        context.config.max_topics = len(context.topics.topics)
        context.config.max_groups = len(context.groups.groups)
        with pytest.raises(AssertionError, match="maxTopics"):
            await send(connection, "another")
        with pytest.raises(AssertionError, match="maxTopics"):
            await send(connection, "%RETRY%nobody")
        made = await ask(connection, Code.UPDATE_AND_CREATE_TOPIC, topic="U", readQueueNums=1, writeQueueNums=1, perm=6)
        assert made.code == ResponseCode.INVALID_PARAMETER
        assert await make_group(connection, groupName="g") == ResponseCode.INVALID_PARAMETER
        assert (await pull(connection, 0)).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
        assert (await ask(connection, Code.HEART_BEAT, heartbeat("A", "g"))).code == 0
        assert not {"another", "U", "%RETRY%g"} & context.topics.topics.keys()
        await send(connection, "T")
        again = await ask(
            connection, Code.UPDATE_AND_CREATE_TOPIC, topic="T", readQueueNums=2, writeQueueNums=2, perm=6
        )
        assert again.code == 0
        context.config.max_topics += 1
        await send(connection, "another")


async def test_only_existing_queues_are_locked_or_committed(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, connection):
        await send(connection, "T")
        context = broker
        name, queues = context.config.broker_name, context.topics.topics["T"].queue_nums
        assert (await ask(connection, Code.HEART_BEAT, heartbeat("A", "g"))).code == 0
        asked = [("T", name, 0), ("T", "x" * 9999, 0), ("no", name, 0), ("T", name, queues), ("T", name, -1)]
        for group, expected in (("g", [0]), ("nobody", [])):
            wanted = [{"topic": topic, "brokerName": where, "queueId": queue} for topic, where, queue in asked]
            body = json.dumps({"consumerGroup": group, "clientId": "A", "mqSet": wanted}).encode()
            answer = lenient_loads((await ask(connection, Code.LOCK_BATCH_MQ, body)).body)
            assert [queue["queueId"] for queue in answer["lockOKMQSet"]] == expected
        assert context.locks.count == 1
        for queue in (queues, 10**12, -1):
            commit = await ask(
                connection, Code.UPDATE_CONSUMER_OFFSET, consumerGroup="g", topic="T", queueId=queue, commitOffset=1
            )
            assert commit.code == ResponseCode.INVALID_PARAMETER
        assert context.offsets.queues_of("g", "T") == {}
        for group, topic in (("nobody", "T"), ("g", "no")):
            denied = await ask(
                connection, Code.UPDATE_AND_GET_GROUP_FORBIDDEN, group=group, topic=topic, readable="false"
            )
            assert denied.code in {ResponseCode.TOPIC_NOT_EXIST, 0}
        assert context.groups.forbidden().keys() <= {"nobody"}, "the broker makes groups by itself, never topics"


async def test_size_of_client_tables_is_limited_and_freed_with_the_connection(tmp_path: Path) -> None:
    async with running(tmp_path, "maxClientBytes=1m") as (broker, connection):
        clients = broker.clients
        assert (await ask(connection, Code.HEART_BEAT, heartbeat("A", "g", topics=("T", "U")))).code == 0
        first = clients.bytes
        assert first > 0
        for _ in range(3):
            assert (await ask(connection, Code.HEART_BEAT, heartbeat("A", "g", topics=("T", "U")))).code == 0
        assert clients.bytes == first, "the same again costs nothing"
        stranger = await open_connection(*broker.address)
        topics = tuple(f"topic-{number}" for number in range(1000))
        answers = [await ask(stranger, Code.HEART_BEAT, heartbeat("B", f"h{n}", topics=topics)) for n in range(9)]
        producers = json.dumps({"clientID": "B", "producerDataSet": [{"groupName": f"p{n}"} for n in range(2000)]})
        answers.append(await ask(stranger, Code.HEART_BEAT, producers.encode()))
        assert {answer.code for answer in answers[:2]} == {0}
        assert {answer.code for answer in answers[4:]} == {ResponseCode.SYSTEM_BUSY}
        assert clients.bytes <= 1 << 20
        assert (await ask(connection, Code.HEART_BEAT, heartbeat("A", "g"))).code == 0, "less is no more"
        for long in (b'{"clientID":"%b"}' % (b"x" * 1025),
                     b'{"clientID":"C","producerDataSet":[{"groupName":"%b"}]}' % (b"x" * 256)):  # fmt: skip
            assert (await ask(stranger, Code.HEART_BEAT, long)).code == ResponseCode.INVALID_PARAMETER
        stranger.close()
        await until(lambda: clients.consumers.keys() == {"g"} and not clients.producers)
        assert clients.bytes < first
        assert (await ask(connection, Code.UNREGISTER_CLIENT, clientID="A", consumerGroup="g")).code == 0
        assert clients.bytes == 0
