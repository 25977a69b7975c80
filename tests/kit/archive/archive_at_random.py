"""A broker's archive whose journal grows by random entries, over real objects."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import msgspec

from infra.objects.store import ObjectStore
from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import (
    AnyEntry,
    Checkpoint,
    Commit,
    CommittedObject,
    Deleted,
    Epoch,
    Erase,
    Expire,
    Gap,
    Intent,
    PlannedObject,
    Replace,
    Topic,
    Unexpire,
    encode_entry,
)
from neve.archive.format.keys import checkpoint_key, data_key, journal_key
from neve.archive.rows.schema import ObjectFacts
from tests.kit.archive.checkpoints import put_checkpoint
from tests.kit.archive.records import TOPIC
from tests.kit.archive.sealed_objects import SMALL, SealedLog
from tiered.write.compactor import Input, compact

T0 = 1_767_225_600_000
FIRST_DAY = date(2026, 1, 2)


class ArchiveAtRandom:
    """One topic with three queues; `step` appends a random valid entry and returns it."""

    def __init__(
        self, store: ObjectStore, broker: str, directory: Path, seed: int, *, checkpoints: bool = True
    ) -> None:
        self.store, self.broker, self.checkpoints = store, broker, checkpoints
        self.random = random.Random(f"{broker}{seed}")
        directory.mkdir()
        self.log, self.seq, self.catalog = SealedLog(directory, seed), 0, Catalog()
        self.inputs: dict[str, Path] = {}  # key -> the object on this disk
        self.replaced: set[str] = set()  # Removed data, which never come back.
        self.round = self.rewrite = 0
        self.append(Epoch(epoch=1, owner="o", log_uuid=broker, broker=broker))

    def append(self, entry: AnyEntry) -> str:
        stands = msgspec.structs.replace(entry, time_ms=T0 + self.seq)
        self.store.put(journal_key("", self.broker, self.seq), encode_entry(stands), if_absent=True)
        self.catalog.apply(self.seq, stands)
        self.seq += 1
        return type(entry).__name__

    def step(self) -> str:
        kinds: list[tuple[int, Callable[[], str | None]]] = [
            (6, self.commit), (2, self.expire), (3, self.expire_in_part), (2, self.replace), (1, self.erase),
            (1, self.unexpire), (1, self.delete), (1, self.gap), (1, self.drop_topic),
            (int(self.checkpoints), self.checkpoint),
        ]  # fmt: skip
        while True:
            (act,) = self.random.choices([act for _, act in kinds], [weight for weight, _ in kinds])
            done = act()
            if done is not None:
                return done

    def live(self) -> list[CommittedObject]:
        return self.catalog.objects(TOPIC)

    # ---- entries

    def commit(self) -> str:
        queues = self.random.sample(range(3), self.random.randrange(1, 4))
        made = self.log.object_of({queue: self.random.randrange(1, 9) for queue in queues}, SMALL)
        self.round += 1
        day = (FIRST_DAY + timedelta(days=self.seq // 20)).isoformat()
        key = data_key("", TOPIC, day, self.broker, start=made.name.start, end=made.name.end, epoch=1)
        name = self._put(key, day, made)
        spans = {queue: (first, last) for queue, (first, last, _) in name.queues.items()}
        self.append(Intent(round=self.round, names=[PlannedObject(key, TOPIC, day, name.start, name.end, spans)]))
        return self.append(Commit(round=self.round, names=[name]))

    def expire(self) -> str | None:
        live = self.live()
        if len(live) < 3:
            return None
        gone = live[: self.random.randrange(1, 3)]
        return self.append(Expire(keys=[one.key for one in gone], delete_after_ms=T0, minimums=self._above(gone)))

    def expire_in_part(self) -> str | None:
        live = self.live()
        if not live:
            return None
        groups = [group for name in live[:2] for group in name.row_groups]
        minimums: dict[int, int] = {}
        for queue, first, last in (run for group in groups for run in group.runs):
            if self.random.random() < 0.4:
                minimums[queue] = max(minimums.get(queue, 0), self.random.randint(first, last + 1))
        return self.append(Expire(keys=[], delete_after_ms=T0, minimums={TOPIC: minimums})) if minimums else None

    def unexpire(self) -> str | None:
        back = [name.key for _, name in self.catalog.topic(TOPIC).expiring_names() if name.key not in self.replaced]
        if not back:
            return None
        lowest = {queue: self.random.randrange(4) for queue in range(3)}
        return self.append(Unexpire(keys=back, minimums={TOPIC: lowest}))

    def replace(self) -> str | None:
        live = self.live()
        at = self.random.randrange(len(live)) if live else 0
        old = [one for one in live[at : at + 3] if one.day == live[at].day]
        if len(old) < 2:
            return None
        minimums = {queue: self.catalog.recorded_minimum(TOPIC, queue) for queue in range(3)}
        below = minimums if self.random.random() < 0.5 else {}
        made = self._made_of(old, below, {})
        if made is None:
            return None
        self.replaced.update(one.key for one in old)
        return self.append(Replace(old=[one.key for one in old], new=[made], delete_after_ms=T0))

    def erase(self) -> str | None:
        live = self.live()
        if not live:
            return None
        old = self.random.choice(live)
        queue, first, last = self.random.choice(list(old.runs))
        erased = first, self.random.randint(first, last)
        made = self._made_of([old], {}, {queue: [erased]})
        self.replaced.add(old.key)
        rows = [(TOPIC, queue, *erased)]
        new = [] if made is None else [made]
        return self.append(Erase(id="e", old=[old.key], new=new, rows=rows, delete_after_ms=T0))

    def delete(self) -> str | None:
        gone = [name.key for _, name in self.catalog.topic(TOPIC).expiring_names()]
        if not gone:
            return None
        self.store.delete_many(gone)
        return self.append(Deleted(keys=gone))

    def gap(self) -> str:
        queue = self.random.randrange(3)
        first = self.log.next.get(queue, 0)
        self.log.next[queue] = first + 3
        return self.append(Gap(topic=TOPIC, queue=queue, first=first, last=first + 2, reason="lost"))

    def drop_topic(self) -> str | None:
        if self.random.random() < 0.6:
            return None
        return self.append(Topic(topic=TOPIC, deleted=True, minimums=dict(self.log.next)))

    def checkpoint(self) -> str:
        through = self.seq - 1
        put_checkpoint(self.store, self.catalog, self.broker)
        return self.append(Checkpoint(key=checkpoint_key("", self.broker, through), through_seq=through))

    # ---- objects

    def _above(self, names: list[CommittedObject]) -> dict[str, dict[int, int]]:
        minimums: dict[int, int] = {}
        for name in names:
            for queue, (_, last, _) in name.queues.items():
                minimums[queue] = max(minimums.get(queue, 0), last + 1)
        return {TOPIC: minimums}

    def _put(self, key: str, day: str, made: Input) -> CommittedObject:
        self.store.put(key, made.path, if_absent=True)
        self.inputs[key] = made.path
        return msgspec.structs.replace(made.name, key=key, day=day)

    def _made_of(
        self, old: list[CommittedObject], below: dict[int, int], erased: dict[int, list[tuple[int, int]]]
    ) -> CommittedObject | None:
        """Return the merged object, or None if no rows are left."""
        runs = [run for one in old for run in one.runs]
        if not any(
            offset >= below.get(queue, 0) and not any(a <= offset <= b for a, b in erased.get(queue, ()))
            for queue, first, last in runs
            for offset in range(first, last + 1)
        ):
            return None
        self.rewrite += 1
        start, end, day = old[0].start, old[-1].end, old[0].day
        key = data_key("", TOPIC, day, self.broker, start=start, end=end, epoch=1, rewrite=self.rewrite)
        facts = ObjectFacts("c", self.broker, TOPIC, day, self.rewrite, start, end)
        path = self.log.directory / f"rewrite-{self.rewrite}.parquet"
        inputs = [Input(self.inputs[one.key], one) for one in old]
        arguments: dict[str, Any] = {"erased": erased} if erased else {}
        made = compact(inputs, below, path, facts=facts, key=key, sizes=SMALL, **arguments)
        return self._put(key, day, Input(path, made))
