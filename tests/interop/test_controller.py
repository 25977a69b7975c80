"""`neve controller` with brokers and the admin tool of Apache RocketMQ 5.3.3."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.wire import Client
from tests.interop.controlled_set import (
    ALTER,
    ELECT,
    HEARTBEAT,
    METADATA,
    REGISTER,
    REPLICA_INFO,
    SYNC_STATE_DATA,
    TOPIC,
    broker_set,
    controller,
    in_sync,
    may_send,
    mqadmin_says,
    name_server,
)
from tests.kit.clock.waiting import wait_until
from tests.kit.server import etcd
from tests.kit.server.apache import ApacheController, ApacheMember
from tests.kit.server.etcd import register_url
from tests.kit.server.neve import Serving

pytestmark = pytest.mark.servers

UPDATE_CONFIG, CLEAN, NEXT_ID, APPLY = 1009, 1011, 1012, 1013
_CHANGE_S = 60.0  # A role change takes a second or two, and the machine is shared.


def master_of(server: Serving) -> str:
    return str(broker_set(server).get("masterAddress", ""))


def alive(server: Serving) -> set[str]:
    """Return the addresses of the living members."""
    found = broker_set(server)
    everybody = [*found.get("inSyncReplicas", ()), *found.get("notInSyncReplicas", ())]
    return {one["brokerAddress"] for one in everybody if one["alive"]}


def test_apache_brokers_change_roles_as_the_controller_orders(tmp_path: Path) -> None:
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

            server.kill()  # The brokers keep working without it, and the register is intact afterwards.
            assert may_send(other)
            server.start()
            first.start()
            wait_until(lambda: in_sync(server) == {a.broker, b.broker}, "it comes back in sync", _CHANGE_S)
            assert (master_of(server), broker_set(server)["masterEpoch"]) == (other.broker, epoch + 1)
            assert not may_send(first)
        assert "Traceback" not in server.log()


def test_apache_set_survives_a_killed_controller_and_a_killed_master(tmp_path: Path) -> None:
    with ExitStack() as stack:
        start = stack.enter_context
        shared = register_url(start(etcd.node(tmp_path / "etcd")))
        one, other = (start(controller(tmp_path / name, shared)) for name in ("one", "other"))
        addresses = ";".join(server.ready["controller"] for server in (one, other))
        names = start(name_server(tmp_path / "namesrv"))
        a, b = (
            start(ApacheMember(tmp_path / name, namesrv=names.namesrv, controller=addresses)) for name in ("a", "b")
        )
        # Each controller hears the brokers, or learns of them from the other.
        wait_until(lambda: in_sync(one) == in_sync(other) == {a.broker, b.broker}, "both in sync", _CHANGE_S)
        first, second = (a, b) if master_of(one) == a.broker else (b, a)
        epoch = broker_set(one)["masterEpoch"]
        wait_until(lambda: may_send(first), "a master that takes messages", _CHANGE_S)
        one.kill()
        assert may_send(first)
        first.kill()
        wait_until(lambda: master_of(other) == second.broker, "the other one is master", _CHANGE_S)
        assert broker_set(other)["masterEpoch"] == epoch + 1
        wait_until(lambda: may_send(second), "the new master takes messages", _CHANGE_S)
        first.start()
        wait_until(lambda: in_sync(other) == {a.broker, b.broker}, "it comes back in sync", _CHANGE_S)
        assert "Traceback" not in other.log()


def test_lost_register_requires_a_forced_election_for_an_existing_log(tmp_path: Path) -> None:
    with controller(tmp_path / "controller") as server, name_server(tmp_path / "namesrv") as names:
        broker = ApacheMember(tmp_path / "a", namesrv=names.namesrv, controller=server.ready["controller"])
        with broker:
            wait_until(lambda: may_send(broker), "a master that takes messages", _CHANGE_S)
            broker.kill()
            server.stop()
            (tmp_path / "controller" / "register" / "register.json").unlink()
            server.start()
            # As docs/ha/controllers.md describes: the broker's id is removed, and it registers as a new broker.
            for identity in (tmp_path / "a" / "store").glob("brokerIdentity*"):
                identity.unlink()
            broker.start()
            wait_until(lambda: "has to designate" in refusal(server), "the controller refuses by itself", _CHANGE_S)
            assert broker_set(server).get("masterBrokerId") is None
            assert not may_send(broker)
            broker.kill()  # A frozen set accepts starting brokers; only a living broker can be designated.
            broker.start()
            wait_until(lambda: alive(server) == {broker.broker}, "it is heard again", _CHANGE_S)
            with Client(server.ready["controller"]) as client:
                own = {"clusterName": "DefaultCluster", "brokerName": "stock", "brokerId": 1}
                client.ask(ELECT, {**own, "designateElect": "true"})
            wait_until(lambda: may_send(broker), "it takes messages again", _CHANGE_S)
            with Client(broker.broker) as client:
                bodies = [bytes(record.body) for record in client.read(TOPIC, 0, *client.bounds(TOPIC, 0))]
            assert bodies[0] == b"are you master?"
            assert len(bodies) >= 2


def refusal(server: Serving) -> str:
    """Return the controller's answer when the first broker asks to be elected."""
    with Client(server.ready["controller"]) as client:
        own = {"clusterName": "DefaultCluster", "brokerName": "stock", "brokerId": 1}
        return client.invoke(ELECT, {**own, "designateElect": "false"}).remark or ""


