"""Tests of the archive of a broker set: failover within each step, and the jobs of a slave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra import failpoint
from infra.failpoint import FailpointError
from infra.objects.store import StoreUnavailable
from lifecycle.evict import no_limit
from lifecycle.lifecycle import ArchiveLifecycle, SharedLog
from lifecycle.retention import RetentionPolicy
from lifecycle.safe_clock import SafeClock
from lifecycle.state_keeper import StateKeeper
from neve.archive.catalog.catalog import Catalog
from neve.archive.format.broker_state import BrokerState, read_state
from neve.archive.format.checkpoint import CheckpointHead, decode_checkpoint
from neve.archive.format.journal import Abort, Epoch, Intent, NewerFormat, PlannedObject, decode_entry
from neve.archive.format.keys import journal_key, pack_key
from tests.kit.archive.catalog_state import state_of
from tests.unit.lifecycle.fakes import RECORD, SEGMENT, STEPS, Rig
from tests.unit.lifecycle.members import UUID, ArchivingMember, ArchivingSet
from tiered.journal.errors import ArchiveRefused, Fenced, NotAttached, NotMaster
from tiered.journal.state import State

WRITES = [step for step in STEPS if "evict" not in step]


@pytest.fixture
def both(tmp_path: Path) -> ArchivingSet:
    """Return a set in which A is master in epoch 1 and B has the same log."""
    made = ArchivingSet(tmp_path)
    made.elect(made.a)
    made.a.hot.put("a", 0, 7)
    made.a.hot.put("b", 0, 5)
    made.a.hot.put("a", 1, 9)
    made.replicate()
    return made


def check_whole(both: ArchivingSet) -> None:
    assert (both.check_tiles("a", 0), both.check_tiles("b", 0), both.check_tiles("a", 1)) == (9, 5, 9)
    assert both.catalog.rounds.open_intents() == {}
    data = {key for key in both.store.objects if key.startswith("topic=")}
    assert data == {name.key for name in both.catalog.objects()}, "an object that nobody vouches for"


def entries(both: ArchivingSet) -> list[object]:
    catalog = both.catalog
    return [decode_entry(both.store.objects[journal_key("", "b", seq)][0]) for seq in range(catalog.next_seq)]


# ---- failover


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("step", WRITES)
def test_next_master_completes_the_round_of_a_dead_one(both: ArchivingSet, step: str, nth: int) -> None:
    with failpoint.armed(step, nth=nth), pytest.raises(FailpointError):
        both.a.offload()
        both.a.hot.put("a", 0, 1)
        both.replicate()
        both.a.offload()
    both.replicate()
    both.elect(both.b)
    both.b.hot.put("a", 0, 9 - both.b.hot.next["a", 0])
    both.b.offload()
    check_whole(both)


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("step", WRITES)
def test_deposed_master_that_resumes_in_any_step_changes_nothing(both: ArchivingSet, step: str, nth: int) -> None:
    """The master is suspended in the step while another one is elected and archives everything, and then resumes."""
    before = both.b.hot.copy

    def failover(_: str) -> None:
        failpoint.disarm()
        before(both.a.hot)
        both.elect(both.b)
        both.b.hot.put("a", 0, 9 - both.b.hot.next["a", 0])
        both.b.offload()

    with failpoint.armed(step, failover, nth):
        try:
            both.a.offload()
            both.a.hot.put("a", 0, 1)
            both.replicate()
            both.a.offload()
            both.a.offload()
        except Fenced:
            assert both.a.journal.ownership.state is State.DEPOSED
        else:
            assert both.b.journal.ownership.leads, "the step comes in this run"
            with pytest.raises(Fenced):
                both.a.offload()
    check_whole(both)
    written = dict(both.store.objects)
    for job in (both.a.lifecycle.evict.run, both.a.lifecycle.expire.run, both.a.lifecycle.sweep.run, both.a.offload):
        with pytest.raises(Fenced):
            job()
    assert both.store.objects == written
    assert both.a.hot.evicted == []


@pytest.mark.parametrize("step", WRITES)
def test_both_members_archive_identical_objects(both: ArchivingSet, step: str, tmp_path: Path) -> None:
    alone = ArchivingSet(tmp_path / "alone")
    alone.elect(alone.a)
    alone.a.hot.copy(both.a.hot)
    alone.a.offload()
    with failpoint.armed(step), pytest.raises(FailpointError):
        both.a.offload()
    both.elect(both.b)
    both.b.offload()

    def content(of: ArchivingSet) -> dict[tuple[str, int, int], bytes]:
        return {(name.topic, name.start, name.end): of.store.objects[name.key][0] for name in of.catalog.objects()}

    assert content(both) == content(alone)


def test_late_upload_is_adopted_if_identical_and_aborted_otherwise(both: ArchivingSet) -> None:
    with failpoint.armed("offload.after_intent"), pytest.raises(FailpointError):
        both.a.offload()
    (names,) = both.catalog.rounds.open_intents().values()
    (same, other) = [name for name in names if name.topic == "a"], [name for name in names if name.topic == "b"]
    entry_runs = both.a.hot.entries("a", same[0].start, same[0].end)
    both.a.worker.encode_upload(same[0], entry_runs)
    both.store.put(other[0].key, b"of another encoder")
    both.elect(both.b)
    both.b.offload()
    objects = {name.key: name for name in both.catalog.objects()}
    assert same[0].key in objects
    assert other[0].key not in objects
    assert (both.check_tiles("a", 0), both.check_tiles("a", 1), both.check_tiles("b", 0)) == (7, 9, 5)


def test_aborted_name_is_retried_in_a_new_journal_epoch(both: ArchivingSet) -> None:
    with failpoint.armed("offload.after_intent"), pytest.raises(FailpointError):
        both.a.offload()
    (names,) = both.catalog.rounds.open_intents().values()
    for name in names:
        both.store.put(name.key, b"of another encoder")
    both.a.offload()
    both.a.offload()
    assert (both.check_tiles("a", 0), both.check_tiles("a", 1), both.check_tiles("b", 0)) == (7, 9, 5)
    said = [entry.master_epoch for entry in entries(both) if isinstance(entry, Epoch)]
    assert said == [1, 1]


def test_round_planned_before_a_reelection_appends_nothing(both: ArchivingSet) -> None:
    """A is deposed, truncated and elected again while one of its rounds is suspended between plan and INTENT."""

    def failover(_: str) -> None:
        failpoint.disarm()
        both.elect(both.b)
        both.b.journal.ownership.ensure_online()
        both.b.journal.ownership.become_slave()
        both.a.journal.ownership.become_slave()
        both.elect(both.a)
        both.a.journal.ownership.ensure_online()  # by another job of A

    with failpoint.armed("offload.before_intent", failover), pytest.raises(NotAttached, match="another master epoch"):
        both.a.offload()
    assert not any(isinstance(entry, Intent) for entry in entries(both))
    both.a.offload()
    assert both.check_tiles("a", 0) == 7


# ---- the fence


def test_archive_ownership_is_proven_once_per_term(both: ArchivingSet, tmp_path: Path) -> None:
    """The proof reads the whole range of an object under the lock of the journal, so it must be rare."""
    proved: list[int] = []

    def prove(catalog: Catalog) -> bool:
        proved.append(catalog.epoch)
        return True

    both.a.offload()
    member = ArchivingMember(both, tmp_path / "c", log_uuid="another name", proof=prove)
    member.hot.copy(both.a.hot)
    for reign in (1, 2):
        both.elect(member)
        member.offload()
        member.journal.ownership.renew_epoch()
        member.journal.ownership.renew_epoch()
        assert len(proved) == reign
        member.journal.ownership.become_slave()
        member.journal.ownership.follow()


def test_log_name_set_during_a_save_is_not_lost(
    both: ArchivingSet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    both.a.offload()
    journal = ArchivingMember(both, tmp_path / "c", log_uuid="its own").journal
    journal.log_name.set_by_master("a former master's")
    with monkeypatch.context() as patch:
        patch.setattr(journal._known, "save", lambda epoch: journal.log_name.set_by_master(UUID))
        with pytest.raises(ArchiveRefused):
            journal.ownership.follow()
    journal.ownership.follow()
    assert journal.log_uuid == UUID


def test_new_master_reports_log_name_of_former_master(both: ArchivingSet, tmp_path: Path) -> None:
    member = ArchivingMember(both, tmp_path / "c", log_uuid="its own")
    member.journal.log_name.set_by_master(UUID)
    both.elect(member)  # no job has read the store yet
    assert member.journal.log_uuid == UUID
    again = ArchivingMember(both, tmp_path / "c", log_uuid="its own")
    again.journal.log_name.set_by_earlier_process(UUID)
    assert again.journal.log_uuid == UUID


def test_log_name_of_archive_overrides_the_masters(both: ArchivingSet) -> None:
    both.a.offload()
    both.b.journal.ownership.follow()
    both.b.journal.log_name.set_by_master("the master's own")
    both.b.journal.ownership.follow()
    assert both.b.journal.log_uuid == UUID


def test_master_with_a_lower_epoch_is_deposed(both: ArchivingSet) -> None:
    both.a.offload()
    both.replicate()
    both.elect(both.b)
    both.b.journal.ownership.ensure_online()
    both.a.start()
    both.a.journal.ownership.become_master(1, both.a.hot.tail)
    with pytest.raises(Fenced):
        both.a.journal.ownership.ensure_online()
    assert both.a.journal.ownership.state is State.DEPOSED
    said = [entry.master_epoch for entry in entries(both) if isinstance(entry, Epoch)]
    assert said == [1, 2]


def test_concurrent_epoch_of_a_superseded_master_is_fenced(both: ArchivingSet) -> None:
    """A later master may write its EPOCH between this master's read of the journal and its PUT."""
    both.a.journal.ownership.become_slave()
    both.elect(both.a)
    later = both.master_epoch + 1

    def overtaken(_: str) -> None:
        failpoint.disarm()
        both.b.journal.ownership.become_master(later, both.b.hot.tail)
        both.b.journal.ownership.ensure_online()

    with failpoint.armed("journal.before_put", overtaken), pytest.raises(Fenced):
        both.a.journal.ownership.ensure_online()
    said = [entry.master_epoch for entry in entries(both) if isinstance(entry, Epoch)]
    assert said == [later]


