"""One compaction: INTENT → the worker reads, merges, verifies and uploads → checks → REPLACE.

REPLACE is the one moment at which the made object counts and its inputs do not; they stay in the store for the grace,
and go as what expired does. A crash before it leaves an open INTENT: whoever holds the epoch next closes it and deletes
what it made. Nothing is completed: what was read and checked is not known any more.

What stands under the made object's name is deleted only behind the ABORT that closes it. A REPLACE whose answer was
lost may still come to stand until another entry has its number; with the ABORT there it can't, or it stood before, and
then the object is live and stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from infra import failpoint
from infra.object_store.protocol import NotFound, ObjectStoreError
from neve.archive.journal import COMPACT, Abort, AnyEntry, CommittedName, Intent, IntentName, Replace
from neve.archive.keys import data_key
from tiered.journal.errors import NotMaster
from tiered.journal.writer import JournalWriter
from tiered.write.merge import Merge, mismatch
from tiered.write.uploader import ContentConflict, EncodeFailed

log = logging.getLogger(__name__)

_GONE = "its inputs are in view no more"
Progress = Callable[[dict[str, Any]], None]


class Merger(Protocol):
    """Makes one object of several and uploads it; raises ContentConflict, EncodeFailed or a store's error."""

    def compact(self, store_url: str, name: IntentName, merge: Merge, metadata: Mapping[str, str]) -> CommittedName: ...

    def give_up_compaction(self) -> None:
        """For good: one that is under way fails soon."""
        ...


class Outcome(NamedTuple):
    """What became of a compaction: the object, or why not. `overtaken`: its inputs left the view meanwhile."""

    made: CommittedName | None
    reason: str = ""
    overtaken: bool = False


class Replacement:
    """Each step with the journal takes a turn; reading, merging and uploading take none."""

    def __init__(
        self,
        journal: JournalWriter,
        worker: Merger,
        delete_after_ms: Callable[[], int],
        turn: AbstractContextManager[None],
        *,
        cluster: str = "DefaultCluster",
    ) -> None:
        """`delete_after_ms`: until when what is replaced now is kept; asks the store for its time."""
        self._journal, self._worker = journal, worker
        self._delete_after_ms, self._turn, self._cluster = delete_after_ms, turn, cluster
        self._master_epoch: int | None = None

    def begin(self) -> None:
        """Before anything is planned. Raises NotMaster where this broker has to follow."""
        self._master_epoch = self._journal.master_epoch
        if self._master_epoch is None:
            raise NotMaster(f"archive of {self._journal.broker}: compaction is the master's")

    def _append(self, entry: AnyEntry) -> None:
        self._journal.append(entry, master_epoch=self._master_epoch)

    def close_open(self) -> int:
        """Close what was begun before, by this process or another, and not ended; how many. In a turn."""
        found = [(n, one) for n, one in self._journal.catalog.open_rewrites().items() if one.kind == COMPACT]
        for number, rewrite in found:
            self._abort(number, [name.key for name in rewrite.names], "its writer did not end it")
        return len(found)

    def run(self, merge: Merge) -> Outcome:
        """Raises where the store or the archive is not to be had: what is open then, `close_open` closes."""
        with self._turn:
            begun = self._begin(merge)
        if begun is None:
            return Outcome(None, _GONE, overtaken=True)
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
            if made is not None and not (failure := self._publish(merge, name, made)):
                return Outcome(made)
            self._abort(number, [name.key], failure)
        return Outcome(None, failure, overtaken=failure == _GONE)

    def _begin(self, merge: Merge) -> tuple[int, IntentName] | None:
        catalog, journal = self._journal.catalog, self._journal
        if not catalog.are_live(merge.inputs):
            return None
        number = catalog.last_rewrite + 1
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
        name = IntentName(key, merge.topic, merge.day, merge.start, merge.end, merge.queues)
        failpoint.hit("compact.before_intent")
        old = [one.key for one in merge.inputs]
        self._append(Intent.of_rewrite(COMPACT, number, old=old, names=[name]))
        failpoint.hit("compact.after_intent")
        return number, name

    def _publish(self, merge: Merge, name: IntentName, made: CommittedName) -> str:
        """REPLACE, decided by what the journal says now; why not, or nothing."""
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
        entry = Replace(old=[one.key for one in merge.inputs], new=[made], delete_after_ms=self._delete_after_ms())
        failpoint.hit("compact.before_replace")
        self._append(entry)
        failpoint.hit("compact.after_replace")
        return ""

    def _abort(self, number: int, keys: Sequence[str], reason: str) -> None:
        log.warning("compaction %d: %s is closed without an object: %s", number, ", ".join(keys), reason)
        self._append(Abort.of_rewrite(COMPACT, number, reason=reason))
        failpoint.hit("compact.after_abort")
        for key in keys:
            if self._journal.catalog.knows(key):
                continue  # a REPLACE that was sent before came to stand before
            try:
                self._journal.store.delete(key)
            except ObjectStoreError as error:
                log.warning("%s is left to the sweep: %s", key, error)
