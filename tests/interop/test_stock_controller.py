"""Apache's own controllers elect the masters of a neve broker set, and of a set with an Apache broker in it.

A mixed set is elected by neve's controller, by Apache's controllers, and by Apache's in a name server.
"""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path

import pytest

from bench.wire import Client, Refused
from tests.interop.controlled_set import mqadmin_says
from tests.interop.promoted import Half, end, offsets_at, prepare, properties
from tests.kit.clock.waiting import wait_until
from tests.kit.server.members import NAME
from tests.kit.server.mixed_set import Broker, MixedSet, Under, assert_same_logs, end_of
from tests.kit.server.neve import NEVE

pytestmark = pytest.mark.servers
TOPIC, GROUP = "orders", "billing"
_UPDATE_OFFSET, _UPDATE_GROUP, _TOPIC_CONFIG = 15, 200, 351
_CHANGE_S = 90.0


def takes(member: Broker, body: bytes) -> bool:
    try:
        with Client(member.broker, timeout=10) as client:
            client.send(TOPIC, 0, body)
    except (OSError, Refused):
        return False
    return True


def bodies(member: Broker) -> list[bytes]:
    with Client(member.broker) as client:
        return [bytes(record.body) for record in client.read(TOPIC, 0, *client.bounds(TOPIC, 0))]


def create_topic(brokers: MixedSet) -> None:
    with Client(brokers.master.broker) as client:
        client.create_topic(TOPIC, 1)


def elect(brokers: MixedSet, member: Broker) -> None:
    brokers.elect(member)
    wait_until(lambda: brokers.master is member, "the designated is master", _CHANGE_S)


def commit(member: Broker, offset: int) -> None:
    with Client(member.broker) as client:
        client.ask(_UPDATE_OFFSET, {"consumerGroup": GROUP, "topic": TOPIC, "queueId": 0, "commitOffset": offset})


def committed(member: Broker) -> int | None:
    return offsets_at(member.broker).get(f"{TOPIC}@{GROUP}", {}).get(0)


def saved_position(member: Broker, offset: int) -> bool:
    """Return whether the broker has a role and this committed offset of the group."""
    try:
        return committed(member) == offset
    except Refused:
        return False


def queues_of(member: Broker, topic: str) -> int | None:
    with Client(member.broker) as client:
        answer = client.invoke(_TOPIC_CONFIG, {"topic": topic})
    return int(json.loads(answer.body)["writeQueueNums"]) if answer.code == 0 else None


class NumberedSends:
    """The acknowledged messages, in order."""

    def __init__(self, brokers: MixedSet) -> None:
        self._brokers = brokers
        self.acknowledged: list[bytes] = []
        self._tried = 0

    def send_more(self, count: int) -> None:
        """Send to the current master. If it rejects a send because a slave has just reconnected, send another one."""
        master = self._brokers.master
        for _ in range(count):
            wait_until(partial(self._send, master), "the master takes messages", _CHANGE_S)

    def _send(self, master: Broker) -> bool:
        body = self._next()
        if takes(master, body):
            self.acknowledged.append(body)
            return True
        return False

    def _next(self) -> bytes:
        self._tried += 1
        return b"%d" % self._tried

    def assert_kept(self) -> None:
        """Assert that acknowledged messages are stored in order; unacknowledged ones may be stored as well."""
        found = bodies(self._brokers.master)
        assert len(set(found)) == len(found)
        known = set(self.acknowledged)
        assert [body for body in found if body in known] == self.acknowledged


def test_neve_set_fails_over_under_apaches_controller(tmp_path: Path) -> None:
    with MixedSet(tmp_path, neves=2) as brokers:
        create_topic(brokers)
        sent, first = NumberedSends(brokers), brokers.master
        sent.send_more(50)
        first.kill()
        second = brokers.master_after(first)
        assert not takes(second, b"alone"), "two have to have it"
        first.start()
        brokers.wait_until_in_sync(*brokers.members)
        sent.send_more(50)
        elect(brokers, first)
        brokers.wait_until_in_sync(*brokers.members)
        sent.send_more(50)
        sent.assert_kept()
        assert_same_logs(brokers.master, *brokers.members)
        assert brokers.told()["masterEpoch"] == 3
        for member in brokers.members:
            assert "Traceback" not in member.log()


def test_set_survives_a_killed_leader_of_apaches_controllers(
    tmp_path: Path,
) -> None:
    with MixedSet(tmp_path, neves=2, controllers=3) as brokers:
        create_topic(brokers)
        sent, first = NumberedSends(brokers), brokers.master
        sent.send_more(20)
        leader = brokers.leader
        leader.kill()
        sent.send_more(20)
        wait_until(lambda: any(one.leads() for one in brokers.controllers if one is not leader), "a leader", _CHANGE_S)
        first.kill()
        brokers.master_after(first)
        first.start()
        brokers.wait_until_in_sync(*brokers.members)
        sent.send_more(20)
        sent.assert_kept()
        assert_same_logs(brokers.master, *brokers.members)


