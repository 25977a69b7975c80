"""A broker with `brokerRole=SLAVE`: refused configurations, its master, and the requests that it serves."""

from __future__ import annotations

import asyncio
import json
import struct
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.wire import pull_ext
from broker.broker_controller import BrokerController
from broker.clients.master_api import MasterApi
from broker.config import BrokerConfig
from broker.ha.settings import is_slave, settings_of
from broker.metadata.stock_tables import ask_stock_master
from broker.role import Role
from infra.config.properties import ConfigError, load
from infra.disk.filesystem import RealDisk
from infra.net.remoting_server import Connection, RemotingServer
from infra.process.startup import StartupError
from neve.record.codec import iter_records
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand
from tests.kit.broker.in_process import ask, running, send
from tests.kit.clock.waiting import until
from tests.unit.broker.ha.test_plain_over_sockets import PlainMaster
from tests.unit.broker.metadata.test_stock_tables import GROUPS, MODES, TOPICS

FILE_SIZE = 1 << 20
SLAVE = ["brokerRole=SLAVE", "brokerId=1", "slaveReadEnable=true"]


class Front:
    """A name server, and the Remoting side of an Apache master whose log is a neve broker's."""

    def __init__(self, source: BrokerController) -> None:
        self.source, self.ha = source, PlainMaster(source.store, FILE_SIZE)
        self.server = RemotingServer(self._serve, host="127.0.0.1", port=0)
        self.master = RemotingServer(self._serve, host="127.0.0.1", port=0)
        self.master_address = ""
        self.timers: tuple[int, int] | None = (0, 0)
        self.delays = "{}"
        self.offsets = '{"offsetTable":{"t@g":{0:2}}}'
        self.knows_master = True
        self.registered: list[dict[str, str]] = []
        self.settings: dict[str, str] = {}
        self.behind = "0 B"
        self.dropped = 0  # the begin of its log, as it reports
        self.others: list[dict[str, object]] = []  # slaves

    @property
    def address(self) -> str:
        """The name server's address."""
        return f"127.0.0.1:{self.server.port}"

    async def start(self) -> None:
        await self.ha.start()
        await self.server.start()
        await self.master.start()
        self.master_address = f"127.0.0.1:{self.master.port}"

    async def stop(self) -> None:
        await self.retire()
        await self.server.shutdown()

    async def retire(self) -> None:
        """Stop the master and unregister it at the name server."""
        self.knows_master = False
        await self.ha.stop()
        await self.master.shutdown()

    def _serve(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        body, ext = "", dict[str, str]()
        store, config = self.source.store, self.source.config
        match request.code:
            case Code.REGISTER_BROKER:
                self.registered.append(dict(request.ext))
                ext = {"masterAddr": self.master_address, "haServerAddr": f"127.0.0.1:{self.ha.port}"}
                ext = ext if self.knows_master else {}
            case Code.GET_BROKER_CONFIG:
                settings = {
                    "brokerClusterName": config.broker_cluster_name, "brokerName": config.broker_name, "brokerId": "0",
                    "mappedFileSizeCommitLog": str(FILE_SIZE), "messageDelayLevel": config.message_delay_level,
                    "flushCommitLogThoroughInterval": "0", "flushIntervalCommitLog": "0",
                }  # fmt: skip
                body = "".join(f"{name}={value}\n" for name, value in {**settings, **self.settings}.items())
            case Code.GET_BROKER_RUNTIME_INFO:
                begin = max(store.min_physical_offset, self.dropped)
                table = {
                    "bootTimestamp": str(self.ha.boot_ms), "commitLogMinOffset": str(begin),
                    "commitLogMaxOffset": str(store.max_physical_offset), "remainHowManyDataToFlush": self.behind,
                }  # fmt: skip
                body = json.dumps({"table": table})
            case Code.EXCHANGE_BROKER_HA_INFO:
                ext = {"masterFlushOffset": str(self.ha.end_at_start), "masterHaAddress": f"127.0.0.1:{self.ha.port}"}
            case Code.GET_BROKER_HA_STATUS:
                slaves = [{"slaveAckOffset": ack, "inSync": True} for ack in self.ha.acks[-1:]]
                status = {"master": True, "masterCommitLogMaxOffset": store.max_physical_offset}
                body = json.dumps({**status, "haConnectionInfo": [*slaves, *self.others]})
            case Code.GET_ALL_TOPIC_CONFIG:
                body = TOPICS % (7, "")
            case Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG:
                body = GROUPS
            case Code.GET_ALL_MESSAGE_REQUEST_MODE:
                body = MODES
            case Code.GET_ALL_DELAY_OFFSET:
                body = f'{{"offsetTable":{self.delays}}}'
            case Code.GET_TIMER_CHECK_POINT:
                if self.timers is None:
                    return RemotingCommand.response(request, 1, "The checkpoint is null")
                read_ms, offset = self.timers
                return RemotingCommand.response(
                    request, 0, body=struct.pack(">7q", read_ms, 0, offset, offset, 0, 0, 0)
                )
            case Code.GET_BROKER_CLUSTER_INFO:
                brokers = {config.broker_name: {"brokerAddrs": {"0": self.master_address}}}
                body = json.dumps({"brokerAddrTable": brokers if self.knows_master else {}})
            case Code.GET_ALL_CONSUMER_OFFSET:
                body = self.offsets
        return RemotingCommand.response(request, 0, ext=ext, body=body.encode())


@asynccontextmanager
async def master(root: Path) -> AsyncIterator[tuple[Front, Connection]]:
    """Yield a master with three messages, two of which a group has consumed."""
    async with running(root / "master") as (source, connection):
        for number in range(3):
            await send(connection, "t", b"%d" % number)
        front = Front(source)
        await front.start()
        try:
            yield front, connection
        finally:
            await front.stop()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(bounded())


async def bodies(connection: Connection, start: int = 0) -> list[bytes]:
    answer = await ask(connection, Code.PULL_MESSAGE, **pull_ext("g", "t", 0, start))
    return [record.body for record in iter_records(bytes(answer.body))] if answer.code == 0 else []


async def page(broker: BrokerController, path: str, series: str) -> float:
    """Return a value from the admin port's metrics."""
    assert broker.admin_address is not None
    url = "http://{}:{}{}".format(*broker.admin_address, path)
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read().decode())
    (value,) = [line.rpartition(" ")[2] for line in text.splitlines() if line.rpartition(" ")[0] == series]
    return float(value)


