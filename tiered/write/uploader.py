"""Who makes an object of a name and uploads it: what a round asks of its worker, and how that may fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from neve.archive.journal import CommittedName, IntentName
from tiered.write.entry_run import EntryRun


class ContentConflict(Exception):
    """An object of other content stands under the name."""


class EncodeFailed(Exception):
    """The worker could not encode, verify or upload a name; the round tries it again next time."""


class RowCounts(NamedTuple):
    """Rows of objects that were written since the start; `wire` and `damaged`: those with these columns set."""

    rows: int = 0
    wire: int = 0
    damaged: int = 0

    def plus(self, rows: int, wire: int, damaged: int) -> RowCounts:
        return RowCounts(self.rows + rows, self.wire + wire, self.damaged + damaged)


class Uploader(Protocol):
    """Encodes, verifies and uploads one named object; raises ContentConflict, EncodeFailed or a store's error.

    `upload_waited` is how many seconds its rate has held uploads back; 0 as the rate is no limit.

    Also forgets the unfinished uploads of a broker's dead workers.
    """

    upload_waited: float
    written: RowCounts

    def set_upload_rate(self, bytes_per_second: int) -> None: ...

    def encode_upload(
        self,
        store_url: str,
        name: IntentName,
        entries: Mapping[int, EntryRun],
        files: Sequence[tuple[str, int, int]],
        metadata: Mapping[str, str],
    ) -> CommittedName: ...

    def remove_stale_uploads(self, store_url: str, broker: str) -> int: ...
