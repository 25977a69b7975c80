"""Tests of erasure by key with a store that fails at every call and a crash at every step.

Messages with the key are deleted for good. All others remain once, byte for byte.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from infra import failpoint
from infra.failpoint import FailpointError
from infra.objects.store import NotFound, ObjectInfo, ObjectStoreError, PreconditionFailed, StoreUnavailable
from lifecycle import erase as erase_module
from lifecycle.erase import EraseRequest
from lifecycle.hot_store import Hidden
from lifecycle.retention import RetentionPolicy
from neve.archive.catalog.journal_reader import read_catalog
from neve.archive.format.journal import (
    COMPACT,
    ERASE,
    ERASED,
    Abort,
    CommittedObject,
    Erase,
    Expire,
    Gap,
    Intent,
    MalformedEntry,
    PlannedObject,
    Replace,
    Topic,
)
from neve.archive.format.keys import data_key
from neve.archive.policy.erasure import Verdict, erased_of
from neve.archive.read.reader import Archive
from neve.archive.read.verify import verify
from neve.record.codec import MessageRecord
from neve.remoting.names import SCHEDULE_TOPIC
from tests.kit.archive.catalog_state import expiring_keys
from tests.kit.archive.checkpoints import restored
from tests.kit.archive.records import TOPIC, record
from tests.kit.archive.sealed_objects import DAY, Sealed, SealedLog
from tests.unit.lifecycle.compact_rig import (
    FAULTS,
    HOUR,
    STEPS,
    CompactRig,
    QuickWorker,
    Row,
    quick,
    quick_content,
    quick_name,
    stored,
)
from tests.unit.lifecycle.fakes import SEGMENT
from tiered.journal.errors import Fenced, WouldLoseRows
from tiered.worker.client import DecodedGroup
from tiered.worker.failed import WorkerFailed
from tiered.worker.frames import MayHold
from tiered.write.offload_plan import TopicUnreadable
from tiered.write.segment_writer import GROUP_SIZES

KEY = "who-is-meant"
# First object: one in the middle and the last. Second: neighbours in two queues. Fourth: all.
MEANT = {(0, 3), (0, 8), (0, 12), (0, 13), (1, 0), *((3, at) for at in range(4))}


class KeyedLog(SealedLog):
    """A log in which some messages have the key and others only contain its text."""

    def record(self, queue: int, at: int) -> bytes:
        offset = self.next.setdefault(queue, 0)
        self.next[queue] += 1
        keys = f"a {KEY} b" if (queue, offset) in MEANT else f"{KEY}-too other{offset % 3}"
        properties = f"KEYS\x01{keys}\x02UNIQ_KEY\x01U{queue}-{offset}\x02TAGS\x01t\x02".encode()
        body = KEY.encode() if offset % 2 else b"plain"
        raw = record(offset, queue_id=queue, physical_offset=at, properties=properties, body=body)
        self.sealed[queue, offset] = raw
        return raw


class _Rows:
    """The interface of a decoded row group that a search uses."""

    def __init__(self, rows: list[Row]) -> None:
        self.wire = memoryview(b"".join(raw for _, _, raw in rows))
        self.positions = np.cumsum([0, *(len(raw) for _, _, raw in rows)])


class QuickEraser(QuickWorker):
    """A QuickWorker that also reads objects, which have no filters."""

    def may_hold(self, store_url: str, name: CommittedObject, groups: list[int], word: bytes) -> MayHold:
        try:
            self.store.head(name.key)
        except ObjectStoreError as error:
            raise WorkerFailed(type(error).__name__, str(error)) from error
        return MayHold(0, groups, 0, 0)

    def read_group(self, store_url: str, name: CommittedObject, index: int) -> DecodedGroup:
        try:
            data = self.store.get_range(name.key, 0, name.size)
        except ObjectStoreError as error:
            raise WorkerFailed(type(error).__name__, str(error)) from error
        if len(data) != name.size:
            raise WorkerFailed("DamagedObject", "cut short")
        return _Rows(msgspec.msgpack.decode(data, type=list[Row]))  # type: ignore[return-value]


class EraseRig(CompactRig):
    def erase(self, **more: Any) -> dict[str, Any]:
        return self.lifecycle.erase.now(EraseRequest(TOPIC, KEY), **more)

    def restart(self) -> None:
        if getattr(self, "is_quick", False):
            self.worker = QuickEraser(self.store, self.hot)
        super().restart()

    def check_rows(self, sealed: Sealed) -> None:
        """Assert that an independent reader of the bucket finds each record once, byte for byte."""
        if self.is_quick:
            super().check_rows(sealed)
            return
        reader = Archive(self.store).topic(TOPIC, "b")
        read = [bytes(raw) for queue in reader.queues() for raw in reader.read_raw(queue)]
        assert sorted(read) == sorted(sealed.values())

    def check_others(self, sealed: Sealed) -> None:
        """Assert that each message without the key is there once, at any stage of the erasure."""
        catalog = read_catalog(self.store, "b")
        found: Counter[tuple[int, int]] = Counter()
        for queue in catalog.queues(TOPIC):
            for run in catalog.queue(TOPIC, queue).runs():
                found.update((queue, at) for at in range(run.first, run.last + 1))
        assert max(found.values()) == 1
        assert {place for place in sealed if place not in MEANT} <= set(found) <= set(sealed)
        gone = {(gap.queue, at) for gap in catalog.gaps(TOPIC) for at in range(gap.first, gap.last + 1)}
        assert gone == set(sealed) - set(found)

    def check_end(self, sealed: Sealed) -> None:
        super().check_end(sealed)
        word = KEY.encode()
        told = [key for key, (data, *_) in self.store.objects.items() if key.startswith("_neve") and word in data]
        assert told == [], "who is meant is in no entry"


New = Callable[..., EraseRig]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> SealedLog:
    log = KeyedLog(tmp_path_factory.mktemp("log"))
    for counts in ({0: 9}, {0: 6, 1: 5}, {1: 3, 2: 4}, {3: 4}):
        log.object_of(counts, GROUP_SIZES)
    return log


@pytest.fixture
def rest(log: SealedLog) -> Sealed:
    return {place: raw for place, raw in log.sealed.items() if place not in MEANT}


@pytest.fixture
def new(tmp_path: Path, log: SealedLog) -> Iterator[New]:
    made: list[EraseRig] = []

    def make(policy: RetentionPolicy | None = None, *, is_quick: bool = False, first: int = 4) -> EraseRig:
        """Make a rig whose archive has the first `first` objects."""
        directory = tmp_path / str(len(made))
        directory.mkdir()
        objects = (quick(stored(log), log.sealed) if is_quick else stored(log))[:first]
        rig = EraseRig(directory, objects, policy, is_quick=is_quick)
        made.append(rig)
        if is_quick:
            rig.restart()
        return rig

    yield make
    for rig in made:
        rig.encoder.close()


def test_erasure_deletes_exactly_the_messages_with_the_key(new: New, log: SealedLog, rest: Sealed) -> None:
    rig = new()
    pinned = Archive(rig.store).topic(TOPIC, "b")
    seen: list[dict[str, Any]] = []
    told = rig.erase(progress=seen.append)
    assert [item["event"] for item in seen] == ["begun", "erased", "erased", "erased", "certificate"]
    assert seen[-1] == told and seen[0]["id"] == told["id"]
    rig.check_rows(rest)
    assert told["complete"] and told["not_erased"] == []
    assert told["rows"] == len(MEANT)
    assert told["erased"] == [
        {"topic": TOPIC, "queue": 0, "offsets": [(3, 3), (8, 8), (12, 13)]},
        {"topic": TOPIC, "queue": 1, "offsets": [(0, 0)]},
        {"topic": TOPIC, "queue": 3, "offsets": [(0, 3)]},
    ]
    assert told["key_sha256"] == hashlib.sha256(f"{told['id']}:{KEY}".encode()).hexdigest()
    held = {name.key for name in rig.names if name.key != rig.names[2].key}
    until = rig.clock.now_ms() + 24 * HOUR
    assert {one["key"]: one["until_ms"] for one in told["remains"]["objects"]} == dict.fromkeys(held, until)
    assert sum(1 for queue in pinned.queues() for _ in pinned.read_raw(queue)) == len(log.sealed), "who pinned them"
    again = rig.erase()
    assert (again["complete"], again["rows"]) == (True, 0)
    assert rig.erase(erase_id=told["id"])["erased"] == told["erased"]
    rig.check_end(rest)
    assert rig.erase(erase_id=told["id"])["remains"]["objects"] == []


def test_erased_offsets_become_gaps_that_name_the_erasure(new: New, log: SealedLog) -> None:
    rig = new()
    told = rig.erase()
    for queue in range(4):
        assert rig.check_tiles(TOPIC, queue) == log.next[queue]
    assert rig.lifecycle.status()["gaps"] == 0, "erased offsets are not lost"
    gaps = read_catalog(rig.store, "b").gaps(TOPIC)
    assert {(gap.queue, at) for gap in gaps for at in range(gap.first, gap.last + 1)} == MEANT
    assert {gap.reason for gap in gaps} == {f"{ERASED}{told['id']}"}
    assert verify(rig.journal.catalog, rig.store, deep=True).problems == []


def test_readers_find_other_rows_once_at_every_step_of_erasure(new: New, log: SealedLog) -> None:
    rig = new()
    with rig.store.looked_at(lambda: rig.check_others(log.sealed)) as looks:
        rig.erase()
    assert len(looks) >= 20


def test_erasure_dry_run_writes_nothing(new: New) -> None:
    rig = new()
    before, seen = dict(rig.store.objects), list[dict[str, Any]]()
    told = rig.erase(dry_run=True, progress=seen.append)
    assert rig.store.objects == before
    assert (told["rows"], told["objects"]) == (len(MEANT), 3)
    assert [item["rows"] for item in seen[:-1]] == [2, 3, 4]
    assert rig.lifecycle.erase.now(EraseRequest("another", KEY), dry_run=True)["rows"] == 0
    assert rig.lifecycle.erase.now(EraseRequest(TOPIC, "nobody"), dry_run=True)["rows"] == 0


@pytest.mark.parametrize("key", ["U0-7", "U2-3"])
def test_erasure_by_unique_key_deletes_one_message(new: New, log: SealedLog, key: str) -> None:
    rig = new()
    assert rig.lifecycle.erase.now(EraseRequest(TOPIC, key))["rows"] == 1
    place = tuple(map(int, key[1:].split("-")))
    left = {at: raw for at, raw in log.sealed.items() if at != place}
    rig.check_rows(left)
    rig.check_end(left)


# ---- faults


def calls_of_one(new: New) -> Counter[str]:
    rig, calls = new(is_quick=True), Counter[str]()
    rig.store.on_call = lambda verb, key: calls.update([verb])
    assert rig.erase()["complete"]
    rig.store.on_call = None
    assert calls["put"] == 7, "an INTENT, an object and an ERASE of two, an ERASE of the third"
    return calls


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("kind", list(FAULTS))
def test_erasure_survives_each_fault_of_each_store_call(
    new: New, log: SealedLog, rest: Sealed, kind: str, crash: bool
) -> None:
    error, after = FAULTS[kind]
    calls = calls_of_one(new)
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
        with contextlib.suppress(ObjectStoreError, MalformedEntry, WorkerFailed):  # reported to the caller
            told = rig.erase()
            assert told["complete"] is not bool(told["not_erased"])
        rig.store.faults.clear()
        rig.cutting.cut = 0
        rig.check_others(log.sealed)
        if crash:
            rig.restart()
        assert rig.erase()["complete"], f"{kind} of {verb} {nth}: who asks again gets the rest"
        rig.check_rows(rest)
        rig.check_end(rest)


@pytest.mark.parametrize("kind", list(FAULTS))
def test_erasure_survives_each_fault_of_worker_calls(new: New, log: SealedLog, rest: Sealed, kind: str) -> None:
    error, after = FAULTS[kind]
    for verb in ("get_range", "put"):
        if verb == "get_range" and isinstance(error, PreconditionFailed):
            continue
        rig = new()
        if error is None:
            rig.cutting.cut, rig.cutting.within = 3, "topic="
        else:
            rig.store.fail(verb, error, after=after, match="topic=")
        rig.erase()
        rig.store.faults.clear()
        rig.cutting.cut = 0
        rig.check_others(log.sealed)
        assert rig.erase()["complete"]
        rig.check_rows(rest)
        rig.check_end(rest)


@pytest.mark.parametrize(("step", "nth"), STEPS)
def test_erasure_survives_a_crash_at_each_step(new: New, log: SealedLog, rest: Sealed, step: str, nth: int) -> None:
    rig = new()
    with failpoint.armed(step, nth=nth), pytest.raises(FailpointError):
        rig.erase()
    rig.check_others(log.sealed)
    rig.restart()
    rig.check_others(log.sealed)
    assert rig.erase()["complete"]
    rig.check_rows(rest)
    rig.check_end(rest)


@pytest.mark.parametrize("step", ["compact.after_intent", "compact.after_upload"])
def test_open_erasure_rewrite_is_aborted_after_restart(new: New, log: SealedLog, step: str) -> None:
    rig = new()
    with failpoint.armed(step), pytest.raises(FailpointError):
        rig.erase()
    rig.restart()
    rig.lifecycle.compact.now()
    assert len(rig.entries(Abort)) == 0, "it is none of compaction's"
    assert rig.lifecycle.erase.run() == 1
    assert rig.lifecycle.erase.run() == 0
    assert rig.journal.catalog.rounds.open_rewrites() == {}
    assert [entry.kind for entry in rig.entries(Abort)] == [ERASE]
    rig.check_end(log.sealed)


# ---- concurrent changes


def once_between(rig: EraseRig, work: Callable[[], object]) -> None:
    """Run `work` once while the first object is written, after its INTENT."""
    rig.store.before_first("put", lambda _: work(), match="topic=")


def test_superseded_broker_cannot_erase(new: New, log: SealedLog, rest: Sealed) -> None:
    rig = new(is_quick=True)
    once_between(
        rig, lambda: rig.new_journal(directory=rig.directory.parent / "copy", log_uuid=rig.log_uuid).ownership.attach(0)
    )
    with pytest.raises(Fenced):
        rig.erase()
    assert rig.entries(Erase) == []
    rig.restart()
    rig.check_rows(log.sealed)
    rig.erase()
    rig.check_end(rest)


def test_erasure_searches_objects_compacted_in_the_meantime(new: New, log: SealedLog, rest: Sealed) -> None:
    rig = new(is_quick=True)
    once_between(rig, rig.compact)
    told = rig.erase()
    assert told["complete"] and told["rows"] == len(MEANT)
    assert [entry.reason for entry in rig.entries(Abort)] == ["its inputs are no longer visible"]
    rig.check_rows(rest)
    rig.check_end(rest)


def test_compaction_after_erasure_keeps_rows_erased(new: New, log: SealedLog, rest: Sealed) -> None:
    rig = new()
    rig.erase()
    assert rig.compact() >= 1
    rig.check_rows(rest)
    for queue in range(4):
        assert rig.check_tiles(TOPIC, queue) == log.next[queue]
    rig.check_end(rest)


def test_expiry_during_erasure_is_not_undone(new: New, log: SealedLog) -> None:
    rig = new(is_quick=True)
    gone = rig.names[0]
    once_between(
        rig, lambda: rig.journal.append(Expire(keys=[gone.key], delete_after_ms=1 << 60, minimums={TOPIC: {0: 9}}))
    )
    told = rig.erase()
    assert told["complete"] and told["rows"] == len(MEANT)
    assert rig.lifecycle.unexpire.run()["objects"] == 0, "an object that has the key"
    left = {at: raw for at, raw in log.sealed.items() if at not in MEANT and (at[0] or at[1] >= 9)}
    rig.check_rows(left)


def test_unexpire_restores_no_object_with_erased_rows(new: New, log: SealedLog) -> None:
    """All rows expired by a wrong clock. Then the key is erased, then the expiry is undone."""
    rig = new()
    minimums = {TOPIC: {0: 15, 1: 5}}
    keys = [name.key for name in rig.names[:2]]
    rig.journal.append(Expire(keys=keys, delete_after_ms=rig.clock.now_ms() + 24 * HOUR, minimums=minimums))
    told = rig.erase()
    assert told["complete"] and told["rows"] == len(MEANT)
    rig.lifecycle.unexpire.run()
    catalog = read_catalog(rig.store, "b")
    assert not {name.key for name in catalog.objects()} & set(keys)
    assert verify(catalog, rig.store).problems == []
    left = {at: raw for at, raw in log.sealed.items() if at not in MEANT and at[0] != 0 and (at[0] != 1 or at[1] >= 5)}
    rig.check_rows(left)


def between_look_and_entry(rig: EraseRig, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Run `work` once, after the search of an object and before the job takes its turn to write."""
    inner = rig.lifecycle.erase._replacement.withdraw

    def withdraw(*arguments: Any) -> Any:
        monkeypatch.setattr(rig.lifecycle.erase._replacement, "withdraw", inner)
        work()
        return inner(*arguments)

    monkeypatch.setattr(rig.lifecycle.erase._replacement, "withdraw", withdraw)


