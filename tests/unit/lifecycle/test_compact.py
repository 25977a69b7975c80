"""Tests of compaction with a store that fails at every call and a crash at every step.

No row is lost or duplicated, and no object is left over.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra import failpoint
from infra.disk.filesystem import RealDisk
from infra.failpoint import FailpointError
from infra.objects.store import (
    ObjectStoreError,
    PreconditionFailed,
    StoreUnavailable,
)
from lifecycle.compact import RETRY_MS
from lifecycle.compaction import plan_topic
from lifecycle.retention import RetentionPolicy
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import read_catalog
from neve.archive.format.journal import (
    COMPACT,
    Abort,
    Expire,
    Intent,
    MalformedEntry,
    Replace,
    Topic,
    Unexpire,
)
from neve.archive.format.keys import parse_data_key
from neve.archive.read.reader import Archive
from neve.archive.rows.rebuild import rebuild
from tests.kit.archive.one_upload import upload_one
from tests.kit.archive.records import TOPIC
from tests.kit.archive.rounds import make_round
from tests.kit.archive.sealed_objects import Sealed, SealedLog
from tests.kit.store.memory_store import MemoryStore
from tests.unit.lifecycle.compact_rig import (
    FAULTS,
    HOUR,
    STEPS,
    CompactRig,
    quick,
    stored,
)
from tiered.journal.errors import Fenced
from tiered.worker import frames
from tiered.worker.process import Worker
from tiered.write.merge import Merge
from tiered.write.replacement import Fate, Outcome
from tiered.write.segment_writer import GROUP_SIZES


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> SealedLog:
    """Return a log of three objects and three queues. The last two queues begin in later objects."""
    log = SealedLog(tmp_path_factory.mktemp("log"))
    for counts in ({0: 9}, {0: 6, 1: 5}, {0: 3, 1: 3, 2: 4}):
        log.object_of(counts, GROUP_SIZES)
    return log


@pytest.fixture
def new(tmp_path: Path, log: SealedLog) -> Iterator[Callable[..., CompactRig]]:
    made: list[CompactRig] = []

    def make(policy: RetentionPolicy | None = None, *, is_quick: bool = False) -> CompactRig:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        objects = quick(stored(log), log.sealed) if is_quick else stored(log)
        made.append(CompactRig(directory, objects, policy, is_quick=is_quick))
        return made[-1]

    yield make
    for rig in made:
        rig.encoder.close()


New = Callable[..., CompactRig]


def test_compaction_merges_small_objects_and_deletes_inputs_after_grace(new: New, log: SealedLog) -> None:
    rig = new()
    pinned = Archive(rig.store).topic(TOPIC, "b")
    before = [list(map(bytes, pinned.read_raw(queue))) for queue in pinned.queues()]
    seen: list[dict[str, Any]] = []
    assert rig.lifecycle.compact.now(progress=seen.append) == 1
    assert [item["event"] for item in seen] == ["compacted", "done"]
    (made,) = rig.journal.catalog.objects()
    parts = parse_data_key(made.key)
    assert parts is not None
    assert (parts.start, parts.end, parts.epoch, parts.rewrite) == (0, log.at, rig.journal.ownership.epoch, 1)
    assert made.etag == rig.store.head(made.key).etag
    rig.check_rows(log.sealed)
    assert [list(map(bytes, pinned.read_raw(queue))) for queue in pinned.queues()] == before, "who pinned them reads on"
    status = rig.lifecycle.status()
    assert (status["compactions"], status["compacted_objects"], status["compactions_failed"]) == (1, 3, 0)
    assert rig.compact() == 0, "there is nothing more to gain"
    rig.check_end(log.sealed)


def test_compaction_does_not_save_the_names_of_all_topics(new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round has already saved the names: a compaction must not save those of ten thousand topics again."""
    rig = new(is_quick=True)
    written: list[Path] = []

    def noted(write: Callable[[RealDisk, Path, bytes], None]) -> Callable[[RealDisk, Path, bytes], None]:
        def writes(disk: RealDisk, path: Path, data: bytes) -> None:
            written.append(path)
            write(disk, path, data)

        return writes

    monkeypatch.setattr(RealDisk, "write_atomic", noted(RealDisk.write_atomic))
    monkeypatch.setattr(RealDisk, "append", noted(RealDisk.append))
    assert rig.compact() == 1
    assert written, "the mirror's at least"
    assert [path for path in written if path.name.startswith("identity.")] == []


