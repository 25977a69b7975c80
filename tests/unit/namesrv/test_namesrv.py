from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.clock import ManualClock
from infra.disk.filesystem import RealDisk
from infra.net.remoting_server import Connection, open_connection
from infra.process.startup import StartupError
from namesrv import request_processor
from namesrv.kv_config_manager import KvConfigManager
from namesrv.namesrv_config import NamesrvConfig
from namesrv.namesrv_controller import NamesrvController
from namesrv.registration import BrokerRegistration, parse_registration
from neve.remoting.body import lenient_loads
from neve.remoting.codes import RequestCode
from neve.remoting.command import RemotingCommand

BROKER = {"clusterName": "c", "brokerName": "a", "brokerAddr": "10.0.0.1:10911", "brokerId": "0", "haServerAddr": ""}
TOPIC = {"topicName": "t", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6}
TABLE = {"topicConfigSerializeWrapper": {"topicConfigTable": {"t": TOPIC}, "dataVersion": {"counter": 1}}}


class NamesrvRig:
    def __init__(self, controller: NamesrvController, clock: ManualClock) -> None:
        self.controller = controller
        self.clock = clock

    async def connect(self) -> Connection:
        return await open_connection("127.0.0.1", self.controller.port)

    async def ask(
        self,
        connection: Connection,
        code: int,
        ext: dict[str, str] | None = None,
        body: object = None,
        version: int = 479,
    ) -> RemotingCommand:
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return await connection.invoke(RemotingCommand(code, version=version, ext=ext or {}, body=raw), 5)

    async def register(self) -> Connection:
        connection = await self.connect()
        answer = await self.ask(connection, RequestCode.REGISTER_BROKER, BROKER, TABLE)
        assert answer.code == 0, answer.remark
        return connection


@asynccontextmanager
async def running(tmp_path: Path, **settings: object) -> AsyncIterator[NamesrvRig]:
    config = NamesrvConfig(listen_port=0, bind_address="127.0.0.1", kv_config_path=str(tmp_path / "d" / "kv.json"))
    for name, value in settings.items():
        setattr(config, name, value)
    clock = ManualClock()
    controller = NamesrvController(config, clock, RealDisk())
    await controller.start()
    try:
        async with asyncio.timeout(10):
            yield NamesrvRig(controller, clock)
    finally:
        await controller.shutdown()


