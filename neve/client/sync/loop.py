"""An event loop in a background thread, and wrappers that run the asynchronous client on it."""

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

_CANCEL_TIMEOUT_S = 5.0  # for calls that are cancelled with their client

P = ParamSpec("P")
R = TypeVar("R")


class ClientClosed(ClientError):
    """The client is closed, or was closed during the call."""

    def __init__(self) -> None:
        super().__init__("the client is closed")


class BackgroundLoop:
    """An event loop in a daemon thread. When it stops, unfinished calls raise ClientClosed."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._entrance = threading.Lock()  # a call is either submitted before the stop, which ends it, or refused
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
        """Begin a coroutine on the loop.

        Raises:
            ClientClosed: the loop has stopped.
            ClientError: this is another process, or the thread of the loop.
        """
        if self._pid != os.getpid():
            work.close()
            raise ClientError("this client was created before a fork: create one in this process")
        if threading.current_thread() is self._thread:
            work.close()
            raise ClientError("the synchronous client was called on its own event loop: use neve.client.connect there")
        with self._entrance:
            if self._is_stopped:
                work.close()
                raise ClientClosed
            call = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def call(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the loop and wait for its result."""
        future = self.submit(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:  # by `stop`: no other code has the future
            raise ClientClosed from None
        except BaseException:  # such as KeyboardInterrupt: cancel the call
            future.cancel()
            raise

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def stop(self) -> None:
        """Cancel unfinished calls, then end the thread."""
        if self._pid != os.getpid():
            return
        with self._entrance:
            is_first, self._is_stopped = not self._is_stopped, True
            if is_first:
                self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()


async def _end_all() -> None:
    """Cancel all tasks of the loop."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=_CANCEL_TIMEOUT_S)
        stuck = {task for task in others if not task.done()}
        if stuck:
            log.error("calls did not end after cancellation: count=%d tasks=%s", len(stuck), stuck)
            return
    await asyncio.get_running_loop().shutdown_asyncgens()


class Wrapper:
    """An object of the asynchronous client, and the loop that it belongs to."""

    def __init__(self, loop: BackgroundLoop, inner: Any) -> None:
        self._loop = loop
        self._inner = inner


W = TypeVar("W", bound=Wrapper)


def waiting(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], R]:
    """Return a method that runs `method` of the inner object on its loop and waits, with the same arguments."""

    def call(self: Wrapper, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._loop.call(method(self._inner, *args, **kwargs))

    call.__name__, call.__doc__ = method.__name__, method.__doc__
    return call


def wrapping(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, Any]], wrapper: Callable[[BackgroundLoop, Any], W]
) -> Callable[Concatenate[Any, P], W]:
    """Return a method as `waiting` does, whose result is wrapped."""

    def call(self: Wrapper, /, *args: P.args, **kwargs: P.kwargs) -> W:
        return wrapper(self._loop, self._loop.call(method(self._inner, *args, **kwargs)))

    call.__name__, call.__doc__ = method.__name__, method.__doc__
    return call


def creating(
    method: Callable[Concatenate[Any, P], Any], wrapper: Callable[[BackgroundLoop, Any], W]
) -> Callable[Concatenate[Any, P], W]:
    """Return a method that calls the plain function `method` of the inner object on its loop and wraps the result."""

    def call(self: Wrapper, /, *args: P.args, **kwargs: P.kwargs) -> W:
        async def create() -> Any:
            return method(self._inner, *args, **kwargs)

        return wrapper(self._loop, self._loop.call(create()))

    call.__name__, call.__doc__ = method.__name__, method.__doc__
    return call


def submitting(
    method: Callable[Concatenate[Any, P], asyncio.Task[R]],
) -> Callable[Concatenate[Any, P], concurrent.futures.Future[R]]:
    """Return a method that begins `method` of the inner object on its loop and returns a future of the result."""

    def call(self: Wrapper, /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[R]:
        async def begin() -> R:
            return await method(self._inner, *args, **kwargs)

        return self._loop.submit(begin())

    call.__name__, call.__doc__ = method.__name__, method.__doc__
    return call
