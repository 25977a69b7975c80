"""Group commit: one fdatasync in a thread covers everything appended before it; then the covered sends are answered.

Other disk work of the store, such as a checkpoint that syncs thousands of queue files, has its own thread, so that no
send waits for it.

A failed fdatasync is final: the records that it covered are never acknowledged, and the broker stops. The broker stops
whenever `run` ends, for whatever reason, because without it nothing is flushed and nothing may be acknowledged.

In a broker set, a send whose record is durable here then waits for the replicas (`broker.intake.replication`).
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
_CUT = "the log was truncated below the bytes to sync"
_AGAIN_S = 0.1


class WaitingSend(msgspec.Struct, frozen=True):
    """An appended send that is not durable yet; `render(code)` returns its complete answer frame."""

    end_offset: int
    connection: Connection
    deadline: float
    render: Callable[[int], bytes]


class Flusher:
    """Group commit (RocketMQ's GroupCommitService): a send is answered only after an fdatasync that covers its bytes.

    One sync runs at a time. After the first failure nothing is acknowledged any longer, and `on_failure` is called.
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
        """`then` receives each send whose bytes are durable; if None, the send is answered at that point."""
        self._synced = then or self._answer
        self._store, self._clock, self._faults, self._threads = store, clock, faults, threads
        self._visibility = store.visibility
        self._begun = False  # until `run`, the caller of `flush_now` or `upkeep_now` does the work itself
        self._interval_ms, self._on_failure = interval_ms, on_failure
        self._waiting: deque[WaitingSend] = deque()
        self._flush_waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._work = asyncio.Event()
        self._pool = ThreadPoolExecutor(1, "flush")
        self._upkeep_pool = ThreadPoolExecutor(1, "upkeep")
        self._upkeep: asyncio.Future[None] | None = None
        self.failed = False
        # Monotonic start times of the running sync and upkeep; None while idle.
        self.syncing_since: float | None = None
        self.upkeep_since: float | None = None
        self.flushed_offset = 0
        self.rounds = 0

    def wait(self, send: WaitingSend) -> None:
        """Answer the send after the next fdatasync that covers it."""
        self._waiting.append(send)
        self._work.set()

    def sync_soon(self) -> None:
        """Request a sync for records that the broker itself appended.

        If readers see records only after a sync, these records would stay invisible, because no sender requests one.
        """
        if self._visibility.waits_for_sync:
            self._work.set()

    async def flush_now(self) -> None:
        """Return when everything appended so far is durable.

        Raises RuntimeError if a sync failed, or if the log was truncated below the requested offset meanwhile.
        """
        if self.failed:
            raise RuntimeError(_FAILED)
        if not self._begun:
            wanted = self._store.max_physical_offset
            self._complete(await self._threads.run(self._visibility.flush))
            if self.flushed_offset < wanted:
                raise RuntimeError("the log can't be synced now")
            return
        waiter = asyncio.get_running_loop().create_future()
        self._flush_waiters.append((self._store.max_physical_offset, waiter))
        self._work.set()
        await waiter

    async def upkeep_now(self) -> None:
        """Return when a checkpoint that is due now is durable. Raises RuntimeError as `flush_now` does."""
        if not self._begun:
            await self._threads.run(self._store.upkeep)  # an exception aborts the start of the broker
            return
        if self._upkeep is not None:
            await asyncio.wait([self._upkeep])  # it may have begun before this call and not cover it
        self._begin_upkeep()
        if self._upkeep is not None:
            await asyncio.wait([self._upkeep])
        if self.failed:
            raise RuntimeError(_FAILED)

    def run(self) -> Coroutine[Any, Any, None]:
        """Return the coroutine of the flush loop, which ends only after a failure.

        From this call on, `flush_now` and `upkeep_now` wait for the loop.
        """
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
            if not (self._visibility.is_dirty or self._waiting or self._flush_waiters):
                self._begin_upkeep()
                continue
            self.syncing_since, wanted = self._clock.monotonic(), self._store.max_physical_offset
            try:
                offset = await loop.run_in_executor(self._pool, self._visibility.flush)
            except Exception as error:  # noqa: BLE001 - after any error nothing appended may be acknowledged
                self.fail(error)
                return
            self.syncing_since = None
            self.rounds += 1
            self._complete(offset)
            self._begin_upkeep()
            # If a file could not be opened for the sync, nothing failed, but an immediate retry would fail again.
            if offset < wanted:
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
        """Answer everything that is durable up to `offset`. An error of one waiter must not affect the others."""
        # A slave's log may have been truncated since the sync began; the sync proves nothing about records appended
        # later.
        offset = self.flushed_offset = min(offset, self._store.max_physical_offset)
        try:
            self._store.after_flush(offset)
        except Exception as error:  # noqa: BLE001 - the records are durable; the next round calls it again
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
        """Answer sends that waited too long with FLUSH_DISK_TIMEOUT: stored, but possibly not durable."""
        now = self._clock.monotonic()
        while self._waiting and self._waiting[0].deadline <= now:
            self._answer(self._waiting.popleft(), 10)

    def answer_all(self, code: int) -> None:
        """Answer all sends that wait for a sync with `code`; this broker will not report them as durable."""
        while self._waiting:
            self._answer(self._waiting.popleft(), code)

    def _answer(self, send: WaitingSend, code: int = 0) -> None:
        try:
            send.connection.send_raw(send.render(code))
        except Exception as error:  # noqa: BLE001 - one failed answer must not stop the others
            self._faults.add("the answer to a send", error, f"that ends at {send.end_offset}")

    def fail(self, error: BaseException) -> None:
        """Stop acknowledging: all pending and later calls of `flush_now` raise. Only the first error is reported.

        Waiting sends get no answer because their outcome is unknown. `on_failure` ends the broker, and the clients see
        their connections close.
        """
        if self.failed:
            return
        log.critical("flush failed, acknowledgements stop: %r", error)
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