def test_unexpire_during_erasure_loses_no_other_message(
    new: New, log: SealedLog, rest: Sealed, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = new()
    expire = Expire(keys=[rig.names[0].key], delete_after_ms=rig.clock.now_ms() + HOUR, minimums={TOPIC: {0: 9}})
    rig.journal.append(expire)
    between_look_and_entry(rig, monkeypatch, rig.lifecycle.unexpire.run)
    told = rig.erase()
    assert (told["complete"], told["rows"]) == (True, len(MEANT))
    rig.check_others(log.sealed)
    rig.check_rows(rest)
    rig.check_end(rest)


def test_erasure_searches_object_after_each_expiry_and_unexpire(
    new: New, log: SealedLog, rest: Sealed, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = new(is_quick=True)
    keys = [rig.names[0].key]

    def expire() -> None:
        after = rig.clock.now_ms() + HOUR
        rig.journal.append(Expire(keys=keys, delete_after_ms=after, minimums={TOPIC: {0: 9}}))

    once_between(rig, expire)
    between_look_and_entry(rig, monkeypatch, rig.lifecycle.unexpire.run)
    told = rig.erase()
    assert (told["complete"], told["rows"]) == (True, len(MEANT))
    rig.check_rows(rest)
    rig.check_end(rest)


def test_erasure_searches_a_single_restored_object_again(
    new: New, log: SealedLog, rest: Sealed, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = new(first=1)
    of_it = {place: raw for place, raw in rest.items() if place in {(0, at) for at in range(9)}}
    expire = Expire(keys=[rig.names[0].key], delete_after_ms=rig.clock.now_ms() + HOUR, minimums={TOPIC: {0: 9}})
    rig.journal.append(expire)
    between_look_and_entry(rig, monkeypatch, rig.lifecycle.unexpire.run)
    told = rig.erase()
    assert (told["complete"], told["rows"]) == (True, 2)
    rig.check_rows(of_it)


def test_erase_entry_that_would_lose_a_visible_row_is_not_written(new: New, log: SealedLog) -> None:
    rig = new()
    of_it: dict[str, Any] = {"id": "e1.1", "old": [rig.names[0].key], "new": [], "delete_after_ms": 0}
    for rows in ([], [(TOPIC, 0, 0, 7)], [(TOPIC, 0, 1, 8)], [("another", 0, 0, 8)]):
        with pytest.raises(WouldLoseRows, match=rig.names[0].key):
            rig.journal.append(Erase(rows=rows, **of_it))
    assert rig.entries(Erase) == []
    rig.check_rows(log.sealed)
    rig.journal.append(Erase(rows=[(TOPIC, 0, 0, 5), (TOPIC, 0, 6, 8)], **of_it))
    assert rig.check_tiles(TOPIC, 0) == log.next[0]


@pytest.mark.parametrize("expired", [False, True])
def test_erasure_that_would_lose_rows_is_aborted_and_reported(
    new: New, log: SealedLog, monkeypatch: pytest.MonkeyPatch, expired: bool
) -> None:
    rig = new(first=2)
    keys = [name.key for name in rig.names]
    if expired:
        rig.journal.append(Expire(keys=keys, delete_after_ms=1 << 60, minimums={TOPIC: {0: 15, 1: 5}}))
    with monkeypatch.context() as patch:
        patch.setattr(rig.journal.catalog, "lost_by", lambda entry: ["a key"])
        told = rig.erase()
    assert not told["complete"] and told["rows"] == 0
    assert told["not_erased"] == [f"{key}: archive of b: rows of a key would be lost" for key in keys]
    assert rig.entries(Erase, Gap) == []
    assert rig.journal.catalog.rounds.open_rewrites() == {}
    assert rig.data_keys() == set(keys)
    assert len(rig.entries(Abort)) == (0 if expired else 2)


def test_unexpire_skips_old_object_after_its_compacted_copy_is_deleted(new: New, log: SealedLog) -> None:
    """The row was below the minimum of its queue when its object was compacted."""
    rig = new(is_quick=True)
    old = rig.names[0]
    key = data_key("", TOPIC, DAY, "b", start=old.start, end=old.end, epoch=1, rewrite=7)
    content = quick_content([(0, at, log.sealed[0, at]) for at in range(4, 9)])
    made = msgspec.structs.replace(quick_name(key, old.start, old.end, content), etag=rig.store.put(key, content).etag)
    rig.journal.append(Expire(keys=[], delete_after_ms=0, minimums={TOPIC: {0: 4}}))
    rig.journal.append(Replace(old=[old.key], new=[made], delete_after_ms=rig.clock.now_ms() + 24 * HOUR))
    told = rig.lifecycle.erase.now(EraseRequest(TOPIC, "U0-2"))
    assert (told["complete"], [one["key"] for one in told["remains"]["objects"]]) == (True, [old.key])
    rig.journal.append(Expire(keys=[key], delete_after_ms=rig.clock.now_ms(), minimums={TOPIC: {0: 9}}))
    rig.lifecycle.expire.run()
    assert key not in rig.store.objects and old.key in rig.store.objects
    rig.lifecycle.unexpire.run()
    assert old.key not in {name.key for name in rig.journal.catalog.objects()}


def test_erasure_without_grace_deletes_objects_before_certificate(new: New, log: SealedLog, rest: Sealed) -> None:
    rig = new()
    rig.lifecycle.compact.now()
    told = rig.lifecycle.erase.now(EraseRequest(TOPIC, KEY, grace_ms=0))
    assert told["complete"] and told["remains"]["objects"] == []
    left = rig.data_keys() - {name.key for name in rig.journal.catalog.objects()}
    assert left == {rig.names[2].key}, "one that was compacted before, and does not have it"
    rig.check_rows(rest)
    rig.check_end(rest)


def test_damaged_object_is_reported_and_others_are_erased(new: New, log: SealedLog) -> None:
    rig = new()
    key = rig.names[0].key
    rig.store.put(key, b"x" * rig.names[0].size)
    told = rig.erase()
    assert not told["complete"]
    assert [text.partition(": ")[0] for text in told["not_erased"]] == [key]
    assert told["rows"] == len(MEANT) - 2


def test_damaged_object_that_expires_during_erasure_is_reported_once(new: New) -> None:
    rig = new(is_quick=True)
    damaged = rig.names[0].key
    rig.store.put(damaged, b"x")
    once_between(rig, lambda: rig.journal.append(Expire(keys=[damaged], delete_after_ms=1 << 60)))
    told = rig.erase()
    assert not told["complete"]
    assert [text.partition(": ")[0] for text in told["not_erased"]] == [damaged]


def test_damaged_object_deleted_before_certificate_is_not_reported(new: New) -> None:
    rig = new()
    damaged = rig.names[0]
    rig.store.put(damaged.key, b"x" * damaged.size)
    rig.journal.append(Expire(keys=[damaged.key], delete_after_ms=rig.clock.now_ms(), minimums={TOPIC: {0: 9}}))
    told = rig.lifecycle.erase.now(EraseRequest(TOPIC, KEY, grace_ms=0))
    assert damaged.key not in rig.store.objects
    assert (told["complete"], told["not_erased"]) == (True, [])


def test_undecidable_rows_are_reported_with_their_object(new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, inner = new(first=1), erase_module._judged

    def judged(wanted: EraseRequest, topics: Collection[str], record: MessageRecord) -> Verdict:
        verdict = inner(wanted, topics, record)
        return Verdict.UNKNOWN if record.queue_offset == 8 else verdict

    monkeypatch.setattr(erase_module, "_judged", judged)
    told = rig.erase()
    (left,) = rig.journal.catalog.objects()
    assert told["not_erased"] == [f"{left.key}: 1 rows could not be checked"]
    assert left.key != rig.names[0].key


def test_object_deleted_during_its_search_is_ignored(new: New, log: SealedLog, rest: Sealed) -> None:
    rig = new(is_quick=True)
    rig.erase()

    def delete(key: str) -> None:
        rig.clock.advance(25 * HOUR)
        rig.lifecycle.expire.run()

    rig.store.before_first("head", delete, match=rig.names[0].key)
    assert rig.erase()["complete"]
    assert rig.store.on_call is None
    with pytest.raises(NotFound):
        rig.store.head(rig.names[0].key)
    rig.check_end(rest)


@pytest.mark.parametrize("confirmed", [1 << 62, 0], ids=["confirmed", "unconfirmed"])
def test_certificate_is_incomplete_while_a_message_is_unarchived(
    new: New, monkeypatch: pytest.MonkeyPatch, confirmed: int
) -> None:
    rig = new()
    rig.hot.tail = 1 << 20
    rig.hot.put(TOPIC, 9, 3)
    monkeypatch.setattr(rig.lifecycle.offload, "run", lambda **_: [])
    monkeypatch.setattr(rig.hot, "confirmed_range", lambda: (0, min(rig.hot.tail, confirmed)))
    told = rig.erase()
    assert not told["complete"] and told["rows"] == len(MEANT)
    assert told["not_erased"] == [f"{TOPIC} is not completely archived"]


def test_certificate_is_incomplete_if_a_round_archives_after_the_search(
    new: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = new(is_quick=True)
    rig.hot.tail = 1 << 20
    rig.hot.put(TOPIC, 9, 3)
    offload, search = rig.lifecycle.offload.run, rig.lifecycle.erase._search
    monkeypatch.setattr(rig.lifecycle.offload, "run", lambda **_: [])  # it failed

    def searched(erasure: Any) -> Iterator[Any]:
        before = erasure.objects
        yield from search(erasure)
        if erasure.objects == before:
            assert [report.committed for report in offload(roll=True)] != [[]]

    monkeypatch.setattr(rig.lifecycle.erase, "_search", searched)
    told = rig.erase()
    assert len(rig.journal.catalog.objects(TOPIC)) == 4, "one of the messages that nobody looked at"
    assert told["not_erased"] == [f"{TOPIC} is not completely archived"]


def test_certificate_lists_local_copies_with_their_deletion_time(new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = new(RetentionPolicy(reserved_ms=7 * HOUR))
    rig.hot.put(TOPIC, 0, 15)
    rig.hot.first_segment, rig.hot.tail = 5_000, 5_000 + SEGMENT  # offsets 0 to 4 were below
    rig.hot.records = [(5_000 + 10 * at, *record[1:]) for at, record in enumerate(rig.hot.records) if record[3] >= 5]
    monkeypatch.setattr(rig.lifecycle.offload, "run", lambda **_: [])
    told = rig.erase()
    until = rig.clock.now_ms() + 7 * HOUR
    copies = [{"topic": TOPIC, "queue": 0, "rows": 3, "hidden": 3, "until_ms": until}]
    assert told["remains"]["local_log"] == [*copies, *of_no_queue(until)]
    assert told["remains"]["other_members"] is False
    assert told["broker"] == "b"
    rig.hot.minimums[TOPIC, 0] = 15
    assert rig.erase(erase_id=told["id"])["remains"]["local_log"] == [*copies, *of_no_queue(until)], "hidden by a TTL"
    rig.clock.advance(25 * HOUR)
    rig.lifecycle.expire.run()
    again = rig.erase()
    assert (again["rows"], again["remains"]["objects"]) == (0, [])
    assert again["remains"]["local_log"] == [*copies, *of_no_queue(until)], "an erasure that is asked for again"


def test_certificate_counts_unsearched_expired_rows_in_local_log(new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = new(RetentionPolicy(reserved_ms=7 * HOUR))
    rig.hot.put(TOPIC, 0, 15)
    monkeypatch.setattr(rig.lifecycle.offload, "run", lambda **_: [])
    rig.journal.append(Expire(keys=[rig.names[0].key], delete_after_ms=rig.clock.now_ms(), minimums={TOPIC: {0: 9}}))
    rig.lifecycle.expire.run()
    assert rig.names[0].key not in rig.store.objects
    rig.hot.minimums[TOPIC, 0] = 9
    (copies,) = (one for one in rig.erase()["remains"]["local_log"] if one["queue"] == 0)
    assert copies["rows"] == 9 + 2, "all that nobody could look at, and what was erased"
    assert copies["hidden"] == copies["rows"], "no request returns what lies below the minimum"


def test_erased_rows_are_hidden_in_local_log_before_certificate(new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = new()
    rig.hot.put(TOPIC, 0, 15)
    monkeypatch.setattr(rig.lifecycle.offload, "run", lambda **_: [])
    hidden: list[set[int]] = []

    def progress(item: dict[str, Any]) -> None:
        if item["event"] == "certificate":
            hidden.append(set(rig.hot.hidden[TOPIC, 0]))

    rig.erase(progress=progress)
    assert hidden == [{offset for queue, offset in MEANT if queue == 0}]


def test_restart_hides_erased_rows_after_crash_before_hiding(new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = new()
    rig.hot.put(TOPIC, 0, 15)
    monkeypatch.setattr(rig.lifecycle.offload, "run", lambda **_: [])
    with failpoint.armed("erase.before_hide"), pytest.raises(FailpointError):
        rig.erase()
    assert rig.hot.hidden == {}
    rig.restart()
    assert rig.lifecycle.hot_erasure.run() == 3
    assert rig.hot.hidden == {(TOPIC, 0): {offset for queue, offset in MEANT if queue == 0}}


def test_interrupted_erasure_hides_the_erased_rows(new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    """No restart is needed: the job runs periodically in the broker."""
    rig = new()
    rig.hot.put(TOPIC, 0, 15)
    monkeypatch.setattr(rig.lifecycle.offload, "run", lambda **_: [])
    with failpoint.armed("erase.before_hide"), pytest.raises(FailpointError):
        rig.erase()
    assert rig.lifecycle.hot_erasure.run() == 3


def test_rows_that_could_not_be_erased_stay_visible(new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first object has two rows with the key and is unreadable, so both tiers still return them."""
    rig = new()
    rig.hot.put(TOPIC, 0, 15)
    monkeypatch.setattr(rig.lifecycle.offload, "run", lambda **_: [])
    rig.store.put(rig.names[0].key, b"x" * rig.names[0].size)
    told = rig.erase()
    assert not told["complete"]
    erased = {at for one in told["erased"] if one["queue"] == 0 for a, b in one["offsets"] for at in range(a, b + 1)}
    assert rig.hot.hidden == {(TOPIC, 0): erased}
    assert erased == {12, 13}


def test_erasure_hides_rows_of_deleted_topic_in_local_log(new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that no reader sees get no gap, but their records can still be read by physical offset."""
    rig = new()
    rig.hot.put(TOPIC, 0, 15)
    monkeypatch.setattr(rig.lifecycle.offload, "run", lambda **_: [])
    rig.journal.append(Topic(topic=TOPIC, deleted=True, minimums={0: 15, 1: 8, 2: 4, 3: 4}))
    rig.lifecycle.expire.run()
    rig.erase()
    assert rig.hot.hidden[TOPIC, 0] == {offset for queue, offset in MEANT if queue == 0}


def of_no_queue(until: int) -> list[dict[str, Any]]:
    """Return the entries of queues that the log lacks: their records may exist, but no request returns them."""
    return [
        {"topic": TOPIC, "queue": 1, "rows": 1, "hidden": 1, "until_ms": until},
        {"topic": TOPIC, "queue": 3, "rows": 4, "hidden": 4, "until_ms": until},
    ]


def test_certificate_lists_local_copies_of_a_deleted_topic(new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = new(RetentionPolicy(reserved_ms=7 * HOUR))
    rig.hot.put(TOPIC, 0, 15)
    monkeypatch.setattr(rig.lifecycle.offload, "run", lambda **_: [])
    rig.hot.next.clear()  # the segments still have its messages
    told = rig.erase()
    assert {one["queue"]: one["rows"] for one in told["remains"]["local_log"]} == {0: 4, 1: 1, 3: 4}


def test_certificate_covers_gaps_dropped_from_the_catalog(new: New) -> None:
    rig = new()
    rig.journal.append(Expire(keys=[rig.names[0].key], delete_after_ms=1 << 60, minimums={TOPIC: {0: 9}}))
    told = rig.lifecycle.erase.now(EraseRequest(TOPIC, KEY, grace_ms=0))
    assert (told["complete"], told["rows"]) == (True, len(MEANT))
    assert told["erased"][0] == {"topic": TOPIC, "queue": 0, "offsets": [(3, 3), (8, 8), (12, 13)]}
    assert erased_of(rig.journal.catalog.gaps(), told["id"])[0][2] == 12, "gaps below all that is there"


def test_repeated_erasure_without_id_lists_all_remains(new: New) -> None:
    rig = new()
    first, again = rig.erase(), rig.erase()
    assert (again["complete"], again["rows"]) == (True, 0)
    assert again["id"] != first["id"]
    assert again["remains"] == first["remains"]
    assert len(again["remains"]["objects"]) == 3


def test_expired_object_with_two_keys_is_listed_for_both(new: New) -> None:
    rig = new()
    key = rig.names[0].key
    rig.journal.append(Expire(keys=[key], delete_after_ms=1 << 60, minimums={TOPIC: {0: 9}}))
    for wanted in ("U0-7", KEY):
        told = rig.lifecycle.erase.now(EraseRequest(TOPIC, wanted))
        assert told["complete"]
        assert key in {one["key"] for one in told["remains"]["objects"]}, wanted


def test_certificate_lists_objects_outside_the_catalog(new: New) -> None:
    rig = new()
    of_it: dict[str, Any] = {"start": rig.names[0].start, "end": rig.names[1].end, "epoch": 1}
    orphan = data_key("", TOPIC, DAY, "b", rewrite=7, **of_it)
    for key in (orphan, data_key("", TOPIC, DAY, "another", **of_it), data_key("", "another", DAY, "b", **of_it)):
        rig.store.put(key, b"what a compaction made, and could not delete")
    names = [
        PlannedObject(data_key("", TOPIC, DAY, "b", rewrite=8, **of_it), TOPIC, DAY, 0, rig.names[1].end, {0: (0, 14)})
    ]
    rig.journal.append(Intent(kind=COMPACT, round=8, old=[name.key for name in rig.names[:2]], names=names))
    told = rig.erase()
    assert told["remains"]["in_no_view"] == [orphan, names[0].key]
    rig.store.fail("list", StoreUnavailable("away"), match=TOPIC, times=99)
    assert not rig.erase()["complete"]


def test_object_deleted_after_listing_is_not_in_certificate(new: New) -> None:
    rig = new()
    rig.erase()
    inner = rig.store.list

    def listed(prefix: str) -> Iterator[ObjectInfo]:
        found = list(inner(prefix))
        rig.clock.advance(25 * HOUR)
        rig.lifecycle.expire.run()
        return iter(found)

    rig.store.list = listed  # type: ignore[method-assign]
    told = rig.erase()
    assert told["remains"]["in_no_view"] == told["remains"]["objects"] == []
    assert rig.names[0].key not in rig.store.objects


def test_fenced_broker_issues_no_certificate(new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    """No message has the key, so the erasure appends no entry that would reveal the fence."""
    rig = new(is_quick=True)
    successor = rig.new_journal(directory=rig.directory.parent / "copy", log_uuid=rig.log_uuid)

    def look(verb: str, key: str) -> None:
        if verb == "head":
            rig.store.on_call = None
            successor.ownership.attach(0)

    rig.store.on_call = look
    with pytest.raises(Fenced):
        rig.lifecycle.erase.now(EraseRequest(TOPIC, "nobody"))


def test_long_search_reports_progress(new: New) -> None:
    rig = new(is_quick=True)
    rig.store.on_call = lambda verb, key: rig.clock.advance(3_000) if verb == "head" else None
    for dry_run in (True, False):
        seen: list[dict[str, Any]] = []
        rig.lifecycle.erase.now(EraseRequest(TOPIC, "nobody"), dry_run=dry_run, progress=seen.append)
        assert [item["objects"] for item in seen if item["event"] == "searched"] == [3]


def test_checkpoint_preserves_erasures(new: New, log: SealedLog) -> None:
    rig = new()
    told = rig.erase()
    catalog = rig.journal.catalog
    again = restored(catalog)
    assert (again.objects(), again.gaps(), expiring_keys(again)) == (
        catalog.objects(),
        catalog.gaps(),
        expiring_keys(catalog),
    )
    for queue, end in log.next.items():
        assert [again.find(TOPIC, queue, at) for at in range(end)] == [
            catalog.find(TOPIC, queue, at) for at in range(end)
        ]
    assert erased_of(again.gaps(), told["id"]) == erased_of(catalog.gaps(), told["id"]) != []


def test_caches_drop_erased_objects_after_their_deletion(new: New, log: SealedLog) -> None:
    rig = new()
    forgotten: list[str] = []

    def forget(names: Sequence[CommittedObject]) -> None:
        assert not any(name.key in rig.store.objects for name in names)
        forgotten.extend(name.key for name in names)

    rig.lifecycle.expire._forget = forget
    rig.erase()
    assert forgotten == []
    rig.clock.advance(25 * HOUR)
    rig.lifecycle.expire.run()
    assert forgotten == [name.key for name in rig.names if name.key != rig.names[2].key]


# ---- the local log


def former(offset: int, keys: str = KEY, *, topic: str = TOPIC, at: int = 0, more: str = "") -> bytes:
    """Return a record outside all queues: of a deleted topic, or delayed."""
    properties = f"KEYS\x01{keys}\x02{more}".encode()
    return record(offset, topic=topic.encode(), queue_id=7, physical_offset=at, properties=properties, body=b"plain")


def test_erasure_searches_messages_of_deleted_topics_in_the_log(new: New) -> None:
    rig = new(RetentionPolicy(reserved_ms=7 * HOUR))
    rig.hot.put(TOPIC, 7, 1)
    rig.hot.former = {TOPIC: 500, "%RETRY%g": 1 << 40}
    retry = f"RETRY_TOPIC\x01{TOPIC}\x02"
    rig.hot.raw = [
        former(0), former(1), former(2, "another"), former(3, at=500),
        former(4, topic="%RETRY%g", more=retry), former(5, topic="%RETRY%g"), former(6, topic="other"),
    ]  # fmt: skip
    told = rig.erase()
    assert told["complete"]
    until = rig.clock.now_ms() + 7 * HOUR
    found = [one for one in told["remains"]["local_log"] if one["queue"] == 7]
    assert found == [{"topic": TOPIC, "queue": 7, "rows": 2, "hidden": 2, "until_ms": until}], "of one in its segments"


@pytest.mark.parametrize("is_damaged", [False, True])
def test_certificate_is_incomplete_where_the_log_cannot_be_searched(new: New, is_damaged: bool) -> None:
    rig = new()
    rig.hot.former = {TOPIC: 500}
    if is_damaged:
        rig.hot.raw = [former(0)[:-3]]
        rig.hot.search_log = lambda ranges, text: iter(rig.hot.raw)  # type: ignore[method-assign]
    rig.hot.is_log_unreadable = not is_damaged
    told = rig.erase()
    assert (told["complete"], told["rows"]) == (False, len(MEANT))
    assert told["not_erased"][0].startswith("the local log could not be searched: ")


def test_erasure_deletes_quarantined_records(new: New) -> None:
    rig = new()
    target = f"REAL_TOPIC\x01{TOPIC}\x02"
    rig.hot.quarantine = {
        "delayed": former(0, topic=SCHEDULE_TOPIC, more=target),
        "another key": former(1, "another", topic=SCHEDULE_TOPIC, more=target),
        "another topic": former(2, topic=SCHEDULE_TOPIC, more="REAL_TOPIC\x01other\x02"),
        "key in the body": record(3, topic=SCHEDULE_TOPIC.encode(), properties=target.encode(), body=KEY.encode()),
    }
    told = rig.erase()
    assert (told["complete"], told["quarantine"]) == (True, ["delayed"])
    assert list(rig.hot.quarantine) == ["another key", "another topic", "key in the body"]


def test_certificate_is_incomplete_where_a_quarantined_record_stays(new: New) -> None:
    rig = new()
    rig.hot.quarantine = {"damaged": former(0, more="n\x01cut\x02")[:-3]}
    told = rig.erase()
    assert (told["complete"], told["quarantine"]) == (False, [])
    assert told["not_erased"][0].startswith("the quarantined record damaged contains the key and is damaged: ")
    rig.hot.quarantine = {"of it": former(0)}
    rig.hot.is_quarantine_locked = True
    told = rig.erase()
    assert (told["complete"], told["quarantine"]) == (False, [])
    assert "permission denied" in told["not_erased"][0]
    assert list(rig.hot.quarantine) == ["of it"]


def test_certificate_is_incomplete_while_messages_wait_for_delivery(new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = new(RetentionPolicy(reserved_ms=7 * HOUR))
    rig.hot.put(SCHEDULE_TOPIC, 7, 3)
    target, other = f"REAL_TOPIC\x01{TOPIC}\x02", "REAL_TOPIC\x01other\x02"
    rig.hot.raw = [former(at, topic=SCHEDULE_TOPIC, at=at * 100, more=target) for at in range(3)]
    rig.hot.raw.append(former(9, topic=SCHEDULE_TOPIC, at=900, more=other))
    monkeypatch.setattr(rig.lifecycle.offload, "run", lambda **_: [])
    rig.hot.pinned = 100
    told = rig.erase()
    assert told["not_erased"] == [f"2 messages of {SCHEDULE_TOPIC} may wait for delivery: erase again later"]
    assert rig.hot.hidden == {(SCHEDULE_TOPIC, 7): {0}}, "that one was delivered"
    assert rig.hot.logged == [(SCHEDULE_TOPIC, 7, 0, 0)]
    rig.hot.pinned, rig.hot.log_takes_nothing = None, True
    told = rig.erase()
    assert "other members may return copies" in told["not_erased"][0]
    rig.hot.log_takes_nothing = False
    told = rig.erase()
    assert told["complete"]
    assert rig.hot.hidden == {(SCHEDULE_TOPIC, 7): {0, 1, 2}}
    until = rig.clock.now_ms() + 7 * HOUR
    found = [one for one in told["remains"]["local_log"] if one["queue"] == 7]
    assert found == [{"topic": SCHEDULE_TOPIC, "queue": 7, "rows": 3, "hidden": 3, "until_ms": until}]


def test_certificate_is_incomplete_until_all_rows_are_hidden(new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = new()
    rig.hot.put(TOPIC, 0, 15)
    monkeypatch.setattr(rig.lifecycle.offload, "run", lambda **_: [])
    rig.hot.unreadable = {TOPIC}
    told = rig.erase()
    assert (told["complete"], told["rows"]) == (False, len(MEANT))
    assert told["not_erased"] == [f"4 messages of {TOPIC}, queue 0 are not hidden: it can't be read"]
    (copies,) = (one for one in told["remains"]["local_log"] if one["queue"] == 0)
    assert (copies["rows"], copies["hidden"]) == (4, 0)
    assert rig.lifecycle.hot_erasure.run() == 0 and rig.hot.hidden == {}
    rig.hot.unreadable = set()
    assert rig.lifecycle.hot_erasure.run() > 0, "without a new entry of the journal"
    again = rig.erase(erase_id=told["id"])
    assert (again["complete"], again["rows"]) == (True, len(MEANT))


def test_certificate_is_incomplete_where_the_hidden_rows_cannot_be_saved(
    new: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = new()
    rig.hot.put(TOPIC, 0, 15)
    monkeypatch.setattr(rig.lifecycle.offload, "run", lambda **_: [])

    def refuse(rows: object) -> Hidden:
        raise OSError("no room")

    with monkeypatch.context() as full:
        full.setattr(rig.hot, "hide_erased", refuse)
        told = rig.erase()
    assert told["not_erased"][0] == "the local log could not save what to hide: no room"
    assert rig.lifecycle.hot_erasure.run() > 0


def test_certificate_is_incomplete_where_the_queues_cannot_be_looked_up(
    new: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = new()
    rig.hot.put(TOPIC, 0, 15)
    monkeypatch.setattr(rig.lifecycle.offload, "run", lambda **_: [])

    def unreadable(topic: str, start: int) -> dict[int, int]:
        raise TopicUnreadable(f"topic {topic}: no descriptor")

    monkeypatch.setattr(rig.hot, "first_offsets", unreadable)
    told = rig.erase()
    assert told["not_erased"] == [
        f"the visible messages of {TOPIC} in the local log are unknown: topic {TOPIC}: no descriptor"
    ]
