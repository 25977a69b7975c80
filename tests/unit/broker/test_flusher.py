"""A disk that no longer syncs: nothing is acknowledged, and nobody waits for it in vain."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.flusher import Flusher
from infra.clock import SystemClock


class BrokenStore:
    """Whose first sync fails."""

    dirty = True
    max_physical_offset = 10

    def flush(self) -> int:
        raise OSError("Input/output error")


def test_after_a_failed_sync_who_waited_and_who_comes_later_both_hear_of_it() -> None:
    async def main() -> None:
        failures: list[BaseException] = []
        store: Any = BrokenStore()
        flusher = Flusher(store, SystemClock(), interval_ms=lambda: 60_000, on_failure=failures.append)
        async with asyncio.timeout(20):
            waiting = asyncio.create_task(flusher.flush_now())
            await flusher.run()
            with pytest.raises(RuntimeError, match="flush failed"):
                await waiting
            with pytest.raises(RuntimeError, match="flush failed"):
                await flusher.flush_now()
        assert [str(failure) for failure in failures] == ["Input/output error"]
        flusher.close()

    asyncio.run(main())
