"""Administration over the wire: offsets, relayed requests, statistics, SQL pulls."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from broker.broker_controller import BrokerController
from broker.broker_stats import BrokerStats, TopicTraffic, Traffic
from infra.clock import ManualClock
from infra.net.remoting_server import Connection, open_connection
from neve.record.codec import iter_records
from neve.record.ids import offset_msg_id
from neve.remoting.body import MessageQueue, lenient_loads
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand
from tests.kit.broker.in_process import ask, running, send

Work = Callable[[BrokerController, Connection], Awaitable[None]]
SUSPEND, SUBSCRIPTION = 2, 4


def with_broker(tmp_path: Path, work: Work, *settings: str) -> None:
    async def main() -> None:
        async with running(tmp_path, *settings) as (broker, connection):
            await work(broker, connection)

    asyncio.run(main())


async def pull(
    connection: Connection, offset: int, *, expression: str = "*", kind: str = "TAG", flags: int = SUBSCRIPTION
) -> RemotingCommand:
    return await ask(
        connection, Code.PULL_MESSAGE, consumerGroup="g", topic="T", queueId=0, queueOffset=offset, maxMsgNums=32,
        sysFlag=flags, commitOffset=0, suspendTimeoutMillis=15_000, subVersion=1, subscription=expression,
        expressionType=kind,
    )  # fmt: skip


async def until_held(broker: BrokerController, connection: Connection) -> None:
    """Wait until the broker suspends the pull. Each attempt is a request of its own."""
    while not broker.hold.count:
        await ask(connection, Code.GET_BROKER_HA_STATUS)


async def heartbeat(connection: Connection, sub_string: str = "*", kind: str = "TAG") -> None:
    sub = {"topic": "T", "subString": sub_string, "expressionType": kind, "subVersion": 1}
    consumer = {
        "groupName": "g", "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "subscriptionDataSet": [sub],
    }  # fmt: skip
    body = json.dumps({"clientID": "c1", "producerDataSet": [{"groupName": "p"}], "consumerDataSet": [consumer]})
    answer = await ask(connection, Code.HEART_BEAT, body.encode())
    assert answer.code == 0, answer.remark


def test_sql_pull_filters_by_properties_and_waits_for_a_match(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        for n in range(6):
            await send(connection, "T", properties=f"n\x01{n}\x02")
        answer = await pull(connection, 0, expression="n IN (2, 4)", kind="SQL92")
        offsets = [record.queue_offset for record in iter_records(answer.body)]
        assert (answer.code, offsets, answer.ext["nextBeginOffset"]) == (0, [2, 4], "6")
        none = await pull(connection, 0, expression="n > 10", kind="SQL92")
        assert (none.code, none.ext["nextBeginOffset"]) == (20, "6")
        bad = await pull(connection, 0, expression="n >", kind="SQL92")
        assert bad.code == 23
        held = asyncio.create_task(pull(connection, 6, expression="n = 8", kind="SQL92", flags=SUBSCRIPTION | SUSPEND))
        await until_held(broker, connection)
        for n in (6, 7, 8):
            await send(connection, "T", properties=f"n\x01{n}\x02")
        answer = await held
        assert [record.queue_offset for record in iter_records(answer.body)] == [8]
        check = json.dumps({"subscriptionData": {"topic": "T", "subString": "n >", "expressionType": "SQL92"}}).encode()
        assert (await ask(connection, Code.CHECK_CLIENT_CONFIG, check)).code == 23
        await heartbeat(connection, "n >", "SQL92")
        assert (await pull(connection, 0, flags=0)).code == 27

    with_broker(tmp_path, work, "enablePropertyFilter=true")


def test_sql_pull_is_refused_if_property_filters_are_disabled(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        await send(connection, "T")
        answer = await pull(connection, 0, expression="n = 1", kind="SQL92")
        assert (answer.code, "SQL92" in (answer.remark or "")) == (1, True)

    with_broker(tmp_path, work, "enablePropertyFilter=false")


def test_reset_applies_to_the_next_pull_and_stale_commits_are_ignored(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        for _ in range(4):
            await send(connection, "T")
        assert (await pull(connection, 4)).code == 19
        place = {"consumerGroup": "g", "topic": "T", "queueId": 0}
        held = asyncio.create_task(pull(connection, 4, flags=SUBSCRIPTION | SUSPEND))
        await until_held(broker, connection)
        reset = await ask(
            connection, Code.INVOKE_BROKER_TO_RESET_OFFSET, group="g", topic="T", timestamp=0, isForce="true",
            queueId=0, offset=1,
        )  # fmt: skip
        assert lenient_loads(reset.body) == {"offsetTable": {MessageQueue("T", "broker-a", 0): 1}}
        answer = await held
        assert (answer.code, answer.ext["nextBeginOffset"]) == (21, "1")
        every = await ask(
            connection, Code.INVOKE_BROKER_TO_RESET_OFFSET, group="g", topic="T", timestamp=-1, isForce="true"
        )
        assert set(lenient_loads(every.body)["offsetTable"].values()) == {4}
        await ask(connection, Code.UPDATE_CONSUMER_OFFSET, commitOffset=2, **place)
        assert (await ask(connection, Code.QUERY_CONSUMER_OFFSET, **place)).ext["offset"] == "4"
        assert (await pull(connection, 0)).ext["nextBeginOffset"] == "4"
        assert (await pull(connection, 0)).code == 0
        await ask(connection, Code.UPDATE_CONSUMER_OFFSET, commitOffset=2, **place)
        assert (await ask(connection, Code.QUERY_CONSUMER_OFFSET, **place)).ext["offset"] == "2"
        wrong = {"timestamp": 0, "isForce": "true"}
        for group, topic, queue, offset, code in (
            ("g", "none", 0, 0, 17),
            ("none", "T", 0, 0, 26),
            ("g", "T", 0, 9, 1),
        ):
            told = await ask(
                connection, Code.INVOKE_BROKER_TO_RESET_OFFSET, group=group, topic=topic, queueId=queue, offset=offset,
                **wrong,
            )  # fmt: skip
            assert told.code == code

    with_broker(tmp_path, work)


def test_group_offsets_are_cloned_and_compared_and_groups_forbidden(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        for _ in range(4):
            await send(connection, "T")
        await pull(connection, 0)
        await ask(connection, Code.UPDATE_CONSUMER_OFFSET, consumerGroup="g", topic="T", queueId=0, commitOffset=3)
        await ask(connection, Code.CLONE_GROUP_OFFSET, srcGroup="g", destGroup="h", topic="T", offline="true")
        assert broker.offsets.query("h", "T", 0) == 3
        broker.offsets.commit("h", "T", 0, 1)
        answer = await ask(connection, Code.QUERY_CORRECTION_OFFSET, filterGroups="", compareGroup="g", topic="T")
        assert lenient_loads(answer.body) == {"correctionOffsets": {0: 1}}
        span = lenient_loads((await ask(connection, Code.QUERY_CONSUME_TIME_SPAN, topic="T", group="g")).body)
        (queue,) = span["consumeTimeSpanSet"]
        assert 0 < queue["minTimeStamp"] <= queue["consumeTimeStamp"] <= queue["maxTimeStamp"]
        told = await ask(connection, Code.UPDATE_AND_GET_GROUP_FORBIDDEN, group="g", topic="T", readable="false")
        assert json.loads(told.body) == {"group": "g", "topic": "T", "readable": False}
        await heartbeat(connection)
        assert (await pull(connection, 0, flags=0)).code == 16
        await ask(connection, Code.UPDATE_AND_GET_GROUP_FORBIDDEN, group="g", topic="T", readable="true")
        assert (await pull(connection, 0, flags=0)).code == 0

    with_broker(tmp_path, work)


def test_requests_for_a_consumer_are_relayed(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        asked: list[RemotingCommand] = []

        def answer(_: Connection, command: RemotingCommand) -> RemotingCommand:
            asked.append(command)
            body = b'{"messageQueueTable":{{"brokerName":"broker-a","queueId":0,"topic":"T"}:7}}'
            return RemotingCommand.response(command, 0, "told", body=body)

        sent = await send(connection, "T")
        where = {"consumerGroup": "g", "clientId": "c1"}
        assert (await ask(connection, Code.GET_CONSUMER_RUNNING_INFO, **where)).code == 1
        consumer = await open_connection(*broker.address, handler=answer)
        await heartbeat(consumer)
        info = await ask(connection, Code.GET_CONSUMER_RUNNING_INFO, jstackEnable="false", **where)
        assert (info.code, info.remark, info.body[:6]) == (0, "told", b'{"mess')
        assert asked[-1].ext["jstackEnable"] == "false"
        await ask(connection, Code.CONSUME_MESSAGE_DIRECTLY, msgId=sent.ext["msgId"], topic="T", **where)
        assert [record.body for record in iter_records(asked[-1].body)] == [b"body"]
        assert asked[-1].ext["brokerName"] == "broker-a"
        lost = offset_msg_id(broker.address, 999_999)
        assert (await ask(connection, Code.CONSUME_MESSAGE_DIRECTLY, msgId=lost, **where)).code == 1
        status = await ask(connection, Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, topic="T", group="g")
        assert lenient_loads(status.body) == {"consumerTable": {"c1": {MessageQueue("T", "broker-a", 0): 7}}}
        none = await ask(connection, Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, topic="T", group="none")
        assert none.code == 1
        consumer.close()

    with_broker(tmp_path, work)


def test_queues_statistics_and_producers_can_be_queried(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        await heartbeat(connection)
        for _ in range(3):
            await send(connection, "T", properties="TAGS\x01A\x02KEYS\x01one two\x02")
        await pull(connection, 0)
        await ask(connection, Code.UPDATE_CONSUMER_OFFSET, consumerGroup="g", topic="T", queueId=0, commitOffset=1)
        cq = json.loads((await ask(connection, Code.QUERY_CONSUME_QUEUE, topic="T", queueId=0, index=1, count=9)).body)
        assert (cq["minQueueIndex"], cq["maxQueueIndex"], len(cq["queueData"])) == (0, 3, 2)
        assert cq["queueData"][0]["tagsCode"] == ord("A")
        assert (await ask(connection, Code.QUERY_CONSUME_QUEUE, topic="T", queueId=5, index=0, count=1)).code == 1

        async def total(name: str, key: str) -> Any:
            answer = await ask(connection, Code.VIEW_BROKER_STATS_DATA, statsName=name, statsKey=key)
            return json.loads(answer.body)["statsMinute"]["sum"] if answer.code == 0 else answer.code

        assert await total("TOPIC_PUT_NUMS", "T") == 3
        assert await total("GROUP_GET_NUMS", "T@g") == 3
        assert await total("BROKER_PUT_NUMS", "DefaultCluster") == 3
        assert await total("TOPIC_PUT_NUMS", "none") == 1
        lags = lenient_loads((await ask(connection, Code.GET_BROKER_CONSUME_STATS, isOrder="false")).body)
        assert (lags["totalDiff"], lags["totalInflightDiff"]) == (2, 2)
        found = await ask(
            connection, Code.QUERY_MESSAGE, topic="T", key="two", maxNum=2, beginTimestamp=0, endTimestamp=1 << 60
        )
        assert [record.queue_offset for record in iter_records(found.body)] == [1, 2]
        producers = json.loads((await ask(connection, Code.GET_ALL_PRODUCER_INFO)).body)
        assert producers["data"]["p"][0]["clientId"] == "c1"
        table = json.loads((await ask(connection, Code.GET_BROKER_RUNTIME_INFO)).body)["table"]
        assert (table["msgPutTotalTodayNow"], table["msgGetTotalTodayNow"], table["msgGetTotalTodayMorning"]) == (
            "3",
            "3",
            "0",
        )
        place = {"topic": "T", "queueId": 0}
        assert int((await ask(connection, Code.GET_EARLIEST_MSG_STORETIME, **place)).ext["timestamp"]) > 0
        assert json.loads((await ask(connection, Code.GET_BROKER_HA_STATUS)).body)["master"] is True
        assert (await ask(connection, Code.GET_BROKER_EPOCH_CACHE)).code == 1

    with_broker(tmp_path, work)


def test_statistics_have_windows_and_drop_idle_items() -> None:
    clock = ManualClock()
    stats = BrokerStats(clock)
    stats.put("T", 100)
    clock.advance(5_000)
    minute = (stats.view("TOPIC_PUT_SIZE", "T") or {})["statsMinute"]
    assert minute == {"sum": 100, "tps": 20.0, "avgpt": 100.0}
    for _ in range(7):
        clock.advance(10_000)
        stats.sample()
    found = stats.view("TOPIC_PUT_NUMS", "T") or {}
    assert (found["statsMinute"]["sum"], found["statsHour"]["sum"]) == (0, 1)
    stats.sent_back("T", "g")
    assert (stats.view("SNDBCK_PUT_NUMS", "T@g") or {})["statsDay"]["sum"] == 1
    for _ in range(26):
        clock.advance(3_600_000)
        stats.sample()
    assert stats.view("TOPIC_PUT_NUMS", "T") is None
    assert stats.view("BROKER_PUT_NUMS", "any") is not None


def test_statistics_window_counts_only_its_own_time_after_idle_hours() -> None:
    clock = ManualClock()
    stats = BrokerStats(clock)
    for number in range(1, 4):
        stats.put("T", 10 * number)
        clock.advance(3_600_000)
        stats.sample()
    clock.advance(5_000)
    stats.sample()
    stats.put("T", 1_000)
    stats.put("T", 1_000)
    found = stats.view("TOPIC_PUT_NUMS", "T") or {}
    assert [found[window]["sum"] for window in ("statsMinute", "statsHour", "statsDay")] == [2, 2, 5]
    sizes = stats.view("TOPIC_PUT_SIZE", "T") or {}
    assert (sizes["statsMinute"]["avgpt"], sizes["statsDay"]["sum"]) == (1_000, 2_060)
    clock.advance(23 * 3_600_000)
    stats.sample()
    assert (stats.view("TOPIC_PUT_NUMS", "T") or {})["statsDay"]["sum"] == 2
    assert stats.of("T").messages_in == 5


def test_sampling_visits_a_bounded_number_of_items(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    stats = BrokerStats(clock)
    for topic in range(100):
        for queue in range(100):
            stats.took(queue, f"topic-{topic}", "g", 1)
    asked = 0

    def idle(traffic: Traffic) -> bool:
        nonlocal asked
        asked += 1
        return was_idle(traffic)

    was_idle = Traffic.idle
    monkeypatch.setattr(Traffic, "idle", idle)
    clock.advance(10_000)
    stats.sample()
    assert 0 < asked <= 500
    clock.advance(24 * 3_600_000)
    for _ in range(50):
        stats.sample()
    assert asked >= 10_000
    assert stats.view("GROUP_GET_LATENCY", "99@topic-99@g") is None


def test_popped_messages_count_as_read(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        for _ in range(3):
            await send(connection, "T")
        ext = {"consumerGroup": "g", "topic": "T", "queueId": 0, "maxMsgNums": 2, "invisibleTime": 60_000}
        popped = await ask(connection, Code.POP_MESSAGE, **ext, pollTime=0, bornTime=0, initMode=0)
        assert popped.ext["msgOffsetInfo"] == "0 0 0,1"
        stats = broker.stats
        assert (stats.messages_out, stats.bytes_out) == (2, len(popped.body))
        assert (stats.view("GROUP_GET_NUMS", "T@g") or {})["statsDay"]["sum"] == 2
        size = len(popped.body) // 2
        assert [stats.of(topic) for topic in stats.topics()] == [TopicTraffic("T", 3, 3 * size, 2, 2 * size)]

    with_broker(tmp_path, work)


def test_malformed_queue_in_a_lock_request_is_refused_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        for code in (Code.LOCK_BATCH_MQ, Code.UNLOCK_BATCH_MQ):
            for queues in (b'[{"queueId":0,"topic":"T"}]', b'[{"brokerName":"b","queueId":"x","topic":"T"}]', b"7"):
                answer = await ask(connection, code, b'{"consumerGroup":"g","clientId":"c","mqSet":%b}' % queues)
                assert answer.code == 1
                assert "Error: " not in (answer.remark or "").replace("ProtocolError: ", "")

    with_broker(tmp_path, work)
    assert "Traceback" not in caplog.text


def test_raised_message_limit_applies_to_the_running_broker(tmp_path: Path) -> None:
    large = bytes(200 << 10)

    async def work(broker: BrokerController, connection: Connection) -> None:
        with pytest.raises(AssertionError, match="maxMessageSize is 1024"):
            await send(connection, "T", large)
        answer = await ask(connection, Code.UPDATE_BROKER_CONFIG, b"maxMessageSize=256k\n")
        assert answer.code == 0, answer.remark
        await send(connection, "T", large)
        assert [record.body for record in iter_records((await pull(connection, 0)).body)] == [large]

    with_broker(tmp_path, work, "maxMessageSize=1k")


def test_delayed_message_above_a_lowered_limit_is_delivered(tmp_path: Path) -> None:
    large = bytes(200 << 10)

    async def sends(broker: BrokerController, connection: Connection) -> None:
        await send(connection, "T", large, "DELAY\x011\x02")

    async def receives(broker: BrokerController, connection: Connection) -> None:
        answer = await pull(connection, 0, flags=SUBSCRIPTION | SUSPEND)
        assert [record.body for record in iter_records(answer.body)] == [large]

    with_broker(tmp_path, sends, "messageDelayLevel=1s", "maxMessageSize=256k")
    with_broker(tmp_path, receives, "messageDelayLevel=1s", "maxMessageSize=1k")


def test_topic_with_too_many_queues_is_refused(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        async def make(queues: int) -> RemotingCommand:
            return await ask(
                connection, Code.UPDATE_AND_CREATE_TOPIC, topic="wide", defaultTopic="TBW102", readQueueNums=4,
                writeQueueNums=queues, perm=6, topicFilterType="SINGLE_TAG", topicSysFlag=0, order="false",
            )  # fmt: skip

        refused = await make(4097)
        assert (refused.code, refused.remark) == (29, "writeQueueNums=4097: allowed are 0 to 4096")
        assert (await ask(connection, Code.UPDATE_BROKER_CONFIG, b"maxQueuesPerTopic=5000\n")).code == 0
        assert (await make(4097)).code == 0

    with_broker(tmp_path, work)
