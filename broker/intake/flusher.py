"""Group commit: one fdatasync in a thread for everything appended before it, then one write for each connection.

What the store has to sync besides, a checkpoint with its thousands of queue files, has a thread of its own: no send
waits for it.

A failed fdatasync is final: what it covered is never acknowledged and the broker stops. It stops whatever ends `run`:
nothing may be acknowledged that nobody flushes any more.

In a broker set a send that is on the disk goes on to wait there, for the set (`broker.intake.replication`).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from broker.store.message_store import MessageStore
from infra.clock import Clock
from infra.loop.supervisor import Faults
from infra.loop.threads import SYSTEM_THREADS, Threads
from infra.net.remoting_server import Connection

log = logging.getLogger(__name__)

_FAILED = "flush failed"
_CUT = "the log was cut below what was to be synced"
_AGAIN_S = 0.1


class WaitingSend(msgspec.Struct, frozen=True):
    """A send that is appended but not yet durable: `render(code)` is its whole answer."""

    end_offset: int
    connection: Connection
    deadline: float
    render: Callable[[int], bytes]


class Flusher:
    """Group commit (RocketMQ's GroupCommitService): who waits is answered once an fdatasync covers his bytes, and not
    before.

    One sync is under way at a time. After the first failed sync nothing is acknowledged and `on_failure` is called.
    """

    def __init__(
        self,
        store: MessageStore,
        clock: Clock,
        *,
        interval_ms: Callable[[], int],
        on_failure: Callable[[BaseException], None],
        faults: Faults,
        threads: Threads = SYSTEM_THREADS,
        then: Callable[[WaitingSend], None] | None = None,
    ) -> None:
        """`then` takes a send whose bytes are on the disk; None: it is answered."""
        self._synced = then or self._answer
        self._store, self._clock, self._faults, self._threads = store, clock, faults, threads
        self._begun = False  # until then who wants a sync makes it
        self._interval_ms, self._on_failure = interval_ms, on_failure
        self._waiting: deque[WaitingSend] = deque()
        self._flush_waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._work = asyncio.Event()
        self._pool = ThreadPoolExecutor(1, "flush")
        self._upkeep_pool = ThreadPoolExecutor(1, "upkeep")
        self._upkeep: asyncio.Future[None] | None = None
        self.failed = False
        # When what is running began.
        self.syncing_since: float | None = None
        self.upkeep_since: float | None = None
        self.flushed_offset = 0
        self.rounds = 0

    def wait(self, send: WaitingSend) -> None:
        """Answer the send after the next fdatasync that covers it."""
        self._waiting.append(send)
        self._work.set()

    def sync_soon(self) -> None:
        """What the broker itself brings to its readers is seen when a sync covers it, and no sender asks for one."""
        if self._store.shows_after_sync:
            self._work.set()

    async def flush_now(self) -> None:
        """Returns when everything appended so far is on disk.

        RuntimeError when no sync succeeds any more, or when a slave's log was cut meanwhile.
        """
        if self.failed:
            raise RuntimeError(_FAILED)
        if not self._begun:
            wanted = self._store.max_physical_offset
            self._complete(await self._threads.run(self._store.flush))
            if self.flushed_offset < wanted:
                raise RuntimeError("the log can't be synced now")
            return
        waiter = asyncio.get_running_loop().create_future()
        self._flush_waiters.append((self._store.max_physical_offset, waiter))
        self._work.set()
        await waiter

    async def upkeep_now(self) -> None:
        """Returns when the checkpoint that is wanted by now is on the disk; raises as `flush_now`."""
        if not self._begun:
            await self._threads.run(self._store.upkeep)  # what it raises ends the start
            return
        if self._upkeep is not None:
            await asyncio.wait([self._upkeep])  # it may have begun before the wish
        self._begin_upkeep()
        if self._upkeep is not None:
            await asyncio.wait([self._upkeep])
        if self.failed:
            raise RuntimeError(_FAILED)

    def run(self) -> Coroutine[Any, Any, None]:
        """Never ends but by a failure; from this call on who wants a sync waits for its rounds."""
        self._begun = True
        return self._run()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(self._interval_ms() / 1000):
                    await self._work.wait()
            except TimeoutError:
                log.debug("flush interval")
            self._work.clear()
            if not (self._store.dirty or self._waiting or self._flush_waiters):
                self._begin_upkeep()
                continue
            self.syncing_since, wanted = self._clock.monotonic(), self._store.max_physical_offset
            try:
                offset = await loop.run_in_executor(self._pool, self._store.flush)
            except Exception as error:  # noqa: BLE001 - whatever went wrong: nothing below it may be acknowledged
                self.fail(error)
                return
            self.syncing_since = None
            self.rounds += 1
            self._complete(offset)
            self._begin_upkeep()
            if (
                offset < wanted
            ):  # a file could not be opened to sync it: nothing failed, but at once it would be the same
                await asyncio.sleep(_AGAIN_S)

    def _begin_upkeep(self) -> None:
        if self._upkeep is not None or self.failed or not self._store.wants_upkeep:
            return
        self.upkeep_since = self._clock.monotonic()
        self._upkeep = asyncio.get_running_loop().run_in_executor(self._upkeep_pool, self._store.upkeep)
        self._upkeep.add_done_callback(self._upkeep_done)

    def _upkeep_done(self, upkeep: asyncio.Future[None]) -> None:
        self._upkeep = self.upkeep_since = None
        error = None if upkeep.cancelled() else upkeep.exception()
        if error is not None:
            self.fail(error)

    def _complete(self, offset: int) -> None:
        """What is on the disk is so whatever goes wrong here: everybody else who waits hears of it."""
        # A sync that began before a slave's log was cut says nothing of what is there now.
        offset = self.flushed_offset = min(offset, self._store.max_physical_offset)
        try:
            self._store.after_flush(offset)
        except Exception as error:  # noqa: BLE001 - the records are on the disk; the next round does it again
            self._faults.add("what follows a flush", error, f"at {offset}")
        waiting = self._waiting
        while waiting and waiting[0].end_offset <= offset:
            self._synced(waiting.popleft())
        rest = []
        for end, waiter in self._flush_waiters:
            if end <= offset:
                if not waiter.done():
                    waiter.set_result(None)
            elif end > self._store.max_physical_offset:
                if not waiter.done():
                    waiter.set_exception(RuntimeError(_CUT))
            else:
                rest.append((end, waiter))
        self._flush_waiters = rest
        if waiting or rest:
            self._work.set()

    def check_deadlines(self) -> None:
        """The disk is slow: FLUSH_DISK_TIMEOUT says stored, but not yet known to be safe."""
        now = self._clock.monotonic()
        while self._waiting and self._waiting[0].deadline <= now:
            self._answer(self._waiting.popleft(), 10)

    def answer_all(self, code: int) -> None:
        """Who waits for a sync of the log waits no longer: this broker will not say that it is safe."""
        while self._waiting:
            self._answer(self._waiting.popleft(), code)

    def _answer(self, send: WaitingSend, code: int = 0) -> None:
        try:
            send.connection.send_raw(send.render(code))
        except Exception as error:  # noqa: BLE001 - one answer that can't be made; the others are waited for
            self._faults.add("the answer to a send", error, f"that ends at {send.end_offset}")

    def fail(self, error: BaseException) -> None:
        """Stop acknowledging: waiting and later calls of `flush_now` raise. Only the first error is reported.

        Waiting sends get no answer, because their outcome is unknown: `on_failure` ends the broker, and the clients see
        their connections close.
        """
        if self.failed:
            return
        log.critical("flush failed: nothing more is acknowledged: %r", error)
        self.failed = True
        self._waiting.clear()
        for _, waiter in self._flush_waiters:
            if not waiter.done():
                waiter.set_exception(RuntimeError(_FAILED))
        self._flush_waiters.clear()
        self._work.set()
        self._on_failure(error)

    def close(self) -> None:
        for pool in (self._pool, self._upkeep_pool):
            pool.shutdown(wait=True)
