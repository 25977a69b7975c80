"""How long a broker with many topics delays requests: 10,000 topics, 80,000 queues, five groups, ordinary traffic.

Every queue has a message and every group an offset in every queue before the measurement begins. Then, until its end:
sends to topics by Zipf's law, each message pulled and committed by each group; heartbeats of groups that subscribe to
all topics; scrapes, an administrator's queries for whole groups; and all of the broker's own jobs (archive, TTL,
eviction, tables, registrations) at their default periods. Three measurements:

- a probe, a separate process, requests the end of a queue every 5 ms: its slowest answers are what a client sees,
  including the noise of the machine;
- the broker's metric `neve_loop_pause_seconds` is the longest lateness of a timer on its loop between two scrapes;
- `bench/steps`, within the broker, records each turn of its loop of more than 5 ms, by wall time and by the CPU time of
  the loop's thread, with the running functions. Wall time includes other processes, and threads with the interpreter;
  without the time in which the thread was ready but had no core, it is what the broker itself is responsible for.

`--deletion 4096` instead deletes a topic of that many queues; `--promotion 10000` kills the master of a set whose
slaves have that many queues with new messages; `--truncation 10000` makes a former master truncate a tail with messages
in that many queues. Each prints the longest turn of the loop meanwhile.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.wire import MAX_OFFSET, PULL, SEND_V2, SUCCESS, Client, Refused, pull_ext, request, send_ext
from tests.kit.clock.waiting import wait_until
from tests.kit.server.broker_set import BrokerSet
from tests.kit.server.neve import NeveServer

_CREATE_LIST, _HEART_BEAT, _COMMIT = 18, 34, 15
_DELETE_TOPIC = 215
_CONSUME_STATS, _TOPIC_STATS, _ALL_TOPICS = 208, 202, 21
_PROBE_S = 0.005
_IN_ONE = 500  # The number of topics created by one request.
_PIPELINE = 200
_AFTER_S = 10  # The new master writes its first checkpoint, and its slave takes its tables, after the next send.
_MOST_MS, _TOLD_MS = 10.0, 5.0
_LONGEST = 5  # How many of the longest turns are printed with their parts.
_BODY = b"x" * 512
_CHANGE_S = 300.0


def pipelined(client: Client, frames: Iterator[tuple[int, dict[str, object]]], body: bytes = b"") -> int:
    """Send a few hundred requests at a time; return how many were refused."""
    refused = 0
    opaque = itertools.count(1)
    while batch := list(itertools.islice(frames, _PIPELINE)):
        client.socket.sendall(b"".join(request(code, next(opaque), ext, body) for code, ext in batch))
        waiting = len(batch)
        while waiting:
            data = client.socket.recv(1 << 20)
            if not data:
                raise ConnectionResetError("the broker closed the connection")
            answers = client.responses.feed(data)
            refused += sum(answer.code != SUCCESS for answer in answers)
            waiting -= len(answers)
    return refused


def create_topics(
    client: Client, topics: Sequence[str], queues: int, attributes: Mapping[str, str] | None = None
) -> None:
    """Create many topics by one request."""
    config: dict[str, object] = {
        "readQueueNums": queues,
        "writeQueueNums": queues,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": False,
    }
    if attributes:
        config["attributes"] = attributes
    for first in range(0, len(topics), _IN_ONE):
        listed = [{"topicName": topic, **config} for topic in topics[first : first + _IN_ONE]]
        client.ask(_CREATE_LIST, {}, json.dumps({"topicConfigList": listed}).encode())


class Cluster:
    """The topics and groups of one run."""

    def __init__(self, broker: str, topics: int, queues: int, groups: int) -> None:
        self.broker = broker
        self.queues = queues
        self.topics = [f"topic-{number:05}" for number in range(topics)]
        self.groups = [f"group-{number}" for number in range(groups)]

    def create(self) -> None:
        with Client(self.broker, 600) as client:
            create_topics(client, self.topics, self.queues)

    def places(self) -> Iterator[tuple[str, int]]:
        return ((topic, queue) for topic in self.topics for queue in range(self.queues))

    def fill(self, *, heartbeats: bool = True) -> None:
        """Store a message in every queue and offsets of every group; `heartbeats` are those of the groups' clients."""
        with Client(self.broker, 600) as client:
            assert pipelined(client, ((SEND_V2, send_ext(*place, queues=self.queues)) for place in self.places())) == 0
            if heartbeats:
                self.heartbeats(client)
            for group in self.groups:
                assert pipelined(client, ((PULL, pull_ext(group, *place, 0)) for place in self.places())) == 0
                assert pipelined(client, (self.commit(group, *place, 1) for place in self.places())) == 0

    @staticmethod
    def commit(group: str, topic: str, queue: int, offset: int) -> tuple[int, dict[str, object]]:
        ext: dict[str, object] = {"consumerGroup": group, "topic": topic, "queueId": queue, "commitOffset": offset}
        return _COMMIT, ext

    def heartbeats(self, client: Client) -> None:
        for group in self.groups:
            subscriptions = [
                {"classFilterMode": False, "expressionType": "TAG", "subString": "*", "subVersion": 1, "topic": topic}
                for topic in self.topics
            ]
            data = {
                "groupName": group,
                "consumeType": "CONSUME_PASSIVELY",
                "messageModel": "CLUSTERING",
                "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
                "subscriptionDataSet": subscriptions,
                "unitMode": False,
            }
            body = {"clientID": f"client-of-{group}", "consumerDataSet": [data], "producerDataSet": []}
            client.ask(_HEART_BEAT, {}, json.dumps(body).encode())