def test_readers_find_each_row_once_at_every_step_of_compaction(new: New, log: SealedLog) -> None:
    rig = new()

    def look() -> None:
        catalog = read_catalog(rig.store, "b")
        rows = Counter(
            (run.queue, offset)
            for queue in catalog.queues(TOPIC)
            for run in catalog.queue(TOPIC, queue).runs()
            for offset in range(run.first, run.last + 1)
        )
        assert rows == Counter(log.sealed.keys())
        assert sum(name.rows for name in catalog.objects(TOPIC)) == len(log.sealed)

    with rig.store.looked_at(look) as looks:
        rig.compact()
    assert len(looks) >= 8


def test_compaction_dry_run_writes_nothing(new: New) -> None:
    rig = new()
    before, seen = dict(rig.store.objects), list[dict[str, Any]]()
    assert rig.lifecycle.compact.now(dry_run=True, progress=seen.append) == 1
    assert rig.store.objects == before
    assert seen[0]["event"] == "planned" and seen[0]["objects"] == 3
    assert rig.lifecycle.compact.now("another", dry_run=True) == 0


def test_compaction_job_needs_the_setting_and_an_ended_day(new: New) -> None:
    rig = new()
    rig.clock.set_wall(1_800_000_000_000)
    rig.lifecycle.safe_clock.confirm()
    assert rig.lifecycle.compact.run() == 0
    rig.policy = RetentionPolicy(compaction=True)
    assert rig.lifecycle.compact.run() == 1


# ---- faults


def calls_of_one(new: New, *, is_quick: bool) -> Counter[str]:
    rig, calls = new(is_quick=is_quick), Counter[str]()
    of_objects = Counter[str]()

    def count(verb: str, key: str) -> None:
        calls.update([verb])
        if "topic=" in key:
            of_objects.update([verb])

    rig.store.on_call = count
    assert rig.compact() == 1
    rig.store.on_call = None
    assert calls["put"] == 3 and of_objects["get_range"] == 3 and calls["head"] == 1
    return calls


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("kind", list(FAULTS))
def test_compaction_survives_each_fault_of_each_store_call(new: New, log: SealedLog, kind: str, crash: bool) -> None:
    error, after = FAULTS[kind]
    calls = calls_of_one(new, is_quick=True)
    if error is None:
        cases = [("body", nth) for nth in range(calls["get_range"] + 1)]
    else:
        verbs = ["put"] if isinstance(error, PreconditionFailed) else sorted(calls)
        cases = [(verb, nth) for verb in verbs for nth in range(calls[verb])]
    for verb, nth in cases:
        rig = new(is_quick=True)
        if error is None:
            rig.cutting.cut = nth + 1
        else:
            rig.store.fail(verb, error, after=after, skip=nth)
        with contextlib.suppress(ObjectStoreError, MalformedEntry):  # the job failed and runs again
            rig.compact()
        rig.store.faults.clear()
        rig.cutting.cut = 0
        rig.check_rows(log.sealed)
        if crash:
            rig.restart()
        rig.compact()
        assert len(rig.journal.catalog.objects()) == 1, f"{kind} of {verb} {nth}: the next run does it"
        rig.check_end(log.sealed)


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("kind", list(FAULTS))
def test_compaction_survives_each_fault_of_worker_calls(new: New, log: SealedLog, kind: str, crash: bool) -> None:
    error, after = FAULTS[kind]
    for verb in ("get_range", "put"):
        if verb == "get_range" and isinstance(error, PreconditionFailed):
            continue
        rig = new()
        if error is None:
            rig.cutting.cut, rig.cutting.within = 3, "topic="
        else:
            rig.store.fail(verb, error, after=after, match="topic=")
        rig.compact()
        rig.store.faults.clear()
        rig.cutting.cut = 0
        if crash:
            rig.restart()
        rig.compact()
        assert len(rig.journal.catalog.objects()) == 1
        rig.check_end(log.sealed)