def test_deposed_master_follows_as_slave_and_leads_when_reelected(both: ArchivingSet) -> None:
    both.a.offload()
    both.replicate()
    both.elect(both.b)
    both.b.offload()
    with pytest.raises(Fenced):
        both.a.offload()
    both.a.journal.ownership.become_slave()
    assert not both.a.journal.ownership.fenced
    both.a.lifecycle.evict.run()
    assert both.a.journal.catalog.next_seq == both.catalog.next_seq
    both.elect(both.a)
    both.a.hot.put("a", 0, 1)
    both.a.offload()
    assert both.check_tiles("a", 0) == 8
    with pytest.raises(Fenced):
        both.b.offload()


def test_standalone_broker_does_not_take_over_the_archive_of_a_set(both: ArchivingSet) -> None:
    both.a.offload()
    written = dict(both.store.objects)
    alone = Rig.__new__(Rig)
    alone.store, alone.clock = both.store, both.clock
    journal = Rig.new_journal(alone, both.directory / "a", both.a.log_uuid)
    with pytest.raises(ArchiveRefused, match=r"master epoch 1.*as a member of it"):
        journal.ownership.attach(both.a.hot.tail)
    assert both.store.objects == written


def test_set_continues_the_archive_of_its_first_broker(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "a", log_uuid="of the first")
    rig.hot.put("a", 0, 7)
    rig.offload()
    both = ArchivingSet.__new__(ArchivingSet)
    both.clock, both.store, both.policy = rig.clock, rig.store, RetentionPolicy()
    both.directory, both.master_epoch = tmp_path, 0
    both.a = ArchivingMember(both, tmp_path / "a", log_uuid="of the first")
    both.a.hot.copy(rig.hot)
    both.elect(both.a)
    both.a.hot.put("a", 0, 3)
    both.a.offload()
    assert both.check_tiles("a", 0) == 10
    with pytest.raises(Fenced):
        rig.offload()


