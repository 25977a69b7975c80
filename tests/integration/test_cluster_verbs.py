"""`neve broker-set` on a set of processes: output, effects, and refusals of commands that would lose messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.wire import Client
from tests.integration.set_reads import bodies
from tests.kit.clock.waiting import wait_until
from tests.kit.cluster.command import Command
from tests.kit.server.broker_set import TOPIC, BrokerSet, create_topic, producing, store_of, takes
from tests.kit.server.members import NAME
from tests.kit.server.neve import Serving, settings_as_options

FAILED, NOT_FOUND, CONFLICT, UNREACHABLE = 1, 3, 5, 6
_CHANGE_S = 60.0


@pytest.fixture
def brokers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerSet]:
    with BrokerSet(tmp_path, replication="sync") as found:
        monkeypatch.setenv("NAMESRV_ADDR", found.name_server.namesrv)
        create_topic(found)
        assert takes(found.master, b"first")
        yield found


@pytest.fixture
def neve(capfd: pytest.CaptureFixture[str]) -> Command:
    return Command("broker-set", capfd)


def member(neve: Command, address: str) -> dict[str, Any]:
    return next(row for row in neve.json("show", NAME) if row["address"] == address)


def test_set_is_listed_switched_over_and_its_members_are_replaced(brokers: BrokerSet, neve: Command) -> None:
    master = brokers.master
    (row,) = neve.json("list")
    assert (row["set"], row["address"], row["epoch"]) == (NAME, master.broker, brokers.epoch)
    assert (row["in_sync"], row["living"], row["members"]) == (3, 3, 3)
    rows = neve.json("show", NAME)
    assert [row["role"] for row in rows if row["address"] == master.broker] == ["master"]
    wait_until(lambda: len({row["log_end"] for row in neve.json("show", NAME)}) == 1, "equal", _CHANGE_S)
    assert {(row["member"], row["epoch"], row["start"]) for row in neve.json("epochs", NAME)} == {
        (row["id"], brokers.epoch, 0) for row in rows
    }
    neve("show", "no-such", code=NOT_FOUND)

    own = member(neve, master.broker)["id"]
    neve("switchover", NAME, "--member", str(own), code=CONFLICT)
    neve("remove-member", NAME, str(own), "--yes", code=CONFLICT)
    slave = brokers.slaves[0]
    other = member(neve, slave.broker)["id"]
    neve("switchover", NAME, "--member", str(other))
    assert brokers.master is slave
    assert takes(slave)
    brokers.wait_until_in_sync(*brokers.members)
    neve("elect", NAME, "--member", str(own), "--yes", code=CONFLICT)
    assert "living master" in neve.err

    neve("remove-member", NAME, str(own), "--yes", code=CONFLICT)
    assert "stop it first" in neve.err
    master.stop()
    new = brokers.another(neve("add-member", NAME))
    with new:
        neve("add-member", NAME, "--wait-for", new.broker, "--within", "60")
        neve("replace-member", NAME, str(own), "--by", new.broker, "--yes", "--within", "60")
        assert own not in {row["id"] for row in neve.json("show", NAME)}
        assert member(neve, new.broker)["in_sync"]
        assert takes(slave)


def test_replace_accepts_a_new_member_at_the_same_address(brokers: BrokerSet, neve: Command) -> None:
    slave = brokers.slaves[0]
    old = member(neve, slave.broker)["id"]
    neve("replace-member", NAME, str(old), "--by", slave.broker, "--yes", code=CONFLICT)
    assert "itself, and alive" in neve.err
    slave.stop()
    store_of(slave).rename(store_of(slave).with_name("lost"))
    slave.start()
    neve("add-member", NAME, "--wait-for", slave.broker, "--within", "60")
    wait_until(lambda: {row["id"]: row["alive"] for row in neve.json("show", NAME)}[old] is False, "gone", _CHANGE_S)

    rows = {row["id"]: row for row in neve.json("show", NAME)}
    assert (rows[old]["epoch"], rows[old]["log_end"], rows[old]["behind"]) == (None, None, None)
    (new,) = [row for row in rows.values() if row["address"] == slave.broker and row["id"] != old]
    assert new["log_end"] > 0
    neve("epochs", NAME, code=FAILED)
    assert f"these members do not answer: {old} at {slave.broker}" in neve.err

    neve("replace-member", NAME, str(old), "--by", slave.broker, "--yes", "--within", "60")
    assert {row["id"] for row in neve.json("show", NAME)} == rows.keys() - {old}
    assert takes(brokers.master)


def test_forced_election_restores_a_set_whose_register_was_lost(
    brokers: BrokerSet, neve: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    master, slaves = brokers.master, brokers.slaves
    slaves[0].stop()
    wait_until(lambda: takes(master), "a message that whoever went first has not", _CHANGE_S)
    for one in (slaves[1], master):
        one.stop()
    brokers.controller.stop()
    (brokers.register / "register.json").unlink()
    brokers.controller.start()
    for one in brokers.members:
        one.start()
    wait_until(lambda: len(brokers.told().get("notInSyncReplicas", ())) == 3, "all are members", _CHANGE_S)
    neve("list", code=NOT_FOUND)
    monkeypatch.setenv("NEVE_CONTROLLER", brokers.controller.ready["controller"])
    (row,) = neve.json("list", NAME, code=FAILED)
    assert row["master"] is None
    assert f"no living master: {NAME}" in neve.err
    chosen, behind = member(neve, master.broker), member(neve, slaves[0].broker)
    neve("switchover", NAME, code=CONFLICT)
    neve("elect", NAME, "--member", str(behind["id"]), "--yes", code=CONFLICT)
    assert f"{behind['id']} is behind, designate one of [{chosen['id']}" in neve.err
    neve("elect", NAME, "--member", str(chosen["id"]), "--yes")
    assert brokers.master is master
    brokers.wait_until_in_sync(*brokers.members)
    assert takes(master)


def test_diverged_tail_of_a_member_is_listed_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neve: Command
) -> None:
    with BrokerSet(tmp_path, replication="sync", flushDiskType="SYNC_FLUSH") as brokers:
        with Client(brokers.master.broker) as client:
            client.create_topic(TOPIC, 1)
            client.send(TOPIC, 0, b"with all")
        former, slaves = brokers.master, brokers.slaves
        assert neve.json("diverged", str(store_of(former))) == []
        for slave in slaves:
            slave.kill()
        assert not takes(former, b"again")
        former.kill()
        for slave in slaves:
            slave.start()
        brokers.master_after(former)
        former.start()
        brokers.wait_until_in_sync(*brokers.members)
        (row,) = neve.json("diverged", str(store_of(former)))
        assert row["topics"][TOPIC] == row["messages"] == 1
        (line,) = neve("diverged", str(store_of(former)), "--messages").splitlines()
        assert json.loads(line)["body"] == "again"


def test_commands_fail_without_a_controller(tmp_path: Path, neve: Command) -> None:
    theirs = {"listenPort": 0, "bindAddress": "127.0.0.1", "kvConfigPath": tmp_path / "kv"}
    with Serving(tmp_path / "namesrv", "namesrv", *settings_as_options(theirs)) as names:
        neve("list", "-n", names.namesrv, code=NOT_FOUND)
        assert "name a controller" in neve.err
        neve("list", "-n", names.namesrv, "--controller", "127.0.0.1:1", code=UNREACHABLE)
        assert "no controller answers" in neve.err


def test_switchover_under_load_loses_no_message_with_async_replication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neve: Command
) -> None:
    with BrokerSet(tmp_path, replication="async") as brokers:
        monkeypatch.setenv("NAMESRV_ADDR", brokers.name_server.namesrv)
        with Client(brokers.master.broker) as client:
            client.create_topic(TOPIC, 1)
        with producing(brokers) as producer:
            for _ in range(3):
                producer.has_sent(200)
                former = brokers.master
                neve("switchover", NAME)
                assert brokers.master is not former
                producer.has_sent(200)
                brokers.wait_until_in_sync(*brokers.members)
        found = [int(body) for body in bodies(brokers.master)]
        assert found == sorted(set(found))
        assert set(producer.acknowledged) <= set(found)
