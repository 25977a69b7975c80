"""Sends at a steady rate, each timed from the moment at which it was due; and cold replays.

    python -m bench.open_load send   BROKER TOPIC SIZE RATE WARM_S SECONDS
    python -m bench.open_load replay BROKER TOPIC GROUPS

A send that is late because earlier answers were late has waited since it was due, so stalls of the broker are measured
in full. `send` prints READY when it is connected and begins at a line on its input; at the end it prints a line of
JSON: the latency of sends, its own lateness, and its processor time. `replay` reads the whole topic repeatedly, each
group from another offset, until its input ends; then it prints a line of JSON with the number of messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import select
import socket
import sys
import time
from typing import cast

import uvloop

from bench.raw_load import QUEUES
from bench.wire import (
    OPAQUE_FIRST,
    PULL,
    PULL_NOT_FOUND,
    PULL_RETRY_IMMEDIATELY,
    SUCCESS,
    Client,
    Responses,
    SendFrames,
    pull_ext,
    request,
)

_ANSWERED_S = 30.0  # After the last send.
_PULL_BATCH = 32
_AGAIN_S = 0.05


def percentile(ordered: list[int], share: float) -> int:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def send(broker: str, topic: str, size: int, rate: float, warm: float, seconds: float) -> None:
    host, _, port = broker.rpartition(":")
    connection = socket.create_connection((host, int(port)), 30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sender = _Sender(connection, SendFrames(topic, b"x" * size, QUEUES), rate)
    gc.disable()
    _stand_apart()
    print("READY", flush=True)
    sys.stdin.readline()
    sender.run(int(rate * (warm + seconds)))
    skipped = int(rate * warm)
    waited, late = sorted(sender.waited[skipped:]), sorted(sender.late[skipped:])
    told = {
        "sent": len(waited),
        "failed": sender.failed,
        "p50": percentile(waited, 0.5),
        "p99": percentile(waited, 0.99),
        "p999": percentile(waited, 0.999),
        "slowest": waited[-1],
        "late_p99": percentile(late, 0.99),
        "cpu": sender.cpu / (warm + seconds),
    }
    print(json.dumps(told), flush=True)


def _stand_apart() -> None:
    """Request real-time scheduling, because producers have their own machines; without it the lateness is reported."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def _take_what_is_left() -> None:
    """Lower the priority, because consumers have their own machines; it takes effect within the broker's session."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class _Sender:
    """One connection; times in microseconds, by number of the send."""

    def __init__(self, connection: socket.socket, frames: SendFrames, rate: float) -> None:
        self._connection, self._frames, self._rate = connection, frames, rate
        self._responses = Responses()
        self.waited: list[int] = []
        self.late: list[int] = []
        self.failed = 0
        self.cpu = 0.0

    def run(self, count: int) -> None:
        self.waited, self.late = [-1] * count, [-1] * count
        period = 1e9 / self._rate
        began, used = time.monotonic_ns() + 1_000_000, time.process_time()
        unanswered, sent = count, 0
        while unanswered:
            now = time.monotonic_ns()
            first = sent
            sent = min(max(int((now - began) / period) + 1, sent), count) if now >= began else sent
            if sent > first:
                self._connection.sendall(b"".join(map(self._frames.frame, range(first, sent))))
                for number in range(first, sent):
                    self.late[number] = int(now - began - number * period) // 1000
            due = (began + sent * period - time.monotonic_ns()) / 1e9 if sent < count else _ANSWERED_S
            # select() waits with microsecond precision, poll() with milliseconds.
            ready, _, _ = select.select([self._connection], [], [], max(due, 0))
            if ready:
                unanswered -= self._take(began, period)
            elif sent == count and due >= _ANSWERED_S:
                raise TimeoutError(f"{unanswered} sends were not answered")
        self.cpu = time.process_time() - used

    def _take(self, began: int, period: float) -> int:
        data = self._connection.recv(1 << 20)
        now = time.monotonic_ns()
        if not data:
            raise ConnectionResetError("the broker closed the connection")
        answers = self._responses.feed(data)
        for answer in answers:
            number = answer.opaque - OPAQUE_FIRST
            self.waited[number] = int(now - began - number * period) // 1000
            self.failed += answer.code != SUCCESS
        return len(answers)


class _Replay(asyncio.Protocol):
    """One group: a pull in flight for each queue, which restarts at the first message after the last."""

    def __init__(self, group: str, topic: str, bounds: list[tuple[int, int]], share: float) -> None:
        self._group, self._topic, self._bounds = group, topic, bounds
        self._offsets = [first + int((end - first) * share) for first, end in bounds]
        self._responses = Responses()
        self.got = self.refused = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class does not inherit from it.
        for queue, (first, end) in enumerate(self._bounds):
            if first < end:
                self._pull(queue)

    def data_received(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        for answer in self._responses.feed(data):
            queue = answer.opaque - OPAQUE_FIRST
            first, end = self._bounds[queue]
            if answer.code == SUCCESS:
                following = int(answer.extFields["nextBeginOffset"])
                self.got += following - self._offsets[queue]
                self._offsets[queue] = following if following < end else first
                self._pull(queue)
            else:  # Like a consumer that was asked to retry.
                self.refused += answer.code not in (PULL_RETRY_IMMEDIATELY, PULL_NOT_FOUND)
                loop.call_later(_AGAIN_S, self._pull, queue)

    def _pull(self, queue: int) -> None:
        ext = pull_ext(self._group, self._topic, queue, self._offsets[queue], _PULL_BATCH)
        self._transport.write(request(PULL, OPAQUE_FIRST + queue, ext))


async def replay(broker: str, topic: str, groups: int) -> None:
    host, _, port = broker.rpartition(":")
    with Client(broker) as client:
        bounds = [client.bounds(topic, queue) for queue in range(QUEUES)]
    loop = asyncio.get_running_loop()
    print("READY", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    readers = []
    for number in range(groups):
        group = _Replay(f"replay-{number}", topic, bounds, number / groups)
        await loop.create_connection(lambda group=group: group, host, int(port))  # type: ignore[misc]
        readers.append(group)
    await loop.run_in_executor(None, sys.stdin.read)
    told = {"got": sum(one.got for one in readers), "refused": sum(one.refused for one in readers)}
    print(json.dumps(told), flush=True)
    os._exit(0)  # Connections are being opened.


def main(verb: str, broker: str, topic: str, *numbers: str) -> None:
    if verb == "send":
        size, rate, warm, seconds = numbers
        send(broker, topic, int(size), float(rate), float(warm), float(seconds))
    elif verb == "replay":
        _take_what_is_left()
        uvloop.run(replay(broker, topic, int(numbers[0])))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
