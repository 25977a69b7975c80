"""Replacement of objects: INTENT → the worker reads, merges, verifies and uploads → checks → REPLACE, or ERASE.

The last entry atomically makes the new object visible and its inputs invisible. The inputs are kept for a grace and
then deleted like expired objects. A crash before the last entry leaves an open INTENT. The next owner of the epoch
closes it and deletes its object. It is not completed, because the results of the reads and checks are lost.

The object under the new name is deleted only after the ABORT that closes its INTENT. A REPLACE without an answer may
still be stored until another entry has its number. If the ABORT has that number, the REPLACE can't be stored. If the
REPLACE was stored before, the object is live and is kept.
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

_GONE = "its inputs are no longer visible"
_BACK = "it is visible, with rows that remain"


class Merger(Protocol):
    """Makes one object of several and uploads it. Raises ContentConflict, EncodeFailed or a store's error."""

    def compact(
        self, store_url: str, name: PlannedObject, merge: Merge, metadata: Mapping[str, str]
    ) -> CommittedObject: ...

    def give_up_compaction(self) -> None:
        """Stop compaction for good; one in progress fails soon."""
        ...


#: Returns the entry that replaces the inputs by the new objects (none or one); may send requests to the store.
Swap = Callable[[Merge, list[CommittedObject]], AnyEntry]


class Fate(Enum):
    """Outcome of a replacement."""

    STANDS = auto()  # its entry is in the journal
    OVERTAKEN = auto()  # its inputs left the view meanwhile, or returned to it
    NEEDLESS = auto()  # nothing had to be written
    FAILED = auto()


class Outcome(NamedTuple):
    """`made`: the object that replaced others. `reason`: the reason of a failure."""

    fate: Fate
    made: CommittedObject | None = None
    reason: str = ""


class Replacement:
    """Replaces objects. Steps with the journal take a turn; reads, merges and uploads take none."""

    def __init__(
        self,
        journal: JournalWriter,
        worker: Merger,
        kind: str,
        turn: AbstractContextManager[None],
        *,
        cluster: str = "DefaultCluster",
    ) -> None:
        """`kind`: the kind of its INTENT entries, which no other component here writes."""
        self._journal, self._worker, self._kind = journal, worker, kind
        self._turn, self._cluster = turn, cluster
        self._master_epoch: int | None = None

    def begin(self) -> None:
        """Note the leadership term before anything is planned. Raises NotMaster if this broker is not the master."""
        self._master_epoch = self._journal.ownership.master_epoch
        if self._master_epoch is None:
            raise NotMaster(f"archive of {self._journal.broker}: its objects are the master's")

    def _append(self, entry: AnyEntry) -> None:
        self._journal.append(entry, master_epoch=self._master_epoch)

    def close_open(self) -> int:
        """Close unfinished replacements of this or another process; returns how many. In a turn."""
        found = [(n, one) for n, one in self._journal.catalog.rounds.open_rewrites().items() if one.kind == self._kind]
        for number, rewrite in found:
            self._abort(number, [name.key for name in rewrite.names], "its writer did not close it")
        return len(found)

    def run(self, merge: Merge, swap: Swap) -> Outcome:
        """Replace objects. Raises if the store or the archive is unavailable; `close_open` closes what is open then."""
        with self._turn:
            planned = self._begin(merge)
        if planned is None:
            return Outcome(Fate.OVERTAKEN, reason=_GONE)
        number, name = planned
        metadata = {"cluster": self._cluster, "broker": self._journal.broker, "round": str(number)}
        made, failure = None, ""
        try:
            made = self._worker.compact(self._journal.store.url, name, merge, metadata)
        except (ContentConflict, EncodeFailed, ObjectStoreError) as error:
            failure = str(error) or repr(error)
        failpoint.hit("compact.after_upload")
        with self._turn:
            self._journal.ownership.follow()
            if made is not None and not (failure := self._publish(merge, name, made, swap)):
                return Outcome(Fate.STANDS, made)
            self._abort(number, [name.key], failure)
        return Outcome(Fate.OVERTAKEN if failure == _GONE else Fate.FAILED, reason=failure)

    def withdraw(self, merge: Merge, decide: Callable[[], Sequence[AnyEntry]]) -> Outcome:
        """Write entries that withdraw objects without making a new one; nothing is written for deleted objects.

        For objects without remaining rows, or out of view. `decide` returns the entries by the journal's state in this
        turn. Nothing is written while the objects are in view with remaining rows. An expiry may have been undone since
        they were read, and those rows would be lost.
        """
        with self._turn:
            self._journal.ownership.follow()
            catalog = self._journal.catalog
            if merge.queues and any(catalog.are_live([one]) for one in merge.inputs):
                return Outcome(Fate.OVERTAKEN, reason=_BACK)
            if not all(catalog.knows(one.key) for one in merge.inputs) or not (entries := decide()):
                return Outcome(Fate.NEEDLESS)
            try:
                for entry in entries:  # check all before the first is written
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
            epoch=journal.ownership.epoch,
            rewrite=number,
        )
        name = PlannedObject(key, merge.topic, merge.day, merge.start, merge.end, merge.queues)
        failpoint.hit("compact.before_intent")
        old = [one.key for one in merge.inputs]
        self._append(Intent(kind=self._kind, round=number, old=old, names=[name]))
        failpoint.hit("compact.after_intent")
        return number, name

    def _publish(self, merge: Merge, name: PlannedObject, made: CommittedObject, swap: Swap) -> str:
        """Write the replacing entry if the journal's state still allows it; returns why not, or an empty string."""
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
                continue  # a REPLACE that was sent earlier has been stored
            try:
                self._journal.store.delete(key)
            except ObjectStoreError as error:
                log.warning("%s is left to the sweep: %s", key, error)
