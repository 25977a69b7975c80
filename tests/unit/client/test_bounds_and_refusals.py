"""Tests of the limits of a client, and of the errors that it reports."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

from neve.cli import main
from neve.client import AsyncClient, connect, model
from neve.client.group import fetcher, pull
from neve.client.model import Message
from neve.client.net.route import QUEUES_MAX, parse_route
from neve.client.validators import check_properties
from neve.errors import BrokerError, ClientError, ConnectionFailed, ProtocolError
from neve.record import bodies, properties
from neve.remoting.command import RemotingCommand
from tests.kit.clock.waiting import until
from tests.kit.cluster.fake_cluster import Answer
from tests.kit.cluster.group_broker import GroupBroker, record
from tests.kit.cluster.pop_broker import POP, PopBroker

LIMIT_S = 5


# ---- compressed bodies


class CompressedBroker(GroupBroker):
    """A broker with compressed messages: 10 KiB in a few bytes."""

    def _pull(self, ext: dict[str, str]) -> Answer:
        answer = super()._pull(ext)
        if answer is None or not answer[2]:
            return answer
        offset, found = int(ext["queueOffset"]), []
        end = int(answer[1]["nextBeginOffset"])
        body = zlib.compress(b"\0" * 10_240)
        found = [record(number, body=body, sys_flag=0x301) for number in range(offset, end)]
        return answer[0], answer[1], b"".join(found)


@pytest.fixture
def inflated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the size of each inflated body."""
    sizes: list[int] = []
    inflate = bodies.inflate

    def counting(body: bytes, sys_flag: int) -> bytes:
        found = inflate(body, sys_flag)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(model, "inflate", counting)
    return sizes


async def test_buffered_messages_are_not_inflated(fake_cluster: Any, inflated: list[int]) -> None:
    broker = CompressedBroker(30)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        client.consumer("g", "t", start="earliest") as consumer,
    ):
        for count in (1, 2):
            message = await consumer.receive(LIMIT_S)
            assert message is not None
            assert (message.body, message.sys_flag) == (b"\0" * 10_240, 0)
            assert (broker.pulls, len(inflated)) == ([0], count)


async def test_pull_limits_decompressed_bytes_and_returns_its_next_offset(
    fake_cluster: Any, inflated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "_INFLATED_MAX", 25_000)

    async with fake_cluster(CompressedBroker(5)) as cluster, connect(cluster.namesrv.address) as client:
        result = await client.pull("t", 0, 0)
        assert ([message.queue_offset for message in result.messages], result.next_offset) == ([0, 1], 2)
        assert len(inflated) == 3
        assert [message.queue_offset async for message in client.reader("t")] == [0, 1, 2, 3, 4]
        monkeypatch.setattr(pull, "_INFLATED_MAX", 1)
        result = await client.pull("t", 0, 0)
        assert (len(result.messages), result.next_offset) == (1, 1)


