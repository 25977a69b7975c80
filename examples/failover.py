"""A broker set loses its master under load, and no acknowledged message is lost.

    neve up --replicas 3 ─▶ send without a pause ─▶ kill -9 of the master ─▶ another is elected ─▶ continue sending
        ─▶ the killed one restarts and follows ─▶ read everything ─▶ compare

Each acknowledged message must be read at its acknowledged offset, and no unsent message may be read; the first
difference ends the program with exit code 1. With async a master may lose messages that it alone had: they are counted.
A message that was sent again because no answer arrived may be stored twice.

    python examples/failover.py [--seconds N] [--replication sync|sync-available|async] [--keep]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neve.admin.broker_sets import BrokerSets, SetState, connect_controllers
from neve.client import AsyncClient, SendStatus, connect
from neve.errors import NeveError

TOPIC = "orders"
SET = "broker-a"
QUEUES = 4
SENDERS = 16
START_SECONDS = 120
CHANGE_SECONDS = 60.0
LOOK_SECONDS = 0.01  # Between two polls of the controller.
PAUSE_SECONDS = 0.02  # After a failed send.


class Lost(Exception):
    """An acknowledged message was not read."""


@dataclass(frozen=True)
class Acknowledged:
    """A message, its offset, and the time of its acknowledgement."""

    body: bytes
    queue: int
    offset: int
    at: float


@dataclass
class Load:
    """The observations of the senders so far."""

    acknowledged: list[Acknowledged] = field(default_factory=list)
    failed: list[bytes] = field(default_factory=list)
    sent: int = 0
    is_over: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def acknowledge(self, one: Acknowledged) -> None:
        self.acknowledged.append(one)
        self.news.set()

    async def first_after(self, instant: float) -> Acknowledged:
        """Return the first message acknowledged after that time."""
        async with asyncio.timeout(CHANGE_SECONDS):
            while not self.acknowledged or self.acknowledged[-1].at <= instant:
                self.news.clear()
                await self.news.wait()
        return next(one for one in self.acknowledged if one.at > instant)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of load before the kill, and after it")
    parser.add_argument("--replication", choices=["sync", "sync-available", "async"], default="sync")
    parser.add_argument("--keep", action="store_true", help="keep the directory with the members' data and logs")
    options = parser.parse_args()
    with ExitStack() as stack:
        if options.keep:
            root = Path(tempfile.mkdtemp(prefix="neve-failover-"))
            print(f"data and logs stay in {root}")
        else:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="neve-failover-")))
        ready = stack.enter_context(running(root, options.replication))
        try:
            lost = asyncio.run(run(ready, options.seconds, may_lose=options.replication == "async"))
        except Lost as error:
            print(f"LOST: {error}", file=sys.stderr)
            return 1
    if lost:
        print(f"{lost} acknowledged messages went with the master, as replication=async allows")
    else:
        print("every acknowledged message is read where it was acknowledged")
    return 0


async def run(ready: dict[str, Any], seconds: float, *, may_lose: bool) -> int:
    """Return how many acknowledged messages were lost, where that is allowed."""
    members = {member["broker"]: member["pid"] for member in ready["members"]}
    print(f"{len(members)} members, the master is {ready['master']}")
    load = Load()
    async with (
        connect(ready["namesrv"], timeout=10.0, attempt_timeout=3.0) as client,
        connect_controllers(ready["namesrv"], ready["controller"]) as (sets, _),
    ):
        await client.admin.create_topic(TOPIC, QUEUES)
        async with asyncio.TaskGroup() as senders:
            for _ in range(SENDERS):
                senders.create_task(send(client, load))
            try:
                elected_at = await fail_over(sets, members, load, seconds)
            finally:
                load.is_over = True
        found = await read_all(client)
    return compare(load, found, lost_until=elected_at if may_lose else 0.0)


async def send(client: AsyncClient, load: Load) -> None:
    """Send each number once; the client retries by itself, so a message may be stored twice."""
    while not load.is_over:
        body = b"%d" % load.sent
        load.sent += 1
        try:
            result = await client.send(TOPIC, body)
        except NeveError:
            load.failed.append(body)
            await asyncio.sleep(PAUSE_SECONDS)
            continue
        if result.status is SendStatus.SEND_OK:
            load.acknowledge(Acknowledged(body, result.queue.queue_id, result.queue_offset, time.monotonic()))
        else:  # Stored, but not durable: nothing was promised.
            load.failed.append(body)


async def fail_over(sets: BrokerSets, members: dict[str, int], load: Load, seconds: float) -> float:
    """Kill the master; return when the next one was elected."""
    await load.first_after(0.0)
    await asyncio.sleep(seconds)
    before = await sets.state(SET)
    former = before.master_address
    if former is None:
        raise Lost(f"nobody leads: {before}")
    os.kill(members[former], signal.SIGKILL)
    killed = time.monotonic()
    elected, elected_at = await elected_after(sets, before)
    last = max(one.at for one in load.acknowledged if one.at <= elected_at)
    first = await load.first_after(elected_at)
    print("\n      s   what")
    told(last - killed, f"the last send that {former} acknowledged")
    told(0.0, f"kill -9 of it, the master of epoch {before.master_epoch}")
    told(elected_at - killed, f"{elected.master_address} is elected, in epoch {elected.master_epoch}")
    told(first.at - killed, "the first send that it acknowledged")
    await asyncio.sleep(seconds)
    await sets.wait_until_in_sync(SET, former, CHANGE_SECONDS)
    told(time.monotonic() - killed, f"{former} is back, and in sync again")
    return elected_at


async def elected_after(sets: BrokerSets, before: SetState) -> tuple[SetState, float]:
    """Return the new master, and when it was seen."""
    async with asyncio.timeout(CHANGE_SECONDS):
        while True:
            state = await sets.state(SET)
            if state.master is not None and state.master_epoch > before.master_epoch:
                return state, time.monotonic()
            await asyncio.sleep(LOOK_SECONDS)


def told(seconds: float, what: str) -> None:
    print(f"{seconds:7.3f}   {what}", flush=True)


async def read_all(client: AsyncClient) -> dict[tuple[int, int], bytes]:
    """Return every message, by queue and offset."""
    found: dict[tuple[int, int], bytes] = {}
    async for message in client.reader(TOPIC):
        assert message.queue is not None
        assert message.queue_offset is not None
        place = (message.queue.queue_id, message.queue_offset)
        if place in found:
            raise Lost(f"{place} is there twice")
        found[place] = message.body
    return found


def compare(load: Load, found: dict[tuple[int, int], bytes], *, lost_until: float) -> int:
    """Return how many messages acknowledged until then are lost. Raise Lost if any other one is."""
    lost = 0
    for one in load.acknowledged:
        place = (one.queue, one.offset)
        if found.get(place) == one.body:
            continue
        if one.at > lost_until:
            there = f"{found[place]!r} is" if place in found else "nothing is"
            raise Lost(f"message {one.body!r} was acknowledged at {place}, and {there} there")
        lost += 1
    for place, body in found.items():
        if not body.isdigit() or int(body) >= load.sent:
            raise Lost(f"{place} has {body!r}, which nobody sent")
    print(f"\n{len(load.acknowledged)} sends were acknowledged, {len(load.failed)} failed")
    unanswered = len(found) - len(load.acknowledged) + lost
    print(f"{len(found)} messages are read, {unanswered} of them sent without an answer")
    return lost


@contextmanager
def running(root: Path, replication: str) -> Iterator[dict[str, Any]]:
    """Run `neve up --replicas 3` on free ports until SIGTERM; yield the addresses that it prints."""
    ports = ["--namesrv-port", "0", "--controller-port", "0", "--port", "0"]
    command = [
        sys.executable, "-c", "from neve.cli.main import main; main()",
        "up", "--replicas", "3", "--data", str(root), *ports, "--set", f"replication={replication}",
    ]  # fmt: skip
    log_path = root / "up.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=root)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith(b"{"):
            process.wait(START_SECONDS)
            raise SystemExit(f"neve up did not start:\n{log_path.read_text()[-4000:]}")
        ready: dict[str, Any] = json.loads(line)
        yield ready
    finally:
        process.terminate()
        try:
            process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
