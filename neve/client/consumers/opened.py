"""The consumers of one client that are open."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from neve.client.group.in_work import Asker


class Closable(Protocol):
    """A consumer, as far as its client cares."""

    @property
    def is_closed(self) -> bool:
        """Whether somebody closed it already."""

    def close_for(self, closer: Asker) -> Coroutine[Any, Any, None]:
        """What `closer` has in hand is not waited for."""


C = TypeVar("C", bound=Closable)


class OpenConsumers:
    """Closes those that are still open with the client."""

    def __init__(self) -> None:
        self._open: list[Closable] = []

    def keep(self, consumer: C) -> C:
        self._open = [*(known for known in self._open if not known.is_closed), consumer]
        return consumer

    async def close(self, closer: Asker) -> None:
        """Close all of them, beside each other; if some fail, raise the error of the first when all have ended."""
        outcomes = await asyncio.gather(
            *(consumer.close_for(closer) for consumer in self._open), return_exceptions=True
        )
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
