"""No request returns a hidden message: trimmed, expired, erased, or of a deleted topic, created again or not.

Every request code that a broker serves is classified here. Each code that returns or copies stored messages is sent
twice: it has to return the message while it is visible, and must not return it after it was hidden.
"""

from __future__ import annotations

import asyncio
import json
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from broker.broker_controller import BrokerController
from broker.store import erased
from infra.loop.in_steps import at_once
from infra.net.remoting_server import Connection, open_connection
from neve.record.ids import offset_msg_id
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand
from neve.remoting.names import HALF_TOPIC
from tests.kit.broker.in_process import ask, offload, running, send
from tests.kit.clock.waiting import until
from tests.kit.wire.admin_port import post_request

SECRET = b"the-secret-body"
TOPIC, KEY = "T", "the-key"
CLIENT = "a-client"
NUMBERS = count()


@dataclass
class HiddenMessage:
    """A stored message and a broker to query for it."""

    broker: BrokerController
    connection: Connection
    physical: int
    given: list[bytes] = field(default_factory=list)  # Bodies that the broker passed to a consumer.

    @property
    def msg_id(self) -> str:
        return offset_msg_id(self.broker.address, self.physical)

    async def ask(self, code: Code, **ext: object) -> RemotingCommand:
        return await ask(self.connection, code, **ext)

    async def pull(self, topic: str, code: Code = Code.PULL_MESSAGE) -> bytes:
        """Return the messages of queue 0 to a consumer that follows the offsets of the answers."""
        found, offset = b"", 0
        while True:
            answer = await self.ask(
                code, consumerGroup="g", topic=topic, queueId=0, queueOffset=offset, maxMsgNums=32, sysFlag=4,
                commitOffset=0, suspendTimeoutMillis=0, subscription="*", subVersion=0, expressionType="TAG",
            )  # fmt: skip
            found += bytes(answer.body)
            following = int(answer.ext.get("nextBeginOffset", offset))
            if following <= offset:
                return found
            offset = following


Read = Callable[[HiddenMessage], Awaitable[bytes]]


async def by_pull(place: HiddenMessage) -> bytes:
    return await place.pull(TOPIC)


async def by_lite_pull(place: HiddenMessage) -> bytes:
    return await place.pull(TOPIC, Code.LITE_PULL_MESSAGE)


async def by_pop(place: HiddenMessage) -> bytes:
    answer = await place.ask(
        Code.POP_MESSAGE, consumerGroup=f"pop-{next(NUMBERS)}", topic=TOPIC, queueId=0, maxMsgNums=32,
        invisibleTime=60_000, pollTime=0, bornTime=0, initMode=0, order="false",
    )  # fmt: skip
    return bytes(answer.body)


async def by_peek(place: HiddenMessage) -> bytes:
    answer = await place.ask(
        Code.PEEK_MESSAGE, consumerGroup=f"peek-{next(NUMBERS)}", topic=TOPIC, queueId=0, maxMsgNums=32,
        invisibleTime=60_000, pollTime=0, bornTime=0, initMode=0, order="false",
    )  # fmt: skip
    return bytes(answer.body)


async def by_key(place: HiddenMessage) -> bytes:
    answer = await place.ask(
        Code.QUERY_MESSAGE, topic=TOPIC, key=KEY, maxNum=32, beginTimestamp=0, endTimestamp=1 << 60
    )
    return bytes(answer.body)


async def by_id(place: HiddenMessage) -> bytes:
    return bytes((await place.ask(Code.VIEW_MESSAGE_BY_ID, offset=place.physical)).body)


async def by_send_back(place: HiddenMessage) -> bytes:
    """Send the message back as dead; return the group's dead letters."""
    group = f"back-{next(NUMBERS)}"
    await place.ask(
        Code.CONSUMER_SEND_MSG_BACK, group=group, offset=place.physical, delayLevel=-1, originMsgId="",
        originTopic=TOPIC, unitMode="false", maxReconsumeTimes=16,
    )  # fmt: skip
    return await place.pull(f"%DLQ%{group}")


async def by_direct_consumption(place: HiddenMessage) -> bytes:
    """Return the messages that a connected consumer was asked to consume."""
    place.given.clear()
    await place.ask(
        Code.CONSUME_MESSAGE_DIRECTLY, consumerGroup="direct", clientId=CLIENT, msgId=place.msg_id, topic=TOPIC
    )
    return b"".join(place.given)


