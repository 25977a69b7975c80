"""The cost of replication: sends of 1 KiB to a master of two members, in each mode; neve and Apache RocketMQ 5.3.3.

    none, async, sync     neve alone, and with one slave in the mode of that name (`replication=`)
    alone, sync-master    Apache alone, and `SYNC_MASTER` with `inSyncReplicas=2` and one slave

Frames are pipelined over one connection. Printed are messages per second, messages per CPU-second of the master, CPU
time per message of the master and of the slave, and the latency of an answer; then the ratios of these, turn by turn.
All processes share the machine: CPU time is the figure that does not depend on the number of cores. Windows begin when
all servers are idle; cases alternate. With SYNC_FLUSH all brokers, including the slave, answer when a message is on the
disk. By default it takes eleven minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.measure import SIZE, end_by_signal, raw_command, settle, spread
from bench.raw_load import create
from bench.wire import Client, Refused
from tests.kit.clock.waiting import wait_until
from tests.kit.server.apache import ApacheMember, ApacheServer
from tests.kit.server.broker_set import BrokerSet
from tests.kit.server.neve import NeveServer
from tests.kit.server.processes import Processes

TOPIC = "bench"
_LOAD_S, _READY_S = 600.0, 180.0
_HEAT_S = 6.0  # A JVM compiles its hot code first.
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Pair:
    """A master, its address, and its slave if it has one."""

    broker: str
    master: Processes
    slave: Processes | None


@dataclass(frozen=True, slots=True)
class Cost:
    """The figures of one window."""

    per_second: float
    master_us: float  # CPU time per message.
    slave_us: float
    p50_us: int
    p99_us: int


def neve_alone(stack: ExitStack, directory: Path, flush: str) -> Pair:
    server = stack.enter_context(NeveServer(directory, settings={"flushDiskType": flush, "archivePeriod": "1h"}))
    return Pair(server.broker, server, None)


def neve_set(mode: str) -> Callable[[ExitStack, Path, str], Pair]:
    def start(stack: ExitStack, directory: Path, flush: str) -> Pair:
        settings = {"flushDiskType": flush, "replication": mode, "mappedFileSizeCommitLog": _GIB}
        brokers = stack.enter_context(BrokerSet(directory, members=2, settings=settings))
        (slave,) = brokers.slaves
        return Pair(brokers.master.broker, brokers.master, slave)

    return start


def apache_alone(stack: ExitStack, directory: Path, flush: str) -> Pair:
    server = stack.enter_context(ApacheServer(directory, heap="1g", settings={"flushDiskType": flush}))
    return Pair(server.broker, server, None)


def apache_pair(stack: ExitStack, directory: Path, flush: str) -> Pair:
    """Run the pair; a slave gets its master's HA port with its next registration at the name server."""
    two = {"flushDiskType": flush, "inSyncReplicas": "2"}
    master = stack.enter_context(
        ApacheServer(directory / "master", heap="1g", settings={**two, "brokerRole": "SYNC_MASTER"})
    )
    own = {
        **two, "brokerRole": "SLAVE", "brokerId": "1", "enableControllerMode": "false", "timerWheelEnable": "true",
        "mappedFileSizeCommitLog": str(_GIB), "syncBrokerMetadataPeriod": "5000", "checkSyncStateSetPeriod": "5000",
        "haSendHeartbeatInterval": "5000", "allAckInSyncStateSet": "false",
    }  # fmt: skip
    slave = stack.enter_context(
        ApacheMember(directory / "slave", namesrv=master.namesrv, name="stock", settings=own, heap="1g")
    )
    return Pair(master.broker, master, slave)


CASES: dict[str, Callable[[ExitStack, Path, str], Pair]] = {
    "neve none": neve_alone,
    "neve async": neve_set("async"),
    "neve sync": neve_set("sync"),
    "Apache alone": apache_alone,
    "Apache sync-master": apache_pair,
}


#: The compared cases: the first is printed as a multiple of the second.
COMPARED = (
    ("neve async", "neve none"),
    ("neve sync", "neve none"),
    ("Apache sync-master", "Apache alone"),
    ("neve none", "Apache alone"),
    ("neve sync", "Apache sync-master"),
)
FLUSHES = ("ASYNC_FLUSH", "SYNC_FLUSH")
HEAD = (
    f"{'sends/s':>24} {'sends/CPU-s of master':>24} {'master µs':>22} {'slave µs':>22} {'ack p50 µs':>22}"
    f" {'ack p99 µs':>24}"
)
Costs = dict[tuple[int, str], list[Cost]]


def is_ready(broker: str) -> bool:
    """Return whether a message is acknowledged."""
    try:
        create(broker, TOPIC)
        with Client(broker) as client:
            client.send(TOPIC, 0, b"ready?")
    except (OSError, Refused):
        return False
    return True


@contextmanager
def started(case: str, root: Path, flush: str) -> Iterator[Pair]:
    with ExitStack() as stack:
        pair = CASES[case](stack, root / case.replace(" ", "-"), flush)
        wait_until(lambda: is_ready(pair.broker), f"{case} takes messages", _READY_S)
        yield pair


