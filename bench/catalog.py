"""The archive's catalog at three sizes: the cost of an object in memory, at a start, in queries and in checkpoints.

    bytes/object    resident memory of the catalog per object
    apply           CPU time per object of a COMMIT
    checkpoint      bytes of its packs and of its head, and the CPU time to write them, without a previous one
    next            the same for the next one, after one new object in one of a hundred topics
    restore         CPU time from a checkpoint's bytes to a usable catalog
    first           CPU time of the first query for an offset of a topic

Objects have eight queues; each topic has 100, in rounds over all topics. Each size runs in its own process.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.topic_parts import topics_in
from neve.archive.format.checkpoint import PackName, decode_checkpoint
from neve.archive.format.journal import Checkpoint, Commit, CommittedObject, RowGroup
from neve.archive.format.keys import data_key

QUEUES = 8
OF_TOPIC = 100
BATCH = 256  # The number of names in a COMMIT.
SIZES = (10_000, 100_000, 1_000_000)
_HOUR = 3_600_000
_BEGIN = 1_767_225_600_000
_PAGE = 4096


def rounds(topics: int, hours: int = OF_TOPIC + 1) -> Iterator[CommittedObject]:
    """Yield an object of each topic each hour."""
    random = Random(1)
    offsets = [[random.randrange(1_000_000) for _ in range(QUEUES)] for _ in range(topics)]
    place = 1 << 30
    for hour in range(hours):
        for number in range(topics):
            oldest = _BEGIN + hour * _HOUR + random.randrange(2000)
            newest = oldest + _HOUR - random.randrange(4000)
            runs, rows = [], 0
            for queue in range(QUEUES):
                count, first = random.randrange(20, 400), offsets[number][queue]
                runs.append((queue, first, first + count - 1))
                offsets[number][queue] += count
                rows += count
            wire = rows * 700 + random.randrange(1000)
            yield _name(random, f"topic-{number:05d}", place, place + wire, oldest, newest, rows, runs)
            place += wire


def _name(
    random: Random,
    topic: str,
    start: int,
    end: int,
    oldest: int,
    newest: int,
    rows: int,
    runs: list[tuple[int, int, int]],
) -> CommittedObject:
    day = datetime.fromtimestamp(oldest / 1000, UTC).strftime("%Y-%m-%d")
    queues, row = {}, 0
    for queue, first, last in runs:
        queues[queue] = (first, last, row)
        row += last - first + 1
    wire, footer = end - start, random.randrange(900, 1500)
    size = wire // 2 + footer
    group = RowGroup(0, rows, 4, size - footer - 4, newest, oldest, wire, runs)
    return CommittedObject(
        key=data_key("", topic, day, "broker-a", start=start, end=end, epoch=7),
        topic=topic, day=day, start=start, end=end, size=size, footer=footer, etag=random.randbytes(16).hex(),
        checksum=("crc32", random.randbytes(4).hex()), sha256=random.randbytes(32).hex(), rows=rows, wire_bytes=wire,
        min_time=oldest, max_time=newest, queues=queues, row_groups=[group],
    )  # fmt: skip


def measure(objects: int) -> dict[str, float]:
    """Measure one size in this process."""
    topics = objects // OF_TOPIC
    catalog, batch = Catalog(), list[CommittedObject]()
    gc.collect()
    before, applying = resident(), 0.0
    coming = rounds(topics)
    for name in islice(coming, objects):
        batch.append(name)
        if len(batch) == BATCH:
            applying += _apply(catalog, batch)
            batch = []
    applying += _apply(catalog, batch)
    more = list(islice(coming, topics))
    del batch
    gc.collect()
    held = resident() - before
    packs: dict[PackName, bytes] = {}
    whole = _write(catalog, packs)
    batch = [name for index, name in enumerate(more) if index % 100 == 0]
    _apply(catalog, batch)
    changed = _write(catalog, packs)
    del catalog
    gc.collect()
    again = Catalog()
    began = time.process_time()
    head = decode_checkpoint(changed.content)
    again.restore(head, topics_in(head, packs.__getitem__))
    restoring = time.process_time() - began
    assert again.object_count == objects + len(batch)
    topic = f"topic-{topics // 2:05d}"
    began = time.process_time()
    assert again.find(topic, 3, again.min_offset(topic, 3) or 0) is not None
    first = time.process_time() - began
    return {
        "objects": objects,
        "topics": topics,
        "bytes/object": held / objects,
        "apply us/object": applying / objects * 1e6,
        "checkpoint MB": whole.bytes / 1e6,
        "head MB": len(whole.content) / 1e6,
        "checkpoint s": whole.seconds,
        "next KB/object": changed.bytes / len(batch) / 1e3,
        "next s": changed.seconds,
        "restore s": restoring,
        "first us": first * 1e6,
    }


class _Written(NamedTuple):
    content: bytes
    bytes: int
    seconds: float


def _write(catalog: Catalog, packs: dict[PackName, bytes]) -> _Written:
    """Write a checkpoint like a broker."""
    seq, mine = catalog.next_seq - 1, dict[PackName, bytes]()
    began = time.process_time()
    written = catalog.write_checkpoint("broker-a", lambda number, data: mine.update({PackName(seq, number): data}))
    took = time.process_time() - began
    packs |= mine
    catalog.adopt_checkpoint(written)
    catalog.apply(seq + 1, Checkpoint(key="", through_seq=seq))
    return _Written(written.content, sum(map(len, mine.values())), took)


def _apply(catalog: Catalog, names: list[CommittedObject]) -> float:
    began = time.process_time()
    catalog.apply(catalog.next_seq, Commit(round=1, names=names))
    return time.process_time() - began


def resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    for size in options.sizes:
        done = subprocess.run(
            [sys.executable, "-m", "bench.catalog", "--one", str(size)], check=True, capture_output=True, text=True
        )
        found = json.loads(done.stdout)
        print("  ".join(f"{name} {value:,.1f}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