class Zipf:
    """A few topics get most of the messages, as in practice."""

    def __init__(self, count: int, seed: int = 1) -> None:
        self._sums = list(itertools.accumulate(1 / rank for rank in range(1, count + 1)))
        self._random = random.Random(seed)

    def next(self) -> int:
        return bisect.bisect_left(self._sums, self._random.random() * self._sums[-1])


def traffic(cluster: Cluster, rate: float, until: float, sent: list[int]) -> None:
    """Send at a steady rate; every group reads and commits each message."""
    zipf, chosen = Zipf(len(cluster.topics)), random.Random(2)
    step = 10 / rate
    due = time.monotonic()
    with Client(cluster.broker, 600) as producer, Client(cluster.broker, 600) as consumer:
        while (now := time.monotonic()) < until:
            if now < due:
                time.sleep(due - now)
            due += step
            for _ in range(10):
                topic, queue = cluster.topics[zipf.next()], chosen.randrange(cluster.queues)
                offset = producer.send(topic, queue, _BODY)
                pulls = ((PULL, pull_ext(group, topic, queue, offset)) for group in cluster.groups)
                assert pipelined(consumer, iter(list(pulls))) == 0
                commits = (cluster.commit(group, topic, queue, offset + 1) for group in cluster.groups)
                assert pipelined(consumer, iter(list(commits))) == 0
                sent[0] += 1


def upkeep(cluster: Cluster, admin: str, until: float, scrape_s: float, pauses: list[float]) -> None:
    """Scrape, and record the longest pause of each scrape; send heartbeats and administrative queries in between."""
    with Client(cluster.broker, 600) as client:
        for turn in itertools.count():
            if time.monotonic() >= until:
                return
            with urllib.request.urlopen(f"http://{admin}/metrics", timeout=120) as answer:
                lines = answer.read().decode().splitlines()
            pauses += [float(line.split()[1]) for line in lines if line.startswith("neve_loop_pause_seconds ")]
            if turn % 2 == 0:
                cluster.heartbeats(client)
            if turn % 4 == 1:
                client.ask(_CONSUME_STATS, {"consumerGroup": cluster.groups[turn % len(cluster.groups)]})
                client.ask(_TOPIC_STATS, {"topic": cluster.topics[turn]})
                client.ask(_ALL_TOPICS, {})
            time.sleep(max(min(scrape_s, until - time.monotonic()), 0))


