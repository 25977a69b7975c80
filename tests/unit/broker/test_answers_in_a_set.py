"""In a broker set, an answer waits for the in-sync slaves, or reports that they did not confirm in time."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bench.wire import send_ext
from broker.broker_controller import BrokerController
from broker.intake.message import NewMessage
from broker.intake.replication import NOT_ENOUGH, AppendRefused
from broker.requests.route import Waits
from broker.requests.table import ROUTES
from infra.clock import ManualClock
from infra.net.remoting_server import Connection
from neve.record.bodies import encode_batch
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.signature import signed
from tests.kit.broker.fake_set import FakeSet
from tests.kit.broker.in_process import ask, running, send
from tests.kit.broker.pop_member import PopMember, Taken
from tests.kit.clock.waiting import until
from tests.unit.broker.send_frames import SendTarget, frame

ROOT = ("root", "root-secret")
SETTINGS = (
    "authenticationEnabled=true", "authorizationEnabled=true",
    'initAuthenticationUser={"username":"root","password":"root-secret"}',
)  # fmt: skip
ACL = {
    "policies": [
        {"policyType": "Custom", "entries": [{"resource": "Topic:t", "actions": ["Pub"], "decision": "Allow"}]}
    ]
}


class MasterOfFakes:
    """A master, its fake slaves, and a client."""

    def __init__(self, broker: BrokerController, connection: Connection, slaves: FakeSet, clock: ManualClock) -> None:
        self.broker, self.connection, self.slaves, self.clock = broker, connection, slaves, clock

    async def until_it_waits(self, asked: asyncio.Task[RemotingCommand]) -> None:
        """Wait until an answer waits for the set. Fail if it was sent before."""
        assert self.broker.group_transfer is not None
        while not asked.done() and not self.broker.group_transfer.waiting:
            await asyncio.sleep(0)
        assert not asked.done(), asked.result()

    async def a_round_trip(self) -> None:
        """Wait until earlier requests have been processed as far as possible."""
        await ask(self.connection, Code.GET_BROKER_HA_STATUS)


Work = Callable[[MasterOfFakes], Awaitable[None]]


def in_a_set(tmp_path: Path, work: Work, *settings: str) -> None:
    async def main() -> None:
        slaves, clock = FakeSet(), ManualClock()
        async with running(tmp_path, *settings, clock=clock, broker_set=slaves) as (broker, connection):
            await work(MasterOfFakes(broker, connection, slaves, clock))

    asyncio.run(main())


def asking(awaited: Awaitable[RemotingCommand]) -> asyncio.Task[RemotingCommand]:
    return asyncio.ensure_future(awaited)


# ---- each request that appends to the log, and its prerequisites


async def _half(world: MasterOfFakes) -> dict[str, object]:
    answer = await send(world.connection, "t", b"half", "TRAN_MSG\x01true\x02PGROUP\x01p\x02")
    where = {"tranStateTableOffset": answer.ext["queueOffset"], "commitLogOffset": int(answer.ext["msgId"][16:], 16)}
    return {"producerGroup": "p", "topic": "t", "msgId": answer.ext["msgId"], **where}


async def _popped(world: MasterOfFakes) -> Taken:
    for _ in range(2):
        await send(world.connection, "t")
    member = PopMember(world.broker, world.connection)
    return (await member.pop(2))[0]


def _place(taken: Taken) -> dict[str, object]:
    return {"consumerGroup": "g", "topic": "t", "queueId": 0, "offset": taken.offset, "extraInfo": taken.receipt}


Asking = Callable[[MasterOfFakes], Awaitable[RemotingCommand]]
Prepared = Callable[[MasterOfFakes], Awaitable[Asking]]


def plain(code: Code, body: Any = None, **ext: object) -> Prepared:
    """Prepare a request on a topic `t` with a message and a group `g` that has consumed it."""

    async def prepare(world: MasterOfFakes) -> Asking:
        await send(world.connection, "t")
        await _group(world)
        await ask(
            world.connection, Code.UPDATE_CONSUMER_OFFSET, consumerGroup="g", topic="t", queueId=0, commitOffset=1
        )
        data = json.dumps(body).encode() if body is not None else b""
        return lambda world: ask(world.connection, code, data, **ext)

    return prepare


def as_root(code: Code, body: Any = None, **ext: str) -> Prepared:
    async def prepare(world: MasterOfFakes) -> Asking:
        data = json.dumps(body).encode() if body is not None else b""
        for user in ("known", "gone"):
            await _as_root(world, Code.AUTH_CREATE_USER, b'{"password":"s"}', username=user)
        acl = json.dumps(ACL).encode()
        await _as_root(world, Code.AUTH_CREATE_ACL, acl, subject="User:known")
        return lambda world: _as_root(world, code, data, **ext)

    return prepare


async def _as_root(world: MasterOfFakes, code: Code, body: bytes, **ext: str) -> RemotingCommand:
    return await world.connection.invoke(RemotingCommand(code, ext=signed(*ROOT, ext, body), body=body), 30)


async def _group(world: MasterOfFakes) -> None:
    body = json.dumps({"groupName": "g"}).encode()
    assert (await ask(world.connection, Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body)).code == 0


async def _sent_back(world: MasterOfFakes) -> Asking:
    sent = await send(world.connection, "t")
    await _group(world)
    where = {
        "offset": int(sent.ext["msgId"][16:], 16),
        "group": "g",
        "delayLevel": 0,
        "originMsgId": "",
        "originTopic": "t",
    }
    await ask(world.connection, Code.CONSUMER_SEND_MSG_BACK, b"", **where)  # creates the retry topic
    return lambda world: ask(world.connection, Code.CONSUMER_SEND_MSG_BACK, b"", **where)


async def _ended(world: MasterOfFakes) -> Asking:
    transaction = await _half(world)
    return lambda world: ask(world.connection, Code.END_TRANSACTION, commitOrRollback=8, **transaction)


async def _checked_again(world: MasterOfFakes) -> Asking:
    transaction = await _half(world)
    return lambda world: ask(world.connection, Code.RESUME_CHECK_HALF_MESSAGE, msgId=transaction["msgId"], topic="t")


async def _recalled(world: MasterOfFakes) -> Asking:
    sent = await send(world.connection, "t", b"later", "TIMER_DELAY_SEC\x0110\x02UNIQ_KEY\x01A\x02")
    handle = sent.ext["recallHandle"]
    return lambda world: ask(world.connection, Code.RECALL_MESSAGE, topic="t", recallHandle=handle, producerGroup="p")


async def _acked(world: MasterOfFakes) -> Asking:
    place = _place(await _popped(world))
    return lambda world: ask(world.connection, Code.ACK_MESSAGE, **place)


async def _acked_together(world: MasterOfFakes) -> Asking:
    taken = await _popped(world)
    parts = taken.receipt.split(" ")
    bits = base64.b64encode(b"\x03").decode()
    item = {"c": "g", "t": "t", "r": "0", "so": 0, "q": 0, "rq": 0, "pt": int(parts[1]), "it": 60_000, "b": bits}
    body = json.dumps({"brokerName": "broker-a", "acks": [item]}).encode()
    return lambda world: ask(world.connection, Code.BATCH_ACK_MESSAGE, body)


async def _hidden(world: MasterOfFakes) -> Asking:
    place = _place(await _popped(world))
    return lambda world: ask(world.connection, Code.CHANGE_MESSAGE_INVISIBLETIME, **place, invisibleTime=500)


def _replied(code: Code) -> Prepared:
    async def prepare(world: MasterOfFakes) -> Asking:
        await send(world.connection, "t")
        beat = {"clientID": "c", "producerDataSet": [{"groupName": "p"}], "consumerDataSet": []}
        assert (await ask(world.connection, Code.HEART_BEAT, json.dumps(beat).encode())).code == 0
        names = send_ext("t", 0, queues=1)
        if code == Code.SEND_REPLY_MESSAGE:
            names = {
                "producerGroup": "p", "topic": "t", "defaultTopic": "TBW102", "defaultTopicQueueNums": 1, "queueId": 0,
                "sysFlag": 0, "bornTimestamp": 1, "flag": 0, "reconsumeTimes": 0, "unitMode": "false", "batch": "false",
            }  # fmt: skip
        properties = "i" if code == Code.SEND_REPLY_MESSAGE_V2 else "properties"
        ext = {**names, properties: "REPLY_TO_CLIENT\x01c\x02"}
        world.connection._handler = lambda _, request: RemotingCommand.response(request, ResponseCode.SUCCESS)
        return lambda world: ask(world.connection, code, b"reply", **ext)

    return prepare


REQUESTS: dict[Code, Prepared] = {
    Code.CONSUMER_SEND_MSG_BACK: _sent_back,
    Code.END_TRANSACTION: _ended,
    Code.RESUME_CHECK_HALF_MESSAGE: _checked_again,
    Code.RECALL_MESSAGE: _recalled,
    Code.SEND_REPLY_MESSAGE: _replied(Code.SEND_REPLY_MESSAGE),
    Code.SEND_REPLY_MESSAGE_V2: _replied(Code.SEND_REPLY_MESSAGE_V2),
    Code.ACK_MESSAGE: _acked,
    Code.BATCH_ACK_MESSAGE: _acked_together,
    Code.CHANGE_MESSAGE_INVISIBLETIME: _hidden,
    Code.SET_MESSAGE_REQUEST_MODE: plain(
        Code.SET_MESSAGE_REQUEST_MODE, {"topic": "t", "consumerGroup": "g", "mode": "POP", "popShareQueueNum": 1}
    ),
    Code.UPDATE_AND_CREATE_TOPIC: plain(
        Code.UPDATE_AND_CREATE_TOPIC, topic="new", readQueueNums=1, writeQueueNums=1, perm=6, defaultTopic="TBW102"
    ),
    Code.UPDATE_AND_CREATE_TOPIC_LIST: plain(
        Code.UPDATE_AND_CREATE_TOPIC_LIST,
        {"topicConfigList": [{"topicName": "new", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}]},
    ),
    Code.DELETE_TOPIC_IN_BROKER: plain(Code.DELETE_TOPIC_IN_BROKER, topic="t"),
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: plain(
        Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {"groupName": "new", "retryMaxTimes": 3}
    ),
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: plain(
        Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, {"groupConfigList": [{"groupName": "new", "retryMaxTimes": 3}]}
    ),
    Code.DELETE_SUBSCRIPTIONGROUP: plain(Code.DELETE_SUBSCRIPTIONGROUP, groupName="g", cleanOffset="true"),
    Code.UPDATE_AND_GET_GROUP_FORBIDDEN: plain(
        Code.UPDATE_AND_GET_GROUP_FORBIDDEN, group="g", topic="t", readable="false"
    ),
    Code.INVOKE_BROKER_TO_RESET_OFFSET: plain(
        Code.INVOKE_BROKER_TO_RESET_OFFSET, topic="t", group="g", timestamp=-1, isForce="true", queueId=0, offset=0
    ),
    Code.CLONE_GROUP_OFFSET: plain(
        Code.CLONE_GROUP_OFFSET, srcGroup="g", destGroup="h", topic="t", offline="true"
    ),
    Code.AUTH_CREATE_USER: as_root(Code.AUTH_CREATE_USER, {"password": "s"}, username="new"),
    Code.AUTH_UPDATE_USER: as_root(Code.AUTH_UPDATE_USER, {"password": "another"}, username="known"),
    Code.AUTH_DELETE_USER: as_root(Code.AUTH_DELETE_USER, username="gone"),
    Code.AUTH_CREATE_ACL: as_root(Code.AUTH_CREATE_ACL, ACL, subject="User:gone"),
    Code.AUTH_UPDATE_ACL: as_root(
        Code.AUTH_UPDATE_ACL,
        {"policies": [{"entries": [{"resource": "Topic:t", "actions": ["Sub"], "decision": "Allow"}]}]},
        subject="User:known",
    ),
    Code.AUTH_DELETE_ACL: as_root(Code.AUTH_DELETE_ACL, subject="User:known"),
}  # fmt: skip


WAITING = {route.code for route in ROUTES.values() if route.waits is Waits.YES}
# The reply is delivered in any case. Its copy is stored where possible.
KEEPS_A_COPY = {Code.SEND_REPLY_MESSAGE, Code.SEND_REPLY_MESSAGE_V2}


def test_every_request_with_a_promise_is_tested_here() -> None:
    assert REQUESTS.keys() == WAITING


@pytest.mark.parametrize("code", sorted(WAITING), ids=lambda code: code.name)
def test_change_is_answered_when_the_set_has_confirmed_it(tmp_path: Path, code: Code) -> None:
    async def work(world: MasterOfFakes) -> None:
        asks = await REQUESTS[code](world)
        world.slaves.hold()
        before = world.broker.store.max_physical_offset
        asked = asking(asks(world))
        await world.until_it_waits(asked)
        assert world.broker.store.max_physical_offset > before, "else it promises nothing"
        world.slaves.confirm_to(world.broker.store.max_physical_offset - 1)
        await world.a_round_trip()
        assert world.broker.group_transfer is not None
        assert world.broker.group_transfer.waiting == 1
        assert not asked.done()
        world.slaves.let_go()
        answer = await asked
        assert answer.code == ResponseCode.SUCCESS, answer.remark

    in_a_set(tmp_path, work, *(SETTINGS if code.name.startswith("AUTH_") else ()))


@pytest.mark.parametrize("code", sorted(WAITING), ids=lambda code: code.name)
def test_unconfirmed_change_is_answered_with_a_timeout(tmp_path: Path, code: Code) -> None:
    async def work(world: MasterOfFakes) -> None:
        asks = await REQUESTS[code](world)
        world.slaves.hold()
        asked = asking(asks(world))
        await world.until_it_waits(asked)
        assert world.broker.group_transfer is not None
        world.clock.advance(2999)
        world.broker.group_transfer.check_deadlines()
        assert world.broker.group_transfer.waiting == 1
        await world.a_round_trip()
        assert not asked.done()
        world.clock.advance(1)
        world.broker.group_transfer.check_deadlines()
        assert (await asked).code == ResponseCode.FLUSH_SLAVE_TIMEOUT

    in_a_set(tmp_path, work, *(SETTINGS if code.name.startswith("AUTH_") else ()))


# ---- sends, in all lanes


def _send(
    topic: str = "t", body: bytes = b"body", properties: str = "", batch: bool = False, code: int = 310
) -> Asking:
    ext = {**send_ext(topic, 0, properties, queues=1), "m": str(batch).lower()}
    return lambda world: ask(world.connection, code, body, **ext)


SENDS: dict[str, Asking] = {
    "by the express lane": _send(),
    "by the general way": _send(properties='UNIQ_KEY\x01a"b\x02'),
    "a batch": _send(body=encode_batch([(b"1", 0, b""), (b"2", 0, b"")]), batch=True, code=320),
    "a batch that is none": _send(code=320),
    "delayed": _send(properties="DELAY\x013\x02"),
    "for a moment": _send(properties="TIMER_DELAY_SEC\x0110\x02"),
    "half": _send(properties="TRAN_MSG\x01true\x02PGROUP\x01p\x02"),
    "to a topic that it makes": _send("made-by-a-send"),
    "to a retry topic": _send("%RETRY%g"),
}


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@pytest.mark.parametrize("lane", SENDS)
def test_send_is_acknowledged_when_the_set_has_confirmed_it(tmp_path: Path, lane: str, flush: str) -> None:
    async def work(world: MasterOfFakes) -> None:
        await send(world.connection, "t")
        await _group(world)
        world.slaves.hold()
        asked = asking(SENDS[lane](world))
        await world.until_it_waits(asked)
        world.slaves.confirm_to(world.broker.store.max_physical_offset - 1)
        await world.a_round_trip()
        assert not asked.done()
        world.slaves.let_go()
        answer = await asked
        assert answer.code == ResponseCode.SUCCESS, answer.remark

    in_a_set(tmp_path, work, f"flushDiskType={flush}")


@pytest.mark.parametrize("lane", SENDS)
def test_unconfirmed_send_is_answered_with_a_timeout(tmp_path: Path, lane: str) -> None:
    async def work(world: MasterOfFakes) -> None:
        await send(world.connection, "t")
        await _group(world)
        world.slaves.hold()
        asked = asking(SENDS[lane](world))
        await world.until_it_waits(asked)
        world.clock.advance(3000)
        assert world.broker.group_transfer is not None
        world.broker.group_transfer.check_deadlines()
        answer = await asked
        assert answer.code == ResponseCode.FLUSH_SLAVE_TIMEOUT
        assert answer.ext["queueOffset"], "it is stored, and its client is told where"

    in_a_set(tmp_path, work)


def test_send_without_wait_does_not_wait_for_slaves(tmp_path: Path) -> None:
    async def work(world: MasterOfFakes) -> None:
        await send(world.connection, "t")
        world.slaves.hold()
        for properties in ("WAIT\x01false\x02", 'WAIT\x01false\x02UNIQ_KEY\x01a"b\x02'):
            assert (await _send(properties=properties)(world)).code == ResponseCode.SUCCESS

    in_a_set(tmp_path, work)


NOBODY = "neither a controller nor a slave responds: another may be master"
DEPOSED = "this member is no longer the master"
REFUSALS: dict[str, tuple[dict[str, Any], ResponseCode, str]] = {
    "too few in sync": ({"has_enough": False}, ResponseCode.SYSTEM_ERROR, NOT_ENOUGH),
    "nobody is heard": (
        {"has_enough": False, "confirm": -1, "silent_because": NOBODY},
        ResponseCode.SYSTEM_ERROR,
        NOBODY,
    ),
    "nobody is heard from this instant on": (
        {"confirm": -1, "silent_because": NOBODY},
        ResponseCode.SYSTEM_ERROR,
        NOBODY,
    ),
    "deposed from this instant on": ({"confirm": -1, "silent_because": DEPOSED}, ResponseCode.SYSTEM_ERROR, DEPOSED),
    "not the master": (
        {"leads": False},
        ResponseCode.SYSTEM_BUSY,
        "this member of the broker set accepts no messages at present",
    ),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_send_that_the_set_cannot_confirm_is_refused_before_it_is_stored(tmp_path: Path, why: str) -> None:
    said, code, remark = REFUSALS[why]

    async def work(world: MasterOfFakes) -> None:
        await send(world.connection, "t")
        await _group(world)
        before = {name: getattr(world.slaves, name) for name in said}
        for name, value in said.items():
            setattr(world.slaves, name, value)
        end = world.broker.store.max_physical_offset
        for lane, asks in SENDS.items():
            answer = await asks(world)
            assert (answer.code, answer.remark) == (code, remark), lane
        assert world.broker.store.max_physical_offset == end
        for name, value in before.items():
            setattr(world.slaves, name, value)
        await send(world.connection, "t")

    in_a_set(tmp_path, work)


@pytest.mark.parametrize("code", sorted(WAITING - KEEPS_A_COPY), ids=lambda code: code.name)
def test_change_that_the_set_cannot_confirm_is_refused_before_it_is_stored(tmp_path: Path, code: Code) -> None:
    async def work(world: MasterOfFakes) -> None:
        asks = await REQUESTS[code](world)
        world.slaves.has_enough = False
        end = world.broker.store.max_physical_offset
        answer = await asks(world)
        assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, NOT_ENOUGH)
        assert world.broker.store.max_physical_offset == end

    in_a_set(tmp_path, work, *(SETTINGS if code.name.startswith("AUTH_") else ()))


# ---- a deposed master


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_pending_answers_fail_when_the_master_is_deposed(tmp_path: Path, flush: str) -> None:
    """They include a send that waits for its fsync: a later term could confirm other bytes at the same offset."""

    async def work(world: MasterOfFakes) -> None:
        await send(world.connection, "t")
        place = _place(await _popped(world))
        world.slaves.hold()
        asked = [asking(_send()(world)), asking(ask(world.connection, Code.ACK_MESSAGE, **place))]
        await world.a_round_trip()
        world.broker.storage.answers.stop()
        world.slaves.let_go()  # of the next term, over other bytes
        assert {(await each).code for each in asked} == {ResponseCode.FLUSH_SLAVE_TIMEOUT}

    in_a_set(tmp_path, work, f"flushDiskType={flush}")


def test_append_of_another_term_is_not_acknowledged_by_this_ones_confirm(tmp_path: Path) -> None:
    """Between the topic's record and its answer the table is saved.

    Another master may have truncated the record meanwhile.
    """

    async def work(world: MasterOfFakes) -> None:
        asks = await REQUESTS[Code.UPDATE_AND_CREATE_TOPIC](world)
        file, may_save = world.broker.topics.file, asyncio.Event()
        saved = file.save

        async def save() -> None:
            await may_save.wait()
            await saved()

        file.save = save  # type: ignore[method-assign]
        end = world.broker.store.max_physical_offset
        asked = asking(asks(world))
        while world.broker.store.max_physical_offset == end:
            await asyncio.sleep(0)
        world.broker.storage.answers.stop()
        may_save.set()
        assert (await asked).code == ResponseCode.FLUSH_SLAVE_TIMEOUT

    in_a_set(tmp_path, work)


# ---- pops


def test_pop_is_answered_when_the_set_has_confirmed_its_record(tmp_path: Path) -> None:
    async def work(world: MasterOfFakes) -> None:
        member = PopMember(world.broker, world.connection)
        await send(world.connection, "t")
        await _group(world)
        world.slaves.hold()
        popped = asking(member.ask_pop())
        await world.until_it_waits(popped)
        world.slaves.let_go()
        assert len(member.taken(await popped)) == 1

    in_a_set(tmp_path, work)


@pytest.mark.parametrize("role", ["the slaves are silent", "it is the master no more"])
def test_pop_whose_record_is_not_confirmed_returns_no_message(tmp_path: Path, role: str) -> None:
    async def work(world: MasterOfFakes) -> None:
        member = PopMember(world.broker, world.connection)
        await send(world.connection, "t")
        await _group(world)
        world.slaves.hold()
        popped = asking(member.ask_pop(invisible=10_000))
        await world.until_it_waits(popped)
        if role == "it is the master no more":
            world.broker.storage.answers.stop()
        else:
            world.clock.advance(3000)
            assert world.broker.group_transfer is not None
            world.broker.group_transfer.check_deadlines()
        answer = await popped
        assert (answer.code, answer.body) == (ResponseCode.SYSTEM_BUSY, b"")

    in_a_set(tmp_path, work)


# ---- visibility

QUEUE: dict[str, object] = {"topic": "t", "queueId": 0}
READS: dict[str, tuple[Code, dict[str, object]]] = {
    "pull": (
        Code.PULL_MESSAGE,
        {
            **QUEUE, "consumerGroup": "g", "queueOffset": 1, "maxMsgNums": 32, "sysFlag": 4, "commitOffset": 0,
            "suspendTimeoutMillis": 0, "subVersion": 0, "subscription": "*",
        },
    ),
    "peek": (
        Code.PEEK_MESSAGE,
        {
            **QUEUE, "consumerGroup": "g", "maxMsgNums": 32, "invisibleTime": 1000, "pollTime": 0, "bornTime": 0,
            "initMode": 0,
        },
    ),
    "notification": (Code.NOTIFICATION, {**QUEUE, "consumerGroup": "popped", "pollTime": 0, "bornTime": 0}),
    "by key": (
        Code.QUERY_MESSAGE,
        {"topic": "t", "key": "K", "maxNum": 9, "beginTimestamp": 0, "endTimestamp": 1 << 50},
    ),
    "the end of a queue": (Code.GET_MAX_OFFSET, QUEUE),
    "by time": (Code.SEARCH_OFFSET_BY_TIMESTAMP, {**QUEUE, "timestamp": 1 << 50}),
    "entries": (Code.QUERY_CONSUME_QUEUE, {**QUEUE, "index": 0, "count": 9}),
    "a topic's ends": (Code.GET_TOPIC_STATS_INFO, {"topic": "t"}),
    "a group's lag": (Code.GET_CONSUME_STATS, {"topic": "t", "consumerGroup": "g"}),
    "a group's times": (Code.QUERY_CONSUME_TIME_SPAN, {"topic": "t", "group": "g"}),
}  # fmt: skip


async def _unconfirmed(world: MasterOfFakes) -> int:
    """Append a message that no reader may see, and return its physical offset."""
    world.slaves.hold()
    world.clock.advance(1000)
    sent = await send(world.connection, "t", b"unseen", "KEYS\x01K\x02WAIT\x01false\x02")
    assert world.broker.store.queues.next_offset("t", 0) == 2
    return int(sent.ext["msgId"][16:], 16)


async def _read_group(world: MasterOfFakes, group: str) -> None:
    body = json.dumps({"groupName": group}).encode()
    await ask(world.connection, Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body)
    await ask(world.connection, Code.UPDATE_CONSUMER_OFFSET, consumerGroup=group, **QUEUE, commitOffset=1)


def _told(answer: RemotingCommand) -> tuple[object, ...]:
    body = re.sub(rb'"topicPutTps":[0-9.]+', b"", answer.body)  # the put rate includes unconfirmed messages
    return answer.code, body, answer.ext.get("offset"), answer.ext.get("hasMsg")


@pytest.mark.parametrize("way", READS)
def test_unconfirmed_message_is_not_visible(tmp_path: Path, way: str) -> None:
    """It may be lost with this master, and its offset be assigned to another message."""
    code, ext = READS[way]

    async def work(world: MasterOfFakes) -> None:
        await send(world.connection, "t", properties="KEYS\x01K\x02")
        for group in ("g", "popped"):
            await _read_group(world, group)
        before = _told(await ask(world.connection, code, **ext))
        place = await _unconfirmed(world)
        assert _told(await ask(world.connection, code, **ext)) == before
        assert (await ask(world.connection, Code.VIEW_MESSAGE_BY_ID, offset=place)).code == ResponseCode.SYSTEM_ERROR
        world.slaves.let_go()
        assert _told(await ask(world.connection, code, **ext)) != before
        assert (await ask(world.connection, Code.VIEW_MESSAGE_BY_ID, offset=place)).code == ResponseCode.SUCCESS

    in_a_set(tmp_path, work)


def test_unconfirmed_message_is_not_popped(tmp_path: Path) -> None:
    async def work(world: MasterOfFakes) -> None:
        await send(world.connection, "t")
        await _read_group(world, "g")
        await _unconfirmed(world)
        member = PopMember(world.broker, world.connection)
        assert not await member.pop()
        world.slaves.let_go()
        assert [taken.body for taken in await member.pop()] == [b"unseen"]

    in_a_set(tmp_path, work)


@pytest.mark.parametrize("confirmed", [0, 1])
@pytest.mark.parametrize("saved_position", [1, 2, 3])
def test_offset_committed_at_another_master_is_not_moved_back(
    tmp_path: Path, saved_position: int, confirmed: int
) -> None:
    """The new master has the messages but does not know yet that they are confirmed."""

    async def work(world: MasterOfFakes) -> None:
        await _group(world)
        for _ in range(confirmed):
            await send(world.connection, "t")
        world.slaves.hold()
        for _ in range(3 - confirmed):
            await send(world.connection, "t", properties="WAIT\x01false\x02")
        code, ext = READS["pull"]
        answer = await ask(world.connection, code, **{**ext, "queueOffset": saved_position})
        assert (answer.code, answer.ext["nextBeginOffset"]) == (ResponseCode.PULL_NOT_FOUND, str(saved_position))

    in_a_set(tmp_path, work)


def test_suspended_pull_gets_a_message_when_the_set_has_confirmed_it(tmp_path: Path) -> None:
    async def work(world: MasterOfFakes) -> None:
        await send(world.connection, "t")
        await _group(world)
        world.slaves.hold()
        code, ext = READS["pull"]
        pulling = asking(ask(world.connection, code, **{**ext, "sysFlag": 6, "suspendTimeoutMillis": 20_000}))
        await world.a_round_trip()
        await send(world.connection, "t", properties="WAIT\x01false\x02")
        await world.a_round_trip()
        assert not pulling.done()
        world.slaves.let_go()
        assert (await pulling).code == ResponseCode.SUCCESS

    in_a_set(tmp_path, work)


# ---- deliveries by the broker itself


def test_due_messages_are_delivered_once_the_set_accepts_appends_again(tmp_path: Path) -> None:
    async def work(world: MasterOfFakes) -> None:
        broker, member = world.broker, PopMember(world.broker, world.connection)
        await send(world.connection, "t", b"popped")
        assert await member.pop(1, invisible=1000)
        await send(world.connection, "t", b"delayed", "DELAY\x011\x02")
        await send(world.connection, "t", b"timer", "TIMER_DELAY_SEC\x011\x02")
        await _half(world)
        world.slaves.has_enough = False
        end = broker.store.max_physical_offset
        world.clock.advance(100_000)
        assert (broker.schedule.deliver_due(), broker.timers.deliver_due(), await broker.revive.run_due()) == (0, 0, 0)
        await broker.check_back.run()
        await broker.persistence.run()
        assert broker.store.max_physical_offset == end
        world.slaves.has_enough = True
        world.clock.advance(20_000)
        while broker.store.queues.max_offset("t", 0) < 3 or not broker.revive.revived:
            await asyncio.sleep(0)
            broker.schedule.deliver_due()
            broker.timers.deliver_due()
            await broker.revive.run_due()
        assert sorted(taken.body for taken in await member.pop(32)) == [b"delayed", b"popped", b"timer"]
        assert len(broker.transactions.waiting()) == 1
        assert not broker.faults.counts

    in_a_set(tmp_path, work)


def test_pending_message_is_delivered_only_after_the_set_has_confirmed_it(tmp_path: Path) -> None:
    """The set must have confirmed the message before its delivered copy and its mark are appended."""

    async def work(world: MasterOfFakes) -> None:
        await send(world.connection, "t")
        world.slaves.hold()
        for properties in ("DELAY\x011\x02", "TIMER_DELAY_SEC\x011\x02"):
            await send(world.connection, "t", properties=properties + "WAIT\x01false\x02")
        world.clock.advance(100_000)
        assert (world.broker.schedule.deliver_due(), world.broker.timers.deliver_due()) == (0, 0)
        world.slaves.let_go()
        while world.broker.store.queues.max_offset("t", 0) < 3:
            await asyncio.sleep(0)
            world.broker.schedule.deliver_due()
            world.broker.timers.deliver_due()

    in_a_set(tmp_path, work)


async def test_member_that_is_not_master_starts_without_an_append(tmp_path: Path) -> None:
    slaves = FakeSet()
    slaves.leads = False
    async with running(tmp_path, broker_set=slaves) as (broker, connection):
        assert broker.store.max_physical_offset == 0
        assert (
            await _send()(MasterOfFakes(broker, connection, slaves, ManualClock()))
        ).code == ResponseCode.SYSTEM_BUSY
    assert not list((tmp_path / "consumequeue").glob("*"))


def test_answer_at_the_end_of_a_sealed_segment_wakes_the_replication(tmp_path: Path) -> None:
    """No append follows that would."""

    async def work(world: MasterOfFakes) -> None:
        place = _place(await _popped(world))
        assert (await ask(world.connection, Code.ACK_MESSAGE, **place)).code == ResponseCode.SUCCESS
        world.broker.store.end.roll()
        assert world.slaves.confirm < world.broker.store.max_physical_offset
        answer = await ask(world.connection, Code.ACK_MESSAGE, **place)  # a repeated ack: there is nothing to append
        assert answer.code == ResponseCode.SUCCESS

    in_a_set(tmp_path, work)


def test_number_of_unconfirmed_sends_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.intake.replication.UNCONFIRMED_MAX", 100)

    async def work(world: MasterOfFakes) -> None:
        await send(world.connection, "t")
        world.slaves.hold()
        waiting = asking(_send()(world))
        await world.until_it_waits(waiting)
        end = world.broker.store.max_physical_offset
        assert (await _send()(world)).code == ResponseCode.SYSTEM_BUSY
        assert world.broker.store.max_physical_offset == end
        world.slaves.let_go()
        assert [(await each).code for each in (waiting, asking(_send()(world)))] == [ResponseCode.SUCCESS] * 2

    in_a_set(tmp_path, work)


def test_refused_send_creates_no_files_for_its_queue(tmp_path: Path) -> None:
    async def work(world: MasterOfFakes) -> None:
        topic = {"readQueueNums": 4, "writeQueueNums": 4, "perm": 6, "defaultTopic": "TBW102"}
        assert (await ask(world.connection, Code.UPDATE_AND_CREATE_TOPIC, topic="t", **topic)).code == 0
        world.slaves.has_enough = False
        assert (await _send()(world)).code == ResponseCode.SYSTEM_ERROR
        assert not (tmp_path / "consumequeue" / "t").exists()

    in_a_set(tmp_path, work)


def test_unknown_group_can_read_while_the_set_accepts_no_append(tmp_path: Path) -> None:
    """The group is created once the set accepts appends."""

    async def work(world: MasterOfFakes) -> None:
        await send(world.connection, "t")
        world.slaves.has_enough = False
        code, ext = READS["pull"]
        answer = await ask(world.connection, code, **{**ext, "consumerGroup": "new", "queueOffset": 0})
        assert answer.code == ResponseCode.SUCCESS
        subscription = {"topic": "t", "subString": "*", "subVersion": 1}
        data = {"groupName": "new", "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING"}
        consumer = {**data, "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "subscriptionDataSet": [subscription]}
        beat = {"clientID": "c", "producerDataSet": [], "consumerDataSet": [consumer]}
        assert (await ask(world.connection, Code.HEART_BEAT, json.dumps(beat).encode())).code == ResponseCode.SUCCESS
        assert "new" not in world.broker.groups.groups
        world.slaves.has_enough = True
        assert (await ask(world.connection, Code.HEART_BEAT, json.dumps(beat).encode())).code == ResponseCode.SUCCESS
        assert "new" in world.broker.groups.groups

    in_a_set(tmp_path, work)


def test_errors_and_answers_without_a_promise_do_not_wait(tmp_path: Path) -> None:
    async def work(world: MasterOfFakes) -> None:
        place, transaction = _place(await _popped(world)), await _half(world)
        world.slaves.hold()
        await send(world.connection, "t", properties="WAIT\x01false\x02")
        wrong = await ask(world.connection, Code.ACK_MESSAGE, **{**place, "offset": 99})
        assert wrong.code == ResponseCode.NO_MESSAGE
        none = await ask(world.connection, Code.RECALL_MESSAGE, topic="t", recallHandle="none", producerGroup="p")
        assert none.code == ResponseCode.ILLEGAL_OPERATION
        ext = {name: str(value) for name, value in {**transaction, "commitOrRollback": 8}.items()}
        world.connection.send_oneway(RemotingCommand(Code.END_TRANSACTION, ext=ext))
        await world.a_round_trip()
        assert not world.broker.transactions.waiting()
        assert world.broker.group_transfer is not None
        assert world.broker.group_transfer.waiting == 0

    in_a_set(tmp_path, work)


def test_broker_checks_the_deadlines_of_pending_answers(tmp_path: Path) -> None:
    async def work(world: MasterOfFakes) -> None:
        await send(world.connection, "t")
        world.slaves.hold()
        asked = asking(_send()(world))
        await world.until_it_waits(asked)
        world.clock.advance(3000)
        assert (await asked).code == ResponseCode.FLUSH_SLAVE_TIMEOUT
        assert world.broker.group_transfer is not None
        assert world.broker.group_transfer.timeouts == 1

    in_a_set(tmp_path, work)


def test_set_is_asked_before_each_append_of_a_prepared_message(tmp_path: Path) -> None:
    async def work(world: MasterOfFakes) -> None:
        await send(world.connection, "t")
        message = NewMessage(topic="t", queue_id=0, body=b"body", born_timestamp=1)
        ready = world.broker.writer.send_of(message)
        world.slaves.has_enough = False
        with pytest.raises(AppendRefused):
            world.broker.writer.append([ready], ("127.0.0.1", 1), world.clock.now_ms())
        with pytest.raises(AppendRefused):
            world.broker.writer.put(message)

    in_a_set(tmp_path, work)


def test_messages_read_together_ask_the_set_twice_in_all(
    tmp_path: Path,
) -> None:
    """It is not asked for each message: its answers do not change within a turn of the event loop."""

    async def work(world: MasterOfFakes) -> None:
        await send(world.connection, "t")
        connection, outside = SendTarget(world.broker).connect(express=True)
        world.slaves.asked = 0
        connection.data_received(b"".join(frame(send_ext("t", 0, queues=1), b"%d" % number) for number in range(64)))
        assert world.slaves.asked == 2
        await until(lambda: outside.written.count(b"queueOffset") == 64, "all are answered")
        world.slaves.asked, world.slaves.has_enough = 0, False
        connection.data_received(b"".join(frame(send_ext("t", 0, queues=1), b"%d" % number) for number in range(64)))
        assert world.slaves.asked <= 3 * 64, "who is refused is not read again and again"
        await until(lambda: outside.written.count(NOT_ENOUGH.encode()) == 64, "all are refused")

    in_a_set(tmp_path, work)
