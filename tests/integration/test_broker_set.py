"""A broker set whose members are processes: if the master is killed, another serves and no message is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from bench.wire import Client, Refused
from tests.integration.set_reads import bodies
from tests.kit.clock.waiting import wait_until
from tests.kit.server.broker_set import TOPIC, BrokerSet, create_topic, producing, store_of, takes
from tests.kit.server.neve import Serving

_CHANGE_S = 60.0
FLUSH_SLAVE_TIMEOUT = 12


def log_of(member: Serving) -> bytes:
    """Return the concatenated commit log files without the zeros of preallocated space."""
    files = sorted((store_of(member) / "commitlog").iterdir())
    return b"".join(file.read_bytes() for file in files if file.name.isdigit()).rstrip(b"\0")


def test_acknowledged_messages_survive_a_kill_of_the_master(tmp_path: Path) -> None:
    with BrokerSet(tmp_path, replication="sync") as brokers:
        create_topic(brokers)
        killed = list[Serving]()
        with producing(brokers) as producer:
            for _ in range(3):
                producer.has_sent(200)
                former, epoch = brokers.master, brokers.epoch
                former.kill()
                killed.append(former)
                assert brokers.master_after(former) is not former
                assert brokers.epoch == epoch + 1
                producer.has_sent(200)
                former.start()
                brokers.wait_until_in_sync(*brokers.members)
        found = [int(body) for body in bodies(brokers.master)]
        assert len(found) == len(set(found)), "each was sent once"
        assert found == sorted(found), "in the order in which they were sent"
        assert set(producer.acknowledged) <= set(found)
        assert all("Traceback" not in member.log() for member in brokers.members)
        master, slaves = brokers.master, brokers.slaves
        for member in slaves:
            member.stop()
        master.stop()
        assert log_of(slaves[0]) == log_of(slaves[1]) == log_of(master)


def test_unreplicated_message_is_neither_acknowledged_nor_ever_visible(tmp_path: Path) -> None:
    with BrokerSet(tmp_path, replication="sync", flushDiskType="SYNC_FLUSH") as brokers:
        create_topic(brokers)
        former, slaves = brokers.master, brokers.slaves
        assert takes(former, b"with all")
        for slave in slaves:
            slave.kill()
        with Client(former.broker) as client, pytest.raises(Refused, match=f"code {FLUSH_SLAVE_TIMEOUT},"):
            client.send(TOPIC, 0, b"alone")
        assert bodies(former) == [b"with all"], "readers see what is confirmed"
        former.kill()
        for slave in slaves:
            slave.start()
        master = brokers.master_after(former)
        wait_until(lambda: takes(master, b"after"), "the new master takes messages", _CHANGE_S)
        former.start()
        brokers.wait_until_in_sync(*brokers.members)
        assert b"alone" not in bodies(master)
        assert bodies(master)[0] == b"with all"
        (diverged,) = (store_of(former) / "diverged").iterdir()
        assert b"alone" in diverged.read_bytes(), "what it had alone is kept"


def test_sync_set_rejects_sends_until_a_second_member_is_in_sync(tmp_path: Path) -> None:
    with BrokerSet(tmp_path, replication="sync", members=2) as brokers:
        create_topic(brokers)
        (slave,) = brokers.slaves
        assert takes(brokers.master)
        slave.kill()
        assert not takes(brokers.master)
        slave.start()
        brokers.wait_until_in_sync(*brokers.members)
        wait_until(lambda: takes(brokers.master), "both have it again", _CHANGE_S)


def test_set_keeps_its_messages_after_all_members_stop(tmp_path: Path) -> None:
    with BrokerSet(tmp_path, replication="sync") as brokers:
        create_topic(brokers)
        assert takes(brokers.master, b"before")
        epoch = brokers.epoch
        for member in brokers.members:
            member.kill()
        for member in brokers.members:
            member.start()
        wait_until(lambda: any(takes(member, b"after") for member in brokers.members), "one takes messages", _CHANGE_S)
        assert brokers.epoch > epoch
        assert bodies(brokers.master)[0] == b"before"


def test_frozen_master_follows_on_waking_and_acknowledges_nothing(tmp_path: Path) -> None:
    """The old master was frozen past its timeout, and learns of the new master from messages, not from its clock."""
    with BrokerSet(tmp_path, replication="sync", controllerHeartBeatTimeoutMills="2s") as brokers:
        create_topic(brokers)
        with producing(brokers) as producer:
            for _ in range(2):
                producer.has_sent(200)
                former = brokers.master
                former.signal(signal.SIGSTOP)
                try:
                    assert brokers.master_after(former) is not former
                    producer.has_sent(200)
                finally:
                    former.signal(signal.SIGCONT)
                brokers.wait_until_in_sync(*brokers.members)
        found = [int(body) for body in bodies(brokers.master) if body.isdigit()]
        assert len(found) == len(set(found))
        assert found == sorted(found)
        assert set(producer.acknowledged) <= set(found)