def test_set_elects_a_master_after_a_kill_of_all_members_and_controller(tmp_path: Path) -> None:
    """The controller mistakes the restarted master for the running one, and would not hold an election."""
    with MixedSet(tmp_path, neves=2) as brokers:
        create_topic(brokers)
        sent = NumberedSends(brokers)
        sent.send_more(20)
        epoch = brokers.told()["masterEpoch"]
        (controller,) = brokers.controllers
        for server in (controller, *brokers.members):
            server.kill()
        for server in (controller, *brokers.members):
            server.start()
        brokers.wait_until_in_sync(*brokers.members)
        sent.send_more(20)
        assert brokers.told()["masterEpoch"] > epoch
        sent.assert_kept()
        assert_same_logs(brokers.master, *brokers.members)


def test_async_flush_member_is_fenced_under_apaches_controller(tmp_path: Path) -> None:
    with MixedSet(tmp_path, neves=0) as brokers, brokers.neve("neve", flushDiskType="ASYNC_FLUSH") as member:
        wait_until(lambda: "flushDiskType=SYNC_FLUSH" in member.get("/set"), "it says why", _CHANGE_S)
        assert json.loads(member.get("/set"))["role"] == "fenced"
        assert brokers.told() == {}


@pytest.mark.parametrize("under", Under)
def test_mixed_set_switches_between_neve_and_apache_masters_without_loss(tmp_path: Path, under: Under) -> None:
    with MixedSet(tmp_path, neves=2, apaches=1, under=under) as brokers:
        apache, one, other = brokers.members
        assert brokers.master is apache
        create_topic(brokers)
        sent = NumberedSends(brokers)
        sent.send_more(50)
        assert_same_logs(apache, one, other)
        for next_master in (one, apache, other, one, apache):
            elect(brokers, next_master)
            sent.send_more(20)
            brokers.wait_until_in_sync(*brokers.members)
            sent.send_more(20)
            assert_same_logs(brokers.master, *brokers.members)
            sent.assert_kept()


@pytest.mark.parametrize(
    ("under", "controllers"), [(Under.APACHE, 3), (Under.APACHE_IN_NAMESRV, 1), (Under.NEVE, 1)], ids=str
)
def test_mixed_set_keeps_messages_topics_and_groups_in_failovers(
    tmp_path: Path, under: Under, controllers: int
) -> None:
    with MixedSet(tmp_path, neves=2, apaches=1, controllers=controllers, under=under) as brokers:
        apache = brokers.members[0]
        create_topic(brokers)
        sent = NumberedSends(brokers)
        sent.send_more(50)
        with Client(apache.broker) as client:
            client.ask(_UPDATE_GROUP, {}, json.dumps({"groupName": GROUP}).encode())
        commit(apache, 30)
        for member in brokers.members[1:]:
            wait_until(partial(saved_position, member, 30), "the group's position is polled", _CHANGE_S)

        apache.kill()
        second = brokers.master_after(apache)
        sent.send_more(20)
        assert committed(second) == 30
        sent.assert_kept()
        with Client(second.broker) as client:
            client.create_topic("made-at-neves", 3)
        commit(second, 60)
        apache.start()
        brokers.wait_until_in_sync(*brokers.members)
        assert_same_logs(second, *brokers.members)
        wait_until(lambda: queues_of(apache, "made-at-neves") == 3, "Apache's slave has the topic", _CHANGE_S)
        wait_until(partial(saved_position, apache, 60), "and the group's position", _CHANGE_S)

        third = next(member for member in brokers.members[1:] if member is not second)
        third.kill()
        brokers.wait_until_in_sync(apache, second)
        second.kill()
        assert brokers.master_after(second) is apache
        third.start()
        brokers.wait_until_in_sync(apache, third)
        sent.send_more(20)
        sent.assert_kept()
        assert committed(apache) == 60
        assert queues_of(apache, "made-at-neves") == 3
        second.start()
        brokers.wait_until_in_sync(*brokers.members)
        assert_same_logs(apache, second, third)
        for member in (second, third):
            assert "Traceback" not in member.log()


