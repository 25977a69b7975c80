"""The archive of a broker set over real logs: failovers in the middle of each step, clean and unclean."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from broker.archiving.attach import Event
from infra import failpoint
from infra.failpoint import FailpointError
from lifecycle.erase import EraseRequest
from neve.archive.format.journal import Abort, Commit, Epoch, Gap, Intent
from neve.archive.policy.ttl import HOUR_MS
from neve.record.codec import iter_records
from tests.simulation.process import drive
from tests.unit.broker.archive_members import BODY, STEPS, TOPIC, ArchiveMember, ArchiveMembers
from tiered.journal.errors import ArchiveRefused, Fenced, NotMaster
from tiered.journal.state import State
from tiered.write.offload import RoundReport


@pytest.fixture(autouse=True)
def _disarm() -> object:
    yield
    failpoint.disarm()


def filled(*, parquet: bool = False, name_is_told: bool = True) -> ArchiveMembers:
    """Make A the master. Both members have 23 messages of two topics and three queues, in more than one segment."""
    both = ArchiveMembers(parquet=parquet)
    both.name_is_told = name_is_told
    both.elect(both.a)
    both.a.put(9)
    both.a.put(9, queue=1)
    both.a.put(5, topic="other")
    both.replicate(both.a)
    return both


def resume_log(both: ArchiveMembers, member: ArchiveMember) -> None:
    """Elect a member and archive the whole log and two more messages."""
    both.elect(member)
    member.put(2)
    both.replicate(member)
    member.offload()
    member.offload()


def check_whole(both: ArchiveMembers, member: ArchiveMember) -> None:
    assert [both.check_tiles(TOPIC, 0), both.check_tiles(TOPIC, 1), both.check_tiles("other", 0)] == [
        (member.store.queues.max_offset(TOPIC, 0), []),
        (9, []),
        (5, []),
    ]
    for topic in (TOPIC, "other"):
        assert both.archived(topic) == sorted(member.rows(topic)), "byte by byte, and nothing twice"
    assert both.catalog.rounds.open_intents() == {}
    both.check_no_orphans()


# ---- clean failover


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("step", STEPS)
def test_round_interrupted_by_the_masters_crash_is_completed_by_the_next(step: str, nth: int) -> None:
    both = filled()
    with failpoint.armed(step, nth=nth), pytest.raises(FailpointError):
        both.a.offload()
        both.a.put(1)
        both.replicate(both.a)
        both.a.offload()
    both.replicate(both.a)
    resume_log(both, both.b)
    check_whole(both, both.b)


@pytest.mark.parametrize("step", [step for step in STEPS if step != "offload.after_encode"])
def test_members_write_equal_objects_across_a_failover(step: str) -> None:
    """The tier worker writes Parquet. A failover in between neither duplicates nor omits a message."""
    both = filled(parquet=True)
    with failpoint.armed(step), pytest.raises(FailpointError):
        both.a.offload()
    both.replicate(both.a)
    resume_log(both, both.b)
    check_whole(both, both.b)
    again = filled(parquet=True)
    again.a.offload()
    bytes_of = {
        place: (again.bucket.objects[one.key][0], both.bucket.objects[other.key][0])
        for one in again.catalog.objects()
        for other in both.catalog.objects()
        if (place := (one.topic, one.start, one.end)) == (other.topic, other.start, other.end)
    }
    assert len(bytes_of) >= 2, "but for what came to a segment meanwhile"
    assert all(one == other for one, other in bytes_of.values())


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("step", STEPS)
def test_master_suspended_through_a_failover_archives_nothing_more(step: str, nth: int) -> None:
    both = filled()

    def failover(_: str) -> None:
        failpoint.disarm()
        both.send(both.a)
        resume_log(both, both.b)

    with failpoint.armed(step, failover, nth), pytest.raises((Fenced, FailpointError)):
        both.a.offload()
        both.a.put(1)
        both.replicate(both.a)
        both.a.offload()
        both.a.offload()
    check_whole(both, both.b)
    with pytest.raises(Fenced):
        both.a.evict()
    assert both.a.archive.journal.ownership.state is State.DEPOSED


def test_job_that_reads_a_later_epoch_reports_the_deposition_to_the_set() -> None:
    both = filled()
    both.a.offload()
    both.replicate(both.a)
    both.elect(both.b)
    both.b.offload()
    job = both.a.archive._as_master(both.a.archive.lifecycle.offload.run)
    with pytest.raises(Fenced):
        job()
    assert both.a.was_deposed == 1
    both.depose(both.a)
    assert job() is None
    assert both.a.was_deposed == 1
    assert both.b.archive._as_master(both.b.archive.lifecycle.offload.run)() == []


def test_hot_traffic_and_later_the_archive_continue_after_a_store_outage() -> None:
    both = filled()
    both.a.offload()
    both.replicate(both.a)
    both.bucket.down = True
    both.elect(both.b)
    both.b.put(4)
    both.replicate(both.b)
    assert both.b.store.queues.max_offset(TOPIC, 0) == 13
    both.bucket.heal()
    both.b.offload()
    check_whole(both, both.b)


def test_archives_log_name_is_proven_by_common_records_and_kept() -> None:
    both = filled(name_is_told=False)
    both.a.offload()
    both.replicate(both.a)
    assert both.a.store.log_uuid != both.b.store.log_uuid
    resume_log(both, both.b)
    assert both.b.archive.journal.log_uuid == both.a.store.log_uuid
    assert {entry.log_uuid for entry in both.entries() if isinstance(entry, Epoch)} == {both.a.store.log_uuid}
    both.b.store.shutdown()
    both.b.live()
    assert both.b.archive.journal.log_uuid == both.a.store.log_uuid
    both.b.store.visibility.confirm(both.b.end)
    assert both.b.evict() != []


def test_member_of_another_set_with_the_same_name_is_refused() -> None:
    """Staging and production share a bucket by mistake."""
    both = filled()
    both.a.offload()
    staging = ArchiveMembers()
    staging.bucket = both.bucket
    for member in (staging.a, staging.b):
        member.store.shutdown()
        member.live()
    staging.elect(staging.a)
    staging.a.put(30)
    staging.replicate(staging.a)
    before = dict(both.bucket.objects)
    for act in (staging.a.offload, staging.a.evict):
        with pytest.raises(ArchiveRefused, match="belongs to another data directory"):
            act()
    with pytest.raises(ArchiveRefused):
        staging.b.evict()
    assert both.bucket.objects == before
    assert len(staging.a.store.reader.segments()) == len(staging.b.store.reader.segments()) > 1


@pytest.mark.parametrize("of_the_archives", [True, False])
@pytest.mark.parametrize("index", [2, 3, -1])
def test_damaged_record_does_not_make_the_archive_foreign(index: int, of_the_archives: bool) -> None:
    """The damaged record is archived unchanged while the other members have it intact, or the other way round."""
    both = filled(parquet=True)
    (both.a if of_the_archives else both.b).damage("other", index=index)
    both.a.offload()
    both.replicate(both.a)
    newest = max(both.catalog.objects(), key=lambda name: name.end)
    assert newest.topic == "other", "it is looked at first"
    both.elect(both.b)
    both.b.put(4)
    both.replicate(both.b)
    both.b.offload()
    assert (both.check_tiles(), both.check_tiles("other")) == ((13, []), (5, []))


def test_diverged_copy_of_a_log_is_refused_whatever_is_below() -> None:
    """Staging was copied from production's disks. It has messages of equal sizes at equal offsets, at other times."""
    both, staging = filled(), filled()
    for one in (both.a, staging.a):
        one.offload()
    assert both.a.rows() == staging.a.rows()
    staging.clock.advance(60_000)
    for members in (both, staging):
        members.a.put(2, topic="other")
        members.replicate(members.a)
    both.a.offload()
    before = dict(both.bucket.objects)
    staging.bucket = both.bucket
    staging.b.store.shutdown()
    staging.b.live()
    staging.b.archive.journal.log_name.set_by_master(both.a.store.log_uuid)
    staging.elect(staging.b)
    with pytest.raises(ArchiveRefused, match="belongs to another data directory"):
        staging.b.offload()
    assert both.bucket.objects == before


