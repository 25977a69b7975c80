"""All tables that changed are saved together: one sync of the log serves them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol


class Saved(Protocol):
    """A table with a file."""

    @property
    def dirty(self) -> bool:
        """Whether the file is behind."""

    def save(self) -> Coroutine[Any, Any, None]:
        """Returns when what it held at this call is on disk."""


class Persistence:
    """One that fails keeps back no other."""

    def __init__(self, tables: Sequence[Saved]) -> None:
        self._tables = tuple(tables)

    async def run(self) -> None:
        """ExceptionGroup of what failed."""
        results = await asyncio.gather(*(each.save() for each in self._tables if each.dirty), return_exceptions=True)
        failures = [result for result in results if isinstance(result, Exception)]
        if failures:
            raise ExceptionGroup("tables that could not be saved", failures)
