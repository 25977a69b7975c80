"""A round's uploads without a worker: an upload is executed only when it is awaited."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from infra.objects.store import ObjectStoreError
from neve.archive.format.journal import CommittedObject, PlannedObject
from tiered.write.uploader import ContentConflict, EncodeFailed, GivenUp, NamedEntries, Outcome

Files = Sequence[tuple[str, int, int]]
Make = Callable[[NamedEntries, Files], CommittedObject]


def in_order(waiting: int) -> list[int]:
    """Complete one upload at a time, in order."""
    return [0]


class DeferredUploads:
    """`choose` gets the number of pending uploads and selects those that end next, at least one."""

    def __init__(self, make: Make, choose: Callable[[int], list[int]] = in_order) -> None:
        self._make, self._choose = make, choose
        self._waiting: list[tuple[NamedEntries, Files]] = []
        self._settled: list[tuple[PlannedObject, Outcome]] = []

    def begin(self, objects: Sequence[NamedEntries], files: Files) -> None:
        self._waiting += [(one, files) for one in objects]

    def done(self) -> Sequence[tuple[PlannedObject, Outcome]]:
        if self._waiting and not self._settled:
            chosen = self._choose(len(self._waiting))
            ending = [self._waiting[number] for number in chosen]
            self._waiting = [one for number, one in enumerate(self._waiting) if number not in chosen]
            for one, files in ending:
                self._settled.append((one.name, self._outcome(one, files)))
        settled, self._settled = self._settled, []
        return settled

    def give_up(self) -> None:
        self._settled += [(one.name, GivenUp("not begun")) for one, _ in self._waiting]
        self._waiting = []

    def _outcome(self, one: NamedEntries, files: Files) -> Outcome:
        try:
            return self._make(one, files)
        except (ContentConflict, EncodeFailed, ObjectStoreError) as error:
            return error
