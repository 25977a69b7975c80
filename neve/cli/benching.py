"""Loads for `neve bench`, against any RocketMQ cluster: sends, reads, and both at once.

With a rate, each message has a scheduled time that does not depend on earlier messages, and its latency starts then. If
a broker stalls for a second, all messages of that second show it, not only those in flight.
"""

from __future__ import annotations

import asyncio
import functools
import struct
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from neve.cli.bench_figures import Cost, Latencies, figures
from neve.cli.failures import FAILED, Failure
from neve.cli.output import say
from neve.cli.process_cpu import ListeningProcess, listening_at
from neve.client.model import SendStatus
from neve.clock import own_cpu_seconds, system_monotonic
from neve.errors import NeveError
from neve.record.codec import iter_bodies

if TYPE_CHECKING:
    from neve.client import AsyncClient, MessageQueue

_STAMP = struct.Struct(">Q")  # at the start of a body: its scheduled time, in ns of the monotonic clock
_PULL_COUNT, _PULL_BYTES, _PULL_WAIT_S = 1024, 1 << 20, 15.0
_QUEUES = 8
_READY_S = 60.0
# Between two progress lines.
_PROGRESS_S = 1.0


class Load(NamedTuple):
    """A load. It ends at `messages` or `seconds`, whichever comes first."""

    messages: int | None
    seconds: float | None
    size: int
    batch: int = 1
    in_flight: int = 64
    rate: float | None = None


class CpuTime:
    """CPU time of this process and of the brokers on this machine, since construction."""

    def __init__(self, addresses: Iterable[str]) -> None:
        found = [listening_at(address) for address in addresses]
        self._brokers: list[ListeningProcess] | None = [one for one in found if one is not None]
        if len(self._brokers) < len(found):
            self._brokers = None
        self._client, self._before = own_cpu_seconds(), self._of_brokers()

    def _of_brokers(self) -> float | None:
        if self._brokers is None:
            return None
        seconds = [one.cpu_seconds() for one in self._brokers]
        return None if None in seconds else sum(one for one in seconds if one is not None)

    def cost(self) -> Cost:
        now = self._of_brokers()
        brokers = None if now is None or self._before is None else now - self._before
        return Cost(own_cpu_seconds() - self._client, brokers)


class Ticker:
    """Prints progress to stderr once a second, if wanted."""

    def __init__(self, wanted: bool) -> None:
        self._wanted, self._printed, self._count = wanted, system_monotonic(), 0

    def at(self, count: int) -> None:
        now = system_monotonic()
        if self._wanted and now - self._printed >= _PROGRESS_S:
            say(f"{count} messages, {(count - self._count) / (now - self._printed):.0f}/s")
            self._printed, self._count = now, count


async def produce(client: AsyncClient, topic: str, load: Load, tick: Ticker) -> dict[str, Any]:
    """Send with a number of requests in flight, or at a rate.

    Raises:
        Failure: no message was stored.
    """
    watched = CpuTime(await _masters(client))
    sender = _Sender(client, topic, load, tick)
    started = system_monotonic()
    await sender.run()
    seconds = system_monotonic() - started
    result = figures("produce", sender.stored, sender.stored * load.size, seconds, watched.cost())
    return {**result, **sender.latencies.figures(), "failed": sender.failed, "failure": sender.failure}