@pytest.mark.parametrize(("step", "nth"), STEPS)
def test_compaction_survives_a_crash_at_each_step(new: New, log: SealedLog, step: str, nth: int) -> None:
    rig = new()
    with failpoint.armed(step, nth=nth), pytest.raises(FailpointError):
        rig.compact()
    rig.check_rows(log.sealed)
    rig.restart()
    rig.check_rows(log.sealed)
    rig.compact()
    assert len(rig.journal.catalog.objects()) == 1
    rig.check_end(log.sealed)


@pytest.mark.parametrize("step", ["compact.after_intent", "compact.after_upload"])
def test_open_compaction_is_aborted_after_restart_if_compaction_is_off(new: New, log: SealedLog, step: str) -> None:
    rig = new()
    with failpoint.armed(step), pytest.raises(FailpointError):
        rig.compact()
    rig.restart()
    assert rig.lifecycle.compact.run() == 0
    assert rig.journal.catalog.rounds.open_rewrites() == {}
    assert rig.data_keys() == {name.key for name in rig.names}
    assert [entry.kind for entry in rig.entries(Abort)] == [COMPACT]


def test_sweep_deletes_orphan_of_a_crash_between_abort_and_deletion(new: New, log: SealedLog) -> None:
    rig = new()
    with failpoint.armed("compact.after_upload"), pytest.raises(FailpointError):
        rig.compact()
    rig.restart()
    with failpoint.armed("compact.after_abort"), pytest.raises(FailpointError):
        rig.compact()
    assert len(rig.data_keys()) == 4
    rig.restart()
    rig.check_end(log.sealed)
    assert rig.data_keys() == {name.key for name in rig.names}


def test_worker_failure_after_encoding_leaves_no_object(new: New, log: SealedLog) -> None:
    rig = new()
    with failpoint.armed("compact.after_encode"):
        assert rig.compact() == 0
    assert rig.lifecycle.status()["compactions_failed"] == 1
    assert rig.data_keys() == {name.key for name in rig.names}
    rig.compact()
    rig.check_end(log.sealed)


# ---- concurrent changes


def while_it_is_made(rig: CompactRig, work: Callable[[], object]) -> None:
    """Run `work` between the INTENT and the upload."""

    def once() -> None:
        rig.encoder.before = lambda: None
        work()

    rig.encoder.before = once


def test_expiry_during_compaction_is_not_undone(new: New, log: SealedLog) -> None:
    rig = new()
    gone = rig.names[0]
    while_it_is_made(
        rig, lambda: rig.journal.append(Expire(keys=[gone.key], delete_after_ms=1 << 60, minimums={TOPIC: {0: 9}}))
    )
    assert rig.compact() == 0
    assert rig.entries(Replace) == []
    left = {at: raw for at, raw in log.sealed.items() if not (at[0] == 0 and at[1] < 9)}
    rig.check_rows(left)
    assert rig.lifecycle.status()["compactions_failed"] == 0, "no fault of anybody"
    assert rig.data_keys() == {name.key for name in rig.names}


def test_minimum_raised_during_compaction_holds(new: New, log: SealedLog) -> None:
    rig = new()
    while_it_is_made(rig, lambda: rig.journal.append(Expire(keys=[], delete_after_ms=0, minimums={TOPIC: {0: 12}})))
    assert rig.compact() == 1
    rig.check_rows({at: raw for at, raw in log.sealed.items() if at[0] != 0 or at[1] >= 12})


