"""Messages in flight at an Apache master: delayed, timed, half, committed, popped; and how each ends elsewhere."""

from __future__ import annotations

import json

from bench.wire import Client
from tests.interop.promoted import PoppedMessage, ack, bodies, end, offsets_at, pop, prepare, properties
from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import Serving

GROUP = "readers"
_UPDATE_OFFSET, _UPDATE_GROUP = 15, 200
_S = 90.0


def commit(address: str, topic: str, offset: int) -> None:
    with Client(address) as client:
        client.ask(_UPDATE_OFFSET, {"consumerGroup": GROUP, "topic": topic, "queueId": 0, "commitOffset": offset})


class InFlight:
    """Messages in flight at an Apache master. Half of them change state before it stops, the rest afterwards."""

    def __init__(self, master: str) -> None:
        """Send the messages; return when those that are due early are delivered."""
        self._master = master
        with Client(master) as client:
            for topic in ("plain", "later", "timed", "paid", "popped"):
                client.create_topic(topic, 1)
            for group in (GROUP, "poppers"):
                client.ask(_UPDATE_GROUP, {}, json.dumps({"groupName": group}).encode())
            for number in range(100):
                client.send("plain", 0, b"%d" % number)
            commit(master, "plain", 60)

            client.send("later", 0, b"early", properties(DELAY=1, UNIQ_KEY="D0"))
            client.send("timed", 0, b"early", properties(TIMER_DELAY_SEC=2, UNIQ_KEY="T0"))
            for number in range(3):
                client.send("later", 0, b"late %d" % number, properties(DELAY=5, UNIQ_KEY=f"D{number + 1}"))
                client.send("timed", 0, b"late %d" % number, properties(TIMER_DELAY_SEC=60, UNIQ_KEY=f"T{number + 1}"))
            client.send(
                "timed", 0, b"recall", properties(TIMER_DELAY_SEC=60, UNIQ_KEY="R1", TIMER_DEL_UNIQKEY="timed+T2")
            )

            committed, rolled_back, self._open_at_the_end, self._late = (
                prepare(client, "paid", b"tx %d" % number, f"X{number}") for number in range(4)
            )
            assert end(client, committed, commit=True) == 0
            assert end(client, rolled_back, commit=False) == 0

            for number in range(10):
                client.send("popped", 0, b"p%d" % number, properties(UNIQ_KEY=f"P{number}"))
            self._out = pop(client, "poppers", "popped", 6, 60_000)
            assert [one.body for one in self._out] == [f"p{number}" for number in range(6)]
            for one in self._out[:2]:
                assert ack(client, "poppers", one) == 0
        wait_until(lambda: bodies(master, "later") == ["early"], "the delayed one", _S)
        wait_until(lambda: bodies(master, "timed") == ["early"], "the timed one", _S)

    def more_before_the_end(self) -> None:
        """Send more messages, which the master's tables need not contain yet. It must be stopped within seconds."""
        master = self._master
        with Client(master) as client:
            client.send("later", 0, b"quick", properties(DELAY=1, UNIQ_KEY="D9"))
            client.send("timed", 0, b"quick", properties(TIMER_DELAY_SEC=1, UNIQ_KEY="T9"))
            wait_until(lambda: "quick" in bodies(master, "later"), "the delayed one", _S)
            wait_until(lambda: "quick" in bodies(master, "timed"), "the timed one", _S)
            # The master marks it as committed only seconds later, and in this test never.
            assert end(client, self._late, commit=True) == 0
            assert ack(client, "poppers", self._out[2]) == 0

    def assert_is_on_its_way(self) -> None:
        for topic in ("later", "timed"):
            assert bodies(self._master, topic) == ["early", "quick"], "the others are on their way still"

    def assert_goes_on_at(self, broker: Serving) -> None:
        """Assert that the broker delivers each message once, also after a restart."""
        with Client(broker.broker) as client:
            assert bodies(broker.broker, "plain") == [str(number) for number in range(100)]
            assert offsets_at(broker.broker)[f"plain@{GROUP}"] == {0: 60}
            assert client.send("plain", 0, b"new") == 100
            assert sorted(bodies(broker.broker, "paid")) == ["tx 0", "tx 3"]
            assert end(client, self._open_at_the_end, commit=True) == 0
            assert sorted(bodies(broker.broker, "paid")) == ["tx 0", "tx 2", "tx 3"]
            assert end(client, self._late, commit=True) != 0 or len(bodies(broker.broker, "paid")) == 3

            assert ack(client, "poppers", self._out[3]) == 0, "by the master's receipt"
            new = pop(client, "poppers", "popped", 10, 60_000)
            assert [one.body for one in new] == ["p6", "p7", "p8", "p9"]
            again: list[PoppedMessage] = []

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
