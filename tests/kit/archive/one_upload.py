"""Upload one object with a real worker and wait for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from neve.archive.format.journal import CommittedObject, PlannedObject
from tiered.worker.client import WorkerClient
from tiered.write.entry_run import EntryRun
from tiered.write.uploader import NamedEntries

FACTS = {"cluster": "c", "broker": "b", "round": "1"}


def upload_one(
    worker: WorkerClient,
    store_url: str,
    name: PlannedObject,
    entries: Mapping[int, EntryRun],
    files: Sequence[tuple[str, int, int]],
    facts: Mapping[str, str] = FACTS,
) -> CommittedObject:
    """Upload an object.

    Raises:
        ContentConflict, EncodeFailed: or an error of the object store.
    """
    uploads = worker.uploads(store_url, facts)
    uploads.begin([NamedEntries(name, entries)], files)
    ((_, outcome),) = uploads.done()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
