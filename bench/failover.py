"""The time without successful sends after a broker set's master is killed or frozen: neve and Apache RocketMQ 5.3.3.

Each set has three members that acknowledge what all in-sync replicas have, one controller, one name server, and default
times. Two producers send sequentially to each set throughout: neve's client with its default settings, and the stock
Java client with `pollNameServerInterval` 3 s. The result is the time from the moment at which the master is killed
(`kill -9`) or frozen (`SIGSTOP`) to the end of the first send that another member acknowledges. Then the former master
is started again, all are in sync, and the next turn follows; sets alternate, so both meet the same machine.

A turn takes more than a minute for Apache: `--times 20` takes well over half an hour. No turn is begun after
`--minutes`. `--results` saves the measurements: with the same file the benchmark resumes, and prints all of them; so
parts (`--only neve --kind killed`) may be measured one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import json
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self

import neve
from bench import jvm
from bench.measure import JAVA_SOURCES, end_by_signal
from bench.wire import Client, Refused
from broker.config import BrokerConfig
from neve import NeveError
from neve.client import SendStatus
from neve.record.ids import parse_offset_msg_id
from tests.kit.clock.waiting import wait_until
from tests.kit.server.apache import ApacheController, ApacheMember, ApacheNameServer
from tests.kit.server.broker_set import BrokerSet
from tests.kit.server.processes import Processes

MEMBERS = 3
TOPIC = "failover"
KILLED, FROZEN = "killed", "frozen"
_SYNC_STATE_DATA = 1006
_PAUSE_S = 0.005
_CHANGE_S = 240.0
_BACK_S = 45.0  # Or a frozen master that was thawed.
#: Apache's defaults; `ApacheMember` polls more often, for tests.
_APACHE_DEFAULTS = {
    "syncBrokerMetadataPeriod": "5000",
    "checkSyncStateSetPeriod": "5000",
    "haSendHeartbeatInterval": "5000",
}


class Member(Protocol):
    """A broker of either kind."""

    @property
    def broker(self) -> str:
        """host:port"""

    def kill(self) -> None:
        """Send SIGKILL."""

    def signal(self, number: int) -> None:
        """Send a signal to its process."""

    def start(self) -> Any:
        """Start it again."""


class Set:
    """The members, as their controller reports them."""

    def __init__(self, name: str, controller: str, namesrv: str, members: list[Member]) -> None:
        self._name, self._controller, self.namesrv, self._members = name, controller, namesrv, members

    def _told(self) -> dict[str, Any]:
        with Client(self._controller) as client:
            answer = client.ask(_SYNC_STATE_DATA, {}, json.dumps([self._name]).encode())
        return dict(json.loads(answer.body)["replicasInfoTable"].get(self._name, {}))

    def _is_whole(self) -> bool:
        told = self._told()
        in_sync = [one for one in told.get("inSyncReplicas", ()) if one["alive"]]
        return bool(told.get("masterAddress")) and len(in_sync) == MEMBERS

    def whole(self) -> None:
        """Wait until there is a master and all members are in sync."""
        wait_until(self._is_whole, "all members are in sync", _CHANGE_S)

    def is_whole_within(self, seconds: float) -> bool:
        try:
            wait_until(self._is_whole, "all members are in sync", seconds)
        except AssertionError:
            return False
        return True

    def master(self) -> Member:
        address = self._told()["masterAddress"]
        return next(member for member in self._members if member.broker == address)

    def create(self) -> None:
        with Client(self.master().broker) as client:
            client.create_topic(TOPIC, 8)


class Prober:
    """A running producer; `acks` are (time in ms, broker that stored it), in order."""

    def __init__(self) -> None:
        self.acks: list[tuple[float, str]] = []

    def first_from_another(self, broker: str, since_ms: float) -> float | None:
        """Return when another broker acknowledged a message for the first time since then."""
        since = bisect.bisect_left(self.acks, (since_ms, ""))
        return next((when for when, by in self.acks[since:] if by != broker), None)

    def works_on(self, broker: str) -> bool:
        """Return whether this broker acknowledged the latest message recently."""
        return bool(self.acks) and self.acks[-1][1] == broker and _now_ms() - self.acks[-1][0] < 500


class NeveProber(Prober):
    """Neve's client, on an event loop in its own thread."""

    def __init__(self, namesrv: str) -> None:
        super().__init__()
        self._namesrv, self._stopped = namesrv, threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()), daemon=True)

    async def _work(self) -> None:
        async with neve.connect(self._namesrv) as client:
            while not self._stopped.is_set():
                try:
                    result = await client.send(TOPIC, b"x" * 100)
                except NeveError:
                    await asyncio.sleep(_PAUSE_S)
                    continue
                if result.status is SendStatus.SEND_OK:
                    self.acks.append((_now_ms(), _stored_by(result.offset_msg_id)))
                await asyncio.sleep(_PAUSE_S)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self._thread.join()


class JavaProber(Prober, Processes):
    """The stock client, in a JVM."""

    def __init__(self, namesrv: str, directory: Path) -> None:
        Prober.__init__(self)
        Processes.__init__(self, directory)
        self._command = jvm.java(jvm.classes(JAVA_SOURCES), "Failover", namesrv, TOPIC, home=directory)

    def start(self) -> Self:
        process = self.spawn(self._command, "java.log", piped=True)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return self

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            word, when, message_id = line.split("\t")
            assert word == "ACK"
            self.acks.append((float(when), _stored_by(message_id.strip())))

    def __exit__(self, *exc: object) -> None:
        self.kill()


