"""Offload rounds and rewrites of a journal: the planned objects that are neither published nor aborted."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import msgspec

from neve.archive.format.checkpoint import JournalMarks
from neve.archive.format.journal import Abort, AnyEntry, Commit, Erase, Intent, OpenRewrite, PlannedObject, Replace


class CatalogRounds:
    """Written under the catalog's lock, which readers take as well.

    Rewrites (compactions and erasures) are numbered apart from offload rounds.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self.lock = lock
        self.last_round = 0
        self.last_rewrite = 0
        self.intent_end = 0  # the highest CommitLog offset of any INTENT: the log must never resume below it
        self._open: dict[int, dict[str, PlannedObject]] = {}
        self._rewrites: dict[int, OpenRewrite] = {}

    # ---- writing

    def apply(self, entry: AnyEntry) -> None:
        """Apply an entry; entries that concern no round are ignored."""
        match entry:
            case Intent(kind=""):
                self.last_round = max(self.last_round, entry.round)
                self._open[entry.round] = {name.key: name for name in entry.names}
                self.intent_end = max(self.intent_end, *(name.end for name in entry.names), 0)
            case Intent():
                # The rows of a rewrite had an INTENT of a round before, so `intent_end` does not change.
                self.last_rewrite = max(self.last_rewrite, entry.round)
                if entry.names:
                    self._rewrites[entry.round] = OpenRewrite(entry.kind, entry.old, entry.names)
            case Commit():
                self._close(entry.round, [name.key for name in entry.names])
            case Abort(kind=""):
                self._close(entry.round, self.closed_by(entry))
            case Abort():
                self._close_rewrites(self.closed_by(entry), [entry.round])
            case Replace() | Erase():
                self._close_rewrites([name.key for name in entry.new], list(self._rewrites))
            case _:
                pass

    def load(self, marks: JournalMarks) -> None:
        """Take the rounds of a checkpoint."""
        self.last_round, self.last_rewrite = marks.last_round, marks.last_rewrite
        self.intent_end = marks.intent_end
        self._open = {number: {name.key: name for name in names} for number, names in marks.open.items()}
        self._rewrites = dict(marks.rewrites)

    def _close(self, round_number: int, keys: Iterable[str]) -> None:
        names = self._open.get(round_number, {})
        for key in keys:
            names.pop(key, None)
        if not names:
            self._open.pop(round_number, None)

    def _close_rewrites(self, keys: Iterable[str], numbers: Iterable[int]) -> None:
        closed = set(keys)
        for number in numbers:
            held = self._rewrites.get(number)
            if held is not None and any(name.key in closed for name in held.names):
                names = [name for name in held.names if name.key not in closed]
                self._rewrites[number] = msgspec.structs.replace(held, names=names)
                if not names:
                    del self._rewrites[number]

    # ---- reading

    def open_intents(self) -> dict[int, list[PlannedObject]]:
        """Return the open objects of each offload round."""
        with self.lock:
            return {number: list(names.values()) for number, names in sorted(self._open.items())}

    def open_rewrites(self) -> dict[int, OpenRewrite]:
        """Return the open rewrites by number."""
        with self.lock:
            return dict(sorted(self._rewrites.items()))

    def closed_by(self, entry: Abort) -> list[str]:
        """Return the keys that an ABORT closes; call it before the entry is applied."""
        with self.lock:
            if entry.keys:
                return entry.keys
            if entry.kind:
                held = self._rewrites.get(entry.round)
                return [] if held is None else [name.key for name in held.names]
            return list(self._open.get(entry.round, ()))

    def lowest_starts(self, round_number: int) -> Mapping[str, int]:
        """Return, for each topic of a round's open objects, the lowest CommitLog offset at which one starts."""
        lowest: dict[str, int] = {}
        for name in self._open.get(round_number, {}).values():
            lowest[name.topic] = min(lowest.get(name.topic, name.start), name.start)
        return lowest

    def topics(self) -> set[str]:
        """Return the topics of all open objects."""
        with self.lock:
            return {
                *(name.topic for names in self._open.values() for name in names.values()),
                *(name.topic for held in self._rewrites.values() for name in held.names),
            }

    def __contains__(self, key: str) -> bool:
        """Whether an open object has this key."""
        with self.lock:
            return any(key in names for names in self._open.values()) or any(
                key == name.key for held in self._rewrites.values() for name in held.names
            )
