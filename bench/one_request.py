"""How long one request blocks the event loop of a broker.

Two brokers in turn, without other traffic:

- `keys`: 1,000,000 messages with one key; then queries for the newest, for the oldest second, for a time without
  messages, by another key with the same hash, and eight at once;
- `queues`: a topic of 4,096 queues with messages, eight groups with an offset in each; then the requests that scan all
  of them.

For each request: the time until its answer, and the longest turn of the event loop meanwhile, by the wall and by the
CPU time of the loop's thread (`bench/steps`; turns of less than 5 ms are not recorded). The goal is 10 ms. On a busy
machine only the CPU time is meaningful.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from zlib import crc32

from bench.pauses import Cluster, create_topics, pipelined
from bench.wire import SEND_V2, Client, Response, request, send_ext
from tests.kit.server.neve import NeveServer
from tests.kit.store.colliding_keys import colliding_words

_QUERY = 12
_POP = 200050
_GOAL_MS = 10.0
_LONG = 1 << 62


class Measured:
    """A broker, and the turns of its loop that take more than 5 ms."""

    def __init__(self, root: Path) -> None:
        self._steps = root / "steps"
        self._steps.touch()
        path = f"{Path(__file__).parent / 'steps'}:{os.environ.get('PYTHONPATH', '')}"
        self.server = NeveServer(root / "neve", settings={"mappedFileSizeCommitLog": "1g"})
        self.server.start({"PYTHONPATH": path, "NEVE_BENCH_STEPS": str(self._steps)})

    def measure(self, name: str, ask: Callable[[Client], list[Response]]) -> None:
        """Print one row."""
        with Client(self.server.broker, 600) as client:
            time.sleep(0.5)
            started = time.monotonic()
            answers = ask(client)
            ended = time.monotonic()
            time.sleep(0.1)
        rows = [json.loads(line) for line in self._steps.read_text().splitlines()]
        during = [row for row in rows if started < row["at"] < ended + 0.05]
        wall = max((row["wall_ms"] for row in during), default=0.0)
        cpu = max((row["cpu_ms"] for row in during), default=0.0)
        where = max(during, key=lambda row: row["cpu_ms"])["where"] if during else ""
        codes = ",".join(str(code) for code in sorted({answer.code for answer in answers}))
        verdict = "" if cpu <= _GOAL_MS else f"  ABOVE {_GOAL_MS:.0f} ms: {where}"
        print(
            f"{name:34} code {codes:4} answered in {(ended - started) * 1e3:8.1f} ms, longest turn "
            f"{_at_least(wall)} ms by the wall, {_at_least(cpu)} ms of CPU{verdict}",
            flush=True,
        )


def _at_least(milliseconds: float) -> str:
    return f"{milliseconds:5.1f}" if milliseconds else "   <5"


def one(code: int, ext: Mapping[str, object]) -> Callable[[Client], list[Response]]:
    return lambda client: [client.invoke(code, ext)]


def several(code: int, ext: Mapping[str, object], count: int) -> Callable[[Client], list[Response]]:
    """Send requests at once on one connection."""

    def ask(client: Client) -> list[Response]:
        client.socket.sendall(b"".join(request(code, number, ext) for number in range(count)))
        answers: list[Response] = []
        while len(answers) < count:
            answers += client.responses.feed(client.socket.recv(1 << 20))
        return answers

    return ask


def keys(broker: Measured, messages: int) -> None:
    """Query by a key that all messages have."""
    key, *_ = colliding_words("t", crc32(b"t#wanted"))
    frames = ((SEND_V2, send_ext("t", 0, f"KEYS\x01{key}\x02", queues=1)) for _ in range(messages))
    with Client(broker.server.broker, 600) as client:
        client.create_topic("t", 1)
        started = time.time()
        assert pipelined(client, frames, b"x") == 0
    first_ms = int(started * 1000)
    print(f"{messages:,} messages with one key stored in {time.time() - started:.0f} s", flush=True)

    def query(wanted: str, begin: int, end: int) -> dict[str, object]:
        return {"topic": "t", "key": wanted, "maxNum": 64, "beginTimestamp": begin, "endTimestamp": end}

    for name, ext in {
        "newest by key": query(key, 0, _LONG),
        "oldest second by key": query(key, first_ms, first_ms + 1000),
        "time without messages, by key": query(key, 0, 1),
        "key with the same hash": query("wanted", 0, _LONG),
    }.items():
        broker.measure(name, one(_QUERY, ext))
    broker.measure("8 × oldest second", several(_QUERY, query(key, first_ms, first_ms + 1000), 8))
    broker.measure("8 × key with the same hash", several(_QUERY, query("wanted", 0, _LONG), 8))


def queues(broker: Measured, count: int, groups: int) -> None:
    """Send requests that scan all queues of a topic."""
    cluster = Cluster(broker.server.broker, 1, count, groups)
    topic, group = cluster.topics[0], cluster.groups[0]
    with Client(cluster.broker, 600) as client:
        create_topics(client, cluster.topics, count)
    cluster.fill(heartbeats=False)
    print(f"{count:,} queues filled, with offsets of {groups} groups", flush=True)
    pop: dict[str, object] = {
        "topic": topic, "queueId": -1, "maxMsgNums": 32, "invisibleTime": 60_000, "pollTime": 0, "bornTime": 0,
        "initMode": 0,
    }  # fmt: skip
    reset = {"topic": topic, "group": group, "isForce": "true"}
    table: list[tuple[str, int, dict[str, object]]] = [
        ("POP, nothing there", _POP, {**pop, "consumerGroup": group}),
        ("POP, first of a group", _POP, {**pop, "consumerGroup": "other"}),
        ("GET_TOPIC_STATS_INFO", 202, {"topic": topic}),
        ("GET_CONSUME_STATS", 208, {"consumerGroup": group}),
        ("GET_BROKER_CONSUME_STATS", 317, {"isOrder": "false"}),
        ("QUERY_CONSUME_TIME_SPAN", 303, {"topic": topic, "group": group}),
        ("GET_ALL_CONSUMER_OFFSET", 43, {}),
        ("INVOKE_BROKER_TO_RESET_OFFSET", 222, {**reset, "timestamp": 0}),
        ("CLONE_GROUP_OFFSET", 314, {"srcGroup": group, "destGroup": "copy", "topic": topic, "offline": "true"}),
        ("QUERY_CORRECTION_OFFSET", 308, {"topic": topic, "compareGroup": group, "filterGroups": ""}),
    ]
    for name, code, ext in table:
        broker.measure(name, one(code, ext))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["keys", "queues"], action="append", help="default: both")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--queues", type=int, default=4096)
    parser.add_argument("--groups", type=int, default=8)
    options = parser.parse_args()
    for part in options.part or ["keys", "queues"]:
        root = Path(tempfile.mkdtemp(prefix="neve-bench-"))
        broker = Measured(root)
        try:
            if part == "keys":
                keys(broker, options.messages)
            else:
                queues(broker, options.queues, options.groups)
        finally:
            broker.server.kill()
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
