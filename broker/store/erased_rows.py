"""What was erased from the archive is hidden in the store: no request returns it from then on."""

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
# Of how many queues one step asks, or changes some: a file may have to be opened for each.
_PLACES_AT_ONCE = 16
_NO_END = 1 << 63


class Call(Protocol):
    """Does a step on the loop."""

    def __call__(self, work: Callable[[], T], /) -> T: ...


def at_once(work: Callable[[], T], /) -> T:
    """On the loop already."""
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
    """How many runs are new, whether there is something to save, and which queues failed."""

    runs: int
    is_changed: bool
    failed: dict[Place, str]  # why the rows of a queue are not hidden


def hide(store: MessageStore, rows: Iterable[tuple[str, int, int, int]], call: Call) -> HiddenRows:
    """Rows are (topic, queue, first offset, last offset); for good once the state is saved.

    A queue whose files can't be read is returned as failed: its rows are still visible, and the others are hidden.

    What is hidden already and has left the log is forgotten on the way. What the loop is asked for is small whatever
    was erased: spans are made one where this runs.
    """
    wanted: dict[Place, list[Span]] = {}
    for topic, queue, first, last in rows:
        wanted.setdefault((topic, queue), []).append((first, last))
    left = sorted({*wanted, *call(store.erased_places)})
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
            left += refused  # they have changed meanwhile
    return HiddenRows(runs, is_changed, failed)


def _held(store: MessageStore, places: Sequence[Place]) -> list[_Held | _Unreadable]:
    found: list[_Held | _Unreadable] = []
    for place in places:
        try:
            failpoint.hit("erase.look_at_queue")
            found.append(_Held(place, store.erased_of(*place), *store.erasable(*place)))
        except (StoreError, OSError) as error:
            found.append(_Unreadable(place, str(error)))
    return found


def _missing(held: _Held, wanted: Iterable[Span]) -> list[Span]:
    """What is not hidden of what is here."""
    new = []
    for first, last in wanted:
        span = max(first, held.low), min(last, held.end - 1)
        if span[0] <= span[1] and not erased.has(held.spans, span):
            new.append(span)
    return new


def _change(store: MessageStore, changes: Sequence[_Change]) -> list[Place]:
    return [one.place for one in changes if not store.set_erased(*one.place, one.before, one.after)]
