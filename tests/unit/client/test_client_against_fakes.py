from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import zlib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, get_type_hints

import pytest

from neve.client import AsyncClient, ClientOptions, LocalTransactionState, Message, connect, sync
from neve.client.options import OptionChanges
from neve.errors import BrokerError, ClientError, ConnectionFailed, RequestTimeout, UnknownOutcome
from neve.record.bodies import decode_batch
from neve.record.properties import bytes_to_properties
from neve.remoting.body import dumps
from neve.remoting.codes import RequestCode
from neve.remoting.command import RemotingCommand
from tests.kit.clock.waiting import until
from tests.kit.cluster.fake_cluster import DEADLINE_S, Answer, FakeServer, refuse, send_ok, sends, silent


async def test_send_request_carries_the_message(fake_cluster: Any) -> None:
    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        result = await client.send("t", "short", tags="A", keys=["k1", "k2"], properties={"x": "y"}, delay_level=3)
        assert (result.status, result.offset_msg_id, result.queue_offset) == ("SEND_OK", "ID", 7)
        await client.send("t", b"z" * 4096)
        short, long = sends(cluster.brokers[0])
        properties = bytes_to_properties(short.ext["i"].encode())
        assert properties == {
            "TAGS": "A", "KEYS": "k1 k2", "x": "y", "DELAY": "3", "WAIT": "true", "UNIQ_KEY": result.msg_id,
        }  # fmt: skip
        assert (short.body, short.ext["f"], short.ext["b"], len(result.msg_id)) == (b"short", "0", "t", 32)
        assert (zlib.decompress(long.body), long.ext["f"]) == (b"z" * 4096, str(0x301))


async def test_batch_is_sent_as_one_request(fake_cluster: Any) -> None:
    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        result = await client.send_batch("t", [b"one", "two"])
        (request,) = sends(cluster.brokers[0])
        parts = decode_batch(request.body)
        assert [body for _, body, _ in parts] == [b"one", b"two"]
        keys = [bytes_to_properties(raw)["UNIQ_KEY"] for _, _, raw in parts]
        assert result.msg_id == ",".join(keys)
        assert len(set(keys)) == 2
        with pytest.raises(ClientError):
            await client.send_batch("t", [])


@pytest.mark.parametrize("code", [1, 2, 14, 16, 17, 204, 205, 1500])
async def test_refused_send_is_retried_at_another_broker(fake_cluster: Any, code: int) -> None:
    async with fake_cluster(refuse(code), send_ok) as cluster, connect(cluster.namesrv.address) as client:
        for _ in range(4):
            assert (await client.send("t", b"x")).queue.broker_name == "b1"
        assert len(sends(cluster.brokers[0])) == 1  # then it is avoided for a while


async def test_permanent_refusal_is_not_retried(fake_cluster: Any) -> None:
    async with fake_cluster(refuse(13)) as cluster, connect(cluster.namesrv.address) as client:
        with pytest.raises(BrokerError) as caught:
            await client.send("t", b"x")
        assert caught.value.code == 13
        assert len(sends(cluster.brokers[0])) == 1


async def test_attempts_are_limited_and_the_last_refusal_is_raised(fake_cluster: Any) -> None:
    async with fake_cluster(refuse(14)) as cluster, connect(cluster.namesrv.address) as client:
        with pytest.raises(BrokerError):
            await client.send("t", b"x")
        assert len(sends(cluster.brokers[0])) == 3


async def test_silence_is_an_unknown_outcome_within_the_timeout(fake_cluster: Any) -> None:
    async with fake_cluster(silent) as cluster, connect(cluster.namesrv.address) as client:
        began = asyncio.get_running_loop().time()
        with pytest.raises(UnknownOutcome):
            await client.send("t", b"x", timeout=0.2)
        assert asyncio.get_running_loop().time() - began < 2


async def test_broken_connection_is_an_unknown_outcome_and_is_reopened(fake_cluster: Any) -> None:
    async with fake_cluster(silent) as cluster, connect(cluster.namesrv.address, send_retries=0) as client:
        broker = cluster.brokers[0]
        broker.handler = lambda request: [writer.close() for writer in broker.writers] and None
        with pytest.raises(UnknownOutcome):
            await client.send("t", b"x")
        broker.handler = send_ok
        assert (await client.send("t", b"x")).queue_offset == 7


async def test_unreachable_broker_is_a_connection_failure(fake_cluster: Any) -> None:
    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        await cluster.brokers[0].stop()
        with pytest.raises(ConnectionFailed):
            await client.send("t", b"x")