# ---- no entry covers unconfirmed records


def test_no_gap_is_recorded_above_the_confirmed_offset(both: ArchivingSet) -> None:
    """Records that B had at its promotion are not confirmed at once. Its rounds end at the confirmed offset."""
    with failpoint.armed("offload.after_intent"), pytest.raises(FailpointError):
        both.a.offload()
    both.b.hot.confirmed = 9 * RECORD
    both.elect(both.b)
    before = len(entries(both))
    both.b.offload()
    assert [type(entry) for entry in entries(both)[before:]] == [Epoch]
    both.b.hot.confirmed = 1 << 62
    both.b.offload()
    assert (both.check_tiles("a", 0), both.check_tiles("a", 1), both.check_tiles("b", 0)) == (7, 9, 5)


def test_round_ends_at_the_archivable_limit(both: ArchivingSet) -> None:
    both.a.hot.archivable = 8 * RECORD
    both.a.hot.put("a", 0, 1)
    both.a.lifecycle.offload.run(roll=True)
    assert max(name.end for name in both.catalog.objects()) == 8 * RECORD
    assert (both.catalog.max_offset("a", 0), both.catalog.max_offset("b", 0)) == (7, 1)
    both.a.hot.archivable = -1
    both.a.hot.promoted_at = 1
    both.a.offload()
    assert both.catalog.max_offset("b", 0) == 1, "a member that does not tell holds all"
    both.a.hot.archivable = 1 << 62
    both.a.offload()
    assert (both.check_tiles("a", 0), both.check_tiles("b", 0)) == (8, 5)


