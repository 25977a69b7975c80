"""What a copy costs: sends of 1 KiB to a master of two members, in each mode, neve beside Apache RocketMQ 5.3.3.

    none, async, sync     neve alone, and with one slave in the mode of that name (`replication=`)
    alone, sync-master    Apache alone, and `SYNC_MASTER` with `inSyncReplicas=2` and one slave

Frames are pipelined over one connection. Told are messages a second, CPU time for each message of the master and of the
slave, apart, and how long an answer takes. All of it shares the machine: CPU time is what does not depend on how many
cores there are. Windows begin when nothing is busy with what came before; cases take turns. With `--sync-flush` all
brokers answer when a message is on the disk, the slave's too.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.measure import SIZE, raw_command, settle
from bench.raw_load import create
from bench.wire import Client, Refused
from tests.servers.apache import ApacheMember, ApacheServer
from tests.servers.broker_set import BrokerSet
from tests.servers.neve import NeveServer
from tests.servers.processes import Processes
from tests.waiting import wait_until

TOPIC = "bench"
_LOAD_S, _READY_S = 600.0, 180.0
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Pair:
    """A master, its address, and its slave if it has one."""

    broker: str
    master: Processes
    slave: Processes | None


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one window."""

    per_second: float
    master_us: float  # of CPU time, a message
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
    """A slave finds its master's HA port by the name server, with its next registration."""
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


def is_ready(broker: str) -> bool:
    """Whether a message is acknowledged."""
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
    """One window: what happened between the generator's two marks, and the CPU time of both members meanwhile."""
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
    parser.add_argument("--warm", type=float, default=4.0, help="seconds before the window")
    parser.add_argument("--seconds", type=float, default=8.0, help="of the window")
    parser.add_argument("--sync-flush", action="store_true")
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    options = parser.parse_args()
    flush = "SYNC_FLUSH" if options.sync_flush else "ASYNC_FLUSH"
    costs: dict[tuple[int, str], list[Cost]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="neve-bench-") as root, ExitStack() as stack:
        cases = options.case or list(CASES)
        pairs = {case: stack.enter_context(started(case, Path(root), flush)) for case in cases}
        everybody = [one for pair in pairs.values() for one in (pair.master, pair.slave) if one is not None]
        for turn in range(options.repeat):
            for in_flight in options.in_flight:
                for case in cases if turn % 2 == 0 else reversed(cases):
                    settle(everybody)
                    cost = measure(pairs[case], in_flight, options.warm, options.seconds)
                    costs[in_flight, case].append(cost)
                    print(f"  {in_flight:3} in flight  {case:20} {cost.per_second:10,.0f}/s", flush=True)
    show(costs, flush)


def show(costs: dict[tuple[int, str], list[Cost]], flush: str) -> None:
    """Medians."""
    print(f"\n{SIZE} B, {flush}: medians")
    print(
        f"{'in flight':>9} {'case':20} {'sends/s':>10} {'master µs':>10} {'slave µs':>10} {'p50 µs':>8} {'p99 µs':>8}"
    )
    for (in_flight, case), found in sorted(costs.items(), key=lambda one: (one[0][0], list(CASES).index(one[0][1]))):

        def median(of: Callable[[Cost], float], found: list[Cost] = found) -> float:
            return statistics.median(map(of, found))

        print(
            f"{in_flight:9} {case:20} {median(lambda one: one.per_second):10,.0f}"
            f" {median(lambda one: one.master_us):10.1f} {median(lambda one: one.slave_us):10.1f}"
            f" {median(lambda one: one.p50_us):8,.0f} {median(lambda one: one.p99_us):8,.0f}"
        )


if __name__ == "__main__":
    main()