def test_member_without_a_common_record_needs_the_masters_log_name() -> None:
    both = ArchiveMembers()
    both.name_is_told = False
    both.elect(both.a)
    both.a.put(3)
    both.replicate(both.a)
    both.a.archive.journal.ownership.ensure_online()  # writes an EPOCH entry and no object
    both.elect(both.b)
    with pytest.raises(ArchiveRefused):
        both.b.offload()
    both.b.archive.journal.log_name.set_by_master(both.a.archive.journal.log_uuid)
    both.b.offload()
    assert both.check_tiles() == (3, [])


def test_elected_member_that_lacks_archived_messages_writes_nothing() -> None:
    """Its set believed it to be in sync."""
    both = filled()
    both.in_sync = [both.a]
    both.a.put(6)
    both.a.store.visibility.confirm(both.a.end)
    both.a.offload()
    both.elect(both.b)
    both.b.put(3)
    before = dict(both.bucket.objects)
    with pytest.raises(ArchiveRefused, match="elected without what its set had archived"):
        both.b.offload()
    assert both.bucket.objects == before


# ---- unclean election


def lacking(*, until: str = "", parquet: bool = False) -> ArchiveMembers:
    """Let A continue alone, archive up to a step, and disappear. B lacks these messages."""
    both = filled(parquet=parquet)
    both.a.offload()
    both.replicate(both.a)
    both.in_sync = [both.a]
    both.a.put(6)
    both.a.store.visibility.confirm(both.a.end)
    if until:
        with failpoint.armed(until), pytest.raises(FailpointError):
            both.a.offload()
    else:
        both.a.offload()
    return both


