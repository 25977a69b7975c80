"""Interface between an offload round and the worker that makes and uploads its objects, with its errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from neve.archive.format.journal import CommittedObject, PlannedObject
from tiered.write.entry_run import EntryRun


class ContentConflict(Exception):
    """An object with other content exists under the name."""


class EncodeFailed(Exception):
    """The worker could not encode, verify or upload a name; the next round tries it again."""


class GivenUp(Exception):
    """The upload was cancelled by `give_up` before it began; the name itself did not fail."""


class RowCounts(NamedTuple):
    """Rows written since the start, and how many of them have the columns `wire` and `damaged` set."""

    rows: int = 0
    wire: int = 0
    damaged: int = 0

    def plus(self, rows: int, wire: int, damaged: int) -> RowCounts:
        return RowCounts(self.rows + rows, self.wire + wire, self.damaged + damaged)


class NamedEntries(NamedTuple):
    """A name, and the entries of its object."""

    name: PlannedObject
    entries: Mapping[int, EntryRun]

    @property
    def wire_bytes(self) -> int:
        return sum(int(run.sizes.sum()) for run in self.entries.values())


#: Number of concurrent uploads of a worker.
UPLOADS = 32
#: Largest wire size of an object that may be encoded together with others, by one request.
SMALL_BYTES = 64 << 10

#: The object as COMMIT publishes it, or the reason why there is none: an exception above, or an error of the store.
Outcome = CommittedObject | Exception


class Uploads(Protocol):
    """Uploads in progress of one round. Objects that begin together are one request."""

    def begin(self, objects: Sequence[NamedEntries], files: Sequence[tuple[str, int, int]]) -> None:
        """Encode, verify and upload objects; returns at once. `files`: path, first CommitLog offset, length."""
        ...

    def done(self) -> Sequence[tuple[PlannedObject, Outcome]]:
        """Wait for the end of a request, and return its outcomes; empty if none is in progress."""
        ...

    def give_up(self) -> None:
        """Cancel uploads that have not begun, with GivenUp as their outcome; others complete."""
        ...


class Uploader(Protocol):
    """A worker that encodes and uploads, and removes unfinished uploads of a broker's dead workers.

    `upload_waited`: seconds for which the rate has delayed uploads. `starved`: seconds for which callers waited for a
    worker that wanted a processor and had none.
    """

    upload_waited: float
    written: RowCounts

    @property
    def starved(self) -> float: ...

    def set_upload_rate(self, bytes_per_second: int) -> None: ...

    def set_priority(self, priority: str) -> None:
        """Set a priority (`infra.process.priority`), effective once only a compaction or nothing is in progress."""
        ...

    def uploads(self, store_url: str, metadata: Mapping[str, str]) -> Uploads:
        """Return the uploads of one round."""
        ...

    def remove_stale_uploads(self, store_url: str, broker: str) -> int: ...
