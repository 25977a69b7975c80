"""The latency of sends at a steady rate beside a producer that saturates the broker from one connection.

Windows alone and beside alternate. Printed at the end, as medians: the p99 of the steady sender alone and beside the
saturating producer, the rate of the producer alone and beside the sender, the sum of both rates, and the processor time
of each process per message.

The producer loses at least the broker's time that the sender's own messages take. The expected rate is its rate alone
less that share, by the cost of these messages for the broker without the producer. A lower rate is a loss that the
broker causes, or a processor that the processes share. `--pin` separates the two: the broker runs on the first
processor that this process may use, all clients on the second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.measure import SIZE, raw_command, settle
from bench.raw_load import create
from tests.kit.server.neve import NeveServer

STEADY, BULK = "steady", "bulk"
WARM_S = 1.0


@dataclass(frozen=True, slots=True)
class Sent:
    """A window of the steady sender; latencies of a message."""

    p99_ms: float
    sender_us: float  # The busy share of a processor.
    broker_us: float  # The busy share of a processor, including its other work.


@dataclass(frozen=True, slots=True)
class Produced:
    """A window of the producer."""

    rate: float  # In messages per second.
    producer_us: float  # Processor time per message.
    broker_share: float  # Share of one processor.

    def broker_us(self, others: float = 0.0) -> float:
        """Return the processor time per message, with `others` more messages per second beside the producer's."""
        return self.broker_share / (self.rate + others) * 1e6


@dataclass(frozen=True, slots=True)
class Round:
    """Alternating windows."""

    sender_alone: Sent
    producer_alone: Produced
    sender: Sent
    producer: Produced


class Bench:
    """The broker and its two clients."""

    def __init__(self, server: NeveServer, rate: float, in_flight: int, seconds: float) -> None:
        self._server, self._rate, self._in_flight, self._seconds = server, rate, in_flight, seconds

    def round(self) -> Round:
        """Measure one round. With both, the sender begins when the producer is warm, for the length of its window."""
        settle([self._server])
        sender = self._sender()
        _begin(sender)
        sender_alone = self._finish(sender)
        settle([self._server])
        producer_alone = self._produce(lambda: None)
        settle([self._server])
        sender = self._sender()
        produced = self._produce(lambda: _begin(sender))
        return Round(sender_alone, producer_alone, self._finish(sender), produced)

    def _sender(self) -> subprocess.Popen[str]:
        """Return a connected sender that is not sending yet."""
        command = [sys.executable, "-m", "bench.open_load", "send", self._server.broker, STEADY]
        numbers = map(str, (SIZE, self._rate, WARM_S, self._seconds))
        process = subprocess.Popen([*command, *numbers], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "READY\n"
        return process

    def _finish(self, sender: subprocess.Popen[str]) -> Sent:
        before = self._server.cpu_seconds()
        out, _ = sender.communicate(timeout=120)
        spent = self._server.cpu_seconds() - before
        found = json.loads(out)
        assert not found["failed"], found
        count = self._rate * (WARM_S + self._seconds)
        return Sent(found["p99"] / 1000, found["cpu"] / self._rate * 1e6, spent / count * 1e6)

    def _produce(self, when_warm: Callable[[], None]) -> Produced:
        command = raw_command(
            "produce", self._server.broker, BULK, SIZE, self._in_flight, WARM_S, WARM_S + self._seconds
        )
        marks: list[tuple[int, int, float, float]] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                word, *values = line.split()
                if word == "MARK":
                    marks.append((int(values[0]), int(values[1]), float(values[2]), self._server.cpu_seconds()))
                    if len(marks) == 1:
                        when_warm()
                else:
                    assert (word, values) == ("FAILED", ["0"]), line
        assert process.returncode == 0
        (started, first, own, broker), (ended, last, own_then, broker_then) = marks
        seconds, count = (ended - started) / 1e9, last - first
        return Produced(count / seconds, (own_then - own) / count * 1e6, (broker_then - broker) / seconds)


def _begin(sender: subprocess.Popen[str]) -> None:
    assert sender.stdin is not None
    sender.stdin.write("\n")
    sender.stdin.flush()


@contextmanager
def placed(pinned: bool) -> Iterator[Callable[[], None]]:
    """Place started processes on the broker's processor; the yielded function places all later ones on another."""
    allowed = sorted(os.sched_getaffinity(0))
    if pinned and len(allowed) < 2:
        raise SystemExit("--pin needs two processors")
    try:
        if pinned:
            os.sched_setaffinity(0, allowed[:1])
        yield (lambda: os.sched_setaffinity(0, allowed[1:2])) if pinned else (lambda: None)
    finally:
        os.sched_setaffinity(0, allowed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1_000, help="sends a second of the steady sender")
    parser.add_argument("--in-flight", type=int, default=64, help="of the saturating producer")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a window")
    parser.add_argument("--pin", action="store_true", help="the broker on one processor, all clients on another")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="neve-bench-") as root,
        placed(options.pin) as place_clients,
        NeveServer(Path(root) / "neve", settings={"archivePeriod": "1d"}) as server,
    ):
        place_clients()
        for topic in (STEADY, BULK):
            create(server.broker, topic)
        bench = Bench(server, options.rate, options.in_flight, options.seconds)
        rounds = [bench.round() for _ in range(options.repeat)]
    report(options.rate, rounds)


def report(rate: float, rounds: Sequence[Round]) -> None:
    def middle(value: Callable[[Round], float]) -> float:
        return statistics.median(map(value, rounds))

    quiet, busy = middle(lambda one: one.sender_alone.p99_ms), middle(lambda one: one.sender.p99_ms)
    print(f"p99 of {rate:,.0f} sends a second: alone {quiet:.2f} ms, beside {busy:.2f} ms, {busy / quiet:.1f}×")
    own, shared = middle(lambda one: one.producer_alone.rate), middle(lambda one: one.producer.rate)
    print(f"saturating producer: alone {own:,.0f}/s, beside {shared:,.0f}/s, {shared / own:.1%}")
    print(f"  both together: {shared + rate:,.0f}/s, {(shared + rate) / own:.1%}")
    cost = middle(lambda one: one.sender_alone.broker_us)
    expected = own * (1 - rate * cost / 1e6)
    print(
        f"  expected beside: {expected:,.0f}/s, {expected / own:.1%}, if the sender's messages cost what they do alone"
    )
    print("µs of a processor for a message:")
    bulk, both = middle(lambda one: one.producer_alone.broker_us()), middle(lambda one: one.producer.broker_us(rate))
    print(f"  broker: of the sender alone {cost:.1f}, of the producer alone {bulk:.1f}, of both {both:.1f}")
    alone, beside = middle(lambda one: one.producer_alone.producer_us), middle(lambda one: one.producer.producer_us)
    print(f"  producer: alone {alone:.1f}, beside {beside:.1f}")
    alone, beside = middle(lambda one: one.sender_alone.sender_us), middle(lambda one: one.sender.sender_us)
    print(f"  sender: alone {alone:.1f}, beside {beside:.1f}")
    alone, beside = middle(lambda one: one.producer_alone.broker_share), middle(lambda one: one.producer.broker_share)
    print(f"the broker uses {alone:.0%} of a processor beside the producer alone, {beside:.0%} beside both")


if __name__ == "__main__":
    main()