def test_rows_restored_by_unexpire_during_compaction_are_not_lost(new: New, log: SealedLog) -> None:
    rig = new()
    rig.journal.append(Expire(keys=[], delete_after_ms=0, minimums={TOPIC: {0: 5}}))
    while_it_is_made(rig, lambda: rig.journal.append(Unexpire(keys=[], minimums={TOPIC: {0: 0}})))
    rig.compact()
    rig.check_rows(log.sealed)
    again = new()
    again.journal.append(Expire(keys=[], delete_after_ms=0, minimums={TOPIC: {0: 5}}))
    while_it_is_made(again, lambda: again.journal.append(Unexpire(keys=[], minimums={TOPIC: {0: 0}})))
    replacement = again.lifecycle.compact._replacement
    replacement.begin()
    outcome = replacement.run(Merge(tuple(again.names), {0: 5}), again.lifecycle.compact._swap)
    assert outcome.made is None and "may be visible again" in outcome.reason
    again.check_end(log.sealed)


def test_compaction_of_recreated_topic_drops_only_deleted_rows(new: New, log: SealedLog) -> None:
    rig = new()
    rig.journal.append(Topic(topic=TOPIC, deleted=True, minimums={0: 12, 1: 2, 2: 0}))
    rig.journal.append(Topic(topic=TOPIC, minimums={0: 12, 1: 2, 2: 0}))
    left = {at: raw for at, raw in log.sealed.items() if at[1] >= {0: 12, 1: 2}.get(at[0], 0)}
    rig.check_rows(left)
    assert rig.compact() == 1
    (made,) = rig.journal.catalog.objects()
    assert made.rows == len(left), "what was deleted is not written again"
    rig.check_end(left)


def test_superseded_compactor_is_fenced_and_its_object_deleted(new: New, log: SealedLog) -> None:
    rig = new()

    def take_over() -> None:
        other = rig.new_journal(directory=rig.directory.parent / "copy", log_uuid=rig.log_uuid)
        other.ownership.attach(rig.hot.tail)

    while_it_is_made(rig, take_over)
    with pytest.raises(Fenced):
        rig.compact()
    assert rig.entries(Replace) == []
    rig.restart()
    rig.check_rows(log.sealed)
    rig.compact()
    rig.check_end(log.sealed)


def test_replace_of_superseded_compactor_is_refused(new: New, log: SealedLog) -> None:
    """The superseded compactor is refused: its inputs are no longer in the catalog."""
    rig = new()
    second: list[int] = []

    def all_of_it() -> None:
        journal, lifecycle = rig.journal, rig.lifecycle
        rig.restart()
        second.append(rig.compact())
        rig.journal, rig.lifecycle = journal, lifecycle

    while_it_is_made(rig, all_of_it)
    with pytest.raises(Fenced):
        rig.compact()
    assert second == [1]
    rig.restart()
    rig.compact()
    assert len(rig.entries(Replace)) == 1
    rig.check_end(log.sealed)


def test_late_replace_before_its_abort_keeps_the_new_object(new: New, log: SealedLog) -> None:
    """The request is delayed in the network, its writer times out, and it arrives just before the ABORT."""
    rig = new()
    held: list[tuple[str, bytes]] = []

    def put(key: str, data: Any, **options: Any) -> Any:
        if isinstance(data, bytes) and b"REPLACE" in data[:40] and not held:
            held.append((key, data))
            raise StoreUnavailable("no answer")
        if isinstance(data, bytes) and b"ABORT" in data[:40] and len(held) == 1:
            MemoryStore.put(rig.store, *held[0], if_absent=True)
            held.append(held[0])  # once
        return MemoryStore.put(rig.store, key, data, **options)

    rig.store.put = put  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        rig.compact()
    rig.compact()
    del rig.store.put
    assert len(rig.entries(Replace)) == 1
    rig.check_end(log.sealed)