def test_slave_follows_the_name_servers_master_and_serves_its_messages(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with master(tmp_path) as (front, theirs):
            settings = [*SLAVE, f"namesrvAddr={front.address}"]
            async with running(tmp_path / "slave", *settings) as (slave, connection):
                assert front.registered[0]["brokerId"] == "1"
                await until(lambda: slave.offsets.table() == {"t@g": {0: 2}})
                assert await bodies(connection) == [b"0", b"1", b"2"]
                assert slave.groups.groups["g"].retry_max_times == 3
                await send(theirs, "t", b"3")
                await until(lambda: slave.store.max_offset("t", 0) == 4)
                assert await bodies(connection, 3) == [b"3"]
                await until(lambda: slave.role.has_master)
                answer = await ask(connection, Code.GET_MAX_OFFSET, topic="t", queueId=0)
                assert answer.code == 2, "it may lack what the master has acknowledged"
                with pytest.raises(AssertionError, match="REJECTREQUEST"):
                    await send(connection, "t")

                status = json.loads((await ask(connection, Code.GET_BROKER_HA_STATUS)).body)
                assert (status["master"], status["masterCommitLogMaxOffset"]) == (
                    False,
                    slave.store.max_physical_offset,
                )
                assert status["haClientRuntimeInfo"]["masterAddr"] == front.master_address
                assert status["haClientRuntimeInfo"]["activated"]

                assert await page(slave, "/metrics", "neve_slave_attached") == 1
                assert (await ask(theirs, Code.GET_BROKER_HA_STATUS)).body.count(b'"master":true') == 1

                await front.ha.stop()
                await until(lambda: not slave.role.has_master)
                assert await page(slave, "/metrics", "neve_slave_attached") == 0
                assert slave.role.current is Role.SLAVE
                assert await bodies(connection, 3) == [b"3"], "a reader goes on"
                await front.ha.start()
            async with running(tmp_path / "slave", *settings) as (slave, connection):
                await send(theirs, "t", b"4")
                await until(lambda: slave.store.max_offset("t", 0) == 5)

    run(scenario)


def test_master_with_a_new_address_is_followed_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with master(tmp_path) as (front, theirs):
            front.knows_master = False
            settings = [*SLAVE, f"namesrvAddr={front.address}"]
            async with running(tmp_path / "slave", *settings) as (slave, _):
                assert slave.store.max_physical_offset == 0
                front.knows_master = True
                await slave.registration.now()
                await until(lambda: slave.store.max_offset("t", 0) == 3)
                await front.ha.stop()
                front.ha.port, before = 0, front.ha.port
                await front.ha.start()
                assert front.ha.port != before
                await send(theirs, "t", b"3")
                await slave.registration.now()
                await until(lambda: slave.store.max_offset("t", 0) == 4)

    run(scenario)


def test_unsuitable_master_is_reported_with_the_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with master(tmp_path) as (front, _):
            front.settings["enableDLegerCommitLog"] = "true"
            async with running(tmp_path / "slave", *SLAVE, f"namesrvAddr={front.address}") as (slave, _connection):
                assert slave.plain_slave is not None
                client = slave.plain_slave.client
                await until(lambda: client.trouble is not None)
                assert client.trouble is not None
                assert "enableDLegerCommitLog=true" in client.trouble.text
                assert slave.store.max_physical_offset == 0

    run(scenario)


def test_directory_with_an_own_log_is_refused_for_a_slave(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (_, connection):
            await send(connection, "t")
        with pytest.raises(StartupError, match="begins with an empty storePathRootDir"):
            async with running(tmp_path, *SLAVE, "namesrvAddr=127.0.0.1:1"):
                raise AssertionError

    run(scenario)


def test_slaves_directory_is_refused_for_a_member_of_a_set(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            master(tmp_path) as (front, _),
            running(tmp_path / "slave", *SLAVE, f"namesrvAddr={front.address}") as (slave, _connection),
        ):
            await until(lambda: slave.store.max_offset("t", 0) == 3)
        with pytest.raises(StartupError, match="copy of an Apache master's log"):
            async with running(tmp_path / "slave", "replication=sync", "controllerAddr=127.0.0.1:1"):
                raise AssertionError

    run(scenario)


def test_unreadable_file_of_the_followed_master_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "ha").mkdir()
    RealDisk().write_atomic(tmp_path / "ha" / "followed.json", b'{"cluster":')

    async def scenario() -> None:
        with pytest.raises(StartupError, match=r"followed\.json cannot be read"):
            async with running(tmp_path, *SLAVE, "namesrvAddr=127.0.0.1:1"):
                raise AssertionError

    run(scenario)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (["brokerRole=SLAVE", "namesrvAddr=a:1"], "brokerId=0: that is the master's"),
        (["brokerRole=SLAVE", "brokerId=1"], "without namesrvAddr"),
        ([*SLAVE, "namesrvAddr=a:1", "controllerAddr=a:1"], "controllerAddr=a:1: a slave"),
        (["brokerId=1", "brokerRole=ASYNC_MASTER"], "a master has id 0"),
        ([*SLAVE, "replication=sync", "controllerAddr=a:1"], "a controller says who is what"),
    ],
)
def test_contradictory_configuration_is_refused(settings: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        settings_of(load(BrokerConfig, None, settings))


def test_only_a_slave_outside_a_set_follows_an_apache_master() -> None:
    slave = load(BrokerConfig, None, [*SLAVE, "namesrvAddr=a:1"])
    assert is_slave(slave)
    assert settings_of(slave) is None
    assert not is_slave(load(BrokerConfig, None, []))


def test_neve_master_answers_the_polls_of_a_stock_slave(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (broker, connection):
            await send(connection, "t")
            broker.groups.find("g")
            broker.offsets.commit("g", "t", 0, 1)
            broker.modes.set("t", "g", "POP", 2)
            broker.groups.set_forbidden("g", "t", forbidden=True)
            api = MasterApi(broker.config)
            image = await ask_stock_master(api, "{}:{}".format(*broker.address))
            api.close()
            assert image.log_end == broker.store.max_physical_offset
            assert image.topics == broker.topics.image()
            assert image.groups == broker.groups.image()
            assert image.modes == broker.modes.image()
            assert image.offsets == {"t@g": {0: 1}}
            assert image.delays.keys() == set(range(1, 19))

    run(scenario)