def test_log_resumes_above_the_archive_after_an_unclean_election() -> None:
    both = lacking(parquet=True)
    reaches = both.catalog.rounds.intent_end
    assert both.b.end < reaches
    both.elect(both.b, in_sync=False)
    assert both.b.end >= reaches
    both.b.put(2)
    both.b.store.visibility.confirm(both.b.end)
    assert [both.b.store.queues.next_offset(TOPIC, 0), both.b.store.queues.min_offset(TOPIC, 0)] == [17, 15]
    assert len(both.b.bodies()) == 17, "9 of both, 6 that the archive alone has, 2 of B"
    both.b.offload()
    assert (both.check_tiles(), both.check_tiles(queue=1)) == ((17, []), (9, []))


def test_raised_queues_are_reported_until_the_log_has_a_record_of_them() -> None:
    """A master that resumed above the archive may have died before its slaves got the record."""
    both = lacking()
    for _ in range(2):
        both.elect(both.b, in_sync=False)
        assert drive(both.b.archive.resume_log()) == {TOPIC: {0: 15}}, "queue 1 has all that is archived of it"
        both.depose(both.b)
    both.elect(both.b, in_sync=False)
    both.b.put(1)
    assert drive(both.b.archive.resume_log()) == {}, "a record says it"


def test_member_that_resumed_above_a_partly_replicated_object_is_reelected() -> None:
    both = filled()
    both.a.offload()
    both.replicate(both.a)
    both.in_sync = [both.a]
    both.a.put(3)
    both.send(both.a)
    both.a.put(3)
    both.a.store.visibility.confirm(both.a.end)
    both.a.offload()
    both.elect(both.b, in_sync=False)
    for _ in range(2):  # it may die before it has archived a message of its own
        both.b.put(1)
        both.depose(both.b)
        both.elect(both.b, in_sync=False)
    both.b.offload()
    assert (both.check_tiles(), both.check_tiles(queue=1)) == ((17, []), (9, []))


@pytest.mark.parametrize("until", ["offload.after_intent", "offload.after_upload", "offload.before_commit"])
def test_open_intent_without_a_surviving_copy_is_recorded_as_a_gap(until: str) -> None:
    both = lacking(until=until)
    before = len(both.entries())
    both.elect(both.b, in_sync=False)
    both.b.put(2)
    both.b.store.visibility.confirm(both.b.end)
    both.b.offload()
    told = [entry for entry in both.entries()[before:] if isinstance(entry, Gap | Abort | Commit)]
    assert [type(entry) for entry in told[:2]] == [Gap, Abort]
    assert (both.check_tiles(), both.check_tiles(queue=1)) == ((17, [(9, 14)]), (9, []))
    assert both.catalog.rounds.open_intents() == {}


def replace_waits(monkeypatch: pytest.MonkeyPatch, wait: Callable[[float], Awaitable[None]]) -> None:
    """Call `wait` in place of each wait of some length; turns of the loop between two steps stay."""
    sleep = asyncio.sleep

    async def waited(seconds: float) -> None:
        await (wait(seconds) if seconds else sleep(0))

    monkeypatch.setattr(asyncio, "sleep", waited)