async def test_answers_find_their_requests_in_any_order(fake_cluster: Any) -> None:
    held: list[RemotingCommand] = []

    def collect(request: RemotingCommand) -> tuple[int, dict[str, str], bytes] | None:
        if request.code != RequestCode.SEND_MESSAGE_V2:
            return 0, {}, b""
        held.append(request)
        if len(held) == 5:
            for one in reversed(held):
                ext = {"msgId": one.body.decode(), "queueId": "0", "queueOffset": one.body.decode()}
                cluster.brokers[0].reply(one, 0, ext)
        return None

    async with fake_cluster(collect) as cluster, connect(cluster.namesrv.address) as client:
        results = await asyncio.gather(*(client.send_async("t", str(number)) for number in range(5)))
        assert [result.queue_offset for result in results] == [0, 1, 2, 3, 4]


async def test_unknown_topic_is_sent_to_the_brokers_of_the_default_topic(fake_cluster: Any) -> None:
    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        cluster.unknown_topics = {"new"}
        assert (await client.send("new", b"x")).queue.topic == "new"
        (request,) = sends(cluster.brokers[0])
        assert (request.ext["b"], request.ext["c"], request.ext["d"]) == ("new", "TBW102", "4")
        cluster.unknown_topics = {"new", "TBW102"}
        async with connect(cluster.namesrv.address) as other:
            with pytest.raises(BrokerError) as caught:
                await other.send("new", b"x")
            assert caught.value.code == 17


async def test_known_route_is_used_without_the_name_server(fake_cluster: Any) -> None:
    changes: dict[str, Any] = {"route_interval": 0.0, "attempt_timeout": 0.5}
    async with fake_cluster() as cluster, connect(cluster.namesrv.address, **changes) as client:
        await client.send("t", b"x")
        await cluster.namesrv.stop()
        assert (await client.send("t", b"y")).queue_offset == 7


async def test_known_route_survives_a_restart_of_the_name_server(fake_cluster: Any) -> None:
    """It knows no topic until the brokers register again. RocketMQ clients also keep their routes meanwhile."""

    async with (
        fake_cluster(refuse(14), send_ok) as cluster,
        connect(cluster.namesrv.address, route_interval=0.0) as client,
    ):
        await client.send("t", b"before")
        asked = len(cluster.namesrv.requests)
        cluster.unknown_topics = {"t", "TBW102"}
        for _ in range(4):  # round robin: every other send is refused first, which refreshes the route
            assert (await client.send("t", b"after")).queue.broker_name == "b1"
        assert len(cluster.namesrv.requests) > asked
        with pytest.raises(BrokerError) as caught:
            await client.admin.topic_route("t")
        assert caught.value.code == 17


