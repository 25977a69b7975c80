"""%RETRY%a_b may belong to group a_b, or to group a for messages popped from b. The tables decide between them."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Container
from pathlib import Path

from broker.broker_controller import BrokerController
from broker.tables.retry_names import Owner, RetryNames
from infra.clock import ManualClock
from infra.net.remoting_server import Connection
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.signature import signed
from tests.kit.broker.in_process import ask, running, send
from tests.kit.broker.pop_member import PopMember


def names(
    topics: set[str], groups: set[str], positions: Container[tuple[str, str]] = (), *, v2: bool = False
) -> RetryNames:
    return RetryNames(topics, groups, lambda group, topic: (group, topic) in positions, lambda: v2)


def test_owners_of_a_retry_name_follow_from_the_tables() -> None:
    known = names({"b", "b_c", "c"}, {"a", "a_b", "a_b_c"})
    assert known.owners("%RETRY%a") == [Owner("a")]
    assert known.owners("%RETRY%a_b") == [Owner("a_b"), Owner("a", "b")]
    assert known.owners("%RETRY%a_b_c") == [Owner("a_b_c"), Owner("a", "b_c"), Owner("a_b", "c")]
    assert known.owners("%RETRY%a+b_c") == [Owner("a", "b_c")]
    assert known.owners("%RETRY%x_y") == []
    assert [known.group_of(name) for name in ("%RETRY%a_b", "%RETRY%x_y", "%RETRY%a_c")] == ["a_b", "x_y", "a"]


def test_pair_with_an_ambiguous_name_gets_an_unambiguous_one() -> None:
    known = names({"b", "c"}, {"a", "a_b"})
    assert known.of_pair("a", "c") == "%RETRY%a_c"
    assert known.of_pair("a", "b") == "%RETRY%a+b"
    assert known.of_pair("a", "%RETRY%a+b") == "%RETRY%a+b"
    assert names({"c"}, {"a"}, v2=True).of_pair("a", "c") == "%RETRY%a+c"


def test_group_reads_its_old_retry_topic_after_the_name_became_ambiguous() -> None:
    there = {"b", "%RETRY%a_b", "%RETRY%a+b"}
    assert names(there, {"a"}).to_read("a", "b") == ["%RETRY%a+b", "%RETRY%a_b"]
    assert names(there, {"a", "a_b"}).to_read("a", "b") == ["%RETRY%a+b"]
    assert names(there, {"a", "a_b"}, {("a", "%RETRY%a_b")}).to_read("a", "b") == ["%RETRY%a+b", "%RETRY%a_b"]


def test_topic_deletion_removes_only_unambiguous_retry_topics() -> None:
    there = {"b", "%RETRY%a_b", "%RETRY%a+b"}
    assert names(there, {"a"}, {("a", "b")}).deleted_with("a", "b") == ["%RETRY%a_b", "%RETRY%a+b"]
    assert names(there, {"a", "a_b"}, {("a", "b")}).deleted_with("a", "b") == ["%RETRY%a+b"]
    assert names(there, {"a"}).deleted_with("a", "b") == []  # the group never read there, so the owner is unknown


def with_broker(root: Path, work: Callable[[BrokerController, Connection, ManualClock], Awaitable[None]]) -> None:
    async def main() -> None:
        clock = ManualClock()
        async with running(root, clock=clock) as (broker, connection):
            await work(broker, connection, clock)

    asyncio.run(main())


async def join(connection: Connection, group: str, topic: str) -> None:
    consumer = {"groupName": group, "subscriptionDataSet": [{"topic": topic, "subString": "*"}]}
    answer = await ask(
        connection, Code.HEART_BEAT, json.dumps({"clientID": group, "consumerDataSet": [consumer]}).encode()
    )
    assert answer.code == 0, answer.remark


async def lose(member: PopMember, clock: ManualClock) -> None:
    """Pop a message and let its invisibility expire."""
    assert len(await member.pop(invisible=1000)) == 1
    clock.advance(1001)
    assert await member.broker.revive.run_due() == 1


def test_topic_deletion_keeps_the_retries_of_other_groups(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection, clock: ManualClock) -> None:
        await send(connection, "billing")
        for group in ("orders", "orders_billing"):
            await join(connection, group, "billing")
        await send(connection, "%RETRY%orders_billing", b"again")
        member = PopMember(broker, connection, topic="billing", group="orders")
        await lose(member, clock)
        assert broker.topics.select("%RETRY%orders+billing") is not None
        assert (await ask(connection, Code.DELETE_TOPIC_IN_BROKER, topic="billing")).code == 0
        assert broker.topics.select("%RETRY%orders+billing") is None
        assert broker.topics.select("%RETRY%orders_billing") is not None
        assert broker.store.queues.max_offset("%RETRY%orders_billing", 0) == 1

    with_broker(tmp_path, work)


def test_topic_deletion_removes_the_retries_of_its_popped_messages(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection, clock: ManualClock) -> None:
        await send(connection, "billing")
        await lose(PopMember(broker, connection, topic="billing", group="orders"), clock)
        assert broker.topics.select("%RETRY%orders_billing") is not None
        assert (await ask(connection, Code.DELETE_TOPIC_IN_BROKER, topic="billing")).code == 0
        assert broker.topics.select("%RETRY%orders_billing") is None

    with_broker(tmp_path, work)


def test_group_with_an_ambiguous_name_gets_none_of_the_pairs_messages(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection, clock: ManualClock) -> None:
        await send(connection, "billing", b"theirs")
        await join(connection, "orders_billing", "other")
        await send(connection, "%RETRY%orders_billing", b"not theirs")
        member = PopMember(broker, connection, topic="billing", group="orders")
        await lose(member, clock)
        again = await member.pop()
        assert [(one.body, one.topic, one.receipt.split(" ")[4]) for one in again] == [(b"theirs", "billing", "2")]
        await member.ack(*again)
        clock.advance(120_000)
        assert await broker.revive.run_due() == 0
        assert broker.store.queues.max_offset("%RETRY%orders_billing", 0) == 1

    with_broker(tmp_path, work)


def test_retry_topics_of_both_versions_are_read_and_acknowledged(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection, clock: ManualClock) -> None:
        member = PopMember(broker, connection)
        for version in (b"1", b"2"):
            await send(connection, "t", version)
        _, second = await member.pop(invisible=1000)
        await member.hide(second, 5000)
        for prefers_v2 in (False, True):
            broker.config.enable_retry_topic_v2 = prefers_v2
            clock.advance(3000)
            assert await broker.revive.run_due() == 1
        assert await member.is_request_in_flight()
        again = await member.pop()
        assert {(one.body, one.receipt.split(" ")[4]) for one in again} == {(b"1", "1"), (b"2", "2")}
        await member.ack(*again)
        clock.advance(120_000)
        assert await broker.revive.run_due() == 0

    with_broker(tmp_path, work)


async def test_user_with_pop_permission_may_acknowledge_redelivered_messages(tmp_path: Path) -> None:
    root = '{"username":"root","password":"root-secret"}'
    settings = ("authenticationEnabled=true", "authorizationEnabled=true", f"initAuthenticationUser={root}")

    clock = ManualClock()
    async with running(tmp_path, *settings, clock=clock) as (broker, connection):

        async def as_user(name: str, code: int, body: bytes = b"", /, **ext: object) -> RemotingCommand:
            fields = signed(name, f"{name}-secret", {key: str(value) for key, value in ext.items()}, body)
            return await connection.invoke(RemotingCommand(code, ext=fields, body=body), 30)

        policies = [
            {"resource": name, "actions": ["Pub", "Sub"], "decision": "Allow"} for name in ("Topic:t", "Group:g")
        ]
        user = {"username": "alice", "password": "alice-secret", "userType": "Normal", "userStatus": "enable"}
        acl = {"subject": "User:alice", "policies": [{"policyType": "Custom", "entries": policies}]}
        for code, key, name, value in (
            (Code.AUTH_CREATE_USER, "username", "alice", user),
            (Code.AUTH_CREATE_ACL, "subject", "User:alice", acl),
        ):
            assert (await as_user("root", code, json.dumps(value).encode(), **{key: name})).code == 0
        made = {"defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
        answer = await as_user(
            "root", Code.UPDATE_AND_CREATE_TOPIC, topic="t", topicFilterType="SINGLE_TAG", order="false", **made
        )
        assert answer.code == 0, answer.remark
        sent = {"a": "p", "b": "t", "c": "TBW102", "d": 1, "e": 0, "f": 0, "g": 1, "h": 0, "i": "", "j": 0}
        assert (await as_user("alice", Code.SEND_MESSAGE_V2, b"job", **sent, k="false", m="false")).code == 0
        pop = {"consumerGroup": "g", "topic": "t", "queueId": 0, "maxMsgNums": 1, "invisibleTime": 1000}
        assert (await as_user("alice", Code.POP_MESSAGE, **pop)).code == 0
        clock.advance(1001)
        assert await broker.revive.run_due() == 1
        again = await as_user("alice", Code.POP_MESSAGE, **pop)
        taken = PopMember(broker, connection).taken(again)[0]
        place = {"consumerGroup": "g", "topic": "%RETRY%g_t", "queueId": 0, "offset": 0}
        for code, more in ((Code.CHANGE_MESSAGE_INVISIBLETIME, {"invisibleTime": 5000}), (Code.ACK_MESSAGE, {})):
            answer = await as_user("alice", code, **place, extraInfo=taken.receipt, **more)
            assert answer.code == ResponseCode.SUCCESS, answer.remark
        # the retries of other pairs stay forbidden
        broker.groups.find("h")
        broker.topics.create_plain("%RETRY%h_t", 1)
        pull = {
            "consumerGroup": "g", "topic": "%RETRY%h_t", "queueId": 0, "queueOffset": 0, "maxMsgNums": 1,
            "sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 0, "subVersion": 0, "subscription": "*",
            "expressionType": "TAG",
        }  # fmt: skip
        answer = await as_user("alice", Code.PULL_MESSAGE, **pull)
        assert (answer.code, "Group:h" in (answer.remark or "")) == (ResponseCode.NO_PERMISSION, True)


def test_unread_retries_by_group_equal_those_by_topic() -> None:
    """Random tables: the retry names of each pair, and the pairs of each retry name."""
    dice, seen = random.Random(5), 0
    for _ in range(3_000):
        words = ["a", "b", "a_b", "b_a", "a_a"]
        groups, topics = set(dice.sample(words, 3)), set(dice.sample(words, 3))
        retries = [
            f"%RETRY%{dice.choice(words)}{dice.choice(['', '_', '+'])}{dice.choice(['', *words])}" for _ in range(4)
        ]
        there = {*topics, *retries}
        stands = {(dice.choice(words), dice.choice([*words, *retries])) for _ in range(5)}
        known = names(there, groups, stands)
        wanted = {
            (retry, group)
            for group, topic in stands
            for retry in (f"%RETRY%{group}", *known.to_read(group, topic))
            if retry in there and (group, retry) not in stands
        }

        def topics_of(group: str, at: set[tuple[str, str]] = stands) -> list[str]:
            return [topic for one, topic in at if one == group]

        found = [(retry, group) for retry in set(retries) for group in known.unread_by(retry, topics_of)]
        assert (set(found), len(set(found))) == (wanted, len(found))
        seen += len(found)
    assert seen > 1_000
