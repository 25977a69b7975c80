"""One object made of others: INTENT → the worker reads, merges, verifies and uploads → checks → REPLACE, or ERASE.

That is the one moment at which the made object counts and its inputs do not; they stay in the store for a grace, and go
as what expired does. A crash before it leaves an open INTENT: whoever holds the epoch next closes it and deletes what
it made. Nothing is completed: what was read and checked is not known any more.

What stands under the made object's name is deleted only behind the ABORT that closes it. A REPLACE whose answer was
lost may still come to stand until another entry has its number; with the ABORT there it can't, or it stood before, and
then the object is live and stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import NamedTuple, Protocol

from infra import failpoint
from infra.objects.store import NotFound, ObjectStoreError
from neve.archive.format.journal import Abort, AnyEntry, CommittedObject, Intent, PlannedObject
from neve.archive.format.keys import data_key
from tiered.journal.errors import NotMaster, WouldLoseRows
from tiered.journal.writer import JournalWriter
from tiered.write.merge import Merge, mismatch
from tiered.write.uploader import ContentConflict, EncodeFailed

log = logging.getLogger(__name__)

_GONE = "its inputs are in view no more"
_BACK = "it is in view, with rows that stay"


class Merger(Protocol):
    """Makes one object of several and uploads it; raises ContentConflict, EncodeFailed or a store's error."""

    def compact(
        self, store_url: str, name: PlannedObject, merge: Merge, metadata: Mapping[str, str]
    ) -> CommittedObject: ...

    def give_up_compaction(self) -> None:
        """For good: one that is under way fails soon."""
        ...


#: The entry by which the made objects, none or one, take the place of what they were made of; may ask the store.
Swap = Callable[[Merge, list[CommittedObject]], AnyEntry]


class Fate(Enum):
    """What became of one."""

    STANDS = auto()  # its entry does
    OVERTAKEN = auto()  # its inputs left the view meanwhile, or came back
    NEEDLESS = auto()  # there was nothing to write
    FAILED = auto()


class Outcome(NamedTuple):
    """`made`: the object that took the place of others. `reason`: of a failure."""

    fate: Fate
    made: CommittedObject | None = None
    reason: str = ""


