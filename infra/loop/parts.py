"""Work on the event loop that yields its blocking parts; `infra.loop.in_steps.run_beside` runs those on a thread."""

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
#: An error of a part is raised at its `yield`.
Parts = Generator[Callable[[], object], None, T]


def nothing() -> None:
    """Yield to the event loop: a part for the border of two slices of work."""


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
