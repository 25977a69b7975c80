"""Count how often a function is called between two turns of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class CallsPerTurn:
    """The highest number of calls of a function between two turns of the loop."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work, self._since, self.most, self.all = work, 0, 0, 0

    def __call__(self, *args: Any) -> Any:
        self._since += 1
        self.all += 1
        if self._since == 1:
            asyncio.get_running_loop().call_soon(self._turn)
        self.most = max(self.most, self._since)
        return self._work(*args)

    def _turn(self) -> None:
        self._since = 0
