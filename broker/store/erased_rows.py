"""Hiding of erased rows of the archive in the local store, so that no request returns them any longer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from broker.store import erased
from broker.store.erased import Span, Spans
from broker.store.errors import StoreError
from broker.store.message_store import MessageStore
from infra import failpoint

T = TypeVar("T")
Place = tuple[str, int]  # topic, queue
# Queues that one step queries or changes, because each may require opening a file.
_PLACES_AT_ONCE = 16
_NO_END = 1 << 63


class LoopCall(Protocol):
    """Runs a function on the event loop and returns its result."""

    def __call__(self, work: Callable[[], T], /) -> T: ...


def at_once(work: Callable[[], T], /) -> T:
    """Run the function directly; for callers on the event loop."""
    return work()


class _Held(NamedTuple):
    place: Place
    spans: Spans
    low: int
    end: int


class _Unreadable(NamedTuple):
    place: Place
    reason: str


class _Change(NamedTuple):
    place: Place
    before: Spans
    after: Spans


class HiddenRows(NamedTuple):
    """Result: the number of new hidden runs, whether there is a state to save, and the queues that failed."""

    runs: int
    is_changed: bool
    failed: dict[Place, str]  # the reason why the rows of a queue are not hidden


def hide(store: MessageStore, rows: Iterable[tuple[str, int, int, int]], call: LoopCall) -> HiddenRows:
    """Hide rows, given as (topic, queue, first offset, last offset). Durable once the queue state is saved.

    A queue whose files cannot be read is returned as failed: its rows stay visible. The rows of all other queues are
    hidden.

    Hidden spans that have left the log are dropped at the same time. The steps on the event loop are small, whatever
    was erased, because the spans are merged on the calling thread.
    """
    wanted: dict[Place, list[Span]] = {}
    for topic, queue, first, last in rows:
        wanted.setdefault((topic, queue), []).append((first, last))
    left = sorted({*wanted, *call(store.queues.records.erased_places)})
    runs, is_changed, failed = 0, False, dict[Place, str]()
    while left:
        some, left = left[:_PLACES_AT_ONCE], left[_PLACES_AT_ONCE:]
        changes: list[_Change] = []
        for held in call(functools.partial(_held, store, some)):
            if isinstance(held, _Unreadable):
                failed[held.place] = held.reason
                continue
            new = _missing(held, wanted.get(held.place, ()))
            kept = erased.within(held.spans, held.low, _NO_END)
            after = erased.united(kept, new) if new else kept
            if after is not held.spans:
                changes.append(_Change(held.place, held.spans, after))
                runs += len(new)
        if changes:
            refused = call(functools.partial(_change, store, changes))
            is_changed |= len(refused) < len(changes)
            left += refused  # changed by others meanwhile
    return HiddenRows(runs, is_changed, failed)


def _held(store: MessageStore, places: Sequence[Place]) -> list[_Held | _Unreadable]:
    found: list[_Held | _Unreadable] = []
    for place in places:
        try:
            failpoint.hit("erase.look_at_queue")
            found.append(_Held(place, store.queues.records.erased_of(*place), *store.erased_offsets.erasable(*place)))
        except (StoreError, OSError) as error:
            found.append(_Unreadable(place, str(error)))
    return found


def _missing(held: _Held, wanted: Iterable[Span]) -> list[Span]:
    """Return the parts of the wanted spans that the local log has and that are not hidden yet."""
    new = []
    for first, last in wanted:
        span = max(first, held.low), min(last, held.end - 1)
        if span[0] <= span[1] and not erased.has(held.spans, span):
            new.append(span)
    return new


def _change(store: MessageStore, changes: Sequence[_Change]) -> list[Place]:
    return [one.place for one in changes if not store.queue_changes.set_erased(*one.place, one.before, one.after)]