#: Requests that return a message of an ordinary topic, or copy it to a topic where it is read.
READERS: dict[Code, Read] = {
    Code.PULL_MESSAGE: by_pull,
    Code.LITE_PULL_MESSAGE: by_lite_pull,
    Code.POP_MESSAGE: by_pop,
    Code.PEEK_MESSAGE: by_peek,
    Code.QUERY_MESSAGE: by_key,
    Code.VIEW_MESSAGE_BY_ID: by_id,
    Code.CONSUMER_SEND_MSG_BACK: by_send_back,
    Code.CONSUME_MESSAGE_DIRECTLY: by_direct_consumption,
}
#: Requests that read a half message; no other request reads its topic.
READERS_OF_HALVES = frozenset({Code.END_TRANSACTION, Code.RESUME_CHECK_HALF_MESSAGE})
#: Requests that name entries of a queue and return no message.
READERS_OF_ENTRIES = frozenset({Code.QUERY_CONSUME_QUEUE})
#: Requests that neither return nor copy a stored message.
OTHERS = frozenset({
    Code.SEND_MESSAGE, Code.SEND_MESSAGE_V2, Code.SEND_BATCH_MESSAGE, Code.SEND_REPLY_MESSAGE,
    Code.SEND_REPLY_MESSAGE_V2, Code.RECALL_MESSAGE, Code.NOTIFICATION, Code.POLLING_INFO, Code.ACK_MESSAGE,
    Code.BATCH_ACK_MESSAGE, Code.CHANGE_MESSAGE_INVISIBLETIME, Code.POP_ROLLBACK, Code.QUERY_ASSIGNMENT,
    Code.SET_MESSAGE_REQUEST_MODE, Code.GET_ALL_MESSAGE_REQUEST_MODE, Code.QUERY_CONSUMER_OFFSET,
    Code.UPDATE_CONSUMER_OFFSET, Code.GET_MAX_OFFSET, Code.GET_MIN_OFFSET, Code.SEARCH_OFFSET_BY_TIMESTAMP,
    Code.GET_EARLIEST_MSG_STORETIME, Code.GET_CONSUMER_LIST_BY_GROUP, Code.LOCK_BATCH_MQ, Code.UNLOCK_BATCH_MQ,
    Code.HEART_BEAT, Code.UNREGISTER_CLIENT, Code.CHECK_CLIENT_CONFIG, Code.UPDATE_AND_CREATE_TOPIC,
    Code.UPDATE_AND_CREATE_TOPIC_LIST, Code.DELETE_TOPIC_IN_BROKER, Code.GET_ALL_TOPIC_CONFIG, Code.GET_TOPIC_CONFIG,
    Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, Code.DELETE_SUBSCRIPTIONGROUP,
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, Code.GET_SUBSCRIPTIONGROUP_CONFIG, Code.GET_BROKER_CONFIG,
    Code.UPDATE_BROKER_CONFIG, Code.CLEAN_EXPIRED_CONSUMEQUEUE, Code.CLEAN_UNUSED_TOPIC, Code.DELETE_EXPIRED_COMMITLOG,
    Code.GET_TOPIC_STATS_INFO, Code.GET_CONSUME_STATS, Code.GET_CONSUMER_CONNECTION_LIST,
    Code.GET_PRODUCER_CONNECTION_LIST, Code.QUERY_TOPIC_CONSUME_BY_WHO, Code.QUERY_TOPICS_BY_CONSUMER,
    Code.QUERY_SUBSCRIPTION_BY_CONSUMER, Code.GET_BROKER_RUNTIME_INFO, Code.INVOKE_BROKER_TO_RESET_OFFSET,
    Code.GET_ALL_CONSUMER_OFFSET, Code.GET_ALL_DELAY_OFFSET, Code.CLONE_GROUP_OFFSET, Code.QUERY_CORRECTION_OFFSET,
    Code.QUERY_CONSUME_TIME_SPAN, Code.UPDATE_AND_GET_GROUP_FORBIDDEN, Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS,
    Code.GET_CONSUMER_RUNNING_INFO, Code.VIEW_BROKER_STATS_DATA, Code.GET_BROKER_CONSUME_STATS,
    Code.GET_ALL_PRODUCER_INFO,
})  # fmt: skip
#: Between the members of a broker set, which copy the log as it is.
OF_A_SET = frozenset({
    Code.EXCHANGE_BROKER_HA_INFO, Code.GET_BROKER_HA_STATUS, Code.GET_BROKER_EPOCH_CACHE, Code.CONTROLLER_ELECT_MASTER,
    Code.NOTIFY_BROKER_ROLE_CHANGED, Code.NOTIFY_MIN_BROKER_ID_CHANGE, Code.GET_TIMER_CHECK_POINT,
})  # fmt: skip
#: Users and permissions.
OF_ACCESS = frozenset(code for code in Code if code.name.startswith("AUTH_"))


def test_every_request_code_is_classified_by_whether_it_reads_messages(tmp_path: Path) -> None:
    classes = (frozenset(READERS), READERS_OF_HALVES, READERS_OF_ENTRIES, OTHERS, OF_A_SET, OF_ACCESS)

    async def main() -> None:
        async with running(tmp_path) as (broker, _):
            assert set(broker.router.codes) - frozenset().union(*classes) == set(), "classify these request codes"

    asyncio.run(main())
    assert sum(map(len, classes)) == len(frozenset().union(*classes)), "a request code is in two classes"


async def post(broker: BrokerController, path: str, **query: str) -> list[dict[str, object]]:
    assert broker.admin_address is not None
    url = "http://{}:{}{}?".format(*broker.admin_address, path) + urllib.parse.urlencode(query)
    data = await asyncio.to_thread(lambda: bytes(urllib.request.urlopen(post_request(url), timeout=60).read()))
    return [json.loads(line) for line in data.splitlines()]


