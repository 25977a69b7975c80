"""Several controllers on one etcd: each answers every request, and one of them elects.

A broker counts as dead only if none of the controllers hears it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from controller.controller_config import ControllerConfig
from controller.controller_manager import ControllerManager
from controller.decision import GetSyncStateData, Report
from controller.etcd_controllers import EtcdControllers
from controller.etcd_register import etcd_register
from controller.register import RegisterUnavailable
from infra.clock import ManualClock
from infra.net.etcd import Etcd, parse_url
from neve.remoting.codes import ResponseCode as Code
from tests.kit.clock.waiting import until
from tests.kit.server import etcd as servers
from tests.kit.server.etcd import Node, register_url
from tests.unit.controller.brokers import FakeBroker, closed, controlling, in_sync

pytestmark = pytest.mark.servers
prefixes = (f"test{number}" for number in count())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with servers.node(tmp_path_factory.mktemp("etcd")) as node:
        yield node


@asynccontextmanager
async def controllers(root: Path, node: Node, number: int = 2) -> AsyncIterator[list[ControllerManager]]:
    url = register_url(node, prefix=next(prefixes))
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(controlling(root / f"{at}", register_url=url)) for at in range(number)]


async def also(broker: FakeBroker, controller: ControllerManager) -> FakeBroker:
    """Connect the same broker to another controller."""
    voice = FakeBroker(controller, broker.name, broker.born)
    voice.id, voice._port, voice.epochs = broker.id, broker._port, broker.epochs
    await voice.connect()
    await voice.beat()
    return voice


async def is_request_in_flight(controller: ControllerManager, asker: FakeBroker, *ids: int) -> None:
    """Wait until the controller knows, by itself or from the others, that exactly these brokers are alive."""

    async def holds() -> bool:
        answer = await controller.sets.carry_out(GetSyncStateData(asker.name))
        return sorted(one.id for one in (*(answer.in_sync or ()), *(answer.not_in_sync or ())) if one.alive) == list(
            ids
        )

    await until(holds, f"{ids} live")


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


async def test_every_controller_answers_all_requests(shared: Node, tmp_path: Path) -> None:
    async with controllers(tmp_path, shared, 3) as (one, two, three):
        a, b = await FakeBroker(one).open(), await FakeBroker(two).open()
        await a.join()
        await b.join()
        assert (a.id, b.id) == (1, 2)
        await is_request_in_flight(three, a, 1, 2)
        at_three = await also(a, three)
        assert (await at_three.elect()).code == Code.SUCCESS
        await is_request_in_flight(one, a, 1, 2)
        assert (await a.alter(a, b)).code == Code.SUCCESS
        info = await b.info()
        assert (info.ext["masterBrokerId"], info.body) == ("1", b'{"syncStateSet":[1,2],"syncStateSetEpoch":2}')
        at_three.hang_up()
        await closed(a, b)


async def test_master_stays_while_one_controller_hears_it(shared: Node, tmp_path: Path) -> None:
    async with controllers(tmp_path, shared) as (one, two):
        a, b = FakeBroker(one), FakeBroker(one)
        await in_sync(a, b)
        await is_request_in_flight(two, a, 1, 2)
        there = [await also(a, two), await also(b, two)]
        there[0].hang_up()
        await until(lambda: 1 not in two.living("b"), "the second one sees it go")
        await is_request_in_flight(two, a, 1, 2)
        await two.scan()
        assert (await there[1].elect()).code == Code.CONTROLLER_MASTER_STILL_EXIST
        assert (await b.info()).ext["masterEpoch"] == "1"
        there[1].hang_up()
        await closed(a, b)


@pytest.mark.parametrize("attempt", range(5))
async def test_master_disconnected_from_all_controllers_is_replaced_once(
    shared: Node, tmp_path: Path, attempt: int
) -> None:
    """No controller scans in this test: the last one that the master disconnects from elects."""

    async with controllers(tmp_path, shared, 3) as found:
        a, b = FakeBroker(found[0]), FakeBroker(found[0])
        await in_sync(a, b)
        there = [await also(one, controller) for one in (a, b) for controller in found[1:]]
        for controller in found:
            await is_request_in_flight(controller, a, 1, 2)
        for voice in (a, *there[:2]):
            voice.hang_up()

        async def holds() -> bool:
            return (await b.info()).ext.get("masterBrokerId") == "2"

        await until(holds, "b is master")
        info = await b.info()
        assert info.ext["masterEpoch"] == "2"
        for voice in there[2:]:
            voice.hang_up()
        await closed(a, b)


async def test_reports_of_a_stopped_or_dead_controller_disappear(shared: Node) -> None:
    url = parse_url(register_url(shared, prefix=next(prefixes)))
    clients = [Etcd(url) for _ in range(3)]
    stops, dies, reads = (EtcdControllers(client, url.prefix, Etcd(url)) for client in clients)
    for one in (stops, dies):
        await one.renew()
        await one.publish("b", {1: Report(0, address="h:1"), 2: Report(0)})
    assert {broker_id: len(found) for broker_id, found in (await reads.reports_of("b")).items()} == {1: 2, 2: 2}
    await stops.close()
    assert {broker_id: len(found) for broker_id, found in (await reads.reports_of("b")).items()} == {1: 1, 2: 1}

    async def is_deleted() -> bool:
        return not await reads.reports_of("b")

    await until(is_deleted, "its lease is over")  # No one renews the lease.
    await dies.close()
    for client in clients:
        await client.close()


class Slow:
    """An etcd that answers requests about leases and its identity, and never answers requests about keys."""

    def __init__(self) -> None:
        self.asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            body = await reader.readexactly(int(length.partition(b":")[2]))
            if b"/v3/kv/" in head and b"serializable" not in body:
                self.asked += 1
                await asyncio.Event().wait()
            said = b'{"header":{"cluster_id":"7"},"ID":"9","TTL":"3","result":{"ID":"9","TTL":"3"}}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(said), said))


async def test_lease_is_renewed_while_all_etcd_connections_are_busy() -> None:
    slow = Slow()
    server = await asyncio.start_server(slow.serve, "127.0.0.1", 0)
    async with asyncio.timeout(30):
        url = f"etcd://127.0.0.1:{server.sockets[0].getsockname()[1]}/neve"
        register, others = etcd_register(ControllerConfig(register_url=url))
        await others.renew()
        asking = [asyncio.create_task(register.get(f"b{number}")) for number in range(200)]
        await until(lambda: slow.asked >= 64, "no connection is free")
        await others.renew()
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await others.close()
        await register.close()
    server.close()


async def test_reports_are_read_by_others_and_written_again_when_lost(tmp_path: Path) -> None:
    with servers.node(tmp_path) as node:
        url = parse_url(register_url(node))
        own, client = Etcd(url), Etcd(url)
        says, reads = (EtcdControllers(one, url.prefix, Etcd(url)) for one in (own, client))
        said = Report(0, address="h:1", cluster="c", epoch=3, max_offset=77, incarnation="i", starts=2, process="p")
        await says.publish("a/b", {1: said})
        assert await reads.reports_of("a/b") == {}  # There is no lease that would end this entry.
        await says.renew()
        await says.publish("a/b", {1: said})
        await says.publish("a", {2: said})
        (reports_of,) = (await reads.reports_of("a/b"))[1]
        assert reports_of == replace(said, max_offset=1)
        assert set(await reads.reports_of("a")) == {2}
        assert await says.reports_of("a/b") == {}, "the own say is not hearsay"
        revision = (await own.read(b"k")).header.revision
        await says.publish("a/b", {1: replace(said, max_offset=99)})
        assert (await own.read(b"k")).header.revision == revision, "it need not be told where a log ends"
        node.wiped()
        node.start()
        await says.renew()
        await says.publish("a/b", {1: said})
        assert set(await reads.reports_of("a/b")) == {1}
        await says.publish("a/b", {})
        assert await reads.reports_of("a/b") == {}
        key = servers.text("neve/alive/a/somebody")
        node.ask("kv/put", {"key": key, "value": servers.text("[]")})
        with pytest.raises(RegisterUnavailable, match="can't be read"):
            await reads.reports_of("a")
        node.ask("kv/put", {"key": key, "value": servers.text('{"5": {"timeoutMs": 5, "aNewField": 1}}')})
        assert set(await reads.reports_of("a")) == {5}
        await says.publish("a", {2: said})
        assert set(await reads.reports_of("a")) == {2, 5}
        (gone,) = [kv.key for kv in (await own.read_all(b"neve/alive/a/", 9)).kvs if b"somebody" not in kv.key]
        node.ask("kv/deleterange", {"key": servers.text(gone.decode())})
        await says.reports_of("a")  # The controller notices that its own entry is missing.
        await says.publish("a", {2: said})
        assert set(await reads.reports_of("a")) == {2, 5}
        await says.close()
        await own.close()
        await client.close()


async def test_stopping_controller_causes_no_election(shared: Node, tmp_path: Path) -> None:
    url = register_url(shared, prefix=next(prefixes))
    async with controlling(tmp_path / "stays", register_url=url) as stays:
        async with controlling(tmp_path / "stops", register_url=url) as stops:
            a, b = FakeBroker(stops), FakeBroker(stops)
            await in_sync(a, b)
            there = [await also(a, stays), await also(b, stays)]
            await is_request_in_flight(stays, a, 1, 2)
        await stays.scan()
        info = await there[0].info()
        assert (info.ext["masterBrokerId"], info.ext["masterEpoch"]) == ("1", "1")
        for voice in there:
            voice.hang_up()
        await closed(a, b)


async def test_new_controller_learns_of_a_live_master_from_other_controllers(shared: Node, tmp_path: Path) -> None:
    url = register_url(shared, prefix=next(prefixes))
    async with controlling(tmp_path / "old", register_url=url) as old:
        a, b = FakeBroker(old), FakeBroker(old)
        await in_sync(a, b)
        clock = ManualClock()
        async with controlling(tmp_path / "new", clock, register_url=url) as new:
            await is_request_in_flight(new, a, 1, 2)
            clock.advance(60_000)  # The startup wait is over.
            await new.scan()
            assert (await b.info()).ext["masterEpoch"] == "1"
        await closed(a, b)
