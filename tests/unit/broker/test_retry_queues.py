"""Messages that a consumer sends back land in queues of the retry topic that consumers read."""

import json
from pathlib import Path

from broker.broker_controller import BrokerController
from infra.clock import ManualClock
from infra.net.remoting_server import Connection
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from tests.kit.broker.in_process import ask, running, send

GROUP, RETRY = "g", "%RETRY%g"
CONSUMER = {
    "groupName": GROUP, "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
    "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "unitMode": False,
    "subscriptionDataSet": [{"topic": "t", "subString": "*", "subVersion": 1, "expressionType": "TAG"}],
}  # fmt: skip
HEARTBEAT = {"clientID": "c", "producerDataSet": [], "consumerDataSet": [CONSUMER]}


async def ask_json(connection: Connection, code: Code, body: object) -> None:
    answer = await ask(connection, code, json.dumps(body).encode())
    assert answer.code == ResponseCode.SUCCESS, answer.remark


async def set_retry_queues(connection: Connection, number: int) -> None:
    row = {"groupName": GROUP, "retryQueueNums": number, "retryMaxTimes": 16}
    await ask_json(connection, Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, row)


async def set_queues(connection: Connection, topic: str, number: int) -> None:
    fields = {"topic": topic, "defaultTopic": "TBW102", "readQueueNums": number, "writeQueueNums": number, "perm": 6}
    answer = await ask(connection, Code.UPDATE_AND_CREATE_TOPIC, **fields, topicFilterType="SINGLE_TAG", order="false")
    assert answer.code == ResponseCode.SUCCESS, answer.remark


async def send_back(broker: BrokerController, connection: Connection, count: int) -> None:
    for _ in range(count):
        await send(connection, "t")
        raw = broker.store.reader.newest_record()
        assert raw is not None
        place = broker.store.max_physical_offset - len(raw)
        answer = await ask(connection, Code.CONSUMER_SEND_MSG_BACK, offset=place, group=GROUP, delayLevel=1)
        assert answer.code == ResponseCode.SUCCESS, answer.remark


async def deliver(broker: BrokerController, clock: ManualClock) -> None:
    await broker.flusher.flush_now()
    clock.advance(1_001)
    broker.schedule.deliver_due()
    await broker.flusher.flush_now()


def read_queues(broker: BrokerController, topic: str) -> int:
    return broker.topics.topics[topic].read_queue_nums


def readable(broker: BrokerController, topic: str) -> list[int]:
    return [broker.store.queues.max_offset(topic, queue) for queue in range(read_queues(broker, topic))]


async def test_group_update_grows_its_retry_topic(tmp_path: Path) -> None:
    clock = ManualClock()
    async with running(tmp_path, clock=clock) as (broker, connection):
        await set_retry_queues(connection, 1)
        await ask_json(connection, Code.HEART_BEAT, HEARTBEAT)
        assert read_queues(broker, RETRY) == 1
        await set_retry_queues(connection, 4)
        assert read_queues(broker, RETRY) == 4
        await send_back(broker, connection, 8)
        await deliver(broker, clock)
        assert readable(broker, RETRY) == [2, 2, 2, 2]
        await set_retry_queues(connection, 2)
        assert read_queues(broker, RETRY) == 4, "a group never takes queues away"


async def test_retries_use_existing_queues_of_a_shrunk_retry_topic(tmp_path: Path) -> None:
    clock = ManualClock()
    async with running(tmp_path, clock=clock) as (broker, connection):
        await set_retry_queues(connection, 4)
        await ask_json(connection, Code.HEART_BEAT, HEARTBEAT)
        await send_back(broker, connection, 8)
        await set_queues(connection, RETRY, 1)
        await deliver(broker, clock)
        assert readable(broker, RETRY) == [8]
        await ask_json(connection, Code.HEART_BEAT, {**HEARTBEAT, "clientID": "another"})
        assert read_queues(broker, RETRY) == 4, "as many as its group asks for"


async def test_half_message_is_committed_to_an_existing_queue_of_its_topic(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, connection):
        await set_queues(connection, "t", 4)
        await send(connection, "t", b"half", "TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01u\x02", queue=3)
        await set_queues(connection, "t", 2)
        await broker.flusher.flush_now()
        half = broker.transactions.waiting()[0]
        answer = await ask(
            connection, Code.END_TRANSACTION, producerGroup="p", commitOrRollback=8,
            tranStateTableOffset=half.queue_offset, commitLogOffset=half.physical_offset,
        )  # fmt: skip
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        assert readable(broker, "t") == [0, 1]


async def test_refused_send_creates_no_topic(tmp_path: Path) -> None:
    async with running(tmp_path, "maxMessageSize=65536") as (broker, connection):
        ext = {"a": "p", "b": "new", "c": "TBW102", "d": 1, "e": 0, "f": 0, "g": 1, "h": 0, "i": "", "j": 0}
        answer = await ask(connection, Code.SEND_MESSAGE_V2, b"x" * 65537, **ext, k="false", m="false")
        assert answer.code == ResponseCode.MESSAGE_ILLEGAL
        assert "new" not in broker.topics.topics
