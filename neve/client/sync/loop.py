"""An event loop in a background thread, and objects whose calls run on it and wait for the answer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from neve.errors import ClientError

log = logging.getLogger(__name__)

_LAST_WORDS_S = 5.0  # so long a call that is ended with the client may take to end

P = ParamSpec("P")
R = TypeVar("R")


class ClientClosed(ClientError):
    """The call came too late, or was ended by the close."""

    def __init__(self) -> None:
        super().__init__("the client is closed")


class BackgroundLoop:
    """An event loop in a daemon thread. Whoever waits for a call when it stops gets an error; nobody waits for ever."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._entrance = threading.Lock()  # a call comes before the stop, and is ended by it, or is refused
        self._is_stopped = False
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="neve-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(_end_all())
            self._loop.close()
            for call in list(self._calls):
                call.cancel()

    def submit(self, work: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        if self._pid != os.getpid():
            work.close()
            raise ClientError("this client was made before a fork; make one in this process")
        if threading.current_thread() is self._thread:
            work.close()
            raise ClientError("the synchronous client was called on its own loop; use neve.client.connect there")
        with self._entrance:
            if self._is_stopped:
                work.close()
                raise ClientClosed
            call = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def call(self, work: Coroutine[Any, Any, R]) -> R:
        future = self.submit(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:  # by the stop: nobody else knows the future
            raise ClientClosed from None
        except BaseException:  # Ctrl-C while waiting: the call is given up
            future.cancel()
            raise

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def stop(self) -> None:
        """Ends the calls under way, then the thread."""
        if self._pid != os.getpid():
            return
        with self._entrance:
            is_first, self._is_stopped = not self._is_stopped, True
            if is_first:
                self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()


async def _end_all() -> None:
    """Cancels what still runs on the loop, so that those who wait for it hear of it."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=_LAST_WORDS_S)
        stuck = {task for task in others if not task.done()}
        if stuck:
            log.error("%d calls do not end with their client: %s", len(stuck), stuck)
            return
    await asyncio.get_running_loop().shutdown_asyncgens()


class Wrapper:
    """Something asynchronous and the loop that it lives on."""

    def __init__(self, loop: BackgroundLoop, inner: Any) -> None:
        self._loop = loop
        self._inner = inner


def waiting(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], R]:
    """The method that calls `method` of the inner object on its loop and waits; same arguments, same documentation."""

    def call(self: Wrapper, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._loop.call(method(self._inner, *args, **kwargs))

    call.__name__, call.__doc__ = method.__name__, method.__doc__
    return call
