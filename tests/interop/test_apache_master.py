"""A neve slave under an unmodified Apache master without a controller."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.wire import PULL, SEND_V2, Client, pull_ext, send_ext
from broker.ha.frames import HELLO_FORMAT
from neve.record.codec import iter_records
from tests.interop.apache_master import GROUP, TOPIC, apache, read, send, slave_of
from tests.interop.promoted import FILE_SIZE, catches_up, loses, offsets_at
from tests.kit.clock.waiting import wait_until
from tests.kit.server.apache import ApacheServer
from tests.kit.server.broker_set import BrokerSet, create_topic
from tests.kit.server.neve import Serving
from tests.kit.server.processes import accepts

pytestmark = pytest.mark.servers

_CHANGE_S = 60.0
_UPDATE_OFFSET, _UPDATE_GROUP, _DELETE_TOPIC, _TOPIC_CONFIG = 15, 200, 215, 351
_HA_INFO = 906
_SYSTEM_BUSY = 2


def log_of(store: Path) -> bytes:
    """Return the concatenated log files; unwritten space is zero."""
    return b"".join(path.read_bytes() for path in sorted((store / "commitlog").iterdir()))


def assert_same_log(master: ApacheServer, slave: Serving) -> None:
    end = catches_up(master.broker)
    theirs, ours = log_of(master.directory / "store"), log_of(slave.directory / "store")
    assert ours[:end] == theirs[:end]


def commit(master: ApacheServer, offset: int) -> None:
    with Client(master.broker) as client:
        ext = {"consumerGroup": GROUP, "topic": TOPIC, "queueId": 0, "commitOffset": offset}
        client.ask(_UPDATE_OFFSET, ext)


def come_again(master: ApacheServer) -> None:
    """Delete the topic and create it again: its offsets begin at 0."""
    with Client(master.broker) as client:
        client.create_topic("again", 1)
        for number in range(5):
            assert client.send("again", 0, b"old %d" % number) == number
        client.ask(_DELETE_TOPIC, {"topic": "again"})
        client.create_topic("again", 1)
        for number in range(3):
            assert client.send("again", 0, b"new %d" % number) == number


def test_slave_copies_log_tables_and_offsets_and_serves_reads(tmp_path: Path) -> None:
    with apache(tmp_path / "apache") as master, slave_of(master, tmp_path / "neve") as slave:
        with Client(master.broker) as client:
            client.create_topic(TOPIC, 1)
            client.ask(_UPDATE_GROUP, {}, json.dumps({"groupName": GROUP}).encode())
        send(master, 300)
        send(master, 30, 200_000)  # Across the end of a file.
        send(master, 5, properties="DELAY\x011\x02")
        commit(master, 250)
        assert_same_log(master, slave)
        assert catches_up(master.broker) > FILE_SIZE

        wait_until(lambda: offsets_at(slave.broker).get(f"{TOPIC}@{GROUP}") == {0: 250}, "the offsets", _CHANGE_S)
        with Client(slave.broker) as ours, Client(master.broker) as theirs:
            topic = [json.loads(client.ask(_TOPIC_CONFIG, {"topic": TOPIC}).body) for client in (ours, theirs)]
            assert topic[0]["writeQueueNums"] == topic[1]["writeQueueNums"] == 1
            end = theirs.bounds(TOPIC, 0)[1]
        commit(master, 20)
        wait_until(lambda: offsets_at(slave.broker)[f"{TOPIC}@{GROUP}"] == {0: 20}, "a group goes back", _CHANGE_S)

        # More delayed messages may have been delivered.
        copies, originals = read(slave.broker, end)[:end], read(master.broker, end)[:end]
        assert copies == originals
        assert len(copies) == end >= 330

        with Client(slave.broker) as client:  # A slave of an Apache master acknowledges nothing.
            refused = client.invoke(SEND_V2, send_ext(TOPIC, 0), b"m")
            assert refused.code == _SYSTEM_BUSY, refused.remark

        slave.kill()
        send(master, 50)
        slave.start()
        assert_same_log(master, slave)
        send(master, 20)
        assert_same_log(master, slave)

        come_again(master)
        assert_same_log(master, slave)
        with Client(slave.broker) as client:
            wait_until(lambda: client.invoke(_TOPIC_CONFIG, {"topic": "again"}).code == 0, "its topic", _CHANGE_S)
            assert [bytes(record.body) for record in client.read("again", 0, 0, 3)] == [b"new 0", b"new 1", b"new 2"]

        master.kill()
        assert read(slave.broker, end)[:end] == originals[:end], "a reader goes on while the master is away"
        assert "Traceback" not in slave.log()


def test_neve_master_reports_its_ha_address_like_an_apache_master(tmp_path: Path) -> None:
    with apache(tmp_path / "apache") as theirs, BrokerSet(tmp_path / "set", members=1, replication="async") as brokers:
        create_topic(brokers)  # Once the member leads, soon after its election.
        ours = brokers.master
        asked = {}
        for master in (theirs, ours):
            with Client(master.broker) as client:
                client.create_topic(TOPIC, 1)
                client.send(TOPIC, 0, b"what comes after the start is not in masterFlushOffset")
                asked[master.broker] = client.ask(_HA_INFO, {}).extFields
        # The additional field announces neve's own stream to neve slaves.
        assert asked[theirs.broker].keys() | {HELLO_FORMAT} == asked[ours.broker].keys()
        for broker, fields in asked.items():
            assert fields["masterAddress"].rpartition(":")[2] == broker.rpartition(":")[2]
            assert accepts(fields["masterHaAddress"])
            assert fields["masterFlushOffset"] == "0"


def test_sync_master_acknowledges_with_a_neve_slave(tmp_path: Path) -> None:
    settings = {"brokerRole": "SYNC_MASTER", "inSyncReplicas": "2", "totalReplicas": "2"}
    with apache(tmp_path / "apache", **settings) as master:
        ext = send_ext(TOPIC, 0)
        with Client(master.broker) as client:
            client.create_topic(TOPIC, 1)
            assert client.invoke(SEND_V2, ext, b"alone").code != 0
            with slave_of(master, tmp_path / "neve", flushDiskType="SYNC_FLUSH") as slave:
                wait_until(lambda: client.invoke(SEND_V2, ext, b"two").code == 0, "an acknowledgement", _CHANGE_S)
                for number in range(50):
                    assert client.invoke(SEND_V2, ext, b"%d" % number).code == 0
                assert_same_log(master, slave)
        master.kill()  # An orderly stop takes minutes without its slave.


def test_slave_quarantines_messages_the_master_lost_and_logs_converge(tmp_path: Path) -> None:
    with apache(tmp_path / "apache") as master, slave_of(master, tmp_path / "neve") as slave:
        with Client(master.broker) as client:
            client.create_topic(TOPIC, 1)
        send(master, 200)
        kept = catches_up(master.broker)
        send(master, 100)
        end = catches_up(master.broker)

        master.kill()
        assert end < FILE_SIZE, "the next file is made, and empty"
        loses(master.directory / "store", kept, end)
        master.start()
        send(master, 40, 120)
        assert_same_log(master, slave)
        (lost,) = (slave.directory / "store" / "diverged").iterdir()
        assert len(list(iter_records(lost.read_bytes()))) == 100
        assert [record.queue_offset for record in read(slave.broker, 240)] == list(range(240))
        with Client(slave.broker) as client:
            answer = client.invoke(PULL, pull_ext("raw_reader", TOPIC, 0, 240))
            assert answer.code != 0
        assert "Traceback" not in slave.log()