def _now_ms() -> float:
    return time.time_ns() / 1e6


def _stored_by(offset_msg_id: str) -> str:
    host, port, _ = parse_offset_msg_id(offset_msg_id)
    return f"{host}:{port}"


def neve_set(stack: ExitStack, directory: Path) -> Set:
    patience = {"controllerHeartBeatTimeoutMills": BrokerConfig().controller_heart_beat_timeout_mills}
    brokers = stack.enter_context(BrokerSet(directory, members=MEMBERS, replication="sync", settings=patience))
    controller = brokers.controller.ready["controller"]
    return Set("broker-a", controller, brokers.name_server.namesrv, list[Member](brokers.members))


def apache_set(stack: ExitStack, directory: Path) -> Set:
    controller = stack.enter_context(ApacheController(directory / "controller"))
    names = stack.enter_context(ApacheNameServer(directory / "namesrv"))
    members = [
        ApacheMember(
            directory / str(number),
            namesrv=names.namesrv,
            controller=controller.address,
            settings=_APACHE_DEFAULTS,
            heap="512m",
        )
        for number in range(MEMBERS)
    ]
    for member in members:
        stack.enter_context(member)
    return Set("stock", controller.address, names.namesrv, list[Member](members))


class Results:
    """Seconds for each turn in order of measurement; the file has a line of JSON for each."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lines: list[tuple[str, str, dict[str, float]]] = []
        if path is not None and path.exists():
            self._lines += [tuple(json.loads(line)) for line in path.read_text().splitlines()]

    def add(self, how: str, name: str, took: dict[str, float]) -> None:
        self._lines.append((how, name, took))
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps((how, name, took)) + "\n")

    def turns(self, how: str, name: str) -> int:
        return sum(line[:2] == (how, name) for line in self._lines)

    def show(self) -> None:
        print("\nTo the first send that another member acknowledged, seconds")
        print(f"{'':8} {'':7} {'':14} {'times':>6} {'median':>8} {'lowest':>8} {'highest':>8}")
        times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        for how, name, took in self._lines:
            for client, seconds in took.items():
                times[how, name, client].append(seconds)
        for (how, name, client), found in sorted(times.items()):
            numbers = " ".join(f"{number:8.2f}" for number in (statistics.median(found), min(found), max(found)))
            print(f"{how:8} {name:7} {client:14} {len(found):6} {numbers}")


def change_master(brokers: Set, how: str, probers: dict[str, Prober]) -> dict[str, float]:
    """Return the seconds until each producer had an acknowledgement from another member; then restore the set."""
    brokers.whole()
    master = brokers.master()
    wait_until(
        lambda: all(one.works_on(master.broker) for one in probers.values()), "producers work on the master", _CHANGE_S
    )
    if how == KILLED:
        begin = _now_ms()
        master.kill()
        undo: Callable[[], object] = master.start
    else:
        begin = _now_ms()
        master.signal(signal.SIGSTOP)
        undo = lambda: master.signal(signal.SIGCONT)  # noqa: E731
    took: dict[str, float] = {}

    def all_went_on() -> bool:
        for name, prober in probers.items():
            first = prober.first_from_another(master.broker, begin)
            if first is not None:
                took[name] = (first - begin) / 1000
        return len(took) == len(probers)

    try:
        wait_until(all_went_on, "another member acknowledges", _CHANGE_S)
    finally:
        undo()
    if not brokers.is_whole_within(_BACK_S):
        print(f"  {master.broker} did not come back in sync by itself: it is started again", flush=True)
        master.kill()
        master.start()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="for each way to lose a master")
    parser.add_argument("--only", choices=["neve", "apache"], help="default: both, in turns")
    parser.add_argument("--kind", choices=[KILLED, FROZEN], help="default: both")
    parser.add_argument("--minutes", type=float, default=24.0, help="no further turn is begun then")
    parser.add_argument("--results", type=Path, help="a file with what was measured before, to which this is added")
    options = parser.parse_args()
    end_by_signal()
    end_by = time.monotonic() + options.minutes * 60
    makers = {"neve": neve_set, "apache": apache_set}
    chosen = [options.only] if options.only else list(makers)
    results = Results(options.results)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="neve-bench-")))
        sets, probers = {}, {}
        for name in chosen:
            sets[name] = makers[name](stack, root / name)
            sets[name].whole()
            wait_until(lambda name=name: _is_made(sets[name]), "a topic", _CHANGE_S)  # type: ignore[misc]
            namesrv = sets[name].namesrv
            probers[name] = {
                "neve's client": stack.enter_context(NeveProber(namesrv)),
                "stock client": stack.enter_context(JavaProber(namesrv, root / f"{name}-java")),
            }
        for turn in range(options.times):
            for how in [options.kind] if options.kind else (KILLED, FROZEN):
                for name in chosen:
                    if results.turns(how, name) > turn or time.monotonic() >= end_by:
                        continue
                    started = time.monotonic()
                    took = change_master(sets[name], how, probers[name])
                    results.add(how, name, took)
                    told = ", ".join(f"{client} {seconds:.3f} s" for client, seconds in took.items())
                    print(f"  {turn:3} {how} {name:7} {told}; {time.monotonic() - started:.0f} s with all", flush=True)
    results.show()


def _is_made(brokers: Set) -> bool:
    """Return whether the topic is created; a newly elected master may not accept requests yet."""
    try:
        brokers.create()
    except (OSError, Refused):
        return False
    return True


if __name__ == "__main__":
    main()
