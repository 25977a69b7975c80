"""Brokers, two controllers and an etcd as processes: each is stopped in turn, and the set must still work."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.wire import SUCCESS, Client
from tests.kit.clock.waiting import wait_until
from tests.kit.server import etcd as servers
from tests.kit.server.broker_set import BrokerSet, create_topic, takes
from tests.kit.server.etcd import Node, register_url
from tests.kit.server.members import NAME
from tests.kit.server.neve import Serving

pytestmark = pytest.mark.servers
ELECT_MASTER = 1002
SILENT_S = 4  # The time after which a silent broker counts as dead.
_CHANGE_S = 60.0


@contextmanager
def with_etcd(directory: Path) -> Iterator[tuple[Node, BrokerSet]]:
    """Run three members and two controllers, with the topic created."""
    with servers.node(directory / "etcd") as etcd:
        shared = register_url(etcd)
        settings = {"controllerHeartBeatTimeoutMills": SILENT_S * 1000}
        with BrokerSet(directory, replication="sync", controllers=2, register_url=shared, settings=settings) as brokers:
            create_topic(brokers)
            yield etcd, brokers


def is_frozen(brokers: BrokerSet) -> bool:
    # The broker that finds out reports it.
    return any("is frozen" in controller.log() for controller in brokers.controllers)


def designate(brokers: BrokerSet, broker_id: int) -> None:
    """Designate a master once the controller has the broker's state.

    The broker's latest state arrives with its next heartbeat. Until then the designation is refused.
    """
    not_yet = (f"broker {broker_id} is behind", f"neither broker {broker_id} nor any other has reported them yet")
    fields = {"clusterName": "DefaultCluster", "brokerName": NAME, "brokerId": broker_id, "designateElect": "true"}

    def is_elected() -> bool:
        answer = client.invoke(ELECT_MASTER, fields)
        assert answer.code == SUCCESS or any(why in (answer.remark or "") for why in not_yet), answer.remark
        return answer.code == SUCCESS

    with Client(brokers.controller.ready["controller"]) as client:
        wait_until(is_elected, "the designated broker is elected", _CHANGE_S)


def test_set_survives_the_loss_of_a_controller_or_of_etcd(tmp_path: Path) -> None:
    with with_etcd(tmp_path) as (etcd, brokers):
        assert takes(brokers.master)
        one, other = brokers.controllers

        # Kill a controller and then the master: the other controller elects.
        one.kill()
        brokers.controller = other
        former, epoch = brokers.master, brokers.epoch
        former.kill()
        takes_after(brokers, former)
        assert brokers.epoch == epoch + 1
        one.start()
        former.start()
        brokers.wait_until_in_sync(*brokers.members)

        # Stop etcd: in-sync members keep working, and no member counts as dead when etcd returns.
        epoch, master, (slave, _) = brokers.epoch, brokers.master, brokers.slaves
        etcd.kill()
        gone_s = time.monotonic()
        wait_until(lambda: not takes(master) or time.monotonic() > gone_s + 2 * SILENT_S, "it is long away", _CHANGE_S)
        assert takes(master)
        etcd.start()
        wait_until(lambda: brokers.epoch == epoch, "what it holds is told again", _CHANGE_S)
        slave.signal(signal.SIGSTOP)
        wait_until(lambda: slave.broker not in known(brokers), "scans go on: one that is silent is seen", _CHANGE_S)
        slave.signal(signal.SIGCONT)
        brokers.wait_until_in_sync(*brokers.members)
        assert brokers.epoch == epoch
        assert brokers.master is master


def takes_after(brokers: BrokerSet, former: Serving) -> None:
    master = brokers.master_after(former)
    wait_until(lambda: takes(master), "the new master takes messages", _CHANGE_S)


def kept_before_an_election(brokers: BrokerSet, etcd: Node, backup: Path) -> None:
    etcd.kept(backup)
    etcd.start()
    former = brokers.master
    former.kill()
    takes_after(brokers, former)
    former.start()
    brokers.wait_until_in_sync(*brokers.members)


def test_restored_etcd_elects_no_master_until_an_operator_designates_one(tmp_path: Path) -> None:
    with with_etcd(tmp_path) as (etcd, brokers):
        kept_before_an_election(brokers, etcd, tmp_path / "backup")
        master, epoch = brokers.master, brokers.epoch
        etcd.restored(tmp_path / "backup")
        etcd.start()
        wait_until(lambda: is_frozen(brokers), "the set is frozen", _CHANGE_S)
        assert takes(master), "the brokers go on as they are"
        designate(brokers, id_of(brokers, master))
        wait_until(lambda: brokers.epoch > epoch, "an epoch above all that was", _CHANGE_S)
        brokers.wait_until_in_sync(*brokers.members)
        wait_until(lambda: takes(master), "it takes messages", _CHANGE_S)


@pytest.mark.parametrize("restarts", [False, True])
def test_empty_broker_is_not_elected_after_etcd_lost_its_data(tmp_path: Path, restarts: bool) -> None:
    """This holds for controllers that remember the set and for controllers that learn of it from its brokers."""
    with with_etcd(tmp_path) as (etcd, brokers):
        master, epoch = brokers.master, brokers.epoch
        if restarts:
            for controller in brokers.controllers:
                controller.kill()
        etcd.wiped()
        etcd.start()
        if restarts:
            for controller in brokers.controllers:
                controller.start()
        wait_until(lambda: len(known(brokers)) == len(brokers.members), "all are members again", _CHANGE_S)
        with brokers.newcomer() as empty:
            wait_until(lambda: empty.broker in known(brokers), "the empty one as well", _CHANGE_S)
            assert brokers.told().get("masterBrokerId") is None
            assert takes(master), "the brokers go on as they are"
            designate(brokers, id_of(brokers, master))
            wait_until(lambda: brokers.epoch > epoch, "an epoch above all that was", _CHANGE_S)
            brokers.wait_until_in_sync(*brokers.members, empty)
            wait_until(lambda: takes(master), "it takes messages", _CHANGE_S)


def known(brokers: BrokerSet) -> dict[str, int]:
    """Return the ids of the living members by address."""
    told = brokers.told()
    everybody = (*told.get("inSyncReplicas", ()), *told.get("notInSyncReplicas", ()))
    return {one["brokerAddress"]: int(one["brokerId"]) for one in everybody if one["alive"]}


def id_of(brokers: BrokerSet, member: Serving) -> int:
    wait_until(lambda: member.broker in known(brokers), "it is a living member", _CHANGE_S)
    return known(brokers)[member.broker]
