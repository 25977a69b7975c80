"""Joint saving of all changed tables, so that one fsync of the log serves them all."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol


class SavedTable(Protocol):
    """A table with a file."""

    @property
    def dirty(self) -> bool:
        """Whether the table has unsaved changes."""

    def save(self) -> Coroutine[Any, Any, None]:
        """Save the table; returns when its content at this call is on disk."""


class Persistence:
    """Saves all changed tables; one that fails does not prevent the others."""

    def __init__(self, tables: Sequence[SavedTable]) -> None:
        self._tables = tuple(tables)

    async def run(self) -> None:
        """Save all changed tables. Raises ExceptionGroup of the failures."""
        results = await asyncio.gather(*(each.save() for each in self._tables if each.dirty), return_exceptions=True)
        failures = [result for result in results if isinstance(result, Exception)]
        if failures:
            raise ExceptionGroup("tables that could not be saved", failures)
