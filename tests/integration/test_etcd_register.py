"""The register in a real etcd: one writer wins, lost answers change nothing, and a rollback is detected."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from controller.broker_set import DamagedBrokerSet, Member
from controller.controller_config import ControllerConfig
from controller.etcd_register import EtcdRegister, etcd_register
from controller.register import NEVER, RegisterUnavailable, Revision, StoredSet
from infra.net.etcd import Etcd, EtcdAway, EtcdUrl, KeyValue
from infra.process.startup import EXIT_CONFIG, StartupError
from neve.cli import main as cli
from tests.kit.clock.waiting import until, wait_until
from tests.kit.server import etcd as servers
from tests.kit.server.etcd import Node, register_url
from tests.kit.server.neve import Serving, settings_as_options
from tests.kit.server.processes import NotReady
from tests.unit.controller.registered import run, value

pytestmark = pytest.mark.servers
T = TypeVar("T")
prefixes = (f"test{number}" for number in count())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Return one node for all tests that do not damage it; each test uses its own key prefix."""
    with servers.node(tmp_path_factory.mktemp("etcd")) as node:
        yield node


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Node]:
    with servers.node(tmp_path / "etcd") as node:
        yield node


@asynccontextmanager
async def register(url: str, **settings: Any) -> AsyncIterator[EtcdRegister]:
    found, _ = etcd_register(ControllerConfig(register_url=url, **settings))
    await found.open()
    try:
        yield found
    finally:
        await found.close()