def test_lost_intent_reserves_no_offsets_after_a_reelection(both: ArchivingSet) -> None:
    """B reused the offsets that A had planned. A must neither skip them nor hide the messages of B."""
    both.store.fail("put", StoreUnavailable("503"), match="journal", skip=1)
    with pytest.raises(StoreUnavailable):
        both.a.offload()
    high = both.a.journal._known.high
    assert high > 0
    both.elect(both.b)
    both.b.journal.ownership.ensure_online()
    both.a.journal.ownership.become_slave()
    both.elect(both.a)
    both.a.journal.ownership.ensure_online()
    assert both.a.journal._known.high == 0
    assert both.a.journal._known.named.everything() == {}
    both.a.start()
    assert both.a.journal._known.high == 0, "its directory says the same"


# ---- a slave


def test_slave_appends_no_journal_entry(both: ArchivingSet) -> None:
    both.a.offload()
    written = dict(both.store.objects)
    for job in (
        both.b.offload,
        both.b.lifecycle.sweep.run,
        both.b.lifecycle.checkpoint.run,
        both.b.lifecycle.unexpire.run,
        both.b.journal.ownership.renew_epoch,
        lambda: both.b.journal.append(Abort(round=1)),
    ):
        with pytest.raises(NotMaster):
            job()
    both.b.lifecycle.evict.run()
    both.b.lifecycle.expire.run()
    assert both.store.objects == written
    assert both.b.lifecycle.status()["archive"] == "following"


