"""Rounds of an archive: records in a spool file, and their commit."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import Commit, CommittedObject, Intent, PlannedObject
from neve.archive.format.keys import data_key
from neve.record.codec import encode_record
from tests.kit.archive.records import T0, TOPIC, Run


@dataclass
class Round:
    name: PlannedObject
    entries: dict[int, Run]
    files: list[tuple[str, int, int]]
    records: dict[tuple[int, int], bytes]


def make_round(directory: Path, base: int, first: int, counts: dict[int, int], body: int = 200) -> Round:
    log, records, entries = bytearray(), {}, {}
    for queue, count in counts.items():
        physical, sizes = [], []
        for offset in range(first, first + count):
            record = encode_record(
                topic=TOPIC.encode(), body=bytes([offset & 0xFF]) * body, queue_id=queue, flag=0, queue_offset=offset,
                properties=b"TAGS\x01%s\x02" % (b"a" if offset % 3 else b"b"), physical_offset=base + len(log),
                sys_flag=0, born_timestamp=1 << 62 if offset % 7 == 0 else T0, born_host=("10.0.0.1", 5),
                store_timestamp=T0 + offset, store_host=("10.0.0.2", 10911),
            )  # fmt: skip
            physical.append(base + len(log))
            sizes.append(len(record))
            records[queue, offset] = record
            log += record
        entries[queue] = Run(first, np.array(physical), np.array(sizes))
    path = directory / f"{base:020d}"
    path.write_bytes(log)
    key = data_key("", TOPIC, "2026-01-02", "b", start=base, end=base + len(log), epoch=1)
    queues = {queue: (first, first + count - 1) for queue, count in counts.items()}
    name = PlannedObject(key, TOPIC, "2026-01-02", base, base + len(log), queues)
    return Round(name, entries, [(str(path), base, len(log))], records)


def commit(catalog: Catalog, made: Round, name: CommittedObject) -> None:
    catalog.apply(catalog.next_seq, Intent(round=catalog.rounds.last_round + 1, names=[made.name]))
    catalog.apply(catalog.next_seq, Commit(round=catalog.rounds.last_round, names=[name]))