class EtcdProxy:
    """A proxy in front of etcd that acts like a network: it can cut connections and drop answers."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.loses_answers = 0
        self.on_loss: Callable[[], object] = lambda: None

    async def __aenter__(self) -> EtcdProxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()

    @property
    def endpoint(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._node.endpoint.rpartition(":")
        upstream, to_etcd = await asyncio.open_connection(host, int(port))
        self._writers |= {writer, to_etcd}
        asked = b""

        async def forward() -> None:
            nonlocal asked
            while data := await reader.read(65536):
                asked = data
                to_etcd.write(data)
            to_etcd.close()

        forwarding = asyncio.create_task(forward())
        with contextlib.suppress(OSError):
            while data := await upstream.read(65536):
                if self.loses_answers and b"/kv/txn" in asked:
                    self.loses_answers -= 1
                    self.on_loss()
                    break
                writer.write(data)
        writer.close()
        await forwarding


async def test_concurrent_writes_at_one_revision_have_one_winner(shared: Node) -> None:
    url = register_url(shared, prefix=next(prefixes))
    async with register(url) as one, register(url) as other:
        assert await one.get("b") == await other.get("b") == StoredSet(None, NEVER)
        first = await one.put(value(), NEVER)
        assert first is not None
        assert await other.put(value(epoch=2), NEVER) is None
        results = await asyncio.gather(
            *(found.put(value(epoch=epoch), first) for epoch, found in enumerate((one, other, one, other), 2))
        )
        (won,) = [result for result in results if result is not None]
        winner = value(epoch=2 + results.index(won))
        assert await other.get("b") == StoredSet(winner, won)
        assert list(await one.all()) == ["b"]


async def test_set_is_removed_only_at_its_current_revision(shared: Node) -> None:
    async with register(register_url(shared, prefix=next(prefixes))) as found:
        old = await found.put(value(), NEVER)
        assert old is not None
        new = await found.put(value(epoch=2), old)
        assert new is not None
        assert not await found.remove("b", old)
        assert await found.remove("b", new)
        assert not await found.remove("b", new)
        assert await found.get("b") == StoredSet(None, NEVER)
        assert await found.put(value(epoch=3), new) is None


async def test_set_names_are_any_text_and_are_confined_to_the_prefix(shared: Node) -> None:
    prefix = next(prefixes)
    names = ["Käse", "a/b", "broker-a", "z\u4e2d"]
    async with register(register_url(shared, prefix=prefix)) as found:
        for name in names:
            assert await found.put(value(name), NEVER) is not None
        shared.ask("kv/put", {"key": servers.text(f"{prefix}/sets0"), "value": servers.text("not a set")})
        assert list(await found.all()) == sorted(names, key=str.encode)
        for name in names:
            assert (await found.get(name)).broker_set == value(name)


async def test_damaged_set_is_reported_and_not_treated_as_missing(shared: Node) -> None:
    prefix = next(prefixes)
    async with register(register_url(shared, prefix=prefix)) as found:
        await found.put(value(), NEVER)
        shared.ask("kv/put", {"key": servers.text(f"{prefix}/sets/b"), "value": servers.text("{}")})
        with pytest.raises(DamagedBrokerSet):
            await found.get("b")
        revision = await found.put(value("other"), NEVER)
        assert revision is not None
        both = await found.all()
        assert isinstance(both["b"], DamagedBrokerSet) and both["other"] == StoredSet(value("other"), revision)
        held = shared.ask("kv/range", {"key": servers.text(f"{prefix}/sets/other")})["kvs"][0]
        shared.ask("kv/put", {"key": servers.text(f"{prefix}/sets/b"), "value": held["value"]})
        with pytest.raises(DamagedBrokerSet, match="'b' is of 'other'"):
            await found.get("b")


# ---- lost answers


@pytest.mark.parametrize("lost", [1, 2])
async def test_write_with_lost_answer_is_recognized_and_applied_once(shared: Node, lost: int) -> None:
    prefix = next(prefixes)
    async with EtcdProxy(shared) as relay, register(f"etcd://{relay.endpoint}/{prefix}") as found:
        first = await found.put(value(), NEVER)
        assert first is not None
        relay.loses_answers = lost
        second = await found.put(value(epoch=2), first)
        assert second is not None
        assert relay.loses_answers == 0
        assert await found.get("b") == StoredSet(value(epoch=2), second)
        held = shared.ask("kv/range", {"key": servers.text(f"{prefix}/sets/b")})["kvs"][0]
        assert held["version"] == "2"
        relay.loses_answers = lost
        assert await found.remove("b", second)
        assert await found.get("b") == StoredSet(None, NEVER)


async def test_write_with_lost_answer_is_a_conflict_if_another_wrote_since(shared: Node) -> None:
    prefix = next(prefixes)
    key = servers.text(f"{prefix}/sets/b")
    async with EtcdProxy(shared) as relay, register(f"etcd://{relay.endpoint}/{prefix}") as found:
        first = await found.put(value(), NEVER)
        assert first is not None
        async with register(register_url(shared, prefix=prefix)) as other:
            await other.put(value("c", 7), NEVER)
            theirs = shared.ask("kv/range", {"key": servers.text(f"{prefix}/sets/c")})["kvs"][0]["value"]
        relay.loses_answers = 1
        relay.on_loss = lambda: shared.ask("kv/put", {"key": key, "value": theirs})
        assert await found.put(value(epoch=2), first) is None


async def test_unanswered_write_is_reported_as_unknown(own: Node) -> None:
    async with register(register_url(own)) as found:
        first = await found.put(value(), NEVER)
        assert first is not None
        own.freeze()
        with pytest.raises(RegisterUnavailable, match="may have been done"):
            await found.put(value(epoch=2), first)
        assert found.glance("b") == value()
        own.thaw()
        # The write has been executed by now or not. A repeated write meets one of these two states.
        again = await found.put(value(epoch=2), first)
        assert again is None or (await found.get("b")).revision == again
        assert (await found.get("b")).broker_set == value(epoch=2)


async def test_register_works_once_etcd_starts_later(tmp_path: Path) -> None:
    node = servers.node(tmp_path)
    async with register(register_url(node)) as found:
        with pytest.raises(RegisterUnavailable):
            await found.get("b")
        with node:
            assert await found.put(value(), NEVER) is not None


# ---- several endpoints


async def test_silent_endpoint_is_skipped(own: Node) -> None:
    silent = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with silent:
        port = silent.sockets[0].getsockname()[1]
        async with register(f"etcd://127.0.0.1:{port},{own.endpoint}/neve") as found:
            assert await found.put(value(), NEVER) is not None


def test_three_nodes_survive_a_lost_leader_but_not_a_lost_majority(tmp_path: Path) -> None:
    members = servers.nodes(tmp_path)
    with contextlib.ExitStack() as stack:
        for member in members:
            stack.callback(member.kill)
            member.launch()
        for member in members:
            wait_until(member.is_healthy, member.name)
        status = members[0].ask("maintenance/status", {})
        leader = next(
            member
            for member in members
            if member.ask("maintenance/status", {})["header"]["member_id"] == status["leader"]
        )

        async def main() -> None:
            async with register(register_url(leader, *(one for one in members if one is not leader))) as found:
                revision = await found.put(value(), NEVER)
                leader.kill()
                for epoch in range(2, 6):  # During the election the outcome of a write may be unknown.
                    try:
                        await found.put(value(epoch=epoch), (await found.get("b")).revision)
                    except RegisterUnavailable:
                        continue
                stored = await found.get("b")
                assert stored.broker_set is not None and stored.broker_set.master_epoch > 1
                assert revision is not None and stored.revision.number > revision.number
                next(one for one in members if one is not leader).kill()
                with pytest.raises(RegisterUnavailable):
                    await found.get("b")

        run(main)


async def test_endpoints_of_different_clusters_are_rejected(tmp_path: Path, shared: Node) -> None:
    with servers.node(tmp_path) as stranger:
        prefix = next(prefixes)
        async with register(register_url(stranger, shared, prefix=prefix)) as found:
            assert await found.put(value(), NEVER) is not None
            stranger.stop()

            async def refused_as_foreign() -> bool:
                with pytest.raises(RegisterUnavailable) as refused:
                    await found.put(value("c"), NEVER)
                return "it is of cluster" in str(refused.value)

            # An endpoint without processor time does not answer within its try: that is refused, too.
            await until(refused_as_foreign, "the endpoint is refused as one of another cluster")
    assert "kvs" not in shared.ask("kv/range", {"key": servers.text(f"{prefix}/sets/c")})


# ---- rollback


async def test_wiped_etcd_is_detected_by_the_known_set(own: Node) -> None:
    async with register(register_url(own)) as found:
        await found.put(value(epoch=4), NEVER)
        own.wiped()
        own.start()
        assert await found.all() == {}
        assert await found.get("b") == StoredSet(None, NEVER, value(epoch=4))
        # Another controller writes a new set, which does not restore the lost one.
        async with register(register_url(own)) as newcomer:
            assert await newcomer.get("b") == StoredSet(None, NEVER)
            revision = await newcomer.put(value(epoch=1), NEVER)
            assert revision is not None
            assert await found.get("b") == StoredSet(value(epoch=1), revision, value(epoch=4))
            # The rollback is reported until a decision with a higher epoch is made.
            revision = await found.put(value(epoch=5), revision)
        assert revision is not None
        assert await found.get("b") == StoredSet(value(epoch=5), revision)


async def test_restored_etcd_is_detected_by_the_known_epoch(own: Node, tmp_path: Path) -> None:
    async with register(register_url(own)) as found:
        first = await found.put(value(), NEVER)
        assert first is not None
        own.kept(tmp_path / "backup")
        own.start()
        assert await found.put(value(epoch=3), first) is not None
        own.restored(tmp_path / "backup")
        own.start()
        assert await found.get("b") == StoredSet(value(), first, value(epoch=3))
        assert await found.all() == {"b": StoredSet(value(), first, value(epoch=3))}


async def test_reused_revision_number_after_a_restore_is_a_conflict(own: Node, tmp_path: Path) -> None:
    async with register(register_url(own)) as found:
        first = await found.put(value(), NEVER)
        assert first is not None
        own.kept(tmp_path / "backup")
        own.start()
        second = await found.put(value(epoch=2), first)
        assert second is not None
        own.restored(tmp_path / "backup")
        own.start()
        async with register(register_url(own)) as other:
            again = await other.put(value(epoch=9), first)
        assert again is not None and again.number == second.number
        assert await found.put(value(epoch=3), second) is None
        assert not await found.remove("b", second)


async def test_set_recreated_by_another_controller_is_not_a_rollback(shared: Node) -> None:
    url = register_url(shared, prefix=next(prefixes))
    async with register(url) as found, register(url) as other:
        await found.put(value(epoch=5), NEVER)
        assert await other.remove("b", (await other.get("b")).revision)
        assert await found.get("b") == StoredSet(None, NEVER)
        revision = await found.put(value(epoch=5), NEVER)
        assert revision is not None
        assert await other.remove("b", (await other.get("b")).revision)
        revision = await other.put(value(epoch=1), NEVER)
        assert revision is not None
        assert await found.get("b") == StoredSet(value(epoch=1), revision)


async def test_set_removed_by_another_controller_is_forgotten_at_next_scan(shared: Node) -> None:
    """Otherwise the table of known sets would fill up, and later rollbacks would not be detected."""

    url = register_url(shared, prefix=next(prefixes))
    async with register(url) as found, register(url) as other:
        for name in ("a", "b"):
            await found.put(value(name), NEVER)
        assert await other.remove("b", (await other.get("b")).revision)
        assert found.glance("b") is not None
        assert list(await found.all()) == ["a"]
        assert found.glance("b") is None
        assert found.glance("a") == value("a")


async def test_read_concurrent_with_a_write_is_not_a_rollback(shared: Node) -> None:
    async with register(register_url(shared, prefix=next(prefixes))) as found:
        revision: Revision | None = NEVER
        for epoch in range(1, 20):
            assert revision is not None
            read, revision = await asyncio.gather(found.get("b"), found.put(value(epoch=epoch), revision))
            assert read.had is None
            assert found.glance("b") == value(epoch=epoch)


# ---- authorization


async def test_user_writes_under_its_prefix_and_renews_a_lost_token(own: Node) -> None:
    own.add_users("secret of root", "neve", "secret", "mine/")

    user = {"etcd_user": "neve", "etcd_password": "secret"}
    async with register(register_url(own, prefix="mine"), **user) as found:
        first = await found.put(value(), NEVER)
        assert first is not None
        own.stop()
        own.start()  # The restart made it forget all tokens.
        assert await found.put(value(epoch=2), first) is not None
    for url, settings, why in (
        (register_url(own, prefix="mine"), {**user, "etcd_password": "wrong"}, "invalid user ID or password"),
        (register_url(own, prefix="mine"), {}, "etcd requires a user"),
        (register_url(own, prefix="theirs"), user, "permission denied"),
    ):
        with pytest.raises(StartupError, match=why) as refused:
            async with register(url, **settings):
                pass
        assert refused.value.exit_code == EXIT_CONFIG


async def test_credentials_are_accepted_if_etcd_requires_none(shared: Node) -> None:
    url = register_url(shared, prefix=next(prefixes))
    async with register(url, etcd_user="neve", etcd_password="secret") as found:
        assert await found.put(value(), NEVER) is not None


def test_tls_requires_client_certificate_and_trusted_server_name(tmp_path: Path) -> None:
    names = servers.certificates(tmp_path / "pem")
    stranger = servers.certificates(tmp_path / "stranger")
    trusting = {"etcd_tls_enable": True, "etcd_tls_trust_cert_path": str(names.authority)}
    pair = {"etcd_tls_cert_path": str(names.certificate), "etcd_tls_key_path": str(names.key)}

    async def main(node: Node) -> None:
        url = register_url(node)
        async with register(url, **trusting, **pair) as found:
            assert await found.put(value(), NEVER) is not None
        cases: list[tuple[dict[str, Any], str]] = [
            ({}, node.endpoint),
            (trusting, node.endpoint),  # without a pair
            ({**trusting, **pair, "etcd_tls_trust_cert_path": str(stranger.authority)}, node.endpoint),
            (
                {**trusting, **pair},
                node.endpoint.replace("127.0.0.1", "localhost"),
            ),  # The certificate does not have this name.
        ]
        for settings, endpoint in cases:
            found, _ = etcd_register(ControllerConfig(register_url=f"etcd://{endpoint}/neve", **settings))
            with pytest.raises(RegisterUnavailable):
                await found.get("b")
            await found.close()

    with servers.node(tmp_path / "etcd", names) as node:
        run(lambda: main(node))


async def test_recreated_cluster_is_adopted_once_all_endpoints_belong_to_it(own: Node) -> None:
    client = Etcd(EtcdUrl((own.endpoint,), "neve"))
    try:
        seen = KeyValue(b"k", b"v", 0, await client.swap(b"k", None, b"v") or 0)
        old = client.cluster_id
        own.wiped()
        own.token = "another"
        own.start()
        assert await client.swap(b"k", seen, b"w") is None
        assert client.cluster_id != old
        assert (await client.read(b"k")).kvs == []
    finally:
        await client.close()


async def test_invalid_answer_counts_as_unavailable_etcd(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = Etcd(EtcdUrl((f"127.0.0.1:{port}",), "neve"))
        with pytest.raises(EtcdAway, match="invalid answer"):
            await client.swap(b"k", None, b"v")
        await client.close()


async def test_concurrent_additions_by_several_controllers_are_all_kept(shared: Node) -> None:
    """Each controller adds members to one set by compare and swap; no addition is lost."""

    url = register_url(shared, prefix=next(prefixes))
    async with register(url) as one, register(url) as two, register(url) as three:
        await one.put(replace(value(), next_broker_id=1000), NEVER)

        async def add(found: EtcdRegister, ids: range) -> None:
            for broker_id in ids:
                while True:
                    held, revision, _ = await found.get("b")
                    assert held is not None
                    joined = tuple(sorted((*held.members, Member(id=broker_id, address="h")), key=lambda m: m.id))
                    if await found.put(replace(held, members=joined), revision) is not None:
                        break

        await asyncio.gather(add(one, range(2, 9)), add(two, range(9, 16)), add(three, range(16, 23)))
        final = (await one.get("b")).broker_set
        assert final is not None and final.ids == tuple(range(1, 23))


def test_doctor_checks_etcd(shared: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "controller.conf"
    for url, code, said in (
        (register_url(shared, prefix=next(prefixes)), 0, "has 0 broker sets"),
        ("etcd://127.0.0.1:1/neve", 1, "etcd does not answer"),
    ):
        path.write_text(f"listenPort=0\ncontrollerStorePath={tmp_path}\nregisterUrl={url}\n")
        assert cli.run(["doctor", "-c", str(path)]) == code
        assert said in capsys.readouterr().out


def test_controller_does_not_start_if_etcd_rejects_it(own: Node, tmp_path: Path) -> None:
    own.add_users("secret of root", "neve", "secret", "neve/")
    settings = {"listenPort": 0, "bindAddress": "127.0.0.1", "controllerStorePath": tmp_path / "controller"}
    settings |= {"registerUrl": register_url(own), "etcdUser": "neve", "etcdPassword": "wrong"}
    with pytest.raises(NotReady, match="invalid user ID or password"):
        Serving(tmp_path / "refused", "controller", *settings_as_options(settings)).start()
    settings["etcdPassword"] = "secret"
    with Serving(tmp_path / "taken", "controller", *settings_as_options(settings)) as server:
        assert server.ready["controller"].startswith("127.0.0.1:")
