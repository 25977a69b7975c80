"""Who has a message: the task or the thread that asked for it, until it settles it or ends.

An asker is taken when a method is called, not when what it returned is awaited: `asyncio.wait_for`, `create_task` and
the synchronous face run a coroutine in a task that lives for this one call. So the methods that take one are plain
functions that return a coroutine.

A message is *in work* as long as it is not settled and its asker lives. Closing a consumer waits for what is in work,
but not for what the closer itself has: nobody could settle that meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from neve.client.group.received import Received

Asker = asyncio.Task[Any] | threading.Thread
Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]

_LOOK_S = 0.1  # the end of a thread, or of a task of another loop, tells nobody: so often it is looked for

#: The consumers, by their `Endings`, whose handlers the present code is part of, and what a handler started with it.
_handlers_of: ContextVar[tuple[Endings, ...]] = ContextVar("neve_handlers_of", default=())


def current_asker() -> Asker:
    """The task that runs; the thread where none does."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop in this thread
        task = None
    return threading.current_thread() if task is None else task


@contextmanager
def handling_for(consumer: Endings) -> Iterator[None]:
    """What is started inside is part of a handler of this consumer."""
    token = _handlers_of.set((*_handlers_of.get(), consumer))
    try:
        yield
    finally:
        _handlers_of.reset(token)


def _is_handling_for(consumer: Endings) -> bool:
    return any(one is consumer for one in _handlers_of.get())


class AutoAcks:
    """What each asker was given and has not settled itself: asking for the next message says that it is done with.

    So does an end without an error. A task that failed or was cancelled, and a thread that ended, says nothing: its
    message comes again.
    """

    def __init__(self) -> None:
        self._given: dict[Asker, list[Received]] = {}

    def give(self, asker: Asker, message: Received) -> None:
        self._given.setdefault(asker, []).append(message)

    def done_with(self, asker: Asker) -> list[Received]:
        """The messages that are done with as `asker` asks for the next, or leaves."""
        done = self._given.pop(asker, [])
        for other in [other for other in self._given if not _is_alive(other)]:
            messages = self._given.pop(other)
            if _ended_well(other):
                done += messages
        return done

    def settled(self, message: Received) -> None:
        """By the application itself: there is nothing left to say of it."""
        for asker, messages in list(self._given.items()):
            left = [one for one in messages if one is not message]
            if left:
                self._given[asker] = left
            else:
                del self._given[asker]


class Endings:
    """The end of one consumer: what was begun with its messages is finished, and it is closed once.

    Whoever gives up waiting for an ack, a nack or the close stops nothing: a nack that is half done would leave its
    message neither here nor at the broker.
    """

    def __init__(self, spawn: Spawn, name: str) -> None:
        self._spawn = spawn
        self._name = name
        self._settling: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def finish(self, settling: Coroutine[Any, Any, None]) -> None:
        """Runs it to its end, whatever becomes of the caller."""
        task = self._spawn(settling, f"settle {self._name}")
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        task.add_done_callback(lambda _: self.settled())
        await asyncio.shield(task)

    def settled(self) -> None:
        """A message is not in work any more."""
        self._changed.set()

    async def close(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Does `work` once and waits for it; a handler of the consumer, for which it waits in turn, goes on at once."""
        if self._closing is None:
            self._closing = self._spawn(work(), f"close {self._name}")
        if not _is_handling_for(self):
            await asyncio.shield(self._closing)

    async def until_settled(self, askers: Callable[[], Iterable[Asker]], closer: Asker, timeout: float) -> int:
        """Waits until no message is in work, though not longer than `timeout`; how many are left."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while (left := at_work(askers(), closer)) and (remaining := deadline - loop.time()) > 0:
            self._changed.clear()
            tasks = {asker for asker in left if isinstance(asker, asyncio.Task) and asker.get_loop() is loop}
            tell = all(asker in tasks for asker in left)
            change = loop.create_task(self._changed.wait())
            try:
                limit = remaining if tell else min(remaining, _LOOK_S)
                await asyncio.wait({change, *tasks}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            finally:
                change.cancel()
        return len(left)

    async def until_finished(self) -> None:
        """Waits for the acks and nacks under way; each is bounded by the time-outs of its requests."""
        while self._settling:
            await asyncio.wait(set(self._settling))


def at_work(askers: Iterable[Asker], closer: Asker) -> list[Asker]:
    """Those of them that may still settle what they have while `closer` waits for it."""
    return [asker for asker in askers if asker is not closer and _is_alive(asker)]


def _is_alive(asker: Asker) -> bool:
    return asker.is_alive() if isinstance(asker, threading.Thread) else not asker.done()


def _ended_well(asker: Asker) -> bool:
    return isinstance(asker, asyncio.Task) and not asker.cancelled() and asker.exception() is None


__all__ = ["Asker", "AutoAcks", "Endings", "at_work", "current_asker", "handling_for"]