def test_mqadmin_commands_print_the_state_of_a_mixed_set(tmp_path: Path) -> None:
    with MixedSet(tmp_path, neves=2, apaches=1, controllers=3) as brokers:
        apache, one, other = brokers.members
        ids = {member.broker: brokers.id_of(member) for member in brokers.members}
        create_topic(brokers)
        sent = NumberedSends(brokers)
        sent.send_more(10)
        assert_same_logs(apache, one, other)
        follower = next(each for each in brokers.controllers if each is not brokers.leader)
        controller, names = f"-a {follower.address}", f"-n {brokers.name_server.namesrv}"
        metadata, shown, epochs, status = mqadmin_says(
            tmp_path / "tool",
            f"getControllerMetaData {controller}",
            f"getSyncStateSet {controller} -b {NAME}",
            f"getBrokerEpoch {names} -b {NAME}",
            f"haStatus {names} -b {apache.broker}",
        )
        assert f"#ControllerLeaderAddress {brokers.leader.address}" in metadata
        assert f"#MasterAddr {apache.broker}" in shown
        assert "#SyncStateSetNums 3" in shown
        for member in brokers.members:
            assert f"brokerId={ids[member.broker]}, brokerAddress='{member.broker}', alive=true" in shown
        first = end_of(apache)
        assert epochs.count(f"Epoch: EpochEntry{{epoch=1, startOffset=0, endOffset={first}}}") == 3, epochs
        for line in (f"#MasterCommitLogMaxOffset {first}", "#SlaveNum 2", "#InSyncSlaveNum 2"):
            assert line in status

        elected, *_ = mqadmin_says(
            tmp_path / "tool2", f"electMaster {controller} -bn {NAME} -c DefaultCluster -b {ids[one.broker]}"
        )
        assert f"#BrokerMasterAddr {one.broker}" in elected
        assert "#MasterEpoch 2" in elected
        sent.send_more(10)
        brokers.wait_until_in_sync(*brokers.members)
        assert_same_logs(one, apache, other)
        epochs, of_master, of_slave, of_apache = mqadmin_says(
            tmp_path / "tool3",
            f"getBrokerEpoch {names} -b {NAME}",
            f"haStatus {names} -b {one.broker}",
            f"haStatus {names} -b {other.broker}",
            f"haStatus {names} -b {apache.broker}",
        )
        last = end_of(one)
        assert epochs.count(f"#Epoch: EpochEntry{{epoch=1, startOffset=0, endOffset={first}}}") == 3, epochs
        assert epochs.count(f"#Epoch: EpochEntry{{epoch=2, startOffset={first}, endOffset={last}}}") == 3, epochs
        for line in (f"#MasterCommitLogMaxOffset {last}", "#SlaveNum 2", "#InSyncSlaveNum 2"):
            assert line in of_master
        assert f"#MasterAddr {one.broker}" in of_slave
        for told in (of_slave, of_apache):
            assert f"#CommitLogMaxOffset {last}" in told

        apache.kill()
        brokers.wait_until_in_sync(one, other)
        living, cleaned, shown = mqadmin_says(
            tmp_path / "tool4",
            f"cleanBrokerMetadata {controller} -bn {NAME} -c DefaultCluster -b {ids[other.broker]}",
            f"cleanBrokerMetadata {controller} -bn {NAME} -c DefaultCluster -b {ids[apache.broker]}",
            f"getSyncStateSet {controller} -b {NAME}",
        )
        assert "is still alive" in living
        assert "success" in cleaned
        assert apache.broker not in shown
        command = [
            NEVE,
            "broker-set",
            "switchover",
            NAME,
            "--member",
            str(ids[other.broker]),
            "--controller",
            follower.address,
        ]
        subprocess.run([*command, "--namesrv", brokers.name_server.namesrv], check=True, timeout=_CHANGE_S)
        assert brokers.master is other
        sent.send_more(10)
        sent.assert_kept()


def has(member: Broker, wanted: set[bytes]) -> bool:
    return wanted <= set(bodies(member))


def commit_half(member: Broker, half: Half) -> bool:
    try:
        with Client(member.broker) as client:
            return end(client, half, commit=True) == 0
    except OSError:
        return False


def test_pending_messages_survive_a_change_between_neve_and_apache_master(tmp_path: Path) -> None:
    """Delayed messages and open transactions are delivered; messages committed before the change are delivered once."""
    with MixedSet(tmp_path, neves=1, apaches=1) as brokers:
        apache, neve = brokers.members
        create_topic(brokers)
        sent = NumberedSends(brokers)
        for former, following in ((apache, neve), (neve, apache)):
            name = b"apache" if former is apache else b"neve"
            sent.send_more(5)
            with Client(former.broker) as client:
                for number in range(3):
                    client.send(TOPIC, 0, b"delayed at %b %d" % (name, number), properties(DELAY=4))
                early, late = (
                    prepare(client, TOPIC, b"%b at %b" % (when, name), f"K{when!r}{name!r}")
                    for when in (b"early", b"late")
                )
            assert commit_half(former, early)
            # An Apache broker ordered to follow would first wait 90 s for its own check of transactions.
            if former is apache:
                former.kill()
                brokers.master_after(former)
                former.start()
            else:
                elect(brokers, following)
            sent.send_more(5)
            wait_until(partial(commit_half, following, late), "the transaction is committed", _CHANGE_S)
            wanted = {b"delayed at %b %d" % (name, number) for number in range(3)}
            wanted |= {b"early at %b" % name, b"late at %b" % name}
            wait_until(partial(has, following, wanted), "what waited has come", _CHANGE_S)
            brokers.wait_until_in_sync(*brokers.members)
            assert_same_logs(following, former)
        found = bodies(brokers.master)
        assert [found.count(b"early at %b" % name) for name in (b"apache", b"neve")] == [1, 1]
        assert "Traceback" not in neve.log()
