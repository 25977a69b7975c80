"""A neve slave takes the place of its Apache master, which is retired: nothing is lost, nothing comes twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import jvm
from bench.wire import Client
from tests.interop.promoted import Popped, ack, apache_and_slave, bodies, end, offsets_at, pop, prepare, properties
from tests.interop.steady import TOPIC as STEADY
from tests.interop.steady import Steady, assert_each_offset_once_acknowledged_and_consumed
from tests.waiting import wait_until

pytestmark = pytest.mark.servers

GROUP = "readers"
_UPDATE_OFFSET, _UPDATE_GROUP = 15, 200
_S = 90.0


def commit(address: str, topic: str, offset: int) -> None:
    with Client(address) as client:
        client.ask(_UPDATE_OFFSET, {"consumerGroup": GROUP, "topic": topic, "queueId": 0, "commitOffset": offset})


def test_what_waits_at_the_master_goes_on_at_the_slave_that_is_promoted(tmp_path: Path) -> None:
    with apache_and_slave(tmp_path) as pair:
        with Client(pair.master.broker) as client:
            for topic in ("plain", "later", "timed", "paid", "popped"):
                client.create_topic(topic, 1)
            for group in (GROUP, "poppers"):
                client.ask(_UPDATE_GROUP, {}, json.dumps({"groupName": group}).encode())
            for number in range(100):
                client.send("plain", 0, b"%d" % number)
            commit(pair.master.broker, "plain", 60)

            client.send("later", 0, b"early", properties(DELAY=1, UNIQ_KEY="D0"))
            client.send("timed", 0, b"early", properties(TIMER_DELAY_SEC=2, UNIQ_KEY="T0"))
            for number in range(3):
                client.send("later", 0, b"late %d" % number, properties(DELAY=5, UNIQ_KEY=f"D{number + 1}"))
                client.send("timed", 0, b"late %d" % number, properties(TIMER_DELAY_SEC=60, UNIQ_KEY=f"T{number + 1}"))
            client.send(
                "timed", 0, b"recall", properties(TIMER_DELAY_SEC=60, UNIQ_KEY="R1", TIMER_DEL_UNIQKEY="timed+T2")
            )

            committed, rolled_back, open_at_the_end, late = (
                prepare(client, "paid", b"tx %d" % number, f"X{number}") for number in range(4)
            )
            assert end(client, committed, commit=True) == 0
            assert end(client, rolled_back, commit=False) == 0

            for number in range(10):
                client.send("popped", 0, b"p%d" % number, properties(UNIQ_KEY=f"P{number}"))
            out = pop(client, "poppers", "popped", 6, 60_000)
            assert [one.body for one in out] == [f"p{number}" for number in range(6)]
            for one in out[:2]:
                assert ack(client, "poppers", one) == 0

            wait_until(lambda: bodies(pair.master.broker, "later") == ["early"], "the delayed one", _S)
            wait_until(lambda: bodies(pair.master.broker, "timed") == ["early"], "the timed one", _S)
            pair.has_all()
            # since the last poll
            client.send("later", 0, b"quick", properties(DELAY=1, UNIQ_KEY="D9"))
            client.send("timed", 0, b"quick", properties(TIMER_DELAY_SEC=1, UNIQ_KEY="T9"))
            wait_until(lambda: "quick" in bodies(pair.master.broker, "later"), "the delayed one", _S)
            wait_until(lambda: "quick" in bodies(pair.master.broker, "timed"), "the timed one", _S)
            assert end(client, late, commit=True) == 0  # its mark comes seconds later, and here never
            assert ack(client, "poppers", out[2]) == 0
            pair.has_log()
        for topic in ("later", "timed"):
            assert bodies(pair.master.broker, topic) == ["early", "quick"], "the others are on their way still"
        pair.master.kill()

        with pair.promoted() as broker, Client(broker.broker) as client:
            assert bodies(broker.broker, "plain") == [str(number) for number in range(100)]
            assert offsets_at(broker.broker)[f"plain@{GROUP}"] == {0: 60}
            assert client.send("plain", 0, b"new") == 100
            assert sorted(bodies(broker.broker, "paid")) == ["tx 0", "tx 3"]
            assert end(client, open_at_the_end, commit=True) == 0
            assert sorted(bodies(broker.broker, "paid")) == ["tx 0", "tx 2", "tx 3"]
            assert end(client, late, commit=True) != 0 or len(bodies(broker.broker, "paid")) == 3

            assert ack(client, "poppers", out[3]) == 0, "by the master's receipt"
            new = pop(client, "poppers", "popped", 10, 60_000)
            assert [one.body for one in new] == ["p6", "p7", "p8", "p9"]
            again: list[Popped] = []

            def came_again() -> bool:
                again.extend(pop(client, "poppers", "popped", 10, 120_000))
                return len(again) >= 2

            wait_until(came_again, "what was popped comes again", _S)
            assert sorted(one.body for one in again if one.body in {"p4", "p5"}) == ["p4", "p5"]
            assert not {one.body for one in again} & {"p0", "p1", "p2", "p3"}

            wait_until(lambda: len(bodies(broker.broker, "later")) >= 5, "delayed messages", _S)
            wait_until(lambda: len(bodies(broker.broker, "timed")) >= 4, "timers", _S)
            assert sorted(bodies(broker.broker, "later")) == ["early", "late 0", "late 1", "late 2", "quick"]
            assert sorted(bodies(broker.broker, "timed")) == ["early", "late 0", "late 2", "quick"]
            assert len(bodies(broker.broker, "paid")) == 3
            assert "Traceback" not in broker.log()

            before = {topic: bodies(broker.broker, topic) for topic in ("plain", "later", "timed", "paid")}
            broker.kill()
            broker.start()
            assert {topic: bodies(broker.broker, topic) for topic in before} == before, "a start as any other"


def test_a_stock_consumer_that_runs_all_the_time_misses_nothing(tmp_path: Path) -> None:
    with apache_and_slave(tmp_path) as pair:
        with Client(pair.master.broker) as client:
            client.create_topic(STEADY, 2)
        with Steady(pair.namesrv, jvm.SERVER, tmp_path / "clients") as clients:
            clients.go_on(["stock"])
            pair.has_all()
            clients.go_on(["stock"])
            pair.has_log()
            pair.master.stop()
            with pair.promoted():
                clients.go_on(["stock"], 2 * 30)
                clients.stop_sending()
                clients.drained("stock")
        assert_each_offset_once_acknowledged_and_consumed(clients.acked, clients.got)
