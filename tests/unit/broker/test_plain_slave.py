"""A broker with `brokerRole=SLAVE`: refused configurations, its master, and the requests that it serves."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path

import pytest

from broker.broker_controller import BrokerController
from broker.clients.master_api import MasterApi
from broker.config import BrokerConfig
from broker.ha.settings import is_slave, settings_of
from broker.metadata.stock_tables import ask_stock_master
from broker.role import Role
from infra.config.properties import ConfigError, load
from infra.disk.filesystem import RealDisk
from infra.process.startup import StartupError
from neve.remoting.codes import RequestCode as Code
from tests.kit.broker.in_process import ask, running, send
from tests.kit.clock.waiting import until
from tests.unit.broker.apache_slave import SLAVE, bodies, master, run


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
                await until(lambda: slave.store.queues.max_offset("t", 0) == 4)
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
                await until(lambda: slave.store.queues.max_offset("t", 0) == 5)

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
                await until(lambda: slave.store.queues.max_offset("t", 0) == 3)
                await front.ha.stop()
                front.ha.port, before = 0, front.ha.port
                await front.ha.start()
                assert front.ha.port != before
                await send(theirs, "t", b"3")
                await slave.registration.now()
                await until(lambda: slave.store.queues.max_offset("t", 0) == 4)

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
        with pytest.raises(StartupError, match="needs an empty storePathRootDir"):
            async with running(tmp_path, *SLAVE, "namesrvAddr=127.0.0.1:1"):
                raise AssertionError

    run(scenario)


def test_slaves_directory_is_refused_for_a_member_of_a_set(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            master(tmp_path) as (front, _),
            running(tmp_path / "slave", *SLAVE, f"namesrvAddr={front.address}") as (slave, _connection),
        ):
            await until(lambda: slave.store.queues.max_offset("t", 0) == 3)
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
        (["brokerRole=SLAVE", "namesrvAddr=a:1"], "brokerId=0: 0 is the id of the master"),
        (["brokerRole=SLAVE", "brokerId=1"], "without namesrvAddr"),
        ([*SLAVE, "namesrvAddr=a:1", "controllerAddr=a:1"], "controllerAddr=a:1: a slave"),
        (["brokerId=1", "brokerRole=ASYNC_MASTER"], "a master has id 0"),
        ([*SLAVE, "replication=sync", "controllerAddr=a:1"], "a controller assigns the roles"),
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