Hide = Callable[[HiddenMessage], Awaitable[None]]


async def trim(place: HiddenMessage) -> None:
    await post(place.broker, "/topic/trim", topic=TOPIC, offsets="0:1")


async def expire(place: HiddenMessage) -> None:
    at_once(place.broker.store.queue_changes.expire_below(TOPIC, {0: 1}, 1 << 62))


async def erase_in_log(place: HiddenMessage) -> None:
    assert place.broker.store.queue_changes.set_erased(TOPIC, 0, erased.NONE, ((0, 0),))


async def erase(place: HiddenMessage) -> None:
    certificate = (await post(place.broker, "/archive/erase", topic=TOPIC, key=KEY))[-1]
    assert (certificate["complete"], certificate["rows"]) == (True, 2), "and the dead letter that was made of it"


async def delete_topic(place: HiddenMessage) -> None:
    assert (await place.ask(Code.DELETE_TOPIC_IN_BROKER, topic=TOPIC)).code == 0


async def delete_and_create_topic(place: HiddenMessage) -> None:
    await delete_topic(place)
    for _ in range(2):
        await send(place.connection, TOPIC, b"of the next life", f"KEYS\x01{KEY}\x02")


CASES = [
    *((False, hide) for hide in (trim, expire, erase_in_log, delete_topic, delete_and_create_topic)),
    *((True, hide) for hide in (trim, erase, delete_topic, delete_and_create_topic)),
]


@pytest.mark.parametrize(("archived", "hide"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
async def test_no_request_returns_a_hidden_message(tmp_path: Path, archived: bool, hide: Hide) -> None:
    settings = [f"storeUrl=dir:{tmp_path}/store"] if archived else []
    async with running(tmp_path / "data", *settings) as (broker, connection):
        place = HiddenMessage(broker, connection, -1)

        def consume(_: Connection, command: RemotingCommand) -> RemotingCommand:
            place.given.append(bytes(command.body))
            return RemotingCommand.response(command, 0, body=b"{}")

        consumer = await open_connection(*broker.address, handler=consume)
        group = {"groupName": "direct", "subscriptionDataSet": [{"topic": TOPIC, "subString": "*"}]}
        beat = json.dumps({"clientID": CLIENT, "consumerDataSet": [group]}).encode()
        assert (await ask(consumer, Code.HEART_BEAT, beat)).code == 0
        sent = await send(connection, TOPIC, SECRET, f"KEYS\x01{KEY}\x02")
        place.physical = int(sent.ext["msgId"][16:], 16)
        await send(connection, TOPIC, b"another")
        if archived:
            await offload(broker)
            assert broker.store.min_physical_offset > place.physical
        missing = [code for code, read in READERS.items() if SECRET not in await read(place)]
        assert missing == [], "while it is visible each of them returns it"
        await hide(place)
        shown = [code for code, read in READERS.items() if SECRET in await read(place)]
        assert shown == []
        entries = await place.ask(Code.QUERY_CONSUME_QUEUE, topic=TOPIC, queueId=0, index=0, count=10)
        assert f'"physicOffset":{place.physical},'.encode() not in bytes(entries.body)
        consumer.close()


@pytest.mark.parametrize("code", sorted(READERS_OF_HALVES))
async def test_hidden_half_message_is_neither_ended_nor_checked(tmp_path: Path, code: Code) -> None:
    async with running(tmp_path) as (broker, connection):
        await send(connection, TOPIC, b"another")
        properties = f"TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01U\x02KEYS\x01{KEY}\x02"
        half = await ask(
            connection, Code.SEND_MESSAGE_V2, SECRET, a="p", b=TOPIC, c="TBW102", d=1, e=0, f=4, g=1, h=0,
            i=properties, j=0, k="false", m="false",
        )  # fmt: skip
        assert half.code == 0
        physical = int(half.ext["msgId"][16:], 16)
        offset = int(half.ext["queueOffset"])

        async def request() -> int:
            answer = await ask(
                connection, code, commitOrRollback=8, tranStateTableOffset=offset, commitLogOffset=physical,
                producerGroup="p", msgId=offset_msg_id(broker.address, physical), fromTransactionCheck="false",
            )  # fmt: skip
            return answer.code

        if code is Code.RESUME_CHECK_HALF_MESSAGE:
            assert await request() == 0
        assert broker.store.queue_changes.set_erased(HALF_TOPIC, 0, erased.NONE, ((offset, offset),))
        assert await request() != 0
        assert broker.store.queues.max_offset(TOPIC, 0) == 1
        assert broker.store.queue_changes.set_erased(
            HALF_TOPIC, 0, broker.store.queues.records.erased_of(HALF_TOPIC, 0), erased.NONE
        )
        assert await request() == 0
        if code is Code.END_TRANSACTION:
            await until(lambda: broker.store.queues.max_offset(TOPIC, 0) == 2, "the committed message")
