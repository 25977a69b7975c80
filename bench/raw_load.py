"""A pipelined load generator that measures capacity: prebuilt frames, one write for all received answers.

    python -m bench.raw_load produce BROKER TOPIC SIZE IN_FLIGHT WARM_S SECONDS [USER SECRET]
    python -m bench.raw_load timed   BROKER TOPIC SIZE IN_FLIGHT WARM_S SECONDS
    python -m bench.raw_load consume BROKER TOPIC COUNT
    python -m bench.raw_load fill    BROKER TOPIC SIZE COUNT

It prints `MARK nanoseconds messages`, once when warm and once at the end, like the Java generator, followed by its
processor time in seconds; `timed` also prints `WAITED p50 p99`, in microseconds, for the answers between the marks.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import cast

import uvloop
from typing_extensions import override

from bench.wire import (
    OPAQUE_FIRST,
    PULL,
    PULL_NOT_FOUND,
    PULL_RETRY_IMMEDIATELY,
    SUCCESS,
    Client,
    Response,
    Responses,
    SendFrames,
    Signer,
    pull_ext,
    request,
)

QUEUES = 8
_PULL_BATCH = 32
_STALL_S = 60.0


def mark(count: int) -> None:
    print(f"MARK {time.monotonic_ns()} {count} {time.process_time():.6f}", flush=True)


class Producer(asyncio.Protocol):
    """Keeps `in_flight` sends in flight; ends after `limit` stored ones if there is a limit."""

    def __init__(self, frames: SendFrames, in_flight: int, limit: int | None = None) -> None:
        self._frames, self._in_flight, self._limit = frames, in_flight, limit
        self._responses = Responses()
        self._next = 0
        self.answered = 0
        self.failed = 0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class does not inherit from it.
        self._send(self._in_flight)

    def data_received(self, data: bytes) -> None:
        answers = self._responses.feed(data)
        self.note(answers)
        self.failed += sum(answer.code != SUCCESS for answer in answers)
        self.answered += len(answers)
        if self._limit is not None and self.answered - self.failed >= self._limit:
            if not self.done.done():
                self.done.set_result(None)
            return
        if answers:
            self._send(len(answers))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionResetError("the broker closed the connection"))

    def end(self) -> None:
        """Close the connection, with sends still in flight."""
        self.done.cancel()
        self._transport.abort()

    def note(self, answers: list[Response]) -> None:
        """Do nothing: times are not recorded here."""

    def _send(self, count: int) -> None:
        first, self._next = self._next, self._next + count
        frame = self._frames.frame
        self._transport.write(b"".join([frame(number) for number in range(first, first + count)]))


class TimedProducer(Producer):
    """A producer that records latencies; it reads the clock once for the frames of one write."""

    def __init__(self, frames: SendFrames, in_flight: int) -> None:
        super().__init__(frames, in_flight)
        self._sent: dict[int, int] = {}
        self.waited: list[int] = []  # In ns.

    @override
    def note(self, answers: list[Response]) -> None:
        now, sent = time.monotonic_ns(), self._sent
        self.waited += [now - sent.pop(answer.opaque - OPAQUE_FIRST) for answer in answers]

    @override
    def _send(self, count: int) -> None:
        now = time.monotonic_ns()
        self._sent.update(dict.fromkeys(range(self._next, self._next + count), now))
        super()._send(count)


class Consumer(asyncio.Protocol):
    """One pull in flight for each queue; the next one uses the offset in the last answer."""

    def __init__(self, topic: str, ends: list[int], count: int) -> None:
        self._topic, self._ends, self._count = topic, ends, count
        self._responses = Responses()
        self._offsets = [0] * len(ends)
        self._warm = False
        self.got = 0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class does not inherit from it.
        self._transport.write(b"".join(self._pull(queue) for queue in range(len(self._ends)) if self._ends[queue]))

    def data_received(self, data: bytes) -> None:
        out = []
        for answer in self._responses.feed(data):
            queue = answer.opaque - OPAQUE_FIRST
            if answer.code == SUCCESS:
                following = int(answer.extFields["nextBeginOffset"])
                self.got += following - self._offsets[queue]
                self._offsets[queue] = following
            elif answer.code not in (PULL_RETRY_IMMEDIATELY, PULL_NOT_FOUND):
                self._fail(RuntimeError(f"pull: code {answer.code}, {answer.remark}"))
                return
            if self._offsets[queue] < self._ends[queue]:
                out.append(self._pull(queue))
        self._transport.write(b"".join(out))
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionResetError("the broker closed the connection"))

    def _pull(self, queue: int) -> bytes:
        ext = pull_ext("raw_consumer", self._topic, queue, self._offsets[queue], _PULL_BATCH)
        return request(PULL, OPAQUE_FIRST + queue, ext)

    def _note(self) -> None:
        if not self._warm and self.got >= self._count // 5:
            self._warm = True
            mark(self.got)
        if not self.done.done() and self.got >= self._count * 19 // 20:
            mark(self.got)
            self.done.set_result(None)

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def create(broker: str, topic: str, signer: Signer | None = None) -> None:
    """Create the topic on any broker, with the queues that both generators use."""
    with Client(broker, signer=signer) as client:
        client.create_topic(topic, QUEUES)


async def produce(
    broker: str, topic: str, size: int, in_flight: int, warm: float, seconds: float, signer: Signer | None
) -> None:
    host, _, port = broker.rpartition(":")
    frames = SendFrames(topic, b"x" * size, QUEUES, signer)
    loop = asyncio.get_running_loop()
    _, producer = await loop.create_connection(lambda: Producer(frames, in_flight), host, int(port))
    for pause in (warm, seconds):
        await asyncio.wait([producer.done], timeout=pause)
        if producer.done.done():
            producer.done.result()
        mark(producer.answered)
    print(f"FAILED {producer.failed}", flush=True)
    producer.end()


async def timed(broker: str, topic: str, size: int, in_flight: int, warm: float, seconds: float) -> None:
    host, _, port = broker.rpartition(":")
    frames = SendFrames(topic, b"x" * size, QUEUES)
    loop = asyncio.get_running_loop()
    _, producer = await loop.create_connection(lambda: TimedProducer(frames, in_flight), host, int(port))
    for pause in (warm, seconds):
        producer.waited.clear()
        await asyncio.wait([producer.done], timeout=pause)
        if producer.done.done():
            producer.done.result()
        mark(producer.answered)
    waited = sorted(producer.waited)
    p50, p99 = (waited[len(waited) * percent // 100] // 1000 for percent in (50, 99))
    print(f"WAITED {p50} {p99}", flush=True)
    print(f"FAILED {producer.failed}", flush=True)
    producer.end()


async def fill(broker: str, topic: str, size: int, count: int) -> None:
    host, _, port = broker.rpartition(":")
    frames = SendFrames(topic, b"x" * size, QUEUES)
    loop = asyncio.get_running_loop()
    transport, producer = await loop.create_connection(lambda: Producer(frames, 256, count), host, int(port))
    await producer.done
    transport.abort()


async def consume(broker: str, topic: str, count: int) -> None:
    host, _, port = broker.rpartition(":")
    with Client(broker) as client:
        ends = [client.bounds(topic, queue)[1] for queue in range(QUEUES)]
    loop = asyncio.get_running_loop()
    transport, consumer = await loop.create_connection(lambda: Consumer(topic, ends, count), host, int(port))
    async with asyncio.timeout(_STALL_S):
        await consumer.done
    transport.abort()


def main(verb: str, broker: str, topic: str, *numbers: str) -> None:
    if verb == "produce":
        size, in_flight, warm, seconds, *user = numbers
        signer = Signer(*user) if user else None
        uvloop.run(produce(broker, topic, int(size), int(in_flight), float(warm), float(seconds), signer))
    elif verb == "timed":
        size, in_flight, warm, seconds = numbers
        uvloop.run(timed(broker, topic, int(size), int(in_flight), float(warm), float(seconds)))
    elif verb == "fill":
        size, count = numbers
        uvloop.run(fill(broker, topic, int(size), int(count)))
    elif verb == "consume":
        uvloop.run(consume(broker, topic, int(numbers[0])))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