def test_nothing_is_appended_before_the_end_of_the_journal_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    both = lacking()
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        assert both.b.store.end.is_following
        if len(waits) == 3:
            both.bucket.heal()

    replace_waits(monkeypatch, wait)
    both.bucket.down = True
    both.elect(both.b, in_sync=False)
    assert len(waits) == 3
    both.b.put(1)
    assert both.b.store.queues.next_offset(TOPIC, 0) == 16


@pytest.mark.parametrize("fault", [OSError("no such device"), TimeoutError(), RuntimeError("the log is not writable")])
def test_elected_master_retries_any_failure_until_it_leads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Exception
) -> None:
    """No other member is elected while it sends heartbeats, so that otherwise the set would have no master."""
    both = lacking()
    settled, waits = both.b.archive.lifecycle.is_settled, list[float]()

    def is_settled() -> bool:
        if len(waits) < 8:
            raise fault
        return settled()

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        assert both.b.archive.unsettled == (str(fault) or repr(fault))

    replace_waits(monkeypatch, wait)
    monkeypatch.setattr(both.b.archive.lifecycle, "is_settled", is_settled)
    both.elect(both.b, in_sync=False)
    assert both.b.archive.unsettled == ""
    assert waits[0] < waits[1] < waits[-1] == waits[-2], "less and less often"
    assert sum("until the archive is settled" in each.message for each in caplog.records) == 1
    both.b.put(1)
    assert both.b.store.queues.next_offset(TOPIC, 0) == 16


