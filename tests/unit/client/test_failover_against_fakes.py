"""Failovers and switchovers of a broker set under a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest

from neve.client import AsyncClient, connect
from neve.client.consumers.base import DeliveringConsumer
from neve.client.group import pop_requests as pop_module
from neve.client.group import pull as pull_module
from neve.client.group.fetcher import Fetcher
from neve.client.group.offset_store import BrokerOffsetStore
from neve.client.group.pop_requests import Popper, Receipt
from neve.client.group.positions import Positions
from neve.client.group.process_queue import ProcessQueue
from neve.client.group.pull import Puller, Subscription
from neve.client.model import MessageQueue
from neve.client.net import routes
from neve.client.net.route import parse_route
from neve.client.net.session import Session
from neve.client.options import ClientOptions
from neve.client.send import producer as producer_module
from neve.errors import BrokerError, ClientError, ConnectionFailed, NeveError, UnknownOutcome
from neve.record.codec import encode_record
from neve.record.ids import offset_msg_id
from neve.remoting.address import parse_address
from neve.remoting.body import dumps
from neve.remoting.command import RemotingCommand
from tests.kit.clock.waiting import until
from tests.kit.cluster.fake_cluster import Answer, FakeServer, Handler, run, send_ok, sends, silent
from tests.kit.cluster.group_broker import GroupBroker

QUEUE = MessageQueue("t", "b0", 0)
RECEIPT = Receipt.parse("0 1 60000 0 0 b0 0 7")


class FakeSetRoute:
    """A broker set. `ids` maps broker ids to members in the name server."""

    def __init__(self, *handlers: Handler) -> None:
        self.members = [FakeServer(handler) for handler in handlers]
        self.ids = dict(enumerate(self.members))
        self.namesrv = FakeServer(self._route)
        #: Called before each answer of the name server.
        self.asked: Callable[[int], None] = lambda _: None

    @property
    def questions(self) -> int:
        return self.namesrv.codes().count(105)

    def _route(self, request: RemotingCommand) -> Answer:
        self.asked(self.questions)
        addresses = {str(number): member.address for number, member in self.ids.items()}
        broker = {"brokerName": "b0", "cluster": "c", "brokerAddrs": addresses}
        if request.code == 106:
            return 0, {}, dumps({"brokerAddrTable": {"b0": broker}, "clusterAddrTable": {"c": ["b0"]}})
        route = {
            "brokerDatas": [broker],
            "queueDatas": [{"brokerName": "b0", "perm": 6, "readQueueNums": 1, "writeQueueNums": 1}],
        }
        return 0, {}, dumps(route)


@asynccontextmanager
async def running(*handlers: Handler) -> AsyncIterator[FakeSetRoute]:
    """Run a broker set of one member per handler. The first one is the master."""
    broker_set = FakeSetRoute(*handlers)
    servers = [broker_set.namesrv, *broker_set.members]
    for server in servers:
        await server.start()
    try:
        yield broker_set
    finally:
        for server in servers:
            await server.stop()


def elected(broker_set: FakeSetRoute, question: int, member: FakeServer) -> Callable[[int], None]:
    """Return a callback that makes `member` master from this name server request on."""

    def asked(number: int) -> None:
        if number >= question:
            broker_set.ids = {0: member}

    return asked


# ---- sends


@pytest.mark.parametrize("queue", [None, 0, QUEUE])
def test_send_in_flight_at_the_death_of_the_master_reaches_its_successor(
    queue: int | MessageQueue | None,
) -> None:
    """The name servers may need any number of requests until they report a master."""

    async def work() -> None:
        async with running(send_ok, send_ok) as broker_set, connect(broker_set.namesrv.address) as client:
            old, new = broker_set.members
            await client.send("t", b"x", queue=queue)
            broker_set.ids = {1: new}
            broker_set.asked = elected(broker_set, 7, new)
            await old.stop()
            assert (await client.send("t", b"y", queue=queue)).queue_offset == 7
            assert [request.body for request in sends(new)] == [b"y"]
            assert broker_set.questions >= 7

    run(work)


@pytest.mark.parametrize("code", [2, 14])
def test_refusal_of_a_former_master_uses_no_attempt(code: int) -> None:
    """A former master may refuse more often than there are attempts until its set has elected another one."""

    async def work() -> None:
        async with running(lambda request: (code if request.code == 310 else 0, {}, b""), send_ok) as broker_set:
            old, new = broker_set.members
            broker_set.asked = elected(broker_set, 6, new)
            async with connect(broker_set.namesrv.address, send_retries=1) as client:
                assert (await client.send("t", b"x")).queue_offset == 7
            assert len(sends(old)) >= 4
            assert len(sends(new)) == 1

    run(work)


def test_send_without_master_times_out_as_not_sent() -> None:
    async def work() -> None:
        async with running(send_ok, send_ok) as broker_set, connect(broker_set.namesrv.address) as client:
            del broker_set.ids[0]
            with pytest.raises(ConnectionFailed, match="no master of b0 is known"):
                await client.send("t", b"x", timeout=0.3)
            assert not sends(broker_set.members[1])

    run(work)


def test_refusal_of_a_broker_without_replicas_uses_an_attempt() -> None:
    async def work() -> None:
        async with running(lambda request: (2 if request.code == 310 else 0, {}, b"")) as broker_set:
            async with connect(broker_set.namesrv.address) as client:
                with pytest.raises(BrokerError):
                    await client.send("t", b"x", timeout=60)
            assert len(sends(broker_set.members[0])) == 3

    run(work)


def test_closed_broker_connection_refreshes_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refresh needs no send, so the next send goes to the new master at once."""

    async def work() -> None:
        async with (
            running(send_ok, send_ok) as broker_set,
            session_of(broker_set) as session,
        ):
            old, new = broker_set.members
            assert await session.routes.master(QUEUE) == old.address
            connection = await session.pool.get(old.address)
            broker_set.ids = {0: new, 1: old}
            monkeypatch.setattr(routes, "_DOUBT_S", 0.0)  # the route counts as outdated
            for writer in old.writers:
                writer.close()
            while not connection.is_closed:
                await asyncio.sleep(0)
            assert await session.routes.master(QUEUE) == new.address

    run(work)