def test_route_with_too_many_queues_is_refused_before_it_is_built() -> None:
    def data(count: int) -> dict[str, Any]:
        queues = {"perm": 6, "readQueueNums": count, "writeQueueNums": 1}
        return {
            "brokerDatas": [{"brokerName": name, "brokerAddrs": {"0": "127.0.0.1:1"}} for name in "ab"],
            "queueDatas": [{"brokerName": name, **queues} for name in "ab"],
        }

    assert len(parse_route("t", data(QUEUES_MAX // 2)).read_queues) == QUEUES_MAX
    for count in (QUEUES_MAX // 2 + 1, 10**15):
        with pytest.raises(ProtocolError, match=f"t has {count} queues on"):
            parse_route("t", data(count))


# ---- pops


async def test_popped_message_with_colliding_tag_hash_is_acknowledged(fake_cluster: Any) -> None:
    """The broker selects by hash. Without an acknowledgement, such a message would be popped forever."""

    broker = PopBroker(4)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        client.pop_consumer("g", {"t": "even"}, start="earliest") as consumer,
    ):
        for offset in (0, 2):
            message = await consumer.receive(LIMIT_S)
            assert message is not None
            assert message.queue_offset == offset
        await until(lambda: sorted(broker.acked) == [1, 3])


async def test_pop_sends_born_time_zero(fake_cluster: Any) -> None:
    """With a client clock, long polling fails on clock skew. With 0, the broker uses its own clock."""

    broker = PopBroker(1)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        client.pop_consumer("g", "t", start="earliest") as consumer,
    ):
        assert await consumer.receive(LIMIT_S) is not None
        assert broker.pops[0].code == POP
        assert broker.pops[0].ext["bornTime"] == "0"


# ---- invalid messages


@pytest.mark.parametrize("body", [5, True, None, 1.5, [1, 2], {"a": 1}, (b"a",), object()])
async def test_body_must_be_bytes_or_text(fake_cluster: Any, body: Any) -> None:
    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        sends = (
            client.send("t", body),
            client.send_async("t", body),
            client.send_oneway("t", body),
            client.send_batch("t", [b"x", body]),
            client.send_batch("t", [Message("t", body)]),
            client.request("t", body),
        )
        for send in sends:
            with pytest.raises(ClientError, match="a body is bytes or str, not " + type(body).__name__):
                await send
        assert not {310, 320} & set(cluster.brokers[0].codes())


async def test_text_and_bytes_like_bodies_are_sent_unchanged(fake_cluster: Any) -> None:
    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        kinds: tuple[Any, ...] = ("é", b"\xc3\xa9", bytearray(b"\xc3\xa9"), memoryview(b"\xc3\xa9"))
        for body in kinds:
            await client.send("t", body)
        sent = [request.body for request in cluster.brokers[0].requests if request.code == 310]
        assert sent == ["é".encode()] * 4


@pytest.mark.parametrize("wrong", [{"tags": 5}, {"keys": [5]}, {"properties": {"a": 1}}, {"properties": {1: "a"}}])
async def test_message_attributes_must_be_text(fake_cluster: Any, wrong: dict[str, Any]) -> None:
    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        with pytest.raises(ClientError, match="str"):
            await client.send("t", b"x", **wrong)


# ---- server errors


async def test_broker_address_given_as_name_server_is_reported(fake_cluster: Any) -> None:
    def unknown(request: RemotingCommand) -> Answer:
        return 3, {}, b""

    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        cluster.namesrv.handler = unknown
        for ask in (client.send("t", b"x"), client.admin.topic_list(), client.admin.cluster_info()):
            with pytest.raises(BrokerError, match="is no name server; is it the address of a broker") as caught:
                await ask
            assert caught.value.code == 3


async def test_untrusted_certificate_is_reported(tmp_path: Path) -> None:
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=neve", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    secured = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
    plain = await asyncio.start_server(_answers_in_plain_text, "127.0.0.1", 0)
    for server, why in (
        (secured, "certificate is not trusted: self"),
        (plain, "TLS with it failed: WRONG_VERSION"),
    ):
        host, port = server.sockets[0].getsockname()
        with pytest.raises(ConnectionFailed, match=why):
            async with connect(f"{host}:{port}", tls=ssl.create_default_context()):
                pass
        server.close()


async def _answers_in_plain_text(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"what?" * 10)
    writer.close()


# ---- problems of consumers


class UnreadableBroker(GroupBroker):
    """A broker that cannot read topic `t` while `is_unreadable` is set."""

    is_unreadable = True

    def __call__(self, request: RemotingCommand) -> Answer:
        if self.is_unreadable and request.code == 11 and request.ext["topic"] == "t":
            return 2, {}, b""
        return super().__call__(request)


async def test_consumer_reports_its_problem_until_a_message_arrives(fake_cluster: Any) -> None:
    broker = UnreadableBroker(1)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        client.consumer("g", "t", start="earliest") as consumer,
    ):
        await until(lambda: consumer.problem is not None)
        assert isinstance(consumer.problem, BrokerError)
        assert (consumer.problem.code, consumer.problem.remark) == (2, "because")
        broker.is_unreadable = False
        assert await consumer.receive(LIMIT_S) is not None
        await until(lambda: consumer.problem is None)


async def test_neve_consume_prints_the_refusal_of_the_broker(
    fake_cluster: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    broker = UnreadableBroker(1)
    async with fake_cluster(broker) as cluster:
        arguments = ["consume", "t", "--group", "g", "--idle", "0.2", "--namesrv", cluster.namesrv.address]
        assert await asyncio.to_thread(main.run, arguments) == 1
        assert "because (code 2)" in capfd.readouterr().err
        broker.is_unreadable = False
        assert await asyncio.to_thread(main.run, [*arguments, "--count", "1"]) == 0


class RefusingBroker(PopBroker):
    """A broker that refuses the first `refused` pulls and pops of topic `t` with `code`."""

    def __init__(self, code: int, *, count: int = 0, refused: int = 1 << 30) -> None:
        super().__init__(count)
        self.code, self.refusals = code, refused

    def __call__(self, request: RemotingCommand) -> Answer:
        if request.code in (11, 361, POP) and request.ext["topic"] == "t" and self.refusals:
            self.refusals -= 1
            return self.code, {}, b""
        return super().__call__(request)


async def by_receive(client: AsyncClient, kind: str) -> None:
    async with getattr(client, kind)("g", "t", start="earliest") as consumer:
        await consumer.receive()


async def by_iteration(client: AsyncClient, kind: str) -> None:
    async with getattr(client, kind)("g", "t", start="earliest") as consumer:
        async for _ in consumer:
            raise AssertionError


async def by_run(client: AsyncClient, kind: str) -> None:
    async def handle(_: Message) -> None: ...

    async with getattr(client, kind)("g", "t", start="earliest") as consumer:
        await consumer.run(handle, workers=2)


async def by_poll(client: AsyncClient, _: str) -> None:
    async with client.lite_pull_consumer("g", start="earliest") as consumer:
        await consumer.subscribe("t")
        await consumer.poll(LIMIT_S)


WAYS = [(by, kind) for by in (by_receive, by_iteration, by_run) for kind in ("consumer", "pop_consumer")]


@pytest.mark.parametrize("code", [16, 23, 26])
@pytest.mark.parametrize(("consume", "kind"), [*WAYS, (by_poll, "")])
async def test_permanent_refusal_is_raised(fake_cluster: Any, consume: Any, kind: str, code: int) -> None:
    async with fake_cluster(RefusingBroker(code)) as cluster, connect(cluster.namesrv.address) as client:
        with pytest.raises(BrokerError) as caught:
            await consume(client, kind)
        assert caught.value.code == code


async def test_temporary_refusal_is_logged_and_the_consumer_goes_on(
    fake_cluster: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "_PAUSE_AFTER_ERROR_S", 0.01)

    broker = RefusingBroker(2, count=1, refused=3)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        client.consumer("g", "t", start="earliest") as consumer,
    ):
        assert await consumer.receive(LIMIT_S) is not None
    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert [text for text in warned if "pull of" in text] == [
        "pull of MessageQueue(topic='t', broker_name='b0', queue_id=0) failed, retrying: because (code 2)"
    ]


async def test_receive_after_a_permanent_refusal_continues(fake_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "_PAUSE_AFTER_ERROR_S", 0.01)

    broker = RefusingBroker(16, count=1, refused=1)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        client.consumer("g", "t", start="earliest") as consumer,
    ):
        with pytest.raises(BrokerError):
            await consumer.receive(LIMIT_S)
        assert await consumer.receive(LIMIT_S) is not None


async def test_error_that_ends_a_pull_loop_is_raised(fake_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    async with (
        fake_cluster(GroupBroker(1)) as cluster,
        connect(cluster.namesrv.address) as client,
    ):
        monkeypatch.setattr(pull.Puller, "pull", fail)
        async with client.consumer("g", "t", start="earliest") as consumer:
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    await consumer.receive(LIMIT_S)


# ---- an application's own properties


@pytest.mark.parametrize("name", [value for key, value in vars(properties).items() if key.startswith("PROPERTY_")])
def test_reserved_properties_are_refused(name: str) -> None:
    with pytest.raises(ClientError, match="used by the system"):
        check_properties({name: "x"})