def test_unfinished_object_is_reported_once_and_retried_with_backoff(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    both = lacking(until="offload.after_intent")
    runs, waits = both.b.archive.lifecycle.salvage.run, list[float]()

    def run() -> list[RoundReport]:
        if len(waits) < 8:
            return [RoundReport(0, failed={"key": "its bytes are damaged"})]
        return runs()

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        assert "its bytes are damaged" in both.b.archive.unsettled

    replace_waits(monkeypatch, wait)
    monkeypatch.setattr(both.b.archive.lifecycle.salvage, "run", run)
    both.elect(both.b, in_sync=False)
    assert both.b.archive.unsettled == ""
    assert waits[0] < waits[1] < waits[-1] == waits[-2]
    assert sum("its bytes are damaged" in each.message for each in caplog.records) == 1


def test_attempt_for_an_ended_term_does_not_complete_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    both = lacking()
    both.bucket.down = True
    both.master_epoch += 1
    both.b.archive.lead(both.master_epoch)

    async def wait(seconds: float) -> None:
        both.bucket.heal()
        both.b.archive.follow()
        both.master_epoch += 1
        both.b.archive.lead(both.master_epoch)

    replace_waits(monkeypatch, wait)
    assert not drive(both.b.archive.settle())


def test_member_stopped_before_it_archived_its_tail_does_not_resume_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its unarchived messages would be hidden, and the next start would not know of them."""
    both = lacking(until="offload.after_intent")
    replace_waits(monkeypatch, stop_here)
    both.master_epoch += 1
    both.in_sync = [both.b]
    both.b.archive.lead(both.master_epoch)
    both.b.store.visibility.confirm(both.b.end)
    both.b.archive._attachment.happens(Event.STOP)
    both.b.archive.lifecycle.stop()
    with pytest.raises(Stopped):
        drive(both.b.archive.settle())


class Stopped(Exception):
    """The process would retry here."""


async def stop_here(seconds: float) -> None:
    raise Stopped


def test_unarchived_messages_are_archived_before_the_log_resumes_above() -> None:
    """Its queues resume at higher offsets. Messages below them would be hidden from every later round."""
    both = filled()
    both.in_sync = [both.a]
    both.a.put(6)
    both.a.store.visibility.confirm(both.a.end)
    with failpoint.armed("offload.after_intent", nth=2), pytest.raises(FailpointError):
        both.a.offload()
    kept = {topic: set(both.b.rows(topic)) for topic in (TOPIC, "other")}
    assert [len(rows) for rows in kept.values()] == [18, 5]
    both.elect(both.b, in_sync=False)
    assert {topic: set(both.archived(topic)) for topic in kept} == kept
    assert both.check_tiles() == (15, [(9, 14)])
    assert both.catalog.rounds.open_intents() == {}


def test_round_waits_until_the_set_has_the_masters_log_of_its_promotion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = lacking(until="offload.after_intent")
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        assert not any(isinstance(entry, Gap) for entry in both.entries())
        both.in_sync = [both.b]

    replace_waits(monkeypatch, wait)
    both.master_epoch += 1
    both.b.archive.lead(both.master_epoch)
    both.in_sync = [both.b, Elsewhere(0)]  # type: ignore[list-item]
    both.b.store.visibility.confirm(both.b.end)
    assert drive(both.b.archive.settle())
    assert len(waits) == 1
    assert any(isinstance(entry, Gap) for entry in both.entries())


class Elsewhere:
    """A member that reports its fsynced offset."""

    def __init__(self, synced: int) -> None:
        self.store = self
        self.flushed_offset = synced


def test_member_deposed_while_it_waits_stops_waiting() -> None:
    both = lacking()
    both.master_epoch += 1
    both.b.archive.lead(both.master_epoch)
    both.b.archive.follow()
    assert not drive(both.b.archive.settle())
    assert both.b.store.end.is_following


# ---- slaves


def test_slave_evicts_by_its_masters_journal_and_reads_the_archive() -> None:
    both = filled(parquet=True)
    both.a.offload()
    both.replicate(both.a)
    bodies = both.b.bodies()
    assert both.b.evict() != []
    assert both.b.store.queues.min_offset(TOPIC, 0) > 0
    assert both.b.bodies() == bodies
    assert [body[: len(BODY)] for body in bodies] == [BODY] * 9


def test_segment_whose_end_is_not_replicated_is_not_evicted() -> None:
    """Its messages are archived, but the next master may resume behind them, and this log be truncated there."""
    both = filled()
    both.a.offload(roll=False)
    has = both.b.end
    both.a.offload()
    (*_, last, _) = both.a.store.reader.segments()
    assert last.base < has < last.end and last.sealed
    assert last.base not in both.a.evict()
    assert both.a.archive.eviction_frontier <= last.base
    both.elect(both.b)
    both.b.put(1)
    both.depose(both.a)
    both.a.store.truncate(has, epoch=2, floor=has)
    both.replicate(both.b)
    assert both.a.end == both.b.end


def test_slave_keeps_pinned_and_unarchived_segments() -> None:
    both = filled()
    both.b.pins.at = 0
    both.a.offload()
    both.replicate(both.a)
    assert both.b.evict() == []
    both.b.pins.at = None
    both.a.put(40)
    both.replicate(both.a)
    assert both.b.evict() != []
    assert both.b.store.queues.min_offset(TOPIC, 0) == both.catalog.max_offset(TOPIC, 0) == 9
    assert both.b.store.queues.max_offset(TOPIC, 0) == 49
    assert both.b.evict() == [], "what is left is in no archive"


def test_round_excludes_messages_that_an_in_sync_member_has_not_fsynced() -> None:
    both = filled()
    both.a.offload()
    end = both.b.store.visibility.flushed
    both.a.put(4)
    both.send(both.a, into_memory=True)
    assert both.b.end == both.a.end
    both.a.store.visibility.confirm(both.a.end)
    both.a.offload(roll=False)
    assert max(name.end for name in both.catalog.objects()) <= end
    intents = [entry for entry in both.entries() if isinstance(entry, Intent)]
    assert max(name.end for entry in intents for name in entry.names) <= end
    both.b.flush()
    both.a.offload(roll=False)
    assert both.check_tiles() == (13, [])


def test_tombstone_ends_at_the_archived_offsets() -> None:
    """An elected member may lack the messages above and assign their offsets again.

    They are recorded by a later tombstone.
    """
    both = filled()
    both.a.offload()
    both.replicate(both.a)
    both.a.put(3)
    tombstones = both.a.archive.tombstones
    drive(tombstones.record(TOPIC, {0: 12, 1: 4, 2: 5}))
    assert both.catalog.topic_entry(TOPIC).minimums == {0: 9, 1: 4, 2: 0}  # type: ignore[union-attr]
    written = both.catalog.next_seq
    drive(tombstones.record(TOPIC, {0: 12, 1: 4, 2: 5}))
    drive(tombstones.record("never archived", {0: 7}))
    assert both.catalog.next_seq == written
    drive(tombstones.record(TOPIC, {0: 12, 1: 3, 2: 5}))
    assert both.catalog.next_seq == written, "it says no less"


def test_messages_counted_before_they_are_confirmed_are_archived_later() -> None:
    """A metrics scrape counts the backlog at any time, and the count is cached."""
    both = filled()
    both.a.offload()
    both.replicate(both.a)
    for topic in (TOPIC, "other"):
        both.a.put(2, topic=topic)
        assert topic not in both.a.archive.lifecycle.backlog(), "readers, and rounds, do not see it yet"
    both.replicate(both.a)
    assert set(both.a.archive.lifecycle.backlog()) == {TOPIC, "other"}
    both.a.offload()
    assert (both.check_tiles(), both.check_tiles("other")) == ((11, []), (7, []))


# ---- compaction


def in_four_objects() -> tuple[ArchiveMembers, list[bytes]]:
    """Archive A's messages in four objects. Return the bodies of queue 0, which both members read."""
    both = ArchiveMembers(parquet=True)
    both.elect(both.a)
    for _ in range(4):
        both.a.put(4)
        both.a.put(2, queue=1)
        both.replicate(both.a)
        both.a.offload()
        both.replicate(both.a)
    assert len(both.catalog.objects(TOPIC)) == 4
    return both, both.a.bodies()


def test_slave_serves_objects_that_its_master_compacted() -> None:
    """It has evicted its whole log. It reads REPLACE at its next poll of the journal, and DELETED later."""
    both, bodies = in_four_objects()
    both.a.put(1, topic="other")
    both.replicate(both.a)
    slave = both.b
    assert slave.evict() != []
    assert slave.store.queues.min_offset(TOPIC, 0) == len(bodies)
    half = len(bodies) // 2
    assert both.a.archive.lifecycle.compact.now(TOPIC) == 1
    assert slave.bodies(first=half) == bodies[half:], "it has not heard of it, and the old ones are there"
    slave.archive.lifecycle.expire.run()
    assert len(slave.archive.journal.catalog.objects(TOPIC)) == 1
    both.clock.advance(25 * HOUR_MS)
    assert both.a.archive.lifecycle.expire.run()["deleted"] == 4
    assert slave.bodies() == bodies
    slave.archive.lifecycle.expire.run()
    assert slave.bodies() == bodies
    assert [at for queue, at, _ in both.archived() if queue == 0] == list(range(len(bodies)))


@pytest.mark.parametrize("step", [None, "compact.after_intent", "compact.after_upload", "compact.after_replace"])
def test_slave_succeeds_a_master_in_any_step_of_a_compaction(step: str | None) -> None:
    """The next master has all messages, continues to archive, and compacts the objects itself."""
    both, bodies = in_four_objects()
    if step is None:
        both.a.archive.lifecycle.compact.now(TOPIC)
    else:
        with failpoint.armed(step), pytest.raises(FailpointError):
            both.a.archive.lifecycle.compact.now(TOPIC)
    both.elect(both.b)
    both.b.evict()
    assert both.b.bodies() == bodies
    both.b.put(3)
    both.replicate(both.b)
    both.b.offload()
    both.b.archive.lifecycle.compact.now(TOPIC)
    assert both.catalog.rounds.open_rewrites() == {}
    assert both.check_tiles() == (len(bodies) + 3, [])
    assert [at for queue, at, _ in both.archived() if queue == 0] == list(range(len(bodies) + 3))
    assert both.b.bodies()[: len(bodies)] == bodies
    with pytest.raises((Fenced, NotMaster)):
        both.a.archive.lifecycle.compact.now(TOPIC)
    both.clock.advance(25 * HOUR_MS)
    both.b.archive.lifecycle.expire.run()
    both.check_no_orphans()
    assert both.b.bodies()[: len(bodies)] == bodies


# ---- erasure


def put_keyed(member: ArchiveMember, keys: Sequence[str]) -> None:
    for key in keys:
        member.store.put(
            TOPIC, 0, b"body", b"KEYS\x01%s\x02" % key.encode(), flag=0, sys_flag=0, born_timestamp=1,
            born_host=("127.0.0.1", 1),
        )  # fmt: skip
    member.flush()


@pytest.mark.parametrize("keys", ["m12m345", "mm1", "1mm", "1m2"])
@pytest.mark.parametrize("is_known", [False, True])
def test_archive_with_erased_messages_still_matches_its_logs(keys: str, is_known: bool) -> None:
    """A member without the archive's name proves it by its own log, which still has the erased messages."""
    both = ArchiveMembers(parquet=True)
    both.name_is_told = is_known
    both.elect(both.a)
    put_keyed(both.a, keys)
    both.replicate(both.a)
    told = both.a.archive.lifecycle.erase.now(EraseRequest(TOPIC, "m"))
    assert (told["complete"], told["rows"]) == (True, keys.count("m"))
    assert told["remains"]["other_members"] is True
    (local,) = told["remains"]["local_log"]
    assert local["rows"] == local["hidden"] == keys.count("m")
    assert len(both.a.bodies()) == len(keys) - keys.count("m"), "before the certificate"
    both.replicate(both.a)
    both.elect(both.b)
    put_keyed(both.b, ["6", "m"])
    both.replicate(both.b)
    both.b.offload()
    left = [at for at, key in enumerate(keys) if key != "m"]
    end, gaps = both.check_tiles()
    assert (end, sum(last - first + 1 for first, last in gaps)) == (len(keys) + 2, keys.count("m"))
    assert [at for _, at, _ in both.archived()] == [*left, len(keys), len(keys) + 1]
    assert both.b.archive.lifecycle.erase.now(EraseRequest(TOPIC, "m"))["rows"] == 1
    assert sum(len(run.sizes) for run in both.b.store.reader.entries(TOPIC, 0, 1 << 62).values()) == len(keys) + 2, (
        "its log has it"
    )
    assert len(both.b.bodies()) == len(left) + 1
    both.replicate(both.b)
    assert both.b.evict() != []
    assert len(both.b.bodies()) == len(left) + 1


def erased_from_a_set() -> tuple[ArchiveMembers, list[int]]:
    """Let A lead and erase by key. Return the set and the offsets of the remaining messages."""
    both, keys = ArchiveMembers(parquet=True), "1m2mm3"
    both.elect(both.a)
    put_keyed(both.a, keys)
    both.replicate(both.a)
    assert both.a.archive.lifecycle.erase.now(EraseRequest(TOPIC, "m"))["rows"] == 3
    both.replicate(both.a)
    return both, [at for at, key in enumerate(keys) if key != "m"]


def offsets_of(member: ArchiveMember) -> list[int]:
    """Return the offsets that a reader of the member's hot log gets."""
    found, offset = list[int](), 0
    while offset < member.store.queues.max_offset(TOPIC, 0):
        got = member.store.reader.get(TOPIC, 0, offset, 32, 1 << 20)
        found += [record.queue_offset for buffer in got.buffers for record in iter_records(buffer)]
        offset = got.next_offset
    return found


def test_slave_hides_erased_messages_once_it_has_read_the_erasure() -> None:
    both, left = erased_from_a_set()
    assert offsets_of(both.a) == left
    places = both.b.store.reader.entries(TOPIC, 0, 1 << 62)[0].physical.tolist()
    both.b.archive.lifecycle.evict.run()
    both.b.archive.lifecycle.hot_erasure.run()
    assert offsets_of(both.b) == left
    assert [both.b.store.reader.record_at(place) is not None for place in places] == [
        at in left for at in range(len(places))
    ]
    assert both.a.store.log_bytes(0, both.a.end, both.a.end)[1] == both.b.store.log_bytes(0, both.b.end, both.b.end)[1]


@pytest.mark.parametrize("has_read", [True, False])
def test_restarted_member_hides_erased_messages_before_it_asks_the_store(has_read: bool) -> None:
    """By its own file or, if it stopped before it wrote that, by its copy of the journal."""
    both, left = erased_from_a_set()
    both.b.archive.lifecycle.evict.run()
    if has_read:
        both.b.archive.lifecycle.hot_erasure.run()
    both.b.store.abandon()
    both.bucket.down = True
    both.b.live()
    both.b.store.visibility.confirm(both.b.end)
    assert offsets_of(both.b) == left


def test_elected_slave_hides_erased_messages_from_the_start_of_its_term() -> None:
    both, left = erased_from_a_set()
    assert offsets_of(both.b) != left, "it has not read of it"
    both.elect(both.b, in_sync=False)
    assert offsets_of(both.b) == left
    put_keyed(both.b, "m4")
    both.replicate(both.b)
    assert offsets_of(both.b) == [*left, 6, 7], "what comes is another's"


def test_new_member_hides_erased_messages_that_it_replicates() -> None:
    both, left = erased_from_a_set()
    both.b = ArchiveMember(both, seed=3)
    both.replicate(both.a)
    both.b.archive.lifecycle.evict.run()
    both.b.archive.lifecycle.hot_erasure.run()
    assert offsets_of(both.b) == left
