"""An archive's catalog on a store: the time from a process's start to its first answer, at three sizes.

    plan     a reader of one topic: `neve.archive.open(url).keys(topic)`, as a Spark driver plans
    start    a broker's catalog with its local copy, until a first cold read finds its row group
    bare     the same with an empty data directory: everything is read from the store
    whole    a reader that goes through all topics

Each runs in its own process. Printed are wall seconds since its start, including imports, and CPU seconds; requests by
kind and the MB that they transferred; and MB of resident memory at the end. The store is a private MinIO; --dir uses a
directory instead. Objects are as in `bench.catalog`, 100 of each topic, with 128 entries after the checkpoint: rounds
of 256 names. The entries before it are empty, because they are not read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from bench.catalog import BATCH, OF_TOPIC, SIZES, resident, rounds
from infra.clock import SystemClock
from infra.disk.filesystem import RealDisk
from infra.objects import minio
from infra.objects.open import open_store
from infra.objects.store import ObjectStore
from neve.archive.catalog.catalog import Catalog, Location
from neve.archive.format.journal import (
    NO_CHECKPOINT,
    AnyEntry,
    Checkpoint,
    Commit,
    CommittedObject,
    Deleted,
    Epoch,
    Intent,
    PlannedObject,
    encode_entry,
)
from neve.archive.format.keys import checkpoint_key, journal_key, pack_key

BROKER = "broker-a"
TAIL = 64  # Rounds after the checkpoint, each of an INTENT and a COMMIT.
_MB = 1e6


# ---- the archive


def fill(store: ObjectStore, objects: int) -> None:
    """Write names without their objects, because no query reads a row."""
    topics = objects // OF_TOPIC
    coming = rounds(topics, OF_TOPIC + TAIL * BATCH // topics + 1)
    catalog = Catalog()
    catalog.apply(0, Epoch(epoch=1, owner="o", log_uuid="u", broker=BROKER))
    for batch in _batches(islice(coming, objects)):
        catalog.apply(catalog.next_seq, Commit(round=catalog.next_seq, names=batch))
    through = catalog.next_seq - 1
    for seq in range(through + 1):
        _put(store, seq, Deleted(keys=[], epoch=1))
    written = catalog.write_checkpoint(
        BROKER, lambda number, data: _keep(store, pack_key("", BROKER, through, number), data)
    )
    _keep(store, checkpoint_key("", BROKER, through), written.content)
    _put(store, through + 1, Checkpoint(key="", through_seq=through, epoch=1))
    seq = through + 2
    for batch in islice(_batches(coming), TAIL):
        intent = Intent(round=seq, names=[_intended(name) for name in batch], epoch=1, checkpoint=through)
        _put(store, seq, intent)
        _put(store, seq + 1, Commit(round=seq, names=batch, epoch=1, checkpoint=through))
        seq += 2


def _batches(names: Iterator[CommittedObject]) -> Iterator[list[CommittedObject]]:
    while batch := list(islice(names, BATCH)):
        yield batch


def _intended(name: CommittedObject) -> PlannedObject:
    queues = {queue: (first, last) for queue, (first, last, _) in name.queues.items()}
    return PlannedObject(name.key, name.topic, name.day, name.start, name.end, queues)


def _put(store: ObjectStore, seq: int, entry: AnyEntry) -> None:
    store.put(journal_key("", BROKER, seq), encode_entry(entry), if_absent=True)


def _keep(store: ObjectStore, key: str, data: bytes) -> None:
    store.put(key, data, if_absent=True)


# ---- one query, in its own process


class Counted:
    """A reader's source that counts its requests."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.requests: Counter[str] = Counter()
        self.bytes = 0

    def __getattr__(self, verb: str) -> Any:
        ask = getattr(self._source, verb)

        def counted(*args: Any) -> Any:
            self.requests[verb] += 1
            found = ask(*args)
            self.bytes += len(found) if isinstance(found, bytes) else 0
            return found

        return counted


def plan(url: str, topic: str, *, whole: bool) -> dict[str, Any]:
    """Plan like a reader."""
    from neve.archive.read.reader import Archive  # noqa: PLC0415 - what it loads counts
    from neve.archive.store.source import open_source  # noqa: PLC0415

    source = Counted(open_source(url))
    archive = Archive(source)
    count = sum(1 for _ in archive.catalogs[BROKER].each_object()) if whole else len(archive.keys(topic))
    assert count >= OF_TOPIC
    return {"requests": dict(source.requests), "MB": source.bytes / _MB}


def start(url: str, topic: str, directory: Path) -> dict[str, Any]:
    """Build the catalog like a broker's start."""
    from tiered.journal.identity import IdentityFile  # noqa: PLC0415
    from tiered.journal.local_journal import LocalJournal  # noqa: PLC0415
    from tiered.journal.tail import JournalTail  # noqa: PLC0415

    store = open_store(url)
    source = Counted(store)
    IdentityFile(directory, RealDisk()).read()
    local = LocalJournal(directory, RealDisk())
    tail = JournalTail(source, "", BROKER, local, SystemClock())
    tail.replay()
    tail.confirm_copy()
    tail.catch_up(128)
    tail.follow()
    catalog = tail.catalog
    assert catalog.checkpoint != NO_CHECKPOINT
    assert isinstance(catalog.find(topic, 3, catalog.min_offset(topic, 3) or 0), Location)
    return {"requests": dict(source.requests), "MB": source.bytes / _MB}


# ---- everything


def measure(url: str, objects: int, directory: Path, environment: dict[str, str]) -> None:
    topic = f"topic-{objects // OF_TOPIC // 2:05d}"
    for what in ("plan", "bare", "start", "whole"):
        command = [sys.executable, "-m", "bench.catalog_starts", "--what", what, url, topic, str(directory)]
        began = time.perf_counter()
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        found = json.loads(done.stdout)
        asked = " ".join(f"{verb} {count}" for verb, count in sorted(found["requests"].items()))
        print(
            f"objects {objects:,}  {what:5}  {found['until'] - began:.2f} s  CPU {found['cpu']:.2f} s  "
            f"{found['MB']:.1f} MB  memory {found['memory']:.0f} MB  {asked}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--dir", action="store_true", help="a directory store")
    parser.add_argument("--what", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what:
        what, url, topic, directory = options.what
        local = Path(directory)
        found = start(url, topic, local) if what in {"start", "bare"} else plan(url, topic, whole=what == "whole")
        # Both processes share the machine's clock.
        found |= {"until": time.perf_counter(), "cpu": time.process_time(), "memory": resident() / _MB}
        print(json.dumps(found))
        return
    for size in options.sizes:
        with ExitStack() as stack:
            top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="neve-bench-")))
            environment, url = dict(os.environ), f"dir:{top / 'store'}"
            (top / "store").mkdir()
            if not options.dir:
                server = stack.enter_context(minio.running(top / "minio"))
                minio.create_bucket(server, "archive")
                keys = {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
                os.environ.update(keys)
                environment |= keys
                url = f"s3://archive?endpoint={server.endpoint}&region=us-east-1"
            fill(open_store(url), size)
            measure(url, size, top / "state", environment)


if __name__ == "__main__":
    main()
