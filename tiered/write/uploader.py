"""Who makes objects of names and uploads them: what a round asks of its worker, and how that may fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from neve.archive.format.journal import CommittedObject, PlannedObject
from tiered.write.entry_run import EntryRun


class ContentConflict(Exception):
    """An object of other content stands under the name."""


class EncodeFailed(Exception):
    """The worker could not encode, verify or upload a name; the round tries it again next time."""


class GivenUp(Exception):
    """The upload had not begun when `give_up` came: nothing is known against the name."""


class RowCounts(NamedTuple):
    """Rows of objects that were written since the start; `wire` and `damaged`: those with these columns set."""

    rows: int = 0
    wire: int = 0
    damaged: int = 0

    def plus(self, rows: int, wire: int, damaged: int) -> RowCounts:
        return RowCounts(self.rows + rows, self.wire + wire, self.damaged + damaged)


class NamedEntries(NamedTuple):
    """A name, and the entries that its object holds."""

    name: PlannedObject
    entries: Mapping[int, EntryRun]

    @property
    def wire_bytes(self) -> int:
        return sum(int(run.sizes.sum()) for run in self.entries.values())


#: How many uploads a worker has on their way at the same time.
UPLOADS = 32
#: Wire bytes of an object that may be made beside others, by one request.
SMALL_BYTES = 64 << 10

#: The object as COMMIT publishes it, or why there is none: one of the exceptions above, or an error of the store.
Outcome = CommittedObject | Exception


class Uploads(Protocol):
    """Objects on their way, of one round: those that were begun together become one request."""

    def begin(self, objects: Sequence[NamedEntries], files: Sequence[tuple[str, int, int]]) -> None:
        """Encode, verify and upload them; returns at once. `files`: path, first CommitLog offset, length."""
        ...

    def done(self) -> Sequence[tuple[PlannedObject, Outcome]]:
        """Wait for a request that was begun to end; empty where none is under way."""
        ...

    def give_up(self) -> None:
        """What is not uploaded yet stays undone, as GivenUp; what is on its way ends as it does."""
        ...


class Uploader(Protocol):
    """`upload_waited` is how many seconds its rate has held uploads back; 0 as the rate is no limit. `starved`: in
    how many its worker was waited for, and wanted a processor and had none.

    Also forgets the unfinished uploads of a broker's dead workers.
    """

    upload_waited: float
    written: RowCounts

    @property
    def starved(self) -> float: ...

    def set_upload_rate(self, bytes_per_second: int) -> None: ...

    def set_priority(self, priority: str) -> None:
        """Set a priority (`infra.process.priority`) from the first request with nothing but a compaction in flight."""
        ...

    def uploads(self, store_url: str, metadata: Mapping[str, str]) -> Uploads:
        """For the objects of one round."""
        ...

    def remove_stale_uploads(self, store_url: str, broker: str) -> int: ...
