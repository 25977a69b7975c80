"""A stock Java producer and two consumers of a group (Steady.java), at work while servers come and go."""

from __future__ import annotations

import subprocess
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Self

from bench import jvm
from tests.interop.agent import FLAGS, SOURCES
from tests.kit.clock.waiting import wait_until

TOPIC = "orders"
#: The number of messages that must be acknowledged and consumed between two events.
STEP = 30
DEADLINE_S = 90


class PlacedMessage(NamedTuple):
    """A message and its broker, queue and offset."""

    number: int
    broker: str
    queue: int
    offset: int


class Steady:
    """The Java producer and the two consumers of Steady.java."""

    def __init__(self, namesrvs: str, version: str, home: Path) -> None:
        home.mkdir(parents=True)
        self._log = home / "steady.log"
        command = jvm.java(jvm.classes(SOURCES, version), "Steady", namesrvs, TOPIC, "g_steady", home=home, flags=FLAGS)
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.acked: list[PlacedMessage] = []
        self.got: list[PlacedMessage] = []
        self.refused: list[str] = []
        self._said: set[str] = set()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, *rest = line.rstrip("\n").split("\t")
            if kind in ("ACK", "GOT"):
                number, broker, queue, offset = rest
                row = PlacedMessage(int(number), broker, int(queue), int(offset))
                (self.acked if kind == "ACK" else self.got).append(row)
            elif kind == "NACK":
                self.refused.append(line)
            self._said.add(kind)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        def ended_or_holds() -> bool:
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            return condition()

        try:
            wait_until(ended_or_holds, what, DEADLINE_S)
        except AssertionError as late:
            told = (
                f"{Counter(row.broker for row in self.acked)} acknowledged, {Counter(row.broker for row in self.got)}"
            )
            raise AssertionError(f"{late}; {told} consumed; refused: {self.refused[-3:]}") from late

    def send_more(self, brokers: Iterable[str], count: int = STEP) -> None:
        """Return when each broker has acknowledged and delivered `count` more messages than now."""
        sent, got = Counter(row.broker for row in self.acked), Counter(row.broker for row in self.got)

        def enough() -> bool:
            more = Counter(row.broker for row in self.acked) - sent, Counter(row.broker for row in self.got) - got
            return all(each[broker] >= count for each in more for broker in brokers)

        self.wait(enough, f"{count} more messages through each of {brokers!r}")

    def drained(self, broker: str) -> None:
        """Return when all messages acknowledged by the broker so far are consumed."""
        owed = {row for row in self.acked if row.broker == broker}
        self.wait(lambda: owed <= set(self.got), f"the consumption of all that {broker} has")

    def stop_sending(self) -> None:
        self._tell("stop\n")
        self.wait(lambda: "STOPPED" in self._said, "the end of sending")

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill() if any(exc) else self._process.stdin.close()
        self._process.wait(60)
        self._reader.join()
        self._process.stdout.close()


def assert_each_offset_once_acknowledged_and_consumed(acked: list[PlacedMessage], got: list[PlacedMessage]) -> None:
    """Assert that no queue has a gap, and that each offset is one message; a redelivered message keeps its offset."""
    places: dict[tuple[str, int, int], set[int]] = defaultdict(set)
    for row in (*acked, *got):
        places[row[1:]].add(row.number)
    assert all(len(numbers) == 1 for numbers in places.values())
    consumed: dict[tuple[str, int], set[int]] = defaultdict(set)
    for row in got:
        consumed[row.broker, row.queue].add(row.offset)
    for (broker, queue), offsets in consumed.items():
        assert offsets == set(range(len(offsets))), f"{broker}, queue {queue}"
    assert set(acked) <= set(got)
