"""`neve doctor -c broker.conf` of a set member: checks of the controllers and of the running set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import override

from bench.wire import Client
from broker.doctor import checks
from infra.clock import SystemClock
from neve.cli.checks import FAIL, OK, WARN, Check
from tests.kit.clock.waiting import wait_until
from tests.kit.server.broker_set import BrokerSet
from tests.kit.server.members import NAME
from tests.kit.server.processes import free_ports

_HOUR_MS = 3_600_000


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[BrokerSet]:
    with BrokerSet(tmp_path / "set", replication="sync") as found:
        yield found


class Ahead(SystemClock):
    """A clock that runs ahead of this one at the same pace."""

    def __init__(self, by_ms: int) -> None:
        self._by_ms = by_ms

    @override
    def now_ms(self) -> int:
        return super().now_ms() + self._by_ms


def looked(brokers: BrokerSet, home: Path, *, clock_ms: int = 0, **keys: object) -> dict[str, list[Check]]:
    """Return the checks of a fourth member's configuration file by name."""
    port, ha_port = free_ports(2)
    fourth = {
        "storePathRootDir": home / "fourth", "listenPort": port, "haListenPort": ha_port, "adminPort": -1,
        "brokerIP1": "127.0.0.1", "bindAddress": "127.0.0.1", "namesrvAddr": brokers.name_server.namesrv,
        "controllerAddr": brokers.controller.ready["controller"], "replication": "sync",
        "mappedFileSizeCommitLog": "1m", **keys,
    }  # fmt: skip
    path = home / "broker.conf"
    path.write_text("".join(f"{key}={value}\n" for key, value in fourth.items()))
    found: dict[str, list[Check]] = {}
    for check in checks(path, (), Ahead(clock_ms)):
        found.setdefault(check.check, []).append(check)
    return found


def the(found: dict[str, list[Check]], name: str) -> Check:
    (check,) = found[name]
    return check


def test_doctor_reports_conflicts_of_a_joining_member(brokers: BrokerSet, tmp_path: Path) -> None:
    well = looked(brokers, tmp_path)
    assert the(well, "controller").state == OK
    assert the(well, "controllers").state == WARN, "only one"
    assert the(well, "broker set").state == OK
    assert "3 of 3 members live" in the(well, "broker set").found
    assert the(well, "machines").state == WARN
    assert "all members are on 127.0.0.1" in the(well, "machines").found
    assert [the(well, f"member {number}").state for number in (1, 2, 3)] == [OK, OK, OK]

    other = looked(brokers, tmp_path, mappedFileSizeCommitLog="2m", replication="async")
    for number in (1, 2, 3):
        told = {check.found.partition(" ")[0]: check.state for check in other[f"member {number}"]}
        assert told == {"mappedFileSizeCommitLog": FAIL, "replication": WARN}

    late = looked(brokers, tmp_path, clock_ms=_HOUR_MS)
    for number in (1, 2, 3):
        assert the(late, f"member {number}").state == WARN
        assert "s apart" in the(late, f"member {number}").found

    elsewhere = looked(brokers, tmp_path, controllerAddr="127.0.0.1:1")
    assert the(elsewhere, "controller").state == FAIL
    assert the(elsewhere, "broker set").state == FAIL
    both = looked(brokers, tmp_path, controllerAddr=f"127.0.0.1:1;{brokers.controller.ready['controller']}")
    assert [check.state for check in both["controller"]] == [WARN, OK]
    new = looked(brokers, tmp_path, brokerName="broker-b")
    assert "first member" in the(new, "broker set").found
    assert "machines" not in new
    with Client(brokers.controller.ready["controller"]) as client:  # The first member of another set.
        applied = {
            "clusterName": "c",
            "brokerName": "broker-c",
            "appliedBrokerId": 1,
            "registerCheckCode": "127.0.0.1:1;1",
        }
        client.ask(1013, applied)
    second = looked(brokers, tmp_path, brokerName="broker-c")
    assert "all members are on 127.0.0.1" in the(second, "machines").found, "as soon as there are two"
    assert "machines" not in looked(brokers, tmp_path, brokerName="broker-c", brokerIP1="127.0.0.2")


def test_doctor_reports_a_set_without_spare_members_or_master(brokers: BrokerSet, tmp_path: Path) -> None:
    master, (one, other) = brokers.master, brokers.slaves
    one.stop()
    brokers.wait_until_in_sync(master, other)
    found = looked(brokers, tmp_path)
    assert the(found, "broker set").state == WARN
    assert "no other member may fail" in the(found, "broker set").found
    other.stop()
    wait_until(lambda: len(brokers.in_sync()) == 1, "one is left", 60)
    found = looked(brokers, tmp_path)
    assert the(found, "broker set").state == FAIL
    assert "nothing is acknowledged" in the(found, "broker set").found
    master.stop()
    wait_until(lambda: not brokers.in_sync(), "nobody is left", 60)
    found = looked(brokers, tmp_path)
    assert the(found, "broker set").state == FAIL
    assert f"{NAME} has no living master" in the(found, "broker set").found
