"""Forbidden to clients: writes to internal topics, recalls and transaction checks of other clients."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from broker.broker_controller import BrokerController
from broker.intake.message import NewMessage
from broker.store.errors import InternalTopic
from infra.clock import ManualClock
from infra.net.remoting_server import Connection, open_connection
from neve.record.codec import decode_record, iter_records
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.names import METADATA_LOG
from neve.remoting.signature import signed
from tests.kit.broker.in_process import ask, running, send
from tests.kit.broker.pop_member import PopMember

Work = Callable[[BrokerController, Connection, ManualClock], Awaitable[None]]
PLACE = {"a": "p", "c": "TBW102", "d": 1, "e": 0, "f": 0, "g": 1, "h": 0, "j": 0, "k": "false", "m": "false"}


def with_broker(root: Path, work: Work, *settings: str) -> None:
    async def main() -> None:
        clock = ManualClock()
        async with running(root, *settings, clock=clock) as (broker, connection):
            await work(broker, connection, clock)

    asyncio.run(main())


def timer(**properties: object) -> str:
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items())


@pytest.mark.parametrize(
    "topic",
    [
        "rmq_sys_REVIVE_LOG_DefaultCluster",
        "rmq_sys_REVIVE_LOG_other",
        "rmq_sys_METADATA_LOG",
        "rmq_sys_wheel_timer",
        "rmq_sys_SYNC_BROKER_MEMBER_broker-a",
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
    ],
)
def test_send_to_an_internal_topic_is_refused(tmp_path: Path, topic: str) -> None:
    async def work(broker: BrokerController, connection: Connection, clock: ManualClock) -> None:
        forged = b'["r","g","t",0,3]'
        before = broker.store.max_physical_offset
        for code, more in ((Code.SEND_MESSAGE_V2, {}), (Code.SEND_BATCH_MESSAGE, {"m": "true"})):
            for properties in ("", "DELAY\x011\x02", "TIMER_DELAY_SEC\x011\x02"):
                answer = await ask(connection, code, forged, **{**PLACE, **more}, b=topic, i=properties)
                assert answer.code == ResponseCode.NO_PERMISSION, answer.remark
        assert broker.store.max_physical_offset == before

    with_broker(tmp_path, work)


TARGETS = ("rmq_sys_METADATA_LOG", "rmq_sys_REVIVE_LOG_DefaultCluster", "rmq_sys_wheel_timer", "SCHEDULE_TOPIC_XXXX")


@pytest.mark.parametrize("target", TARGETS)
def test_pending_messages_are_not_delivered_to_internal_topics(tmp_path: Path, target: str) -> None:
    """A log imported from an Apache broker may have such messages, because it accepts them."""

    async def work(broker: BrokerController, connection: Connection, clock: ManualClock) -> None:
        await send(connection, "t", b"delayed", "DELAY\x011\x02")
        await send(connection, "t", b"timer", "TIMER_DELAY_SEC\x011\x02")
        config = broker.topics.topics["t"]
        broker.topics.topics[target] = broker.topics.topics.get(target, config)  # the row that an import added
        message = NewMessage(
            topic=target, queue_id=0, body=b"forged", born_timestamp=1, properties=b"UNIQ_KEY\x01u\x02"
        )
        assert broker.schedule.take(message, {"DELAY": "1"}) is not None
        assert broker.timers.take(message, {"TIMER_DELAY_SEC": "1"}) is not None
        broker.transactions.take(message, {"UNIQ_KEY": "u"})
        await broker.flusher.flush_now()
        half = broker.transactions.waiting()[0]
        ends = broker.store.queues.max_offset(target, 0)
        clock.advance(1_001)
        broker.schedule.deliver_due()
        broker.timers.deliver_due()
        answer = await ask(
            connection, Code.END_TRANSACTION, producerGroup="", commitOrRollback=8,
            tranStateTableOffset=half.queue_offset, commitLogOffset=half.physical_offset,
        )  # fmt: skip
        assert answer.code != ResponseCode.SUCCESS
        assert broker.store.queues.max_offset(target, 0) <= ends + (target == "rmq_sys_wheel_timer")
        assert broker.store.queues.max_offset("t", 0) == 2, "those behind them are delivered"
        assert broker.faults.counts["a delayed message"] == 1
        # a timer with an Apache master's revive log as target is dropped because of its name
        assert broker.faults.counts["a timer message"] == ("REVIVE" not in target)

    with_broker(tmp_path, work)


def test_log_writer_refuses_internal_topics_in_each_method(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection, clock: ManualClock) -> None:
        await send(connection, "t")
        raw = broker.store.reader.newest_record()
        assert raw is not None
        for topic in TARGETS:
            message = NewMessage(topic=topic, queue_id=0, body=b"forged", born_timestamp=1)
            for put in (
                lambda message=message: broker.writer.put(message),
                lambda message=message: broker.writer.send_of(message),
                lambda topic=topic: broker.writer.put_copy(decode_record(raw), topic, 0),
            ):
                with pytest.raises(InternalTopic):
                    put()

    with_broker(tmp_path, work)


def test_metadata_log_is_hidden_from_every_reader(tmp_path: Path) -> None:
    """Also if tables of another broker or of an earlier release have a row of it."""

    async def work(broker: BrokerController, connection: Connection, clock: ManualClock) -> None:
        await send(connection, "t")
        row = msgspec.structs.replace(broker.topics.topics["t"], topic_name=METADATA_LOG)
        image = broker.topics.image()
        broker.topics.install(msgspec.structs.replace(image, topics={**image.topics, METADATA_LOG: row}))
        broker.topics.put_back(row)
        assert METADATA_LOG not in broker.topics.topics
        broker.topics.topics[METADATA_LOG] = row
        fields = {
            "topic": METADATA_LOG, "consumerGroup": "g", "group": "g", "queueId": 0, "queueOffset": 0, "index": 0,
            "count": 10, "maxMsgNums": 1, "sysFlag": 0, "commitOffset": 0, "suspendTimeoutMillis": 0, "subVersion": 0,
            "subscription": "*", "expressionType": "TAG", "invisibleTime": 1000, "pollTime": 0, "bornTime": 1,
            "initMode": 0, "key": "k", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 1 << 60, "timestamp": 0,
        }  # fmt: skip
        for code in (
            Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE, Code.POP_MESSAGE, Code.PEEK_MESSAGE, Code.NOTIFICATION,
            Code.QUERY_MESSAGE, Code.QUERY_CONSUME_QUEUE, Code.GET_MAX_OFFSET, Code.GET_MIN_OFFSET,
            Code.SEARCH_OFFSET_BY_TIMESTAMP, Code.GET_EARLIEST_MSG_STORETIME, Code.GET_TOPIC_CONFIG,
            Code.GET_TOPIC_STATS_INFO, Code.QUERY_CONSUME_TIME_SPAN,
        ):  # fmt: skip
            answer = await ask(connection, code, **fields)
            assert (code, answer.code) == (code, ResponseCode.TOPIC_NOT_EXIST), answer.remark

    with_broker(tmp_path, work)


def test_clients_may_send_to_trace_topics(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection, clock: ManualClock) -> None:
        for topic in ("rmq_sys_TRACE_DATA_region", "RMQ_SYS_TRACE_TOPIC"):
            await send(connection, topic, b"trace")

    with_broker(tmp_path, work)


def test_timer_is_recalled_only_by_topic_and_id(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection, clock: ManualClock) -> None:
        for topic in ("ours", "theirs"):
            await send(connection, topic)
        for topic, unique in (("ours", "A"), ("ours", "B"), ("theirs", "A")):
            await send(connection, topic, b"later", timer(TIMER_DELAY_SEC=10, UNIQ_KEY=unique))
        for key in ("A", "ours+A", "+A"):
            properties = timer(TIMER_DELAY_SEC=10, TIMER_DEL_UNIQKEY=key, UNIQ_KEY="x")
            answer = await ask(connection, Code.SEND_MESSAGE_V2, b"x", **PLACE, b="theirs", i=properties)
            assert answer.code == ResponseCode.MESSAGE_ILLEGAL, answer.remark
        properties = timer(TIMER_DELAY_SEC=10, TIMER_DEL_UNIQKEY="ours+A", UNIQ_KEY="x")
        answer = await ask(connection, Code.SEND_MESSAGE_V2, b"x", **PLACE, b="ours", i=properties)
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        await broker.flusher.flush_now()
        clock.advance(10_001)
        broker.timers.deliver_due()
        assert [broker.store.queues.max_offset(topic, 0) for topic in ("ours", "theirs")] == [2, 2]

    with_broker(tmp_path, work)


@pytest.mark.parametrize("enabled", [True, False])
def test_answer_to_a_recall_names_the_trace_region(tmp_path: Path, enabled: bool) -> None:
    """A stock client's hook writes a trace only if the answer names the region."""

    async def work(broker: BrokerController, connection: Connection, clock: ManualClock) -> None:
        broker.config.recall_message_enable = enabled
        sent = await send(connection, "t", b"later", timer(TIMER_DELAY_SEC=10, UNIQ_KEY="A"))
        handle = sent.ext["recallHandle"]
        answer = await ask(connection, Code.RECALL_MESSAGE, topic="t", recallHandle=handle, producerGroup="p")
        expected = (ResponseCode.SUCCESS, "A") if enabled else (ResponseCode.NO_PERMISSION, None)
        assert (answer.code, answer.ext.get("msgId")) == expected
        assert (answer.ext["MSG_REGION"], answer.ext["TRACE_ON"]) == ("DefaultRegion", "true")

    with_broker(tmp_path, work)