class _Sender:
    """Sends messages by parallel workers, each of which takes the next numbers."""

    def __init__(self, client: AsyncClient, topic: str, load: Load, tick: Ticker) -> None:
        self._client, self._topic, self._load, self._tick = client, topic, load, tick
        self._padding = bytes(at % 251 for at in range(load.size))
        self._next = 0
        self._begun = system_monotonic()
        self.latencies = Latencies()
        self.stored = self.failed = 0
        self.failure: str | None = None

    async def run(self) -> None:
        self._begun = system_monotonic()
        workers = [asyncio.create_task(self._work()) for _ in range(self._load.in_flight)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        if not self.stored:
            raise Failure(FAILED, f"no message was stored: {self.failure}")

    async def _work(self) -> None:
        load = self._load
        while True:
            number = self._next
            count = load.batch if load.messages is None else min(load.batch, load.messages - number)
            due = self._begun + number / load.rate if load.rate is not None else None
            if count <= 0 or self._is_over(system_monotonic() if due is None else due):
                return
            self._next += count
            if due is not None:
                await asyncio.sleep(due - system_monotonic())
            await self._send(count, due)

    def _is_over(self, now: float) -> bool:
        return self._load.seconds is not None and now - self._begun >= self._load.seconds

    async def _send(self, count: int, due: float | None) -> None:
        began = system_monotonic() if due is None else due
        body = _STAMP.pack(round(began * 1e9)) + self._padding[_STAMP.size :]
        try:
            if count == 1:
                result = await self._client.send(self._topic, body)
            else:
                result = await self._client.send_batch(self._topic, [body] * count)
        except NeveError as error:
            self.failed += count
            self.failure = str(error)
            return
        if result.status is not SendStatus.SEND_OK:
            self.failure = str(result.status)
        self.stored += count
        self.latencies.add(system_monotonic() - began)
        self._tick.at(self.stored)


async def consume(client: AsyncClient, topic: str, load: Load, tick: Ticker) -> dict[str, Any]:
    """Read the present messages of all queues in parallel, without a group; latencies are those of pulls."""
    queues = await client.queues(topic)
    spans = [(queue, await client.min_offset(topic, queue), await client.max_offset(topic, queue)) for queue in queues]
    if not any(end > begin for _, begin, end in spans):
        raise Failure(FAILED, f"{topic} has no messages to read")
    watched, latencies = CpuTime(await _masters(client)), Latencies()
    started = system_monotonic()
    count = size = 0

    def is_over() -> bool:
        enough = load.messages is not None and count >= load.messages
        return enough or (load.seconds is not None and system_monotonic() - started >= load.seconds)

    async def read(queue: MessageQueue, offset: int, end: int) -> None:
        nonlocal count, size
        while offset < end and not is_over():
            began = system_monotonic()
            found = await client.pull_records(queue, offset, max_count=_PULL_COUNT, max_bytes=_PULL_BYTES)
            latencies.add(system_monotonic() - began)
            if found.next_offset <= offset:
                raise Failure(
                    FAILED, f"{queue.broker_name} makes no progress at offset {offset} of queue {queue.queue_id}"
                )
            for one in iter_bodies(found.records):
                count, size = count + 1, size + len(one.body)
            offset = found.next_offset
            tick.at(count)

    await _in_parallel([functools.partial(read, *span) for span in spans])
    result = figures("consume", count, size, system_monotonic() - started, watched.cost())
    return {**result, **latencies.figures(), "pulls": len(latencies)}


async def latency(client: AsyncClient, topic: str, load: Load, tick: Ticker) -> dict[str, Any]:
    """Send at a rate and read at the same time, by long polls of each queue."""
    queues = await client.queues(topic)
    ends = [(queue, await client.max_offset(topic, queue)) for queue in queues]
    watched, latencies, received = CpuTime(await _masters(client)), Latencies(), 0
    sender = _Sender(client, topic, load, Ticker(wanted=False))
    started = system_monotonic()

    async def read(queue: MessageQueue, offset: int) -> None:
        nonlocal received
        while True:
            found = await client.pull_records(
                queue, offset, max_count=_PULL_COUNT, max_bytes=_PULL_BYTES, wait=_PULL_WAIT_S
            )
            now = system_monotonic()
            for one in iter_bodies(found.records):
                latencies.add(now - _STAMP.unpack_from(one.body)[0] / 1e9)
                received += 1
            tick.at(received)
            offset = found.next_offset

    readers = [asyncio.create_task(read(*end)) for end in ends]
    try:
        await _first_failure(sender.run(), readers)
        deadline = system_monotonic() + _READY_S
        while received < sender.stored and system_monotonic() < deadline:
            await _first_failure(asyncio.sleep(0.05), readers)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    result = figures("latency", received, received * load.size, system_monotonic() - started, watched.cost())
    lost = max(sender.stored - received, 0)
    return {**result, **latencies.figures(), "failed": sender.failed, "failure": sender.failure, "not_received": lost}


async def _first_failure(work: Any, others: Sequence[asyncio.Task[None]]) -> None:
    """Wait for `work`, or raise the first failure of the others."""
    task = asyncio.ensure_future(work)
    await asyncio.wait([task, *others], return_when=asyncio.FIRST_COMPLETED)
    for other in others:
        if other.done():
            task.cancel()
            other.result()
    await task


async def _in_parallel(works: Sequence[Callable[[], Any]]) -> None:
    tasks = [asyncio.create_task(work()) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _masters(client: AsyncClient) -> list[str]:
    return [one.master for one in (await client.admin.cluster_info()).values() if one.master is not None]


@asynccontextmanager
async def own_topic(client: AsyncClient, name: str, *, keep: bool) -> AsyncGenerator[str]:
    """Create a topic for this measurement, and delete it afterwards unless `keep` is set."""
    await client.admin.create_topic(name, _QUEUES)
    try:
        deadline = system_monotonic() + _READY_S
        while len(await _routed(client, name)) < _QUEUES:
            if system_monotonic() > deadline:
                raise Failure(FAILED, f"the name server has no route of {name} after {_READY_S:.0f} s")
            await asyncio.sleep(0.1)
        yield name
    finally:
        if keep:
            say(f"kept {name}")
        else:
            await client.admin.delete_topic(name)


async def until_visible(client: AsyncClient, topic: str, count: int) -> None:
    """Wait until all messages are visible: Apache's brokers acknowledge a message before it is.

    Raises:
        Failure: some are not visible in time.
    """
    deadline = system_monotonic() + _READY_S
    while sum(one.max_offset for one in (await client.admin.topic_stats(topic)).values()) < count:
        if system_monotonic() > deadline:
            raise Failure(FAILED, f"not all of {count} messages of {topic} are visible after {_READY_S:.0f} s")
        await asyncio.sleep(0.1)


async def _routed(client: AsyncClient, topic: str) -> Sequence[Any]:
    try:
        return (await client.admin.topic_route(topic)).write_queues
    except NeveError:
        return ()