async def test_routes_in_both_dialects(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        broker = await rig.register()
        client = await rig.connect()
        new = await rig.ask(client, RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"})
        assert new.code == 0
        parsed = json.loads(new.body)
        assert parsed["brokerDatas"][0]["brokerAddrs"] == {"0": "10.0.0.1:10911"}
        assert parsed["queueDatas"][0]["writeQueueNums"] == 4
        assert "orderTopicConf" not in parsed
        old = await rig.ask(client, RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"}, version=400)
        assert b'"brokerAddrs":{0:"10.0.0.1:10911"}' in old.body
        assert lenient_loads(old.body)["brokerDatas"][0]["cluster"] == "c"
        asked = {"topic": "t", "acceptStandardJsonOnly": "true"}
        assert (await rig.ask(client, RequestCode.GET_ROUTEINFO_BY_TOPIC, asked, version=317)).body == new.body
        missing = await rig.ask(client, RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "x"})
        assert (missing.code, "topic: x" in (missing.remark or "")) == (17, True)
        broker.close()
        client.close()


async def test_every_request_has_its_response(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        broker = await rig.register()
        ask = rig.ask
        known = await ask(broker, RequestCode.QUERY_DATA_VERSION, BROKER, {"counter": 1})
        assert (known.ext["changed"], json.loads(known.body)["counter"]) == ("false", 1)
        assert (await ask(broker, RequestCode.QUERY_DATA_VERSION, BROKER, {"counter": 2})).ext["changed"] == "true"
        assert (await ask(broker, RequestCode.BROKER_HEARTBEAT, BROKER)).code == 0
        info = json.loads((await ask(broker, RequestCode.GET_BROKER_CLUSTER_INFO)).body)
        assert info["clusterAddrTable"] == {"c": ["a"]}
        group = json.loads((await ask(broker, RequestCode.GET_BROKER_MEMBER_GROUP, BROKER)).body)
        assert group["brokerMemberGroup"]["brokerAddrs"] == {"0": "10.0.0.1:10911"}
        assert (await ask(broker, RequestCode.WIPE_WRITE_PERM_OF_BROKER, BROKER)).ext == {"wipeTopicCount": "1"}
        assert (await ask(broker, RequestCode.ADD_WRITE_PERM_OF_BROKER, BROKER)).ext == {"addTopicCount": "1"}
        route = {
            "queueDatas": [{"brokerName": "a", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6, "topicSysFlag": 3}]
        }
        assert (await ask(broker, RequestCode.REGISTER_TOPIC_IN_NAMESRV, {"topic": "n"}, route)).code == 0
        for code, expected in ((206, ["n", "t"]), (311, ["n"]), (312, ["n"]), (313, []), (304, ["a", "c"])):
            assert json.loads((await ask(broker, code)).body)["topicList"] == expected
        by_cluster = await ask(broker, RequestCode.GET_TOPICS_BY_CLUSTER, {"cluster": "c"})
        assert json.loads(by_cluster.body)["topicList"] == ["n", "t"]
        assert (await ask(broker, RequestCode.DELETE_TOPIC_IN_NAMESRV, {"topic": "n"})).code == 0
        assert (await ask(broker, RequestCode.UNREGISTER_BROKER, BROKER)).code == 0
        assert json.loads((await ask(broker, 206)).body)["topicList"] == []
        assert (await ask(broker, 10)).code == 3
        broker.close()


@pytest.mark.parametrize(
    ("code", "ext", "body", "expected"),
    [
        (103, {**BROKER, "bodyCrc32": "1"}, TABLE, 1),
        (103, {**BROKER, "brokerAddr": "nowhere"}, TABLE, 1),
        (103, {**BROKER, "brokerId": "-1"}, TABLE, 1),
        (103, {**BROKER, "brokerId": "x"}, TABLE, 1),
        (103, {}, TABLE, 1),
        (103, BROKER, b"{{{", 1),
        (103, {**BROKER, "compressed": "true"}, TABLE, 1),
        (322, BROKER, b"", 1),
        (105, {}, None, 1),
        (101, {"namespace": "n", "key": "k"}, None, 22),
        (219, {"namespace": "n"}, None, 22),
        (318, {}, b"kvConfigPath=/tmp/x", 16),
        (318, {}, b"configBlackList=x", 16),
        (318, {}, b"\xff", 16),
    ],
)
async def test_refused_request_keeps_the_connection_open(
    tmp_path: Path, code: int, ext: dict[str, str], body: object, expected: int
) -> None:
    async with running(tmp_path) as rig:
        connection = await rig.connect()
        assert (await rig.ask(connection, code, ext, body)).code == expected
        assert (await rig.ask(connection, 206)).code == 0
        connection.close()


async def test_disconnected_or_silent_broker_is_removed(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        broker = await rig.register()
        client = await rig.connect()
        broker.close()
        while (await rig.ask(client, 105, {"topic": "t"})).code != 17:
            pass
        silent = await rig.register()
        gone = asyncio.Event()
        silent.on_close(lambda _: gone.set())
        rig.clock.advance(120_001)
        rig.controller.scan()
        await gone.wait()
        assert (await rig.ask(client, 105, {"topic": "t"})).code == 17
        client.close()


async def test_scan_runs_periodically(tmp_path: Path) -> None:
    async with running(tmp_path, scan_not_active_broker_interval=100) as rig:
        silent = await rig.register()
        gone = asyncio.Event()
        silent.on_close(lambda _: gone.set())
        rig.clock.advance(120_001)
        await gone.wait()


async def test_settings_survive_a_restart_and_orders_reach_brokers_and_clients(tmp_path: Path) -> None:
    order = {"namespace": "ORDER_TOPIC_CONFIG", "key": "t", "value": "a:4"}

    async with running(tmp_path) as rig:
        connection = await rig.connect()
        assert (await rig.ask(connection, RequestCode.PUT_KV_CONFIG, order)).code == 0
        assert (await rig.ask(connection, RequestCode.PUT_KV_CONFIG, {**order, "key": "gone"})).code == 0
        assert (await rig.ask(connection, RequestCode.DELETE_KV_CONFIG, {**order, "key": "gone"})).code == 0
        assert (await rig.ask(connection, RequestCode.DELETE_KV_CONFIG, {**order, "key": "gone"})).code == 0
        connection.close()
    async with running(tmp_path, order_message_enable=True) as rig:
        connection = await rig.connect()
        assert (await rig.ask(connection, RequestCode.GET_KV_CONFIG, order)).ext == {"value": "a:4"}
        table = await rig.ask(connection, RequestCode.GET_KVLIST_BY_NAMESPACE, order)
        assert json.loads(table.body) == {"table": {"t": "a:4"}}
        registered = await rig.ask(connection, RequestCode.REGISTER_BROKER, BROKER, TABLE)
        assert json.loads(registered.body) == {"table": {"t": "a:4"}}
        route = await rig.ask(connection, RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"})
        assert json.loads(route.body)["orderTopicConf"] == "a:4"
        rig.controller.kv.print_all()
        connection.close()


async def test_live_setting_applies_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        connection = await rig.connect()
        assert (await rig.ask(connection, 318, body=b"enableAllTopicList=false\n")).code == 0
        assert (await rig.ask(connection, 206)).code == 1
        assert b"enableAllTopicList=false" in (await rig.ask(connection, 319)).body
        connection.close()


@pytest.mark.parametrize("content", [b"", b"{", b'{"version":2,"configTable":{}}', b'{"configTable":{"a":{"b":1}}}'])
def test_damaged_settings_file_stops_the_start(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "kv.json"
    path.write_bytes(content)
    with pytest.raises(StartupError, match=r"kv\.json"):
        KvConfigManager(path, RealDisk()).load()


def test_settings_file_of_rocketmq_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kv.json"
    path.write_text('{"configTable":{"n":{"k":"v"}}}')
    manager = KvConfigManager(path, RealDisk())
    manager.load()
    assert manager.get("n", "k") == "v"


async def test_unchanged_registration_is_not_parsed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(body: bytes, **more: Any) -> BrokerRegistration:
        read.append(len(body))
        return parse_registration(body, **more)

    monkeypatch.setattr(request_processor, "parse_registration", counted)

    async with running(tmp_path) as rig:
        broker = await rig.register()

        async def again(table: object = TABLE, **ext: str) -> None:
            answer = await rig.ask(broker, RequestCode.REGISTER_BROKER, {**BROKER, **ext}, table)
            assert answer.code == 0, answer.remark

        async def topics() -> list[str]:
            found: list[str] = json.loads((await rig.ask(broker, 206)).body)["topicList"]
            return found

        for _ in range(3):
            rig.clock.advance(100_000)  # less than a broker's patience
            await again()
            rig.controller.routes.expire()
        assert len(read) == 1
        assert await topics() == ["t"]
        rig.clock.advance(121_000)
        rig.controller.routes.expire()
        assert await topics() == []
        await again()
        assert await topics() == ["t"]
        assert (await rig.ask(broker, RequestCode.UNREGISTER_BROKER, BROKER)).code == 0
        await again()
        assert await topics() == ["t"]
        newer = {"t": TOPIC, "u": {**TOPIC, "topicName": "u"}}
        await again({"topicConfigSerializeWrapper": {"topicConfigTable": newer, "dataVersion": {"counter": 2}}})
        assert await topics() == ["t", "u"]
        assert len(read) == 4
        await again(brokerAddr="10.0.0.2:10911")
        assert len(read) == 5
