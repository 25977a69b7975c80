from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from infra.objects.store import AccessDenied, ObjectStoreError, StoreUnavailable, UnknownOutcome
from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import Commit, Gap
from neve.archive.read.verify import verify
from tests.unit.lifecycle.fakes import Rig


def test_sound_archive_has_no_findings(rig: Rig) -> None:
    rig.hot.put("a", count=25)
    rig.hot.put("a", 1, 3)
    rig.offload(evict=True)
    report = verify(rig.journal.catalog, rig.store)
    assert (report.ok, report.rows, report.problems) == (True, 28, [])


def test_verify_reports_missing_foreign_and_torn_objects(rig: Rig) -> None:
    for topic in ("gone", "other", "torn"):
        rig.hot.put(topic, count=2)
    rig.offload()
    keys = {name.topic: name.key for name in rig.journal.catalog.objects()}
    rig.store.delete(keys["gone"])
    rig.store.put(keys["other"], bytes(len(rig.store.get(keys["other"]))))
    rig.store.put(keys["torn"], b"")
    problems = verify(rig.journal.catalog, rig.store).problems
    assert [problem.split(": ")[1] for problem in problems] == [
        "the object is missing",
        "the object is not the committed one (etag " + rig.store.head(keys["other"]).etag + ")",
        "0 bytes, the journal records " + str(next(n.size for n in rig.journal.catalog.objects("torn"))),
    ]


@pytest.mark.parametrize(("shift", "kind"), [(-1, "overlap"), (2, "hole")])
def test_verify_reports_overlaps_and_holes(rig: Rig, shift: int, kind: str) -> None:
    rig.hot.put("a", count=5)
    rig.offload()
    (name,) = rig.journal.catalog.objects()
    group = msgspec.structs.replace(name.row_groups[0], runs=[(0, 5 + shift, 9 + shift)])
    second = msgspec.structs.replace(
        name, key=name.key.replace("-e1", "-e2"), queues={0: (5 + shift, 9 + shift, 0)}, row_groups=[group]
    )
    rig.store.put(second.key, rig.store.get(name.key))
    catalog = Catalog()
    catalog.apply(0, Commit(round=0, names=[name, second]))
    assert [f": {kind} " in problem for problem in verify(catalog, rig.store).problems] == [True]
    if kind == "hole":
        catalog.apply(1, Gap(topic="a", queue=0, first=5, last=6, reason="lost"))
        assert verify(catalog, rig.store).ok


@pytest.mark.parametrize("seed", range(60))
def test_random_faults_and_restarts_neither_lose_nor_duplicate(tmp_path: Path, seed: int) -> None:
    """Two faults at a time, before or after their effect, at random calls; then none."""
    chance = random.Random(seed)
    rig = Rig(tmp_path / "state")
    errors = (StoreUnavailable("503"), UnknownOutcome("timeout"), AccessDenied("403"))
    for _ in range(6):
        for _ in range(2):
            verb = chance.choice(("put", "put", "get", "head"))
            rig.store.fail(verb, chance.choice(errors), after=chance.random() < 0.5, skip=chance.randrange(8))
        for topic in chance.sample("abc", 2):
            rig.hot.put(topic, chance.randrange(2), chance.randrange(1, 9))
        for _ in range(2):
            try:
                rig.lifecycle.offload.run(roll=chance.random() < 0.7, evict=chance.random() < 0.7)
            except ObjectStoreError:
                continue
        if chance.random() < 0.4:
            rig.store.faults.clear()
            rig.restart()
    rig.store.faults.clear()
    rig.offload(evict=True)
    report = verify(rig.journal.catalog, rig.store)
    assert report.problems == []
    assert (report.gaps, report.open_names, rig.hot.records) == (0, 0, [])
    for topic, queue in rig.hot.next:
        assert rig.check_tiles(topic, queue) == rig.hot.next[topic, queue]
    written = {key for key in rig.store.objects if key.startswith("topic=")}
    assert written == {name.key for name in rig.journal.catalog.objects()}