class Replacement:
    """Each step with the journal takes a turn; reading, merging and uploading take none."""

    def __init__(
        self,
        journal: JournalWriter,
        worker: Merger,
        kind: str,
        turn: AbstractContextManager[None],
        *,
        cluster: str = "DefaultCluster",
    ) -> None:
        """`kind`: of its INTENTs, which nobody else here makes."""
        self._journal, self._worker, self._kind = journal, worker, kind
        self._turn, self._cluster = turn, cluster
        self._master_epoch: int | None = None

    def begin(self) -> None:
        """Before anything is planned. Raises NotMaster where this broker has to follow."""
        self._master_epoch = self._journal.master_epoch
        if self._master_epoch is None:
            raise NotMaster(f"archive of {self._journal.broker}: its objects are the master's")

    def _append(self, entry: AnyEntry) -> None:
        self._journal.append(entry, master_epoch=self._master_epoch)

    def close_open(self) -> int:
        """Close what was begun before, by this process or another, and not ended; how many. In a turn."""
        found = [(n, one) for n, one in self._journal.catalog.rounds.open_rewrites().items() if one.kind == self._kind]
        for number, rewrite in found:
            self._abort(number, [name.key for name in rewrite.names], "its writer did not end it")
        return len(found)

    def run(self, merge: Merge, swap: Swap) -> Outcome:
        """Raises where the store or the archive is not to be had: what is open then, `close_open` closes."""
        with self._turn:
            begun = self._begin(merge)
        if begun is None:
            return Outcome(Fate.OVERTAKEN, reason=_GONE)
        number, name = begun
        metadata = {"cluster": self._cluster, "broker": self._journal.broker, "round": str(number)}
        made, failure = None, ""
        try:
            made = self._worker.compact(self._journal.store.url, name, merge, metadata)
        except (ContentConflict, EncodeFailed, ObjectStoreError) as error:
            failure = str(error) or repr(error)
        failpoint.hit("compact.after_upload")
        with self._turn:
            self._journal.follow()
            if made is not None and not (failure := self._publish(merge, name, made, swap)):
                return Outcome(Fate.STANDS, made)
            self._abort(number, [name.key], failure)
        return Outcome(Fate.OVERTAKEN if failure == _GONE else Fate.FAILED, reason=failure)

    def withdraw(self, merge: Merge, decide: Callable[[], Sequence[AnyEntry]]) -> Outcome:
        """Where no object is made: nothing of them is left, or they are out of view. Not of what is deleted by now.

        `decide`: the entries, by what the journal says in this turn. Nothing is written while rows that stay are in
        view: an expiry may have been taken back since they were read, and those rows would be nowhere.
        """
        with self._turn:
            self._journal.follow()
            catalog = self._journal.catalog
            if merge.queues and any(catalog.are_live([one]) for one in merge.inputs):
                return Outcome(Fate.OVERTAKEN, reason=_BACK)
            if not all(catalog.knows(one.key) for one in merge.inputs) or not (entries := decide()):
                return Outcome(Fate.NEEDLESS)
            try:
                for entry in entries:  # all of them, before the first is written
                    self._journal.check_rows(entry)
            except WouldLoseRows as error:
                return Outcome(Fate.FAILED, reason=str(error))
            failpoint.hit("compact.before_replace")
            for entry in entries:
                self._append(entry)
            failpoint.hit("compact.after_replace")
            return Outcome(Fate.STANDS)

    def _begin(self, merge: Merge) -> tuple[int, PlannedObject] | None:
        catalog, journal = self._journal.catalog, self._journal
        if not catalog.are_live(merge.inputs):
            return None
        number = catalog.rounds.last_rewrite + 1
        key = data_key(
            journal.prefix,
            merge.topic,
            merge.day,
            journal.broker,
            start=merge.start,
            end=merge.end,
            epoch=journal.epoch,
            rewrite=number,
        )
        name = PlannedObject(key, merge.topic, merge.day, merge.start, merge.end, merge.queues)
        failpoint.hit("compact.before_intent")
        old = [one.key for one in merge.inputs]
        self._append(Intent(kind=self._kind, round=number, old=old, names=[name]))
        failpoint.hit("compact.after_intent")
        return number, name

    def _publish(self, merge: Merge, name: PlannedObject, made: CommittedObject, swap: Swap) -> str:
        """The swap, decided by what the journal says now; why not, or nothing."""
        catalog, store = self._journal.catalog, self._journal.store
        if made.key != name.key:
            return f"the worker made {made.key}"
        if not catalog.are_live(merge.inputs):
            return _GONE
        minimum = {queue: catalog.recorded_minimum(merge.topic, queue) for queue in merge.below}
        if unfit := mismatch(merge, made, minimum):
            return unfit
        try:
            found = store.head(made.key)
        except NotFound:
            return "the object is not in the store"
        if found.size != made.size or (made.etag and found.etag and found.etag != made.etag):
            return f"another object is in its place: {found.size} bytes, etag {found.etag}"
        entry = swap(merge, [made])
        failpoint.hit("compact.before_replace")
        try:
            self._append(entry)
        except WouldLoseRows as error:
            return str(error)
        failpoint.hit("compact.after_replace")
        return ""

    def _abort(self, number: int, keys: Sequence[str], reason: str) -> None:
        log.warning("%s %d: %s is closed without an object: %s", self._kind, number, ", ".join(keys), reason)
        self._append(Abort(kind=self._kind, round=number, reason=reason))
        failpoint.hit("compact.after_abort")
        for key in keys:
            if self._journal.catalog.knows(key):
                continue  # a REPLACE that was sent before came to stand before
            try:
                self._journal.store.delete(key)
            except ObjectStoreError as error:
                log.warning("%s is left to the sweep: %s", key, error)