def probe(broker: str, topic: str, seconds: float) -> None:
    """Print the latency of each answer, in microseconds."""
    end = time.monotonic() + seconds
    due = time.monotonic()
    took: list[int] = []
    with Client(broker, 600) as client:
        while (now := time.monotonic()) < end:
            if now < due:
                time.sleep(due - now)
            start = time.monotonic_ns()
            client.ask(MAX_OFFSET, {"topic": topic, "queueId": 0})
            took.append((time.monotonic_ns() - start) // 1_000)
            due = max(due + _PROBE_S, time.monotonic())
    print(json.dumps(took))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, default=10_000)
    parser.add_argument("--queues", type=int, default=8)
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument("--rate", type=float, default=100, help="sends a second; each is read by every group")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--scrape", type=float, default=15, help="seconds from one scrape to the next")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the broker")
    parser.add_argument("--deletion", type=int, metavar="QUEUES", help="delete a topic of so many queues")
    parser.add_argument("--promotion", type=int, metavar="QUEUES", help="a slave with so many active queues is elected")
    parser.add_argument("--truncation", type=int, metavar="QUEUES", help="a member cuts off a tail in so many queues")
    parser.add_argument("--probe", nargs=2, metavar=("BROKER", "TOPIC"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        broker, topic = options.probe
        probe(broker, topic, options.seconds)
        return
    if options.deletion or options.promotion or options.truncation:
        with tempfile.TemporaryDirectory(prefix="neve-bench-") as directory:
            if options.deletion:
                deletion(Path(directory) / "deletion", options.deletion)
            if options.promotion:
                promotion(Path(directory) / "promotion", options.promotion)
            if options.truncation:
                truncation(Path(directory) / "truncation", options.truncation)
        return
    settings = dict(pair.split("=", 1) for pair in options.set)
    root = Path(tempfile.mkdtemp(prefix="neve-bench-"))
    try:
        steps = root / "steps"
        path = f"{Path(__file__).parent / 'steps'}:{os.environ.get('PYTHONPATH', '')}"
        server = NeveServer(root / "neve", settings=settings)
        server.start({"PYTHONPATH": path, "NEVE_BENCH_STEPS": str(steps)})
        try:
            run(server, steps, options)
        finally:
            server.kill()  # No connection reads its data.
    finally:
        # Creating a file for each queue takes minutes, next to other work.
        subprocess.Popen(["rm", "-rf", root], start_new_session=True)


def run(server: NeveServer, steps: Path, options: argparse.Namespace) -> None:
    cluster = Cluster(server.broker, options.topics, options.queues, options.groups)
    started = time.monotonic()
    cluster.create()
    created = time.monotonic()
    cluster.fill()
    filled = time.monotonic()
    total = options.topics * options.queues
    print(f"{options.topics:,} topics made in {created - started:.0f} s, {total:,} queues filled and read by ", end="")
    print(f"{options.groups} groups in {filled - created:.0f} s", flush=True)
    began = time.monotonic()
    until = began + options.seconds
    pauses: list[float] = []
    sent = [0]
    command = [sys.executable, "-m", "bench.pauses", "--probe", server.broker, cluster.topics[0]]
    cpu = server.cpu_seconds()
    with subprocess.Popen([*command, "--seconds", str(options.seconds)], stdout=subprocess.PIPE, text=True) as asker:
        threads = [
            threading.Thread(target=traffic, args=(cluster, options.rate, until, sent)),
            threading.Thread(target=upkeep, args=(cluster, server.admin, until, options.scrape, pauses)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert asker.stdout is not None
        took = sorted(json.loads(asker.stdout.read()))
    cpu = (server.cpu_seconds() - cpu) / options.seconds
    memory = max(anonymous(process.pid) for process in server.alive())
    # The first scrape covers the time before the measurement.
    seen = sorted(pauses[1:])
    print(f"{options.seconds:.0f} s, {sent[0]:,} sends, each read by {options.groups} groups; {cpu:.2f} cores")
    print(f"loop's pause between scrapes: longest {seen[-1] * 1e3:.1f} ms, median {seen[len(seen) // 2] * 1e3:.1f} ms")
    shares = ((0.5, "p50"), (0.99, "p99"), (0.999, "p99.9"), (0.9999, "p99.99"))
    told = ", ".join(f"{name} {took[int(len(took) * share)] / 1e3:.1f} ms" for share, name in shares)
    print(f"answers to the probe: {told}, slowest {took[-1] / 1e3:.1f} ms of {len(took):,}")
    print(f"memory of the broker: {memory >> 20} MiB, mapped files apart")
    tell_steps([step for step in map(json.loads, steps.read_text().splitlines()) if began < step["at"] < until])


def tell_steps(steps: list[dict[str, Any]]) -> None:
    """Print the longest turn by each measure, and the functions in those with more than 5 ms of CPU time."""
    for step in steps:
        step["own_ms"] = step["wall_ms"] - step["core_ms"]
    for measure, what in (
        ("wall_ms", "by the wall"),
        ("own_ms", "by the wall without waits for a core"),
        ("cpu_ms", "by the CPU time of its thread"),
    ):
        longest = max(steps, key=lambda step: step[measure], default={measure: 0.0, "where": "none above 5 ms"})
        over = sum(step[measure] > _MOST_MS for step in steps)
        print(
            f"longest turn of the loop {what}: {longest[measure]:.1f} ms in {longest['where'] or 'no code of ours'}; ",
            end="",
        )
        print(f"{over} above {_MOST_MS:.0f} ms")
    for step in sorted(steps, key=lambda step: -step["wall_ms"])[:_LONGEST]:
        parts = ", ".join(f"{part} {step[part + '_ms']:.1f}" for part in ("cpu", "core", "blocked"))
        print(f"  {step['wall_ms']:5.1f} ms by the wall ({parts}): {step['where'] or 'no code of ours'}")
    named: dict[str, list[float]] = collections.defaultdict(list)
    for step in steps:
        if step["cpu_ms"] > _TOLD_MS:
            named[step["where"] or "no code of ours"].append(step["cpu_ms"])
    for where, took in sorted(named.items(), key=lambda item: -max(item[1])):
        print(f"  {len(took):4} times, longest {max(took):5.1f} ms of CPU time: {where}")


def watched(steps: Path) -> dict[str, str]:
    """Return the environment of a broker that `bench/steps` watches."""
    path = f"{Path(__file__).parent / 'steps'}:{os.environ.get('PYTHONPATH', '')}"
    return {"PYTHONPATH": path, "NEVE_BENCH_STEPS": str(steps)}


def steps_since(steps: Path, began: float) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in steps.read_text().splitlines()]
    assert rows, "no turn was recorded since the servers began: they are not watched"
    return [step for step in rows if step["at"] > began]


def deletion(root: Path, queues: int) -> None:
    """Print the longest turn of the loop while a topic of many queues is deleted and its files are removed."""
    steps = root / "steps"
    server = NeveServer(root / "neve", settings={"maxQueuesPerTopic": queues})
    server.start(watched(steps))
    try:
        cluster = Cluster(server.broker, 1, queues, 0)
        cluster.create()
        cluster.fill(heartbeats=False)
        time.sleep(1)
        began = time.monotonic()
        with Client(server.broker, 600) as client:
            client.ask(_DELETE_TOPIC, {"topic": cluster.topics[0]})
        answered = time.monotonic() - began
        removed = server.directory / "data" / "broker" / "consumequeue.removed"
        while any(removed.iterdir()) or (removed.parent / "consumequeue" / cluster.topics[0]).exists():
            time.sleep(0.05)
        print(f"topic of {queues:,} queues: deleted in {answered:.2f} s, removed in {time.monotonic() - began:.2f} s")
        tell_steps(steps_since(steps, began))
    finally:
        server.kill()


def promotion(root: Path, queues: int) -> None:
    """Print the longest turn of two slaves while one is elected, and for `_AFTER_S` after its first send."""
    root.mkdir(parents=True)
    steps, per_topic = root / "steps", 100
    os.environ.update(watched(steps))
    settings = {"maxQueuesPerTopic": per_topic, "mappedFileSizeCommitLog": "64m"}
    with BrokerSet(root / "set", replication="sync", settings=settings) as brokers:
        former = brokers.master
        cluster = Cluster(former.broker, queues // per_topic, per_topic, 0)
        cluster.create()
        cluster.fill(heartbeats=False)
        time.sleep(1)
        began = time.monotonic()
        former.kill()
        heir = brokers.master_after(former)
        with Client(heir.broker, 600) as client:
            until_taken(client, cluster.topics[0])
        print(f"{queues:,} active queues: the next send succeeded {time.monotonic() - began:.2f} s after the kill")
        time.sleep(_AFTER_S)
        tell_steps(steps_since(steps, began))


def truncation(root: Path, queues: int) -> None:
    """Print the longest turn of the loop of a former master that restarts and truncates its diverged tail."""
    root.mkdir(parents=True)
    steps, per_topic = root / "steps", 100
    # Slaves that are suspended for minutes stay in the SyncStateSet.
    patience = {"haMaxTimeSlaveNotCatchup": "10m", "controllerHeartBeatTimeoutMills": "10m"}
    settings = {"maxQueuesPerTopic": per_topic, "mappedFileSizeCommitLog": "64m", **patience}
    with BrokerSet(root / "set", replication="async", settings=settings) as brokers:
        former = brokers.master
        cluster = Cluster(former.broker, queues // per_topic, per_topic, 0)
        cluster.create()
        cluster.fill(heartbeats=False)
        wait_until(lambda: len(brokers.in_sync()) == len(brokers.members), "all are in sync", _CHANGE_S)
        others = [process for member in brokers.members if member is not former for process in member.alive()]
        for process in others:
            process.suspend()
        try:
            cluster.fill(heartbeats=False)  # The slaves do not have these messages.
            former.kill()
        finally:
            for process in others:
                process.resume()
        heir = brokers.master_after(former)
        with Client(heir.broker, 600) as client:
            until_taken(client, cluster.topics[0])
        former.start(watched(steps))
        began = time.monotonic()
        wait_until(lambda: len(brokers.in_sync()) == len(brokers.members), "the former master is back", _CHANGE_S)
        kept = sum(path.stat().st_size for path in former.directory.rglob("diverged/*.log"))
        assert kept, "nothing was cut off"
        print(f"{queues:,} queues: {kept:,} bytes cut off; in sync {time.monotonic() - began:.2f} s after the start")
        tell_steps(steps_since(steps, began))


def until_taken(client: Client, topic: str) -> None:
    """Send to an elected member until it accepts a message."""
    while True:
        try:
            client.send(topic, 0, _BODY)
            return
        except Refused:
            time.sleep(0.01)


def anonymous(pid: int) -> int:
    """Return the bytes of anonymous memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


if __name__ == "__main__":
    main()
