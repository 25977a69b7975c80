"""The open consumers of one client, which are closed with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from neve.client.group.ownership import Owner


class Closable(Protocol):
    """A consumer."""

    @property
    def is_closed(self) -> bool: ...

    def close_for(self, closer: Owner) -> Coroutine[Any, Any, None]:
        """Close the consumer without waiting for messages that `closer` owns."""


C = TypeVar("C", bound=Closable)


class OpenConsumers:
    """Keeps the consumers of a client and closes them."""

    def __init__(self) -> None:
        self._open: list[Closable] = []

    def keep(self, consumer: C) -> C:
        self._open = [*(known for known in self._open if not known.is_closed), consumer]
        return consumer

    async def close(self, closer: Owner) -> None:
        """Close all consumers concurrently; raise the first error when all have ended."""
        outcomes = await asyncio.gather(
            *(consumer.close_for(closer) for consumer in self._open), return_exceptions=True
        )
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
