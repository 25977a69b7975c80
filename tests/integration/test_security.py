"""`neve up` with TLS, users and policies, used by neve's client and by plain sockets."""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from infra.net.remoting_server import open_connection
from neve.client import connect
from neve.errors import NeveError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand
from neve.remoting.signature import signed
from tests.kit.server.processes import NotReady
from tests.kit.server.security import ROOT, make_certificate, round_trip, trusting

Up = Callable[..., AbstractContextManager[Any]]


def tls_settings(mode: str, pair: tuple[Path, Path]) -> list[str]:
    keys = (f"tlsServerMode={mode}", f"tlsCertPath={pair[0]}", f"tlsKeyPath={pair[1]}")
    return [part for key in keys for part in ("--set", key)]


def subject_of(address: str, context: ssl.SSLContext) -> str:
    host, port = address.rsplit(":", 1)
    plain = socket.create_connection((host, int(port)), 10)
    with context.wrap_socket(plain, server_hostname=host) as encrypted:
        found: Any = encrypted.getpeercert()
    return str(found["subject"][0][0][1])


def test_one_port_accepts_tls_and_plain_text(neve_up: Up, tmp_path: Path) -> None:
    pair = make_certificate(tmp_path, "first")
    with neve_up(tmp_path / "neve", "--store", "", *tls_settings("permissive", pair)) as neve:
        assert asyncio.run(round_trip(neve.namesrv, "Encrypted", tls=trusting(pair[0]))) == b"over the wire"
        assert asyncio.run(round_trip(neve.namesrv, "Plain")) == b"over the wire"
        with pytest.raises(NeveError):  # The system does not trust the certificate.
            asyncio.run(round_trip(neve.namesrv, "Untrusted", tls=True))

        second = make_certificate(tmp_path, "second")
        assert subject_of(neve.broker, trusting(pair[0])) == "first"
        # Between the two replacements the pair does not match, and the old pair stays in use.
        second[1].replace(pair[1])
        assert subject_of(neve.broker, trusting(pair[0])) == "first"
        trust = trusting(second[0])
        second[0].replace(pair[0])
        assert subject_of(neve.broker, trust) == "second"
        assert subject_of(neve.namesrv, trust) == "second"


def test_enforcing_mode_closes_plain_text_connections(neve_up: Up, tmp_path: Path) -> None:
    pair = make_certificate(tmp_path, "only")
    with neve_up(tmp_path / "neve", "--store", "", *tls_settings("enforcing", pair)) as neve:
        assert asyncio.run(round_trip(neve.namesrv, "Encrypted", tls=trusting(pair[0]))) == b"over the wire"
        for address in (neve.namesrv, neve.broker):
            host, port = address.rsplit(":", 1)
            with socket.create_connection((host, int(port)), 10) as plain:
                plain.sendall(b"\0\0\0\x10")
                # The kernel resets the connection because the byte was never read.
                with contextlib.suppress(ConnectionResetError):
                    assert plain.recv(1) == b""


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["tlsServerMode=enforcing"], "tlsCertPath"),
        (["tlsCertPath=/nowhere.pem", "tlsKeyPath=/nowhere.key"], "/nowhere.pem"),
        (["authorizationEnabled=true"], "authenticationEnabled"),
        (["authenticationEnabled=true", 'initAuthenticationUser={"username":"root"}'], "initAuthenticationUser"),
    ],
)
def test_start_with_insecure_settings_is_rejected(neve_up: Up, tmp_path: Path, settings: list[str], text: str) -> None:
    options = [part for key in settings for part in ("--set", key)]
    with pytest.raises(NotReady, match=text), neve_up(tmp_path / "neve", "--store", "", *options):
        pass


async def ask(address: str, code: int, ext: dict[str, str], body: object = None, user: str = "root") -> RemotingCommand:
    host, port = address.rsplit(":", 1)
    data = json.dumps(body).encode() if body is not None else b""
    connection = await open_connection(host, int(port))
    try:
        return await connection.invoke(
            RemotingCommand(code, ext=signed(user, f"{user}-secret", ext, data), body=data), 10
        )
    finally:
        connection.close()


async def denied(work: Any) -> None:
    with pytest.raises(NeveError) as refusal:
        await work
    assert refusal.value.code == 16, refusal.value


