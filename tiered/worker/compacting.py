"""Compaction in a tier worker: copy the inputs, merge them into one object, and upload it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from infra import failpoint
from infra.objects.store import ObjectStore
from neve.archive.format.journal import CommittedObject
from neve.archive.rows.schema import DamagedObject, ObjectFacts
from tiered.worker import frames
from tiered.worker.work_dir import own_prefix
from tiered.write.compactor import Cancelled, Input, compact
from tiered.write.segment_writer import GroupSizes

_COPIES = 8  # concurrent copies
_COPY_BYTES = 8 << 20

#: Uploads a file under a name that is free or has the same content; returns the name with its etag.
Upload = Callable[[Path, CommittedObject], CommittedObject]


def make(
    request: frames.Compact, store: ObjectStore, upload: Upload, sizes: GroupSizes, is_wanted: Callable[[], bool]
) -> CommittedObject:
    """Make and upload the object. Raises DamagedObject, Cancelled, or an error of the store."""
    name = request.name
    facts = ObjectFacts.of(name, request.metadata)
    with TemporaryDirectory(prefix=own_prefix("compact"), dir=request.work_dir) as directory:
        inputs = [Input(Path(directory) / f"{number}.parquet", one) for number, one in enumerate(request.inputs)]
        with ThreadPoolExecutor(_COPIES, "compact") as pool:
            list(pool.map(functools.partial(_copy, store, is_wanted), inputs))
        path = Path(directory) / "object.parquet"
        erased = request.erased
        made = compact(
            inputs, request.below, path, erased=erased, facts=facts, key=name.key, sizes=sizes, is_wanted=is_wanted
        )
        failpoint.hit("compact.after_encode")
        return upload(path, made)


def _copy(store: ObjectStore, is_wanted: Callable[[], bool], one: Input) -> None:
    with one.path.open("wb") as file:
        for start in range(0, one.name.size, _COPY_BYTES):
            if not is_wanted():
                raise Cancelled(one.name.key)
            length = min(_COPY_BYTES, one.name.size - start)
            data = store.get_range(one.name.key, start, length)
            if len(data) != length:
                raise DamagedObject(f"{one.name.key}: {len(data)} bytes came of {length} at {start}")
            file.write(data)