async def freeze(client: AsyncClient, master: FakeServer) -> None:
    """Make a master silent, including answers to earlier heartbeats."""
    await client.send("t", b"x")
    await until(lambda: 34 in master.codes(), "the first heartbeat")
    await client.send("t", b"x")
    master.handler = silent


@pytest.mark.parametrize("what", ["send", "pull", "pop"])
def test_request_to_a_frozen_master_moves_to_its_successor(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The request moves as soon as the name servers report the new master, long before its own timeout."""
    for module in (producer_module, pull_module, pop_module):
        monkeypatch.setattr(module, "_PATIENCE_S", 0.05)

    async def work() -> None:
        async with running(send_ok, GroupBroker(5)) as broker_set:
            old, new = broker_set.members
            async with connect(broker_set.namesrv.address, timeout=600, attempt_timeout=600) as client:
                await freeze(client, old)
                broker_set.asked = elected(broker_set, broker_set.questions + 3, new)
                if what == "send":
                    assert (await client.send("t", b"y")).queue_offset == 7
                    assert len(sends(old)) == 3
                elif what == "pop":
                    popper = Popper(client._session, "g")
                    with pytest.raises(UnknownOutcome):
                        await popper.pop(QUEUE, subscription=Subscription(), max_count=1, wait=0.0, invisible=60)
                    assert await client._session.routes.master(QUEUE) == new.address
                    await popper.close()
                else:
                    with pytest.raises(UnknownOutcome):
                        await client.pull("t", 0, 0)
                    assert len((await client.pull("t", 0, 0)).messages) == 5

    run(work)


def test_slow_master_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_module, "_PATIENCE_S", 0.01)

    async def work() -> None:
        async with running(send_ok, send_ok) as broker_set:
            old, new = broker_set.members
            async with connect(broker_set.namesrv.address, timeout=600, attempt_timeout=600) as client:
                await freeze(client, old)
                sending = asyncio.create_task(client.send("t", b"y"))
                await until(lambda: broker_set.questions >= 4, "the name server is asked again and again")
                old.reply(sends(old)[2], 0, {"msgId": "ID", "queueId": "0", "queueOffset": "9"})
                assert (await sending).queue_offset == 9
                assert not sends(new)

    run(work)


def test_new_master_gets_a_heartbeat_of_its_producers_at_once() -> None:
    """The heartbeat uses the open connection. The new master may have to check transactions of the producers."""

    async def work() -> None:
        async with running(send_ok, send_ok) as broker_set, session_of(broker_set) as session:
            old, new = broker_set.members
            session.membership.produces("p")
            await session.routes.get("t")
            await session.pool.get(new.address)
            await session.membership.heartbeat()
            assert 34 not in new.codes(), "producers are the master's to know"
            broker_set.ids = {0: new, 1: old}
            await session.routes.read_now("t")
            while 34 not in new.codes():
                await asyncio.sleep(0)

    run(work)


# ---- reads


@asynccontextmanager
async def session_of(
    broker_set: FakeSetRoute, *, attempt_timeout: float = 3.0, timeout: float = 5.0
) -> AsyncIterator[Session]:
    session = Session(broker_set.namesrv.address, ClientOptions(attempt_timeout=attempt_timeout, timeout=timeout))
    await session.start()
    try:
        yield session
    finally:
        await session.close()


def reads(suggested: int, code: int = 19) -> Handler:
    """Return a handler that answers pulls without a message and suggests a member."""

    def handler(request: RemotingCommand) -> Answer:
        where = {"nextBeginOffset": request.ext.get("queueOffset", "0"), "minOffset": "0", "maxOffset": "0"}
        return (code if request.code == 11 else 0), {**where, "suggestWhichBrokerId": str(suggested)}, b""

    return handler


def pulls(broker_set: FakeSetRoute) -> list[int]:
    return [member.codes().count(11) for member in broker_set.members]


@pytest.mark.parametrize("missing", [False, True])
def test_pull_follows_the_suggested_member_and_returns(missing: bool) -> None:
    """If the suggested member does not exist, the next one is used, as by RocketMQ clients."""

    async def work() -> None:
        async with running(reads(1), reads(1), reads(0)) as broker_set, session_of(broker_set) as session:
            master, first, second = broker_set.members
            if missing:
                broker_set.ids = {0: master, 2: second}
            puller = Puller(session)
            for _ in range(2):
                await puller.pull(QUEUE, 0)
            assert pulls(broker_set) == ([1, 0, 1] if missing else [1, 1, 0])
            first.handler = reads(0)
            await puller.pull(QUEUE, 0)
            await puller.pull(QUEUE, 0)
            assert pulls(broker_set) == ([2, 0, 2] if missing else [2, 2, 0])

    run(work)


def test_failed_read_from_a_replica_returns_to_the_master() -> None:
    async def work() -> None:
        async with running(reads(1), reads(1, code=2)) as broker_set, session_of(broker_set) as session:
            puller = Puller(session)
            await puller.pull(QUEUE, 0)
            with pytest.raises(BrokerError):
                await puller.pull(QUEUE, 0)
            await puller.pull(QUEUE, 0)
            assert pulls(broker_set) == [2, 1]

    run(work)


def test_replicas_are_read_in_turn_without_a_master() -> None:
    async def work() -> None:
        async with running(reads(0), reads(0, code=2), reads(0)) as broker_set, session_of(broker_set) as session:
            await broker_set.members[0].stop()
            del broker_set.ids[0]
            puller = Puller(session)
            with pytest.raises(BrokerError):
                await puller.pull(QUEUE, 0)
            await puller.pull(QUEUE, 0)
            assert pulls(broker_set) == [0, 1, 1]

    run(work)


def test_reader_that_a_replica_redirects_looks_up_an_unknown_master() -> None:
    async def work() -> None:
        async with running(reads(0), reads(0, code=20)) as broker_set, session_of(broker_set) as session:
            master, replica = broker_set.members
            broker_set.ids = {1: replica}
            puller = Puller(session)
            await puller.pull(QUEUE, 0)
            broker_set.ids = {0: master, 1: replica}
            while not master.codes().count(11):
                await puller.pull(QUEUE, 0)

    run(work)


# ---- messages by id and key


def stores(host: tuple[str, int]) -> Handler:
    """Return a handler with one message stored by `host`. It also reports the brokers of the cluster."""
    stored = encode_record(
        topic=b"t", body=b"kept", properties=b"", queue_id=0, flag=0, queue_offset=0, physical_offset=100, sys_flag=0,
        born_timestamp=1, born_host=("127.0.0.1", 1), store_timestamp=1, store_host=host,
    )  # fmt: skip

    def handler(request: RemotingCommand) -> Answer:
        match request.code:
            case 12:
                return 0, {}, stored
            case 33:
                return (0, {}, stored) if request.ext["offset"] == "100" else (1, {}, b"")
        return 0, {}, b""

    return handler


@pytest.mark.parametrize("is_named", [True, False])
def test_message_of_a_lost_broker_is_found_at_other_members(is_named: bool) -> None:
    """The message is found by id and by key, even if the name servers no longer list the storing broker."""

    async def work() -> None:
        async with running(send_ok, send_ok) as broker_set, connect(broker_set.namesrv.address) as client:
            old, new = broker_set.members
            address = parse_address(old.address)
            new.handler = stores(address)
            await old.stop()
            if not is_named:
                broker_set.ids = {0: new}
            assert (await client.admin.view_message(offset_msg_id(address, 100))).body == b"kept"
            assert [message.body for message in await client.admin.query_messages("t", "key")] == [b"kept"]
            with pytest.raises(BrokerError):
                await client.admin.view_message(offset_msg_id(address, 200))
            if not is_named:  # that offset belongs to another broker
                with pytest.raises(BrokerError):
                    await client.admin.view_message(offset_msg_id(("127.0.0.1", 1), 100))

    run(work)


def test_message_id_of_a_former_log_is_not_found() -> None:
    """The storing broker was reset and has a new log."""

    async def work() -> None:
        async with running(stores(("127.0.0.1", 1))) as broker_set, connect(broker_set.namesrv.address) as client:
            address = parse_address(broker_set.members[0].address)
            with pytest.raises(BrokerError, match="not on b0") as caught:
                await client.admin.view_message(offset_msg_id(address, 100))
            assert caught.value.code == 22

    run(work)


@pytest.mark.parametrize("is_named", [True, False])
def test_unreachable_broker_does_not_block_a_message_query(is_named: bool) -> None:
    """If no reachable broker has the message, the result is an error rather than "not found"."""

    async def work() -> None:
        gone = FakeServer(send_ok)
        await gone.start()
        await gone.stop()
        address = ("127.0.0.1", 1)
        async with running(stores(address)) as broker_set:
            brokers = {
                "a": {"brokerName": "a", "cluster": "c", "brokerAddrs": {"0": gone.address} if is_named else {}},
                "b": {"brokerName": "b", "cluster": "c", "brokerAddrs": {"0": broker_set.members[0].address}},
            }
            table = dumps({"brokerAddrTable": brokers, "clusterAddrTable": {"c": ["a", "b"]}})
            broker_set.namesrv.handler = lambda _: (0, {}, table)
            async with connect(broker_set.namesrv.address) as client:
                assert (await client.admin.view_message(offset_msg_id(address, 100))).body == b"kept"
                with pytest.raises(ConnectionFailed):
                    await client.admin.view_message(offset_msg_id(address, 200))

    run(work)


# ---- requests only for a master


def refuses(code: int, request_code: int) -> Handler:
    return lambda request: (code if request.code == request_code else 0, {}, b"")


@pytest.mark.parametrize("how", ["refused", "dead", "silent"])
def test_acknowledgement_reaches_the_next_master(how: str) -> None:
    """Otherwise, the message would be redelivered. A repeated acknowledgement is harmless."""
    handler = {"refused": refuses(2, 200051), "dead": send_ok, "silent": silent}[how]

    async def work() -> None:
        async with running(handler, send_ok) as broker_set, session_of(broker_set, attempt_timeout=0.2) as session:
            old, new = broker_set.members
            assert await session.routes.master(QUEUE) == old.address
            broker_set.ids = {1: new}
            broker_set.asked = elected(broker_set, 5, new)
            if how == "dead":
                await old.stop()
            await Popper(session, "g").ack(QUEUE, RECEIPT)
            assert 200051 in new.codes()

    run(work)


@pytest.mark.parametrize("code", [14, 30])
def test_queue_bounds_and_committed_offsets_are_asked_until_answered(code: int) -> None:
    """A replica that is not in sync refuses. An answer of any other replica is equivalent."""

    async def work() -> None:
        async with running(send_ok, refuses(2, code), GroupBroker(5, stored=4)) as broker_set:
            _, cannot, can = broker_set.members
            broker_set.ids = {1: cannot, 2: can}

            def leaves(number: int) -> None:
                if number >= 4:
                    broker_set.ids = {2: can}

            broker_set.asked = leaves
            async with session_of(broker_set) as session:
                puller = Puller(session)
                found = await (puller.committed("g", QUEUE) if code == 14 else puller.max_offset(QUEUE))
            assert found == (4 if code == 14 else 5)
            assert cannot.codes().count(code) >= 2

    run(work)


def test_request_that_must_not_repeat_is_sent_once() -> None:
    async def work() -> None:
        async with running(silent, send_ok) as broker_set, session_of(broker_set, attempt_timeout=0.2) as session:
            broker_set.asked = elected(broker_set, 2, broker_set.members[1])
            with pytest.raises(UnknownOutcome):
                await session.requests.ask_master(QUEUE, 37, {})
            assert 37 not in broker_set.members[1].codes()

    run(work)


def test_close_does_not_wait_for_a_master() -> None:
    async def work() -> None:
        async with running(refuses(2, 200051), send_ok) as broker_set, session_of(broker_set, timeout=600) as session:
            acking = asyncio.create_task(Popper(session, "g").ack(QUEUE, RECEIPT))
            await until(lambda: 200051 in broker_set.members[0].codes(), "it is refused")
            await session.close()
            with pytest.raises(ClientError, match="closed"):
                await acking

    run(work)


def test_call_timeout_bounds_each_attempt() -> None:
    async def work() -> None:
        async with (
            running(silent, silent) as broker_set,
            session_of(broker_set, attempt_timeout=600, timeout=0.1) as session,
        ):
            with pytest.raises(UnknownOutcome, match="within 0"):
                await Popper(session, "g").ack(QUEUE, RECEIPT)

    run(work)


def test_slow_broker_without_replicas_causes_no_lookup_of_its_master() -> None:
    async def work() -> None:
        async with running(silent) as broker_set, session_of(broker_set) as session:
            master = await session.routes.master(QUEUE)
            await session.pool.get(master)
            with pytest.raises(UnknownOutcome):
                await session.requests.ask_watched(QUEUE, master, 310, {}, timeout=0.2, patience=0.0)
            assert broker_set.questions == 1

    run(work)


def test_silent_master_is_watched_if_its_connection_opens_late() -> None:
    async def work() -> None:
        async with running(silent, send_ok) as broker_set, session_of(broker_set) as session:
            former, new = broker_set.members
            master = await session.routes.master(QUEUE)
            assert session.pool.open_connection(master) is None
            broker_set.ids = {0: new, 1: former}
            with pytest.raises(UnknownOutcome):
                await session.requests.ask_watched(QUEUE, master, 310, {}, timeout=600, patience=0.0)

    run(work)


@pytest.mark.parametrize("has_replicas", [False, True])
def test_busy_broker_makes_its_route_doubtful_only_with_replicas(
    monkeypatch: pytest.MonkeyPatch, has_replicas: bool
) -> None:
    """Otherwise, all clients of an overloaded broker would reload known routes."""
    monkeypatch.setattr(routes, "_DOUBT_S", 0.0)

    async def work() -> None:
        handlers = [refuses(2, 310), send_ok][: 1 + has_replicas]
        async with running(*handlers) as broker_set, session_of(broker_set) as session:
            with pytest.raises(BrokerError):
                await session.requests.ask(await session.routes.master(QUEUE), 310, {})
            await session.routes.master(QUEUE)
            assert broker_set.questions == 1 + has_replicas

    run(work)


def test_refusal_of_a_master_without_replicas_is_raised_at_once() -> None:
    async def work() -> None:
        async with running(refuses(2, 200051)) as broker_set, session_of(broker_set) as session:
            with pytest.raises(BrokerError):
                await Popper(session, "g").ack(QUEUE, RECEIPT)
            assert broker_set.members[0].codes().count(200051) == 1

    run(work)


# ---- committed offsets


def test_offset_is_committed_only_at_the_master() -> None:
    """A commit to a replica would be lost and not repeated."""

    async def work() -> None:
        async with running(GroupBroker(5), GroupBroker(5)) as broker_set, session_of(broker_set) as session:
            del broker_set.ids[0]
            for once in (False, True):
                with pytest.raises((ClientError, NeveError), match="no master"):
                    await Puller(session).commit("g", QUEUE, 3, once=once)
            assert 15 not in broker_set.members[1].codes()

    run(work)


def positions(member: FakeServer) -> list[int]:
    """Return the offsets of the queue that were committed at a member."""
    commits = [request.ext for request in member.requests if request.code == 15]
    return [int(ext["commitOffset"]) for ext in commits if ext["topic"] == "t"]


async def acknowledge_five(consumer: DeliveringConsumer) -> None:
    for _ in range(5):
        message = await consumer.receive()
        assert message is not None
        await message.ack()


def test_idle_group_commits_again_to_a_new_master_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old master may have died before its replicas had the offset."""
    rounds: list[None] = []
    commit = Positions.commit

    async def counted(self: Positions, *, once: bool = False) -> None:
        await commit(self, once=once)
        rounds.append(None)

    monkeypatch.setattr(Positions, "commit", counted)

    async def told(member: FakeServer) -> int:
        """Return the number of commits after three more rounds."""
        await until(lambda: 5 in positions(member), "it is told")
        end = len(rounds) + 3
        await until(lambda: len(rounds) >= end, "three rounds more")
        return positions(member).count(5)

    async def work() -> None:
        async with running(GroupBroker(5), GroupBroker(5)) as broker_set:
            old, new = broker_set.members
            async with (
                connect(broker_set.namesrv.address, commit_interval=0.02) as client,
                client.consumer("g", "t", start="earliest") as consumer,
            ):
                await acknowledge_five(consumer)
                assert await told(old) == 1
                broker_set.ids = {0: new}
                await old.stop()
                assert await told(new) == 1

    run(work)


def test_commit_that_a_master_refuses_is_repeated_over_one_connection() -> None:
    """The master was preparing a switchover, but kept its role."""
    handing_over = [True]
    group = GroupBroker(5)

    def handler(request: RemotingCommand) -> Answer:
        is_refused = request.code == 15 and request.ext["topic"] == "t" and handing_over[0]
        return (2, {}, b"") if is_refused else group(request)

    async def work() -> None:
        async with (
            running(handler, GroupBroker(5)) as broker_set,
            connect(broker_set.namesrv.address, commit_interval=0.02) as client,
            client.consumer("g", "t", start="earliest") as consumer,
        ):
            await acknowledge_five(consumer)
            await until(lambda: positions(broker_set.members[0]).count(5) >= 2, "it is told again and again")
            handing_over[0] = False
            await until(lambda: group.offsets.get("t") == 5, "it is stored")

    run(work)


class Assigned:
    """A stand-in for a fetcher."""

    def __init__(self) -> None:
        self.assigned: dict[MessageQueue, ProcessQueue] = {}

    def take_over(self, process_queue: ProcessQueue) -> None:
        self.assigned[process_queue.queue] = process_queue


def test_commit_to_the_old_master_is_repeated_at_one_elected_meanwhile() -> None:
    """A consumer commits all its queues at once and waits for the slowest."""

    async def work() -> None:
        slow = QUEUE._replace(topic="slow")
        handler: Handler = lambda request: None if request.ext.get("topic") == slow.topic else (0, {}, b"")  # noqa: E731
        async with running(handler, send_ok) as broker_set, session_of(broker_set) as session:
            old, new = broker_set.members
            own = Positions(session, cast(Fetcher, Assigned()), BrokerOffsetStore(Puller(session), "g"), "earliest")
            for queue in (QUEUE, slow):
                own.begin(queue, 3, is_stored=False)
            committing = asyncio.create_task(own.commit())
            await until(lambda: old.codes().count(15) == 2, "both are told")
            broker_set.ids = {0: new, 1: old}
            await session.routes.read_now(QUEUE.topic)
            await session.pool.get(new.address)
            old.reply(next(one for one in old.requests if one.ext.get("topic") == slow.topic), 0, {})
            await committing
            assert positions(new) == []
            await own.commit()
            assert positions(new) == [3]
            await own.commit()
            assert positions(new) == [3]

    run(work)


def test_consumer_of_a_demoted_broker_finds_the_new_master() -> None:
    async def work() -> None:
        async with running(GroupBroker(5), GroupBroker(5)) as broker_set:
            old, new = broker_set.members
            async with (
                connect(broker_set.namesrv.address) as client,
                client.consumer("g", "t", start="earliest") as consumer,
            ):
                assert await consumer.receive() is not None
                serves = old.handler
                old.handler = lambda request: (2, {}, b"") if request.code == 11 else serves(request)
                new_group = GroupBroker(8)
                new.handler = new_group
                broker_set.ids = {0: new, 1: old}
                old.reply(next(one for one in reversed(old.requests) if one.code == 11), 2, {})  # the held pull
                await until(lambda: bool(new_group.pulls), "the new master is read from")

    run(work)


# ---- routes


def test_route_has_write_queues_only_with_a_master() -> None:
    def broker(name: str, *ids: int) -> dict[str, object]:
        return {"brokerName": name, "cluster": "c", "brokerAddrs": {str(number): f"h:{number}" for number in ids}}

    def queues(name: str) -> dict[str, object]:
        return {"brokerName": name, "perm": 6, "readQueueNums": 1, "writeQueueNums": 1}

    data = {"brokerDatas": [broker("a", 0, 1), broker("b", 1, 2)], "queueDatas": [queues("a"), queues("b")]}
    route = parse_route("t", data)
    assert [queue.broker_name for queue in route.write_queues] == ["a"]
    assert [queue.broker_name for queue in route.read_queues] == ["a", "b"]
    assert (route.without_master, route.master("b")) == ("b", None)
    assert (route.address("a"), route.address("b")) == ("h:0", "h:1")