@contextmanager
def members(server: Serving, count: int, name: str = "b") -> Iterator[list[Client]]:
    """Connect brokers that send what a controller expects, until their connections are closed."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(server.ready["controller"])) for _ in range(count)]
        for broker_id, client in enumerate(clients, 1):
            own = {"clusterName": "c", "brokerName": name, "brokerId": broker_id}
            address = f"127.0.0.1:{broker_id}"
            client.ask(APPLY, {**own, "appliedBrokerId": broker_id, "registerCheckCode": f"{address};1"})
            client.ask(REGISTER, {**own, "brokerAddress": address})
            beat = {"brokerAddr": address, "epoch": 0, "maxOffset": 0, "heartbeatTimeoutMills": 600_000}
            client.ask(HEARTBEAT, {**own, **beat})
        first = {"clusterName": "c", "brokerName": name, "brokerId": 1}
        clients[0].ask(ELECT, {**first, "designateElect": "false"})
        altered = {"syncStateSet": list(range(1, count + 1)), "syncStateSetEpoch": 1}
        clients[0].ask(ALTER, {"brokerName": name, "masterBrokerId": 1, "masterEpoch": 1}, json.dumps(altered).encode())
        yield clients


def test_mqadmin_controller_commands_work(tmp_path: Path) -> None:
    with controller(tmp_path / "controller") as server, members(server, 2):
        to = f"-a {server.ready['controller']}"
        metadata, shown, elected, lacking, living, cleaned, shrunk, updated, refused, settings = mqadmin_says(
            tmp_path / "tool",
            f"getControllerMetaData {to}",
            f"getSyncStateSet {to} -b b",
            f"electMaster {to} -b 2 -bn b -c c",
            f"electMaster {to} -b 1 -bn b -c c",
            f"cleanBrokerMetadata {to} -bn b -c c -b 1",
            f"cleanBrokerMetadata {to} -bn b -c c -b 1 -l",
            f"getSyncStateSet {to} -b b",
            f"updateControllerConfig {to} -k enableElectUncleanMaster -v true",
            f"updateControllerConfig {to} -k controllerStorePath -v /",
            f"getControllerConfig {to}",
        )
        assert f"#ControllerLeaderAddress {server.ready['controller']}" in metadata
        assert f"#Peer: n0:{server.ready['controller']}" in metadata
        for line in ("#MasterBrokerId 1", "#MasterAddr 127.0.0.1:1", "#MasterEpoch 1", "#SyncStateSetEpoch 2",
                     "#SyncStateSetNums 2"):  # fmt: skip
            assert line in shown
        assert "brokerId=2, brokerAddress='127.0.0.1:2', alive=true" in shown
        for line in ("#BrokerName b", "#BrokerMasterAddr 127.0.0.1:2", "#MasterEpoch 2", "#SyncStateSetEpoch 3"):
            assert line in elected
        assert "may lack acknowledged messages" in lacking
        assert "is still alive, clean up failure" in living
        assert "success" in cleaned
        assert "brokerId=2, brokerAddress='127.0.0.1:2', alive=true" in shrunk
        assert "brokerId=1" not in shrunk
        assert "success" in updated
        assert "CODE: 16" in refused
        assert re.search(r"enableElectUncleanMaster +=  true", settings)
        assert "Traceback" not in server.log()


class Interview:
    """Requests to a controller, sent by two brokers that act like Apache's."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.answers: list[tuple[str, int, dict[str, str], bytes]] = []

    def ask(self, client: Client, code: int, body: bytes = b"", **ext: object) -> None:
        answer = client.invoke(code, ext, body)
        question = f"{code} {json.dumps(ext)} {body.decode()}"
        ext_told = {name: value.replace(self._address, "here") for name, value in answer.extFields.items()}
        self.answers.append((question, answer.code, ext_told, answer.body))

    def alter(self, client: Client, ids: list[int], based_on: int, master: int = 1, epoch: int = 1) -> None:
        body = json.dumps({"syncStateSet": ids, "syncStateSetEpoch": based_on}).encode()
        self.ask(client, ALTER, body, brokerName="b", masterBrokerId=master, masterEpoch=epoch)

    def hold(self) -> None:
        with Client(self._address) as a:
            with Client(self._address) as b:
                self._both(a, b)
            wait_until(lambda: b'"alive":false' in a.invoke(SYNC_STATE_DATA, {}, b'["b"]').body, "b is dead", _CHANGE_S)
            self.ask(a, ELECT, clusterName="c", brokerName="b", brokerId=1, designateElect="false")

    def _both(self, a: Client, b: Client) -> None:
        own: dict[str, Any] = {"clusterName": "c", "brokerName": "b"}
        self.ask(a, METADATA)
        self.ask(a, REPLICA_INFO, brokerName="b")
        self.ask(a, REGISTER, **own, brokerId=1, brokerAddress="h1:1")
        self.ask(a, ELECT, **own, brokerId=1, designateElect="false")
        self.ask(a, APPLY, **own, appliedBrokerId=2, registerCheckCode="h1:1;1")
        for broker_id, client in ((1, a), (2, b)):
            address = f"h{broker_id}:1"
            self.ask(client, NEXT_ID, **own)
            self.ask(client, APPLY, **own, appliedBrokerId=broker_id, registerCheckCode=f"{address};1")
            self.ask(client, REGISTER, **own, brokerId=broker_id, brokerAddress=address)
            beat: dict[str, Any] = {"epoch": 0, "maxOffset": 0, "confirmOffset": 0, "heartbeatTimeoutMills": 600_000}
            self.ask(client, HEARTBEAT, **own, **beat, brokerId=broker_id, brokerAddr=address)
        self.ask(a, APPLY, **own, appliedBrokerId=2, registerCheckCode="h9:1;1")
        self.ask(a, APPLY, **own, appliedBrokerId=2, registerCheckCode="h2:1;1")
        self.ask(a, HEARTBEAT, **own)
        self.ask(a, REPLICA_INFO, brokerName="b")
        self.ask(a, SYNC_STATE_DATA, b'["b"]')
        self.ask(a, ELECT, **own, brokerId=1, designateElect="false")
        self.ask(b, ELECT, **own, brokerId=2, designateElect="false")
        self.ask(a, REGISTER, **own, brokerId=2, brokerAddress="h2:1")
        self.ask(a, REPLICA_INFO, brokerName="b")
        self.alter(a, [1], 1)
        self.alter(a, [1, 2], 1, master=2)
        self.alter(a, [1, 2], 1, epoch=2)
        self.alter(a, [1, 2], 7)
        self.alter(a, [1, 7], 1)
        self.alter(a, [2], 1)
        self.alter(a, [1, 2], 1)
        for names in (b'["b","unknown"]', b"[]", b""):
            self.ask(a, SYNC_STATE_DATA, names)
        for broker_id in (2, 9, 1):
            self.ask(a, ELECT, **own, brokerId=broker_id, designateElect="true")
        self.ask(a, CLEAN, **own)
        self.ask(a, CLEAN, **own, brokerControllerIdsToClean="x")
        self.ask(a, CLEAN, **own, brokerControllerIdsToClean="1")
        self.ask(a, CLEAN, clusterName="c", brokerName="unknown", isCleanLivingBroker="true")
        self.ask(a, UPDATE_CONFIG, b"notifyBrokerRoleChanged=false\n")
        self.ask(a, UPDATE_CONFIG, b"configStorePath=/\n")


def test_controller_answers_like_apaches_controller(tmp_path: Path) -> None:
    with ApacheController(tmp_path / "apache") as apache, controller(tmp_path / "neve") as neve:
        theirs, ours = Interview(apache.address), Interview(neve.ready["controller"])
        theirs.hold()
        ours.hold()
    assert len(theirs.answers) > 40
    # Neve's answers have additional fields for neve's own brokers.
    assert [fields.pop("knowsIncarnations", None) for _, _, fields, _ in ours.answers] == [
        "true",
        *[None] * (len(ours.answers) - 1),
    ]
    counted = [question[:4] for question, _, fields, _ in ours.answers if fields.pop("members", None) is not None]
    assert counted == [str(REPLICA_INFO)] * 2, "of the three that ask, the first asks before there is a set"
    for stock, own in zip(theirs.answers, ours.answers, strict=True):
        assert own == stock