def test_slave_evicts_only_archived_segments(both: ArchivingSet) -> None:
    both.a.offload()
    both.a.hot.put("a", 0, SEGMENT // RECORD)
    both.replicate()
    both.b.hot.roll()
    both.b.hot.disk = 0.9
    both.b.lifecycle.evict.run()
    archived = max(name.end for name in both.catalog.objects())
    assert both.b.hot.evicted
    assert both.b.hot.first_segment <= archived
    assert both.b.hot.records, "what is not archived stays"
    both.b.hot.pinned = both.b.hot.first_segment
    both.a.offload()
    left = list(both.b.hot.evicted)
    both.b.lifecycle.evict.run()
    assert both.b.hot.evicted == left, "something waits in it"


def test_slave_evicts_nothing_if_store_is_unavailable_or_of_another_log(both: ArchivingSet, tmp_path: Path) -> None:
    both.a.offload()
    stranger = ArchivingMember(both, tmp_path / "c", log_uuid="staging")
    stranger.hot.copy(both.a.hot)
    for member in (stranger, both.b):
        member.hot.disk = 0.9
    with pytest.raises(ArchiveRefused, match="another data directory"):
        stranger.lifecycle.evict.run()
    both.store.fail("get", StoreUnavailable("503"), times=100)
    both.store.fail("head", StoreUnavailable("503"), times=100)
    with pytest.raises(StoreUnavailable):
        both.b.lifecycle.evict.run()
    assert stranger.hot.evicted == both.b.hot.evicted == []


def test_slave_hides_rows_expired_by_its_master(both: ArchivingSet) -> None:
    both.policy = RetentionPolicy(ttl_hours=lambda topic: 1 if topic == "b" else None)
    both.a.offload()
    both.clock.advance(2 * 3_600_000)
    assert both.a.lifecycle.expire.run()["expired"] == 2
    assert both.b.lifecycle.expire.run()["raised"] == 1
    assert (both.b.hot.min_offset("b", 0), both.b.hot.min_offset("a", 0)) == (5, 0)
    assert both.b.lifecycle.expire.run()["raised"] == 0


def counted(both: ArchivingSet, name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls of this method of A's hot log. Each call is a hop to the event loop of the broker."""
    asked, ask = list[str](), getattr(both.a.hot, name)

    def count(*arguments: Any) -> Any:
        asked.append(name)
        return ask(*arguments)

    monkeypatch.setattr(both.a.hot, name, count)
    return asked


def test_eviction_frontier_cost_is_independent_of_segment_count(
    both: ArchivingSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = counted(both, "confirmed_range", monkeypatch)
    costs = list[int]()
    for _ in range(2):
        both.a.hot.put("a", 0, 5 * SEGMENT // RECORD)
        both.a.offload()
        asked.clear()
        both.a.lifecycle.evict.run()
        costs.append(len(asked))
        assert both.a.lifecycle.evict.frontier == both.a.hot.tail // SEGMENT * SEGMENT
    assert costs[0] == costs[1]


def test_copy_of_an_apache_master_has_no_eviction_frontier(both: ArchivingSet) -> None:
    member = both.a
    lifecycle = ArchiveLifecycle(
        member.hot, member.journal, member.worker, lambda: both.policy, both.clock, SafeClock(both.clock),
        shared=SharedLog(member.hot.is_settled, no_limit),
    )  # fmt: skip
    member.hot.put("a", 0, 5 * SEGMENT // RECORD)
    lifecycle.offload.run(roll=True)
    lifecycle.evict.run()
    assert lifecycle.evict.frontier == 0


def test_ttl_finds_its_archivable_limit_without_reading_entries(
    both: ArchivingSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    both.policy = RetentionPolicy(ttl_hours=lambda topic: 1)
    both.clock.advance(2 * 3_600_000)
    asked = counted(both, "entries", monkeypatch)
    assert both.a.lifecycle.expire.run()["raised"] == 3
    assert asked == []


def test_ttl_records_minimums_only_below_the_archivable_limit(both: ArchivingSet) -> None:
    both.policy = RetentionPolicy(ttl_hours=lambda topic: 1)
    both.a.hot.archivable = 9 * RECORD
    both.clock.advance(2 * 3_600_000)
    both.a.lifecycle.expire.run()
    assert (both.catalog.recorded_minimum("a", 0), both.catalog.recorded_minimum("b", 0)) == (7, 2)
    assert both.catalog.recorded_minimum("a", 1) == 0
    assert (both.a.hot.min_offset("b", 0), both.a.hot.min_offset("a", 1)) == (2, 0)


def test_slave_truncates_its_journal_copy_at_checkpoints(both: ArchivingSet) -> None:
    both.a.journal._checkpoints.period = 4
    sizes = []
    for _ in range(12):
        both.a.hot.put("a", 0, 1)
        both.a.offload()
        both.a.lifecycle.checkpoint.run()
        both.b.journal.ownership.follow()
        sizes.append((both.directory / "b" / "journal.mirror").stat().st_size)
    assert max(sizes[6:]) <= 2 * max(sizes[:6])
    before = both.store.requests.copy()
    both.b.start()
    assert both.store.requests == before, "a start asks the store for nothing"
    assert both.b.journal.catalog.next_seq == both.catalog.next_seq
    both.replicate()
    both.elect(both.b)
    both.b.offload()
    assert both.check_tiles("a", 0) == 19


def test_slave_refuses_a_journal_of_a_newer_format(both: ArchivingSet) -> None:
    both.a.journal.ownership.ensure_online()
    both.b.journal.ownership.follow()
    key = journal_key("", "b", both.catalog.next_seq)
    both.store.put(key, b"\x82\xa4type\xa5EPOCH\xa7version\x63")
    for _ in range(2):
        with pytest.raises(NewerFormat):
            both.b.lifecycle.evict.run()


# ---- the state slots


def test_reelected_master_does_not_overwrite_the_newest_state(both: ArchivingSet) -> None:
    def state(offset: int) -> BrokerState:
        return BrokerState(broker="b", log_end=offset, queues={"a": {0: offset}})

    keeper = StateKeeper(both.a.journal, both.clock)
    others = StateKeeper(both.b.journal, both.clock)
    keeper.run(lambda: state(1))
    both.elect(both.b)
    others.run(lambda: state(2))
    others.run(lambda: state(3))
    both.elect(both.a)
    with failpoint.armed("state.before_put"), pytest.raises(FailpointError):
        keeper.run(lambda: state(4))
    assert (found := read_state(both.store, "b")) is not None
    assert found.log_end == 3
    torn = both.store.put

    def damaged(key: str, data: bytes, **how: Any) -> object:
        return torn(key, data[: len(data) // 2] if "/state/" in key else data, **how)

    both.store.put = damaged  # type: ignore[method-assign, assignment]
    keeper.run(lambda: state(4))
    assert (found := read_state(both.store, "b")) is not None
    assert (found.log_end, found.log_uuid) == (3, both.a.log_uuid), "the newest was the other slot"


def test_next_master_knows_the_names_of_a_late_intent(both: ArchivingSet) -> None:
    """A late INTENT before the new EPOCH covers confirmed records, so the next master completes it."""
    both.b.journal.ownership.follow()
    name = PlannedObject("topic=a/dt=1970-01-01/broker=b/x-e1.parquet", "a", "1970-01-01", 0, 1000, {0: (0, 6)})

    def late(_: str) -> None:
        failpoint.disarm()
        both.a.journal.ownership.ensure_online()
        both.a.journal.append(Intent(round=1, names=[name]))

    both.elect(both.b)
    with failpoint.armed("journal.before_put", late):
        both.b.journal.ownership.ensure_online()
    assert both.b.journal.catalog.rounds.intent_end == 1000
    assert [type(entry) for entry in entries(both)] == [Epoch, Intent, Epoch]


def test_checkpoints_of_alternating_masters_give_the_same_catalog(both: ArchivingSet) -> None:
    """Each checkpoint refers to packs of the previous one; a new master refers to no pack that it has not read."""
    masters = (both.a, both.b)
    leads, kept = both.a, set[str]()
    leads.hot.put("quiet", 0, 1)
    for turn in range(40):
        other = both.b if leads is both.a else both.a
        if turn % 13 == 2:
            other.start()  # its knowledge of packs becomes outdated while it follows
        leads.journal._checkpoints.period = 4
        other.journal._checkpoints.period = 1000  # so that it follows entry by entry
        leads.hot.put(("a", "b")[turn % 2], 0, 2)
        other.hot.copy(leads.hot)
        leads.offload()
        leads.lifecycle.checkpoint.run()
        if turn % 3:
            other.journal.ownership.follow()
        if turn % 13 == 12:
            other.hot.copy(leads.hot)
            leads.journal.ownership.become_slave()
            both.elect(other)
            leads = other
        kept = {key for key in both.store.objects if key.endswith(".pack")}
        heads = [decode_checkpoint(data) for key, (data, _) in both.store.objects.items() if key.endswith(".catalog")]
        named = {
            pack_key("", "b", *name) for head in heads if isinstance(head, CheckpointHead) for name in head.sizes()
        }
        assert named <= kept, "no checkpoint that is kept lacks a pack"
    assert len(kept) < 12, "what is not named goes"
    whole = Catalog()
    for seq, entry in enumerate(entries(both)):
        whole.apply(seq, entry)  # type: ignore[arg-type]
    for member in masters:
        member.journal.ownership.follow()
        assert state_of(member.journal.catalog) == state_of(whole)
        both.store.fail("*", StoreUnavailable("down"), times=1000)
        member.start()
        assert state_of(member.journal.catalog) == state_of(whole), "by its own copy alone"
        both.store.faults.clear()
    assert state_of(both.catalog) == state_of(whole)
