"""Many messages at an Apache master, a group in the middle of them, and pending ones: each must be delivered once."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Self

import neve
from bench import jvm
from bench.wire import Client
from neve.client.model import Message
from tests.interop.agent import FLAGS, SOURCES
from tests.interop.promoted import Half, bodies, end, offsets_at, prepare, properties
from tests.kit.clock.waiting import wait_until
from tests.kit.cluster.routes import is_routed

#: `make migrations` uses 100,000.
MESSAGES = int(os.environ.get("NEVE_MIGRATION_MESSAGES", "2000"))
GROUP, TOPIC, LATER, PAID = "g_moved", "moved", "moved_later", "moved_paid"
QUEUES = 4
_HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
_UPDATE_OFFSET, _SEND_BACK, _UPDATE_GROUP = 15, 36, 200
_LEVEL_10S, _LEVEL_30S, _LEVEL_2M, _DEAD = 3, 4, 6, -1
_BATCH, _MANY = 250, 10_000
#: The number of pending messages of each kind.
_SHARE = max(MESSAGES // 100, 10)
_CONSUMED_S = 120.0 + MESSAGES / 200


class Delivered(NamedTuple):
    """A message as the stock consumer received it."""

    topic: str
    broker: str
    queue: int
    offset: int
    retries: int
    body: str


class Taking:
    """A stock Java push consumer of the group (Taking.java), and the messages it received."""

    def __init__(self, namesrv: str, home: Path) -> None:
        home.mkdir(parents=True)
        self._log = home / "taking.log"
        words = [namesrv, GROUP, TOPIC, LATER, PAID]
        command = jvm.java(jvm.classes(SOURCES, jvm.SERVER), "Taking", *words, home=home, flags=FLAGS)
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.got: list[Delivered] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, *rest = line.rstrip("\n").split("\t")
            if kind == "GOT":
                topic, broker, queue, offset, retries, body = rest
                self.got.append(Delivered(topic, broker, int(queue), int(offset), int(retries), body))

    def has(self, expected: set[tuple[str, bool, str]]) -> bool:
        assert self._process.poll() is None, self._log.read_text()[-3000:]
        return len(self.got) >= len(expected) and expected <= {_what(one) for one in self.got[:]}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill() if any(exc) else self._process.stdin.close()
        self._process.wait(60)
        self._reader.join()
        self._process.stdout.close()


def _what(one: Delivered) -> tuple[str, bool, str]:
    return one.topic, one.retries > 0, one.body


class InTransit:
    """Stored messages are sent at once; pending ones only just before the master stops."""

    def __init__(self, namesrv: str, master: str) -> None:
        self._master = master
        with Client(master) as client:
            for topic, queues in ((TOPIC, QUEUES), (LATER, 1), (PAID, 1)):
                client.create_topic(topic, queues)
            client.ask(_UPDATE_GROUP, {}, json.dumps({"groupName": GROUP, "retryMaxTimes": 7}).encode())
        asyncio.run(self._send(namesrv))
        self.ends = dict.fromkeys(range(QUEUES), MESSAGES // QUEUES)
        self.positions = {queue: count // 2 + queue for queue, count in self.ends.items()}
        self.stand_at(self.positions)
        self._expected: set[tuple[str, bool, str]] = set()
        self._halves: list[Half] = []

    async def _send(self, namesrv: str) -> None:
        async with neve.connect(namesrv) as client:
            await is_routed(client, TOPIC, QUEUES)

            async def fill(queue: int) -> None:
                for first in range(0, MESSAGES // QUEUES, _BATCH):
                    numbers = range(first, min(first + _BATCH, MESSAGES // QUEUES))
                    await client.send_batch(
                        TOPIC, [Message(TOPIC, b"%d-%d" % (queue, n)) for n in numbers], queue=queue
                    )

            await asyncio.gather(*map(fill, range(QUEUES)))

    def stand_at(self, positions: dict[int, int]) -> None:
        """Commit the offset up to which the group has read."""
        with Client(self._master) as client:
            for queue, offset in positions.items():
                place = {"consumerGroup": GROUP, "topic": TOPIC, "queueId": queue, "commitOffset": offset}
                client.ask(_UPDATE_OFFSET, place)
        self.positions = positions

    def before_the_end(self, *, drained: bool = False) -> None:
        """Send delayed, timed, half, retried and dead messages; if `drained`, they need not survive the master."""
        level, timer_s = (_LEVEL_10S, 8) if drained else (_LEVEL_30S, 25)
        if MESSAGES > _MANY:  # Sending the pending messages takes longer then.
            level, timer_s = _LEVEL_2M, 110
        with Client(self._master) as client:
            records = list(client.read(TOPIC, 0, 0, 2 * _SHARE))
            for number in range(_SHARE):
                client.send(LATER, 0, b"delayed %d" % number, properties(DELAY=level, UNIQ_KEY=f"MD{number}"))
                client.send(LATER, 0, b"timed %d" % number, properties(TIMER_DELAY_SEC=timer_s, UNIQ_KEY=f"MT{number}"))
                self._halves.append(prepare(client, PAID, b"half %d" % number, f"MH{number}"))
            for at, record in enumerate(records[: 2 * _SHARE]):
                again = level if at < _SHARE else _DEAD
                client.ask(
                    _SEND_BACK,
                    {"group": GROUP, "offset": record.physical_offset, "delayLevel": again, "originTopic": TOPIC,
                     "originMsgId": f"M{at}", "unitMode": "false", "maxReconsumeTimes": 7},
                )  # fmt: skip
        self.retried = [record.body.decode() for record in records[:_SHARE]]
        self.dead = [record.body.decode() for record in records[_SHARE : 2 * _SHARE]]
        self._expected = {
            (LATER, False, f"{kind} {number}") for kind in ("delayed", "timed") for number in range(_SHARE)
        }
        self._expected |= {(TOPIC, True, body) for body in self.retried}

    def retries_are_read(self) -> None:
        """Consume the retries with members that run at the master until none are left."""
        retry = f"%RETRY%{GROUP}"

        def arrived() -> bool:
            with Client(self._master) as client:
                return client.bounds(retry, 0)[1] == _SHARE

        wait_until(arrived, "the retries", _CONSUMED_S)
        with Client(self._master) as client:
            place = {"consumerGroup": GROUP, "topic": retry, "queueId": 0, "commitOffset": _SHARE}
            client.ask(_UPDATE_OFFSET, place)
        self._expected -= {(TOPIC, True, body) for body in self.retried}

    def waiting_is_due(self) -> None:
        """Return when delayed and timed messages are delivered at the master."""
        wait_until(lambda: len(bodies(self._master, LATER)) == 2 * _SHARE, "delayed and timed messages", _CONSUMED_S)

    def assert_is_on_its_way(self) -> None:
        assert bodies(self._master, LATER) == [], "some came before the end: the machine is too slow for this test"
        assert bodies(self._master, PAID) == []

    def end_transactions(self, address: str) -> None:
        """Commit every second transaction and roll back the others, each by its last check-back to the producer.

        An Apache broker that checks back appends the half message again, and refers to that copy.
        """
        with Client(address) as client:
            newest = {
                (unique := record.properties["UNIQ_KEY"]): Half(record.queue_offset, record.physical_offset, unique)
                for record in client.read(_HALF_TOPIC, 0, *client.bounds(_HALF_TOPIC, 0))
            }
            for at, half in enumerate(self._halves):
                assert end(client, newest[half.unique], commit=at % 2 == 0) == 0
        self._expected |= {(PAID, False, f"half {number}") for number in range(0, _SHARE, 2)}

    def not_read(self) -> set[tuple[str, bool, str]]:
        """Return the initial messages that the group had not read."""
        return {(TOPIC, False, f"{q}-{n}") for q, count in self.ends.items() for n in range(self.positions[q], count)}

    def is_consumed(self, clients: Taking, more: Iterable[str] = ()) -> None:
        """Return when all messages were received: each once, and none that the group had read before."""
        expected = self._expected | self.not_read() | {(TOPIC, False, body) for body in more}
        try:
            wait_until(lambda: clients.has(expected), "all that the group has not read", _CONSUMED_S)
        except AssertionError as late:
            missing = expected - {_what(one) for one in clients.got}
            raise AssertionError(f"{late}: {len(missing)} of {len(expected)} missing: {sorted(missing)[:5]}") from late
        counts = Counter(_what(one) for one in clients.got)
        assert counts.keys() == expected, sorted(counts.keys() - expected)[:5]
        assert max(counts.values()) == 1, counts.most_common(3)

    def assert_offsets_are_as_they_were(self, clients: Taking, broker: str) -> None:
        """Assert that messages keep their offsets of Apache's broker, and that the group is at the ends of queues."""
        for one in clients.got:
            if one.topic == TOPIC and not one.retries:
                assert f"{one.queue}-{one.offset}" == one.body
        wait_until(lambda: offsets_at(broker).get(f"{TOPIC}@{GROUP}") == self.ends, "the group's positions", 60)

    def assert_dead_letters_are_at(self, broker: str) -> None:
        assert sorted(bodies(broker, f"%DLQ%{GROUP}")) == sorted(self.dead)
