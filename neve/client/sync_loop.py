"""An event loop in a background thread, and objects whose calls run on it and wait for the answer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from neve.errors import ClientError

P = ParamSpec("P")
R = TypeVar("R")


class BackgroundLoop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="neve-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def submit(self, work: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        if self._pid != os.getpid():
            work.close()
            raise ClientError("this client was made before a fork; make one in this process")
        if self._loop.is_closed():
            work.close()
            raise ClientError("the client is closed")
        if threading.current_thread() is self._thread:
            work.close()
            raise ClientError("the synchronous client was called on its own loop; use neve.client.connect there")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, R]) -> R:
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:  # Ctrl-C while waiting: the call is given up
            future.cancel()
            raise

    def stop(self) -> None:
        if self._pid == os.getpid() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


class Face:
    """Something asynchronous and the loop that it lives on."""

    def __init__(self, loop: BackgroundLoop, inner: Any) -> None:
        self._loop = loop
        self._inner = inner


def waiting(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], R]:
    """The method that calls `method` of the inner object on its loop and waits; same arguments, same documentation."""

    def call(self: Face, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._loop.call(method(self._inner, *args, **kwargs))

    call.__name__, call.__doc__ = method.__name__, method.__doc__
    return call
