"""`neve namesrv --controller`: one process runs two servers, each on its own port."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.wire import Client, Refused
from tests.kit.server.neve import Serving, settings_as_options
from tests.kit.server.processes import NotReady, accepts

GET_METADATA_INFO, GET_BROKER_CLUSTER_INFO, APPLY, SYNC_STATE_DATA = 1005, 106, 1013, 1006


def both(directory: Path, controller: str) -> Serving:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "controller.conf"
    path.write_text(f"bindAddress=127.0.0.1\ncontrollerStorePath={directory / 'register'}\n{controller}\n")
    settings = {"listenPort": 0, "bindAddress": "127.0.0.1", "kvConfigPath": directory / "kv.json"}
    return Serving(directory, "namesrv", "--controller", str(path), *settings_as_options(settings))


def test_name_server_and_controller_serve_on_their_ports_and_stop_together(tmp_path: Path) -> None:
    with both(tmp_path, "listenPort=0") as server:
        names, controller = server.namesrv, str(server.ready["controller"])
        assert names != controller
        with Client(controller) as client:
            assert client.ask(GET_METADATA_INFO, {}).extFields["controllerLeaderAddress"] == controller
            applied = {"clusterName": "c", "brokerName": "b", "appliedBrokerId": 1, "registerCheckCode": "h:1;1"}
            client.ask(APPLY, applied)
        with Client(names) as client:
            assert json.loads(client.ask(GET_BROKER_CLUSTER_INFO, {}).body)["brokerAddrTable"] == {}
            with pytest.raises(Refused, match="not supported"):
                client.ask(GET_METADATA_INFO, {})
        assert server.stop() == 0
        assert not accepts(names) and not accepts(controller)
        server.start()
        with Client(server.ready["controller"]) as client:
            table = json.loads(client.ask(SYNC_STATE_DATA, {}, b'["b"]').body)["replicasInfoTable"]
        assert [one["brokerId"] for one in table["b"]["notInSyncReplicas"]] == [1], "it has kept what it was told"


@pytest.mark.parametrize(
    ("controller", "why"),
    [
        ("listenPort=x", "listenPort=x"),
        ("listenPort=0\nregisterUrl=etcd://h", "expected a prefix"),
        ("listenPort=0\ncontrollerDLegerPeers=n0-a:1;n1-b:1", "each elect a master of their own"),
    ],
)
def test_failed_controller_start_stops_the_name_server_as_well(tmp_path: Path, controller: str, why: str) -> None:
    with pytest.raises(NotReady, match=why):
        both(tmp_path, controller).start()