async def users_and_policies(namesrv: str, broker: str) -> None:
    root, alice = ("root", "root-secret"), ("alice", "alice-secret")
    assert await round_trip(namesrv, "Orders", credentials=root) == b"over the wire"
    async with connect(namesrv, credentials=root) as client:
        await client.admin.create_topic("Other", queues=1)
    assert (await ask(broker, 3001, {"username": "alice"}, {"username": "alice", "password": "alice-secret"})).code == 0
    rules = [{"resource": "Topic:Orders", "actions": ["Pub"], "sourceIps": [], "decision": "Allow"}]
    acl = {"subject": "User:alice", "policies": [{"policyType": "Custom", "entries": rules}]}
    assert (await ask(broker, 3006, {"subject": "User:alice"}, acl)).code == 0
    # The name server in the same process knows the user as well.
    assert (await ask(namesrv, Code.GET_ROUTEINFO_BY_TOPIC, {"topic": "Orders"}, user="alice")).code == 0
    assert (await ask(namesrv, Code.GET_ROUTEINFO_BY_TOPIC, {"topic": "Other"}, user="alice")).code == 16
    async with connect(namesrv, credentials=alice) as client:
        await client.send("Orders", b"allowed")
        await denied(client.send("Other", b"denied"))
        await denied(client.admin.create_topic("Mine", queues=1))
    assert (await ask(broker, Code.SEND_MESSAGE, {"topic": "Other"}, user="alice")).code == 16
    assert (await ask(broker, Code.PULL_MESSAGE, {"topic": "Orders", "consumerGroup": "g"}, user="alice")).code == 16
    assert (await ask(broker, Code.GET_BROKER_CONFIG, {}, user="alice")).code == 16
    shown = await ask(broker, Code.GET_BROKER_CONFIG, {})
    assert shown.code == 0
    assert b"secret" not in shown.body.lower()
    await records_of_another_topic(namesrv, broker)
    for credentials in (None, ("root", "guess"), ("nobody", "x")):
        async with connect(namesrv, credentials=credentials) as client:
            await denied(client.send("Orders", b"unsigned or badly signed"))


async def records_of_another_topic(namesrv: str, broker: str) -> None:
    """Requests that name a permitted group or topic, but point at a record of another topic, are refused."""
    rules = [
        {"resource": "Topic:Orders", "actions": ["Pub"], "sourceIps": [], "decision": "Allow"},
        {"resource": "Group:hers", "actions": ["Sub"], "sourceIps": [], "decision": "Allow"},
    ]
    acl = {"subject": "User:alice", "policies": [{"policyType": "Custom", "entries": rules}]}
    assert (await ask(broker, 3007, {"subject": "User:alice"}, acl)).code == 0
    async with connect(namesrv, credentials=("root", "root-secret")) as client:
        secret = await client.send("Other", b"not hers")
    offset = int(secret.offset_msg_id[16:], 16)
    back = {"group": "hers", "offset": str(offset), "delayLevel": "0", "originTopic": "Orders"}
    refused = await ask(broker, Code.CONSUMER_SEND_MSG_BACK, back, user="alice")
    assert (refused.code, "Topic:Other" in (refused.remark or "")) == (16, True), refused.remark
    assert (await ask(broker, Code.CONSUMER_SEND_MSG_BACK, back)).code == 0
    send = {
        "producerGroup": "p", "topic": "Other", "defaultTopic": "TBW102", "defaultTopicQueueNums": "1", "queueId": "0",
        "sysFlag": "4", "bornTimestamp": "1", "flag": "0", "properties": "TRAN_MSG\x01true\x02PGROUP\x01p\x02",
    }  # fmt: skip
    half = await ask(broker, Code.SEND_MESSAGE, send)
    assert half.code == 0, half.remark
    end = {
        "producerGroup": "p", "topic": "Orders", "commitOrRollback": "8",
        "tranStateTableOffset": half.ext["queueOffset"], "commitLogOffset": str(int(half.ext["msgId"][16:], 16)),
    }  # fmt: skip
    refused = await ask(broker, Code.END_TRANSACTION, end, user="alice")
    assert (refused.code, "Topic:Other" in (refused.remark or "")) == (16, True), refused.remark
    assert (await ask(broker, Code.END_TRANSACTION, end)).code == 0


def test_users_and_policies_are_enforced(neve_up: Up, tmp_path: Path) -> None:
    keys = ("authenticationEnabled=true", "authorizationEnabled=true", f"initAuthenticationUser={ROOT}")
    options = [part for key in keys for part in ("--set", key)]
    with neve_up(tmp_path / "neve", "--store", "", *options) as neve:
        asyncio.run(users_and_policies(neve.namesrv, neve.broker))
    log = neve.log()
    assert "root-secret" not in log
    assert "alice-secret" not in log