def test_check_of_a_half_message_is_sent_only_to_permitted_producers(tmp_path: Path) -> None:
    root = '{"username":"root","password":"root-secret"}'
    settings = ("authenticationEnabled=true", "authorizationEnabled=true", f"initAuthenticationUser={root}")

    async def work(broker: BrokerController, connection: Connection, clock: ManualClock) -> None:
        async def as_user(by: Connection, name: str, code: int, body: bytes = b"", /, **ext: object) -> None:
            fields = signed(name, f"{name}-secret", {key: str(value) for key, value in ext.items()}, body)
            answer = await by.invoke(RemotingCommand(code, ext=fields, body=body), 30)
            assert answer.code == ResponseCode.SUCCESS, answer.remark

        made = {"defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6, "order": "false"}
        await as_user(
            connection, "root", Code.UPDATE_AND_CREATE_TOPIC, topic="secret", topicFilterType="SINGLE_TAG", **made
        )
        for name, topic in (("alice", "secret"), ("mallory", "public")):
            user = {"username": name, "password": f"{name}-secret", "userType": "Normal", "userStatus": "enable"}
            await as_user(connection, "root", Code.AUTH_CREATE_USER, json.dumps(user).encode(), username=name)
            entries = [{"resource": f"Topic:{topic}", "actions": ["Pub"], "decision": "Allow"}]
            subject = f"User:{name}"
            acl = {"subject": subject, "policies": [{"policyType": "Custom", "entries": entries}]}
            await as_user(connection, "root", Code.AUTH_CREATE_ACL, json.dumps(acl).encode(), subject=subject)
        asked: dict[str, list[bytes]] = {"alice": [], "mallory": []}
        producers: list[Connection] = []

        async def join(name: str) -> None:
            def take(_: Connection, command: RemotingCommand) -> None:
                asked[name] += [bytes(record.body) for record in iter_records(command.body)]

            producer = await open_connection(*broker.address, handler=take)
            producers.append(producer)
            data = {"clientID": name, "producerDataSet": [{"groupName": "payments"}]}
            await as_user(producer, name, Code.HEART_BEAT, json.dumps(data).encode())

        await join("mallory")
        half = timer(TRAN_MSG="true", PGROUP="payments", UNIQ_KEY="A")
        await as_user(connection, "alice", Code.SEND_MESSAGE_V2, b"top secret", **PLACE, b="secret", i=half)
        for round_ in range(4):
            if round_ == 2:
                await join("alice")
            clock.advance(120_000)
            await broker.check_back.run()
        member = PopMember(broker, connection)
        while len(asked["alice"]) < 2:
            await ask(member.connection, Code.GET_BROKER_HA_STATUS)
        for producer in producers:
            producer.close()
        assert asked == {"alice": [b"top secret"] * 2, "mallory": []}

    with_broker(tmp_path, work, *settings)


def test_metadata_log_cannot_be_read_by_topic_or_by_offset(tmp_path: Path) -> None:
    """The log contains users' secrets."""

    async def work(broker: BrokerController, connection: Connection, clock: ManualClock) -> None:
        await send(connection, "T", b"m")
        entry = broker.store.reader.entry(METADATA_LOG, 0, 0)
        assert entry is not None and broker.store.reader.record_at(entry[0]) is not None
        place = {"offset": entry[0], "topic": METADATA_LOG}
        back = {"group": "g", "offset": entry[0], "delayLevel": 1, "originTopic": "T"}
        pull = {
            "consumerGroup": "g", "topic": METADATA_LOG, "queueId": 0, "queueOffset": 0, "maxMsgNums": 1, "sysFlag": 4,
            "commitOffset": 0, "suspendTimeoutMillis": 0, "subscription": "*", "subVersion": 0,
        }  # fmt: skip
        created = {"defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6, "order": "false"}
        for code, ext in (
            (Code.VIEW_MESSAGE_BY_ID, place),
            (Code.CONSUMER_SEND_MSG_BACK, back),
            (Code.PULL_MESSAGE, pull),
            (Code.LITE_PULL_MESSAGE, pull),
            (Code.UPDATE_AND_CREATE_TOPIC, {"topic": METADATA_LOG, "topicFilterType": "SINGLE_TAG", **created}),
            (Code.DELETE_TOPIC_IN_BROKER, {"topic": METADATA_LOG}),
            (Code.GET_TOPIC_CONFIG, {"topic": METADATA_LOG}),
        ):
            answer = await ask(connection, code, **ext)
            assert answer.code != 0 and not answer.body, code
        listed = await ask(connection, Code.GET_ALL_TOPIC_CONFIG)
        assert METADATA_LOG.encode() not in listed.body and b'"T"' in listed.body

    with_broker(tmp_path, work)
