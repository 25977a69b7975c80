"""Retries a pull while a broker is busy.

A broker answers so while it fetches from its archive, or throttles a reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from neve.cli.output import say
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode

T = TypeVar("T")

_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)


async def retry_while_busy(pull: Callable[[], Awaitable[T]]) -> T:
    """Return the result of the pull, retried with backoff for a minute.

    Raises:
        BrokerError: the broker is still busy, or refused.
    """
    for pause_s in _PAUSES_S:
        try:
            return await pull()
        except BrokerError as error:
            if error.code != ResponseCode.SYSTEM_BUSY:
                raise
            say(f"{error}; retrying")
        await asyncio.sleep(pause_s)
    return await pull()