def test_failed_compaction_is_retried_after_a_delay_or_on_request(
    new: New, log: SealedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = new(RetentionPolicy(compaction=True, grace_ms=0))
    rig.clock.set_wall(1_800_000_000_000)
    rig.lifecycle.safe_clock.confirm()
    tries = []

    def failing(merge: Any, swap: Any) -> Outcome:
        tries.append(merge)
        return Outcome(Fate.FAILED, reason="damaged")

    monkeypatch.setattr(rig.lifecycle.compact._replacement, "run", failing)
    for _ in range(3):
        rig.lifecycle.compact.run()
    assert len(tries) == 1
    assert rig.lifecycle.status()["not_compacted"] == {TOPIC: "damaged"}
    rig.lifecycle.compact.now()
    assert len(tries) == 2
    rig.clock.advance(RETRY_MS)
    rig.lifecycle.compact.run()
    assert len(tries) == 3


@pytest.mark.parametrize("how", ["etag", "missing"])
def test_missing_or_altered_output_object_replaces_nothing(new: New, log: SealedLog, how: str) -> None:
    rig = new()
    spoiled: Callable[[str], object] = functools.partial(rig.store.put, data=b"x")
    spoil = rig.store.delete if how == "missing" else spoiled
    rig.store.before_first("head", spoil)
    assert rig.compact() == 0
    assert rig.entries(Replace) == []
    rig.check_end(log.sealed)


def test_catalog_rebuilt_from_objects_finds_each_row_once(new: New, log: SealedLog) -> None:
    """Old, new and uncommitted objects coexist. The format page defines which of them count."""
    rig = new()
    with failpoint.armed("compact.after_upload"), pytest.raises(FailpointError):
        rig.compact()
    rig.restart()
    with failpoint.armed("compact.after_abort"), pytest.raises(FailpointError):
        rig.compact()
    rig.restart()
    assert rig.compact() == 1
    assert len(rig.data_keys()) == 5

    def rank(key: str) -> tuple[int, int]:
        parts = parse_data_key(key)
        assert parts is not None
        return parts.rewrite, parts.epoch

    found: Sealed = {}
    for key in sorted(rig.data_keys(), key=rank, reverse=True):
        file = pq.ParquetFile(pa.BufferReader(rig.store.objects[key][0]))
        rows = file.read()
        records = rebuild(rows, TOPIC)
        places = zip(rows.column("queue_id").to_pylist(), rows.column("queue_offset").to_pylist(), strict=True)
        for row, place in enumerate(places):
            raw = bytes(records.record(row))
            assert found.setdefault(place, raw) == raw, "whichever counts, the bytes are the same"
    assert found == log.sealed
    ranked = sorted(rig.data_keys(), key=rank, reverse=True)
    assert ranked[0] == rig.journal.catalog.objects()[0].key, "the one that is live holds all"


def test_compaction_job_plans_a_topic_only_after_a_change(new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = new(RetentionPolicy(compaction=True))
    rig.clock.set_wall(1_800_000_000_000)
    rig.lifecycle.safe_clock.confirm()
    looks: list[str] = []

    def counted(catalog: Catalog, topic: str, *more: Any) -> list[Merge]:
        looks.append(topic)
        return plan_topic(catalog, topic, *more)

    monkeypatch.setattr("lifecycle.compact.plan_topic", counted)
    assert rig.lifecycle.compact.run() == 1
    for _ in range(5):
        assert rig.lifecycle.compact.run() == 0
    assert len(looks) == 1
    rig.clock.advance(24 * HOUR)
    rig.lifecycle.compact.run()
    assert len(looks) == 2, "a day has ended"
    rig.lifecycle.compact.now()
    assert len(looks) == 3, "somebody asks"


def test_stop_does_not_wait_for_a_running_compaction(new: New, log: SealedLog) -> None:
    rig = new()

    def stop(key: str) -> None:
        rig.lifecycle.stop()
        assert rig.encoder.inner.compaction_given_up.wait(10)

    rig.store.before_first("get_range", stop, match="topic=")
    assert rig.compact() == 0
    assert rig.data_keys() == {name.key for name in rig.names}
    assert [entry.kind for entry in rig.entries(Abort)] == [COMPACT]
    assert rig.compact() == 0 and len(rig.entries(Intent)) == 2, "nothing is begun any more"
    rig.restart()
    rig.check_rows(log.sealed)


def test_round_does_not_wait_for_a_running_compaction(new: New, log: SealedLog, tmp_path: Path) -> None:
    rig = new()
    made = make_round(tmp_path, base=1 << 20, first=0, counts={0: 5})
    uploaded: list[str] = []

    def upload(key: str) -> None:
        uploaded.append(upload_one(rig.encoder, rig.store.url, made.name, made.entries, made.files).key)

    rig.store.before_first("get_range", upload, match="topic=")
    rig.encoder._patience.seconds = 20.0
    assert rig.compact() == 1, "it went on when the round's object was in the store"
    assert uploaded == [made.name.key]
    rig.check_rows(log.sealed)


def test_priority_change_restarts_compaction_but_no_upload(new: New, log: SealedLog, tmp_path: Path) -> None:
    rig = new()
    made = make_round(tmp_path, base=1 << 20, first=0, counts={0: 5})
    first: list[Worker] = []

    def change(key: str) -> None:
        first.append(rig.encoder.inner)
        rig.encoder.set_priority("low")
        upload_one(rig.encoder, rig.store.url, made.name, made.entries, made.files)

    rig.store.before_first("get_range", change, match="topic=")
    assert rig.compact() == 1
    assert rig.encoder.inner is not first[0]
    assert len(rig.entries(Replace)) == 1
    rig.check_rows(log.sealed)


def test_priority_changes_do_not_use_up_the_compaction_retry(
    new: New, log: SealedLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads change the priority twice during the compaction; then a worker dies once."""
    rig = new()
    made = make_round(tmp_path, base=1 << 20, first=0, counts={0: 5})
    workers: list[Worker] = []
    compacted, one_upload = Worker.compacted, threading.Lock()

    def change(worker: Worker, request: frames.Compact) -> frames.Compacted:
        workers.append(worker)
        if len(workers) < 4:
            with one_upload:
                rig.encoder.set_priority(f"of {len(workers)}")
                upload_one(rig.encoder, rig.store.url, made.name, made.entries, made.files)
        elif len(workers) == 4:
            with one_upload, rig.encoder._lock:
                rig.encoder._hang_up()
        return compacted(worker, request)

    monkeypatch.setattr(Worker, "compacted", change)
    assert rig.compact() == 1
    assert len(set(workers)) == len(workers) == 5
    rig.check_rows(log.sealed)


def test_worker_timeout_counts_all_uploads_that_share_the_rate(new: New, log: SealedLog, tmp_path: Path) -> None:
    """A worker within its upload rate is not killed as hanging.

    Cases: a round, a compaction, and a compaction that a round joins.
    """
    rig, rate = new(), 1000
    made = make_round(tmp_path, base=1 << 20, first=0, counts={0: 5})
    round_bytes = sum(int(run.sizes.sum()) for run in made.entries.values())
    patience = rig.encoder._patience
    rig.encoder.set_upload_rate(rate)
    alone = patience.seconds
    seen: list[float] = []

    def during(key: str) -> None:
        compaction = patience.begin()
        seen.append(patience.begin().more())
        rig.encoder.set_upload_rate(0)
        upload_one(rig.encoder, rig.store.url, made.name, made.entries, made.files)
        rig.encoder.set_upload_rate(rate)
        seen.append(compaction.more())

    rig.store.before_first("get_range", during, match=rig.names[0].key)
    assert rig.compact() == 1
    inputs = sum(name.wire_bytes for name in rig.names)
    assert seen == [alone + inputs / rate, alone + (inputs + round_bytes) / rate]
    assert patience.begin().more() == alone
