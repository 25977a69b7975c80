"""`neve controller` with Apache RocketMQ 5.3.3: its brokers as members, its admin tool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.wire import Client, Refused
from tests.servers.apache import ApacheMember
from tests.servers.neve import Serving, settings_as_options
from tests.servers.processes import free_ports
from tests.waiting import wait_until

pytestmark = pytest.mark.servers

SYNC_STATE_DATA = 1006
TOPIC = "orders"
_CHANGE_S = 60.0  # a role takes a second or two; the machine is shared


def controller(directory: Path) -> Serving:
    """On a port that it keeps over a restart."""
    (port,) = free_ports(1)
    settings = {"listenPort": port, "bindAddress": "127.0.0.1", "controllerStorePath": directory / "register"}
    return Serving(directory, "controller", *settings_as_options(settings))


def name_server(directory: Path) -> Serving:
    settings = {"listenPort": 0, "bindAddress": "127.0.0.1", "kvConfigPath": directory / "kv.json"}
    return Serving(directory, "namesrv", *settings_as_options(settings))


def broker_set(server: Serving, name: str = "stock") -> dict[str, Any]:
    """What the controller says of it; nothing while it is unknown."""
    with Client(server.ready["controller"]) as client:
        answer = client.ask(SYNC_STATE_DATA, {}, json.dumps([name]).encode())
    found = json.loads(answer.body)["replicasInfoTable"].get(name, {})
    return dict(found)


def master_of(server: Serving) -> str:
    return str(broker_set(server).get("masterAddress", ""))


def in_sync(server: Serving) -> set[str]:
    return {one["brokerAddress"] for one in broker_set(server).get("inSyncReplicas", ()) if one["alive"]}


def may_send(member: ApacheMember) -> bool:
    try:
        with Client(member.broker) as client:
            client.create_topic(TOPIC, 1)
            client.send(TOPIC, 0, b"are you master?")
    except (OSError, Refused):
        return False
    return True


def test_apaches_brokers_change_roles_as_neves_controller_says(tmp_path: Path) -> None:
    with controller(tmp_path / "controller") as server, name_server(tmp_path / "namesrv") as names:
        near = {"namesrv": names.namesrv, "controller": server.ready["controller"]}
        a, b = (ApacheMember(tmp_path / name, **near) for name in ("a", "b"))
        with a, b:
            wait_until(lambda: in_sync(server) == {a.broker, b.broker}, "both in sync", _CHANGE_S)
            first, other = (a, b) if master_of(server) == a.broker else (b, a)
            epoch = broker_set(server)["masterEpoch"]
            wait_until(lambda: may_send(first), "a master that takes messages", _CHANGE_S)
            with Client(first.broker) as client:
                for number in range(50):
                    client.send(TOPIC, 0, b"%d" % number)

            first.kill()
            wait_until(lambda: master_of(server) == other.broker, "the other one is master", _CHANGE_S)
            assert broker_set(server)["masterEpoch"] == epoch + 1
            wait_until(lambda: may_send(other), "the new master takes messages", _CHANGE_S)
            with Client(other.broker) as client:
                bodies = [bytes(record.body) for record in client.read(TOPIC, 0, *client.bounds(TOPIC, 0))]
            assert [body for body in bodies if body.isdigit()] == [b"%d" % number for number in range(50)]

            first.start()
            wait_until(lambda: in_sync(server) == {a.broker, b.broker}, "it comes back in sync", _CHANGE_S)
            assert master_of(server) == other.broker
            assert not may_send(first)
        assert "Traceback" not in server.log()