async def test_silent_name_server_does_not_delay_a_send_with_a_known_route(
    fake_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neve.client.net.routes._PATIENCE_S", 0.02)

    async with fake_cluster(refuse(14), send_ok) as cluster, connect(cluster.namesrv.address) as client:
        await client.admin.topic_route("t")
        cluster.namesrv.handler = silent
        first = await client.send("t", b"x", queue=lambda queues, _: queues[len(sends(cluster.brokers[0])) % 2])
        assert first.queue.broker_name == "b1"
        assert len(sends(cluster.brokers[0])) == 1


async def test_deletion_of_a_topic_removes_its_route(fake_cluster: Any) -> None:
    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        await client.send("t", b"x")
        route = cluster.namesrv.handler
        table = {"brokerAddrTable": {"b0": {"brokerName": "b0", "brokerAddrs": {"0": cluster.brokers[0].address}}}}
        cluster.namesrv.handler = lambda request: (
            {106: (0, {}, dumps(table)), 216: (0, {}, b"")}.get(request.code) or route(request)
        )
        await client.admin.delete_topic("t")
        cluster.unknown_topics = {"t", "TBW102"}
        with pytest.raises(BrokerError) as caught:
            await client.send("t", b"x")
        assert caught.value.code == 17


async def test_broker_without_routes_gets_no_heartbeat(fake_cluster: Any) -> None:
    async with fake_cluster(send_ok, send_ok) as cluster, connect(cluster.namesrv.address) as client:
        session = client._session
        session.membership.produces("p")
        await client.send("t", b"x")
        await client.send("t", b"x")
        await session.membership.heartbeat()
        moved = cluster.brokers.pop()
        before = moved.codes().count(RequestCode.HEART_BEAT)
        assert before > 0
        await session.routes.get("t", fresh=True)
        for _ in range(3):
            await session.membership.heartbeat()
        assert moved.codes().count(RequestCode.HEART_BEAT) == before
        assert cluster.brokers[0].codes().count(RequestCode.HEART_BEAT) >= 3
        cluster.brokers.append(moved)
        await session.routes.get("t", fresh=True)
        await session.membership.heartbeat()
        assert moved.codes().count(RequestCode.HEART_BEAT) == before + 1


async def test_transaction_producer_heartbeats_all_brokers_without_a_route(fake_cluster: Any) -> None:
    """A process that only answers checks sends nothing, so no route names the brokers that ask it."""

    def listed(request: RemotingCommand) -> Answer:
        if request.code != RequestCode.GET_BROKER_CLUSTER_INFO:
            return None
        table = {
            f"b{number}": {"brokerName": f"b{number}", "cluster": "c", "brokerAddrs": {"0": broker.address}}
            for number, broker in enumerate(named)
        }
        return 0, {}, dumps({"brokerAddrTable": table})

    named: list[FakeServer] = []

    async with fake_cluster(send_ok, send_ok) as cluster, connect(cluster.namesrv.address) as client:
        cluster.namesrv.handler = listed
        first, late = cluster.brokers
        named[:] = [first]
        session = client._session

        async def reached() -> list[FakeServer]:
            """Return the brokers that receive the next heartbeat."""
            before = [broker.codes().count(RequestCode.HEART_BEAT) for broker in cluster.brokers]
            await session.membership.heartbeat()
            after = [broker.codes().count(RequestCode.HEART_BEAT) for broker in cluster.brokers]
            return [cluster.brokers[at] for at in range(2) if after[at] > before[at]]

        async with client.transaction_producer("p", check=lambda _: LocalTransactionState.COMMIT):
            assert await reached() == [first]
            named.append(late)
            assert await reached() == [first, late]
            cluster.namesrv.handler = lambda _: (1, {}, b"")
            assert await reached() == [first, late], "the list outlives the name server"
            named.remove(late)
            cluster.namesrv.handler = listed
            assert await reached() == [first], "a broker that left is forgotten"
        session.membership.produces("ordinary")
        assert await reached() == [], "an ordinary producer without a route has no broker to reach"


async def test_second_name_server_is_used_if_the_first_is_unreachable(fake_cluster: Any) -> None:
    async with fake_cluster() as cluster:
        away = cluster.brokers[0].address.rpartition(":")[0] + ":1"
        async with connect(f"{away};{cluster.namesrv.address}") as client:
            await client.send("t", b"x")
        with pytest.raises(ConnectionFailed):
            async with connect(away):
                pass


async def test_invalid_send_is_refused_without_a_request(fake_cluster: Any) -> None:
    async with fake_cluster() as cluster, connect(cluster.namesrv.address, max_message_size=10) as client:
        for arguments in ({"properties": {"x": ""}}, {"properties": {"x": "a\x01"}}, {"queue": 5}):
            with pytest.raises(ClientError):
                await client.send("t", b"x", **arguments)
        with pytest.raises(ClientError):
            await client.send("t", b"x" * 11)
        with pytest.raises(ClientError):
            await client.send("", b"x")
        assert not sends(cluster.brokers[0])
    with pytest.raises(ClientError):
        await client.send("t", b"x")
    with pytest.raises(ClientError):
        connect(" ; ")


async def test_unknown_request_to_the_client_is_answered_with_code_3(fake_cluster: Any) -> None:
    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        await client.send("t", b"x")
        broker = cluster.brokers[0]
        broker.push(RemotingCommand(RequestCode.GET_CONSUMER_RUNNING_INFO, 99, ext={"consumerGroup": "g"}))
        while not any(request.is_response and request.opaque == 99 for request in broker.requests):
            await client.send("t", b"x")
        (answer,) = [request for request in broker.requests if request.is_response]
        assert answer.code == 3


async def test_client_is_refused_after_fork(fake_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        await client.send("t", b"x")
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)
            with pytest.raises(ClientError, match="fork"):
                await client.send("t", b"x")


async def test_synchronous_client_returns_the_same_results(fake_cluster: Any) -> None:
    def use(namesrv: str) -> None:
        with sync.connect(namesrv) as client:
            assert client.send("t", b"x", tags="A").queue_offset == 7
            assert client.send_async("t", b"x").result(DEADLINE_S).queue_offset == 7
            with pytest.raises(ClientError):
                client.send("t", b"x", queue=9)
            assert client.send.__doc__
        with pytest.raises(ClientError, match="closed"):
            client.send("t", b"x")
        with pytest.raises(ConnectionFailed):
            sync.connect("127.0.0.1:1")

    async with fake_cluster() as cluster:
        await asyncio.to_thread(use, cluster.namesrv.address)


async def test_send_async_retries_timeouts_but_not_refusals(fake_cluster: Any) -> None:
    """Like DefaultMQProducerImpl: a refusal is a decision, but a silent broker may be replaced."""

    async with fake_cluster(refuse(14), send_ok) as cluster, connect(cluster.namesrv.address) as client:
        with pytest.raises(BrokerError):
            await client.send_async("t", b"x", queue=lambda queues, _: queues[0])
    async with (
        fake_cluster(silent, send_ok) as cluster,
        connect(cluster.namesrv.address, attempt_timeout=0.1) as client,
    ):
        results = await asyncio.gather(*(client.send_async("t", b"x") for _ in range(4)))
        assert {result.queue.broker_name for result in results} == {"b1"}


@pytest.mark.parametrize("wanted", [False, True])
async def test_message_not_flushed_in_time_is_sent_elsewhere_only_on_request(fake_cluster: Any, wanted: bool) -> None:
    def reserved(request: RemotingCommand) -> tuple[int, dict[str, str], bytes]:
        return 12 if request.code == 310 else 0, send_ok(request)[1], b""

    async with (
        fake_cluster(reserved, send_ok) as cluster,
        connect(cluster.namesrv.address, retry_when_not_stored_ok=wanted) as client,
    ):
        statuses = {(await client.send("t", b"x")).status for _ in range(2)}
        assert statuses == ({"SEND_OK"} if wanted else {"FLUSH_SLAVE_TIMEOUT", "SEND_OK"})
    async with (
        fake_cluster(reserved) as cluster,
        connect(cluster.namesrv.address, retry_when_not_stored_ok=wanted) as client,
    ):
        assert (await client.send("t", b"x")).status == "FLUSH_SLAVE_TIMEOUT"


HANDLE = base64.urlsafe_b64encode(b"v1 t b0 1 key").decode()
CALLS: dict[str, Callable[[AsyncClient], Awaitable[object]]] = {
    "send": lambda client: client.send("t", b"x"),
    "send_async": lambda client: client.send_async("t", b"x"),
    "send_oneway": lambda client: client.send_oneway("t", b"x"),
    "send_batch": lambda client: client.send_batch("t", [b"x"]),
    "recall": lambda client: client.recall("t", HANDLE),
    "request": lambda client: client.request("t", b"x", timeout=0.05),
    "set_request_mode": lambda client: client.admin.set_request_mode("g", "t", "POP"),
    "queues": lambda client: client.queues("t"),
    "pull": lambda client: client.pull("t", 0, 0),
    "min_offset": lambda client: client.min_offset("t", 0),
    "max_offset": lambda client: client.max_offset("t", 0),
    "offset_by_time": lambda client: client.offset_by_time("t", 0, 0),
    "committed": lambda client: client.committed("g", "t", 0),
    "commit": lambda client: client.commit("g", "t", 0, 1),
    "create_topic": lambda client: client.admin.create_topic("t"),
    "delete_topic": lambda client: client.admin.delete_topic("t"),
    "topic_config": lambda client: client.admin.topic_config("t"),
    "topic_route": lambda client: client.admin.topic_route("t"),
    "topic_list": lambda client: client.admin.topic_list(),
    "topic_stats": lambda client: client.admin.topic_stats("t"),
    "consume_stats": lambda client: client.admin.consume_stats("g", "t"),
    "cluster_info": lambda client: client.admin.cluster_info(),
}


@pytest.mark.parametrize("what", CALLS)
async def test_call_ends_within_its_timeout_with_silent_servers(fake_cluster: Any, what: str) -> None:
    """No other limit ends the call: connecting and single requests have an hour."""
    options: dict[str, Any] = {"timeout": 0.05, "attempt_timeout": 3600.0, "connect_timeout": 3600.0}

    async with fake_cluster(silent) as cluster, connect(cluster.namesrv.address, **options) as client:
        answering, cluster.namesrv.handler = cluster.namesrv.handler, silent
        is_unsent = what in ("send", "send_async", "send_oneway", "send_batch")  # there is no route
        with pytest.raises(ConnectionFailed if is_unsent else UnknownOutcome):
            await CALLS[what](client)
        cluster.namesrv.handler = answering
    only_brokers_silent = what not in ("queues", "topic_route", "topic_list", "cluster_info", "send_oneway")
    if only_brokers_silent and what not in ("create_topic", "delete_topic"):
        async with fake_cluster(silent) as cluster, connect(cluster.namesrv.address, **options) as client:
            with pytest.raises(UnknownOutcome):
                await CALLS[what](client)


async def test_time_limit_includes_the_wait_for_a_writable_connection(fake_cluster: Any) -> None:
    """Regression test: writing and the answer each used to have the whole time limit."""

    async with fake_cluster(silent) as cluster, connect(cluster.namesrv.address) as client:
        connection = await client._session.pool.get(cluster.brokers[0].address)
        limits: list[float] = []
        call_later, loop = connection._loop.call_later, asyncio.get_running_loop()

        class Clock:
            """The event loop, recording the timeout of the answer."""

            def __getattr__(self, name: str) -> Any:
                return getattr(loop, name)

            def call_later(self, delay: float, *rest: Any) -> Any:
                limits.append(delay)
                return call_later(0, *rest)

        connection._loop = Clock()  # type: ignore[assignment]
        connection.pause_writing()
        asking = asyncio.create_task(connection.invoke(11, {}, b"", 5.0))
        loop.call_later(0.02, connection.resume_writing)
        with pytest.raises(UnknownOutcome):
            await asking
        assert limits[0] < 5.0


@pytest.mark.parametrize("start", ["latest", "first", "0", 1.5, datetime(2026, 1, 1, tzinfo=UTC).replace(tzinfo=None)])
async def test_reader_refuses_to_start_where_it_would_end(fake_cluster: Any, start: Any) -> None:
    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        with pytest.raises(ClientError, match=r"start must be|a reader starts|a time is|needs a time zone"):
            client.reader("t", start=start)


async def test_send_async_raises_argument_errors_from_its_task(fake_cluster: Any) -> None:
    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        sent = client.send_async("t", b"x", queue=0, order_key="k")
        with pytest.raises(ClientError, match="exclude each other"):
            await sent


# ---- messages as arguments


def ways_to_send(client: AsyncClient, *arguments: Any, **options: Any) -> list[Any]:
    return [
        client.send(*arguments, **options),
        client.send_async(*arguments, **options),
        client.send_oneway(*arguments, **options),
        client.request(*arguments, **{"timeout": 0.05, **options}),
    ]


async def test_message_is_sent_with_its_own_parts(fake_cluster: Any) -> None:
    message = Message("t", b"x", "T", ("k", "l"), {"colour": "red"}, 5)

    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        for send in ways_to_send(client, message, queue=0):
            with contextlib.suppress(RequestTimeout):  # of the request, which gets no reply
                await send
        server = cluster.brokers[0]
        await until(lambda: len(sends(server)) == 4)
        for request in sends(server):
            properties = bytes_to_properties(request.ext["i"].encode())
            found = [properties[name] for name in ("TAGS", "KEYS", "colour")]
            assert (request.body, request.ext["b"], request.ext["h"], found) == (
                b"x",
                "t",
                "5",
                ["T", "k l", "red"],
            )


@pytest.mark.parametrize(
    "extra", [{"body": b"y"}, {"tags": "T"}, {"keys": "k"}, {"properties": {"a": "b"}}, {"flag": 1}]
)
async def test_message_excludes_arguments_for_its_parts(fake_cluster: Any, extra: dict[str, Any]) -> None:
    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        for send in ways_to_send(client, Message("t", b"x"), **extra):
            with pytest.raises(ClientError, match="are those of the Message"):
                await send


async def test_message_with_a_reserved_property_is_not_sent(fake_cluster: Any) -> None:
    """A received message has such properties; sent as it is, it would be a retry or a delayed message."""

    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        with pytest.raises(ClientError, match="used by the system"):
            await client.send(Message("t", b"x", properties={"RETRY_TOPIC": "other"}))


def test_option_changes_are_the_fields_of_the_options() -> None:
    fields = get_type_hints(ClientOptions)
    assert get_type_hints(OptionChanges) == fields


@pytest.mark.parametrize("kind", [AsyncClient, sync.Client])
@pytest.mark.parametrize("name", ["consumer", "pop_consumer", "lite_pull_consumer", "batch_sender", "send_async"])
def test_factories_are_documented_methods_of_the_client(kind: type, name: str) -> None:
    method = getattr(kind, name)
    assert method.__doc__
    assert method.__name__ == name