def measure(pair: Pair, in_flight: int, warm: float, seconds: float) -> Cost:
    """Measure one window: messages between the generator's two marks, and the CPU time of both members meanwhile."""
    marks: list[tuple[int, int, float, float]] = []
    waited = (0, 0)
    command = raw_command("timed", pair.broker, TOPIC, SIZE, in_flight, warm, seconds)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            word, *values = line.split()
            if word == "MARK":
                slave = 0.0 if pair.slave is None else pair.slave.cpu_seconds()
                marks.append((int(values[0]), int(values[1]), pair.master.cpu_seconds(), slave))
            elif word == "WAITED":
                waited = int(values[0]), int(values[1])
            elif word == "FAILED" and values != ["0"]:
                raise RuntimeError(f"{values[0]} sends were refused")
        errors = process.stderr.read()
        status = process.wait(_LOAD_S)
    if len(marks) != 2 or status:
        raise RuntimeError(f"the generator ended with {status}: {errors[-2000:]}")
    (begin, before, master, slave), (end, after, master_end, slave_end) = marks
    count = after - before
    return Cost(
        count / ((end - begin) / 1e9),
        (master_end - master) / count * 1e6,
        (slave_end - slave) / count * 1e6,
        *waited,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--warm", type=float, default=1.5, help="seconds before the window")
    parser.add_argument("--seconds", type=float, default=4.0, help="of the window")
    parser.add_argument("--flush", action="append", choices=FLUSHES, help="default: both, one after the other")
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    options = parser.parse_args()
    end_by_signal()
    tables = [Table(flush, *measure_all(options, flush)) for flush in options.flush or FLUSHES]
    for table in tables:
        table.show()


def measure_all(options: argparse.Namespace, flush: str) -> tuple[list[str], Costs]:
    """Measure all cases side by side."""
    cases, costs = options.case or list(CASES), defaultdict[tuple[int, str], list[Cost]](list)
    with tempfile.TemporaryDirectory(prefix="neve-bench-") as root, ExitStack() as stack:
        pairs = {case: stack.enter_context(started(case, Path(root), flush)) for case in cases}
        everybody = [one for pair in pairs.values() for one in (pair.master, pair.slave) if one is not None]
        for case in cases:
            if isinstance(pairs[case].master, ApacheServer):
                measure(pairs[case], max(options.in_flight), _HEAT_S, 0.5)
        for turn in range(options.repeat):
            for in_flight in options.in_flight:
                for case in cases if turn % 2 == 0 else reversed(cases):
                    settle(everybody)
                    cost = measure(pairs[case], in_flight, options.warm, options.seconds)
                    costs[in_flight, case].append(cost)
                    print(f"  {flush:11} {in_flight:3} in flight  {case:20} {cost.per_second:10,.0f}/s", flush=True)
    return cases, costs


@dataclass(frozen=True, slots=True)
class Table:
    """The figures for one way to flush."""

    flush: str
    cases: list[str]
    costs: Costs

    def show(self) -> None:
        for in_flight in sorted({in_flight for in_flight, _ in self.costs}):
            print(f"\n{SIZE} B, {self.flush}, {in_flight} in flight: median (lowest-highest)")
            print(f"{'':20} {HEAD}")
            for case in self.cases:
                print(f"{case:20} {self._row(self.costs[in_flight, case])}")
            for of, to in COMPARED:
                if of in self.cases and to in self.cases:
                    self._compare(of, to, self.costs[in_flight, of], self.costs[in_flight, to])
            for case in self.cases:
                found = [cost.slave_us / cost.master_us for cost in self.costs[in_flight, case]]
                if any(found):
                    print(f"  {case + ':':44} slave / master  CPU a message {spread(found, 2)}")

    def _row(self, found: list[Cost]) -> str:
        def told(of: Callable[[Cost], float], places: int = 0) -> str:
            return spread([of(cost) for cost in found], places)

        return (
            f"{told(lambda one: one.per_second):>24} {told(lambda one: 1e6 / one.master_us):>24}"
            f" {told(lambda one: one.master_us, 1):>22} {told(lambda one: one.slave_us, 1):>22}"
            f" {told(lambda one: one.p50_us):>22} {told(lambda one: one.p99_us):>24}"
        )

    def _compare(self, of: str, to: str, ours: list[Cost], theirs: list[Cost]) -> None:
        """Compare within each turn, because other load on the machine affected both cases."""
        masters = [one.master_us / other.master_us for one, other in zip(ours, theirs, strict=True)]
        both = [
            (one.master_us + one.slave_us) / (other.master_us + other.slave_us)
            for one, other in zip(ours, theirs, strict=True)
        ]
        title = f"{of} / {to}:"
        print(f"  {title:44} masters' CPU a message {spread(masters, 2)}, with slaves {spread(both, 2)}")


if __name__ == "__main__":
    main()
