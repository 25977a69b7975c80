"""A pull that a broker is too busy for now, done again for a while.

So answers a broker whose archive takes its time, or that holds back who reads much; it says that there is more.
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


async def patiently(pull: Callable[[], Awaitable[T]]) -> T:
    """What it gives at last.

    Raises:
        BrokerError: the broker is busy after a minute, too.
    """
    for pause_s in _PAUSES_S:
        try:
            return await pull()
        except BrokerError as error:
            if error.code != ResponseCode.SYSTEM_BUSY:
                raise
            say(f"{error}; trying again")
        await asyncio.sleep(pause_s)
    return await pull()
