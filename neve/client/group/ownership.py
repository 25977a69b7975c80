"""Ownership of messages: the task or the thread that received a message owns it, until it settles it or ends.

The owner is determined when a method is called, not when its coroutine is awaited: `asyncio.wait_for`, `create_task`
and the synchronous client run a coroutine in a task that exists for this one call. Methods that need the owner are
therefore plain functions that return a coroutine.

Closing a consumer waits for messages that are owned by living tasks and threads. It does not wait for those of the
closer itself, which cannot settle them meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from neve.client.group.received import Received

Owner = asyncio.Task[Any] | threading.Thread
Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]

_POLL_S = 0.1  # the end of a thread, or of a task of another loop, sends no event to this loop

#: The consumers, by their `PendingWork`, whose handlers run in this context.
_handlers_of: ContextVar[tuple[PendingWork, ...]] = ContextVar("neve_handlers_of", default=())


def current_owner() -> Owner:
    """Return the running task, or the thread if there is none."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # there is no loop in this thread
        task = None
    return threading.current_thread() if task is None else task


@contextmanager
def handling_for(consumer: PendingWork) -> Iterator[None]:
    """Mark what is started in the block as part of a handler of this consumer."""
    token = _handlers_of.set((*_handlers_of.get(), consumer))
    try:
        yield
    finally:
        _handlers_of.reset(token)


def _is_handling_for(consumer: PendingWork) -> bool:
    return any(one is consumer for one in _handlers_of.get())


class AutoAcks:
    """The messages of `async for`, which are acknowledged automatically: at the next step, or at the end of the owner.

    A task that fails or is cancelled, and a thread that ends, acknowledges nothing: its message is redelivered.
    """

    def __init__(self) -> None:
        self._given: dict[Owner, list[Received]] = {}

    def give(self, owner: Owner, message: Received) -> None:
        self._given.setdefault(owner, []).append(message)

    def done_with(self, owner: Owner) -> list[Received]:
        """Remove and return the messages to acknowledge when `owner` takes its next step or leaves."""
        done = self._given.pop(owner, [])
        for other in [other for other in self._given if not _is_alive(other)]:
            messages = self._given.pop(other)
            if _ended_well(other):
                done += messages
        return done

    def settled(self, message: Received) -> None:
        """Remove a message that the application settled itself."""
        for owner, messages in list(self._given.items()):
            left = [one for one in messages if one is not message]
            if left:
                self._given[owner] = left
            else:
                del self._given[owner]


class PendingWork:
    """The unfinished settlements of one consumer, and its close, which runs once.

    They continue if their caller is cancelled. A half-finished nack would lose its message between client and broker.
    """

    def __init__(self, spawn: Spawn, name: str) -> None:
        self._spawn = spawn
        self._name = name
        self._settling: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def finish(self, settling: Coroutine[Any, Any, None]) -> None:
        """Run a settlement to its end, even if the caller is cancelled."""
        task = self._spawn(settling, f"settle {self._name}")
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        task.add_done_callback(lambda _: self.settled())
        await asyncio.shield(task)

    def settled(self) -> None:
        """Record that a message was settled."""
        self._changed.set()

    async def close(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` once and wait for it. A handler of the consumer does not wait: `work` waits for the handler."""
        if self._closing is None:
            self._closing = self._spawn(work(), f"close {self._name}")
        if not _is_handling_for(self):
            await asyncio.shield(self._closing)

    async def until_settled(self, owners: Callable[[], Iterable[Owner]], closer: Owner, timeout: float) -> int:
        """Wait until no message is owned, at most `timeout` seconds; return the number of messages left."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while (left := still_owned(owners(), closer)) and (remaining := deadline - loop.time()) > 0:
            self._changed.clear()
            tasks = {owner for owner in left if isinstance(owner, asyncio.Task) and owner.get_loop() is loop}
            all_send_events = all(owner in tasks for owner in left)
            change = loop.create_task(self._changed.wait())
            try:
                limit = remaining if all_send_events else min(remaining, _POLL_S)
                await asyncio.wait({change, *tasks}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            finally:
                change.cancel()
        return len(left)

    async def until_finished(self) -> None:
        """Wait for unfinished settlements. The timeouts of their requests bound the time."""
        while self._settling:
            await asyncio.wait(set(self._settling))


def still_owned(owners: Iterable[Owner], closer: Owner) -> list[Owner]:
    """Return the owners that may settle their messages while `closer` waits."""
    return [owner for owner in owners if owner is not closer and _is_alive(owner)]


def _is_alive(owner: Owner) -> bool:
    return owner.is_alive() if isinstance(owner, threading.Thread) else not owner.done()


def _ended_well(owner: Owner) -> bool:
    return isinstance(owner, asyncio.Task) and not owner.cancelled() and owner.exception() is None
