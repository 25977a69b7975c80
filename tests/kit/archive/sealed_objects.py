"""A log whose messages are sealed into data objects."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from neve.archive.rows.schema import ObjectFacts
from tests.kit.archive.records import TOPIC, Run, record
from tiered.write.compactor import Input, compact
from tiered.write.segment_writer import GroupSizes, encode

DAY = "2026-01-02"
SMALL = GroupSizes(2000, 500)
Sealed = dict[tuple[int, int], bytes]  # (queue, offset) -> record


class SealedLog:
    """A sequence of records, and objects made of them."""

    def __init__(self, directory: Path, seed: int = 1) -> None:
        self.directory, self.at, self.sealed = directory, 0, Sealed()
        self.random = random.Random(seed)
        self.next: dict[int, int] = {}
        self.inputs: list[Input] = []

    def record(self, queue: int, at: int) -> bytes:
        offset = self.next.setdefault(queue, 0)
        self.next[queue] += 1
        kind = self.random.randrange(20)
        changes: dict[str, Any] = {"body": self.random.randbytes(self.random.randrange(60))}
        if kind == 0:
            changes["properties"] = b"a\x01b\x02a\x01c\x02"
        elif kind == 1:
            changes["born_host"] = ("fe80::1", 9)
        elif kind == 2:
            changes["store_timestamp"] = -1
        raw = bytearray(record(offset, queue_id=queue, physical_offset=at, **changes))
        if kind == 3:
            raw[self.random.randrange(len(raw))] ^= 0x40
        self.sealed[queue, offset] = bytes(raw)
        return bytes(raw)

    def object_of(self, counts: Mapping[int, int], sizes: GroupSizes = SMALL) -> Input:
        """Append `counts` records per queue, interleaved, and make an object of them."""
        start, wire = self.at, bytearray()
        order = [queue for queue, count in counts.items() for _ in range(count)]
        self.random.shuffle(order)
        places: dict[int, list[tuple[int, int]]] = {}
        firsts = {queue: self.next.get(queue, 0) for queue in counts}
        for queue in order:
            raw = self.record(queue, start + len(wire))
            places.setdefault(queue, []).append((start + len(wire), len(raw)))
            wire += raw
        self.at += len(wire)
        log = self.directory / "log"
        log.write_bytes(wire)
        runs = {queue: Run(firsts[queue], *map(np.array, zip(*held, strict=True))) for queue, held in places.items()}
        number = len(self.inputs)
        facts = ObjectFacts("c", "b", TOPIC, DAY, number, start, self.at)
        path = self.directory / f"{number}.parquet"
        named = [(str(log), start, len(wire))]
        written = encode(runs, named, path, facts=facts, key=f"{number}.parquet", sizes=sizes)
        self.inputs.append(Input(path, written.name))
        return self.inputs[-1]

    def compact(
        self, inputs: Sequence[Input] | None = None, below: Mapping[int, int] | None = None, sizes: GroupSizes = SMALL
    ) -> Input:
        inputs = self.inputs if inputs is None else inputs
        facts = ObjectFacts("c", "b", TOPIC, DAY, 7, inputs[0].name.start, inputs[-1].name.end)
        path = self.directory / f"made-{len(list(self.directory.glob('made-*')))}.parquet"
        return Input(path, compact(inputs, below or {}, path, facts=facts, key=path.name, sizes=sizes))
