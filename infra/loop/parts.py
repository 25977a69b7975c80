"""Work on the event loop that yields its blocking parts; `infra.loop.in_steps.run_beside` runs those on a thread."""

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")
# Entries of a table that are freed in one turn of the event loop, about 1 ms.
FREED_IN_A_TURN = 2_000
#: An error of a part is raised at its `yield`.
Parts = Generator[Callable[[], object], None, T]


def nothing() -> None:
    """Yield to the event loop: a part for the border of two slices of work."""


def emptied(*tables: dict[Any, Any] | set[Any] | list[Any] | deque[Any]) -> Parts[None]:
    """Free tables that no other code refers to, in turns: a million entries would take a tenth of a second."""
    for table in tables:
        take = table.popitem if isinstance(table, dict) else table.pop
        while table:
            for _ in range(min(len(table), FREED_IN_A_TURN)):
                take()
            yield nothing


def run_here(parts: Parts[T]) -> T:
    """Run all of it on this thread, at a start or in a test."""
    error: BaseException | None = None
    while True:
        try:
            part = next(parts) if error is None else parts.throw(error)
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            part()
            error = None
        except Exception as raised:  # noqa: BLE001 - raised again inside the generator
            error = raised
