"""Tests of long backlogs: disk space is freed meanwhile, a stop is quick, and work is linear in new data."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from infra.objects.store import StoreUnavailable
from lifecycle.backlog import _Count
from lifecycle.retention import Pending, RetentionPolicy
from lifecycle.turns import Turns
from neve.archive.format.journal import Commit, Expire
from tests.kit.clock.waiting import wait_until
from tests.unit.lifecycle.fakes import RECORD, SEGMENT, Rig
from tiered.write.entry_run import EntryRun
from tiered.write.offload_plan import TopicRange

SEGMENTS = 12
HOURS = 3_600_000


def backlog(rig: Rig) -> Rig:
    rig.hot.put("a", count=10 * SEGMENTS)
    return rig


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "state", RetentionPolicy(archive_min_bytes=1))


def on_upload(rig: Rig, act: Callable[[int], None]) -> list[int]:
    """Call `act` with the number of each upload before it begins, and return the growing list of numbers."""
    upload = rig.worker.encode_upload
    numbers: list[int] = []

    def acting(*arguments: Any) -> Any:
        numbers.append(len(numbers) + 1)
        act(numbers[-1])
        return upload(*arguments)

    rig.worker.encode_upload = acting  # type: ignore[method-assign,assignment]
    return numbers


def test_turns_are_granted_in_request_order() -> None:
    turns, order, asked = Turns(), [], []
    threads = []

    def take(name: int) -> None:
        with turns:
            order.append(name)

    with turns:
        for name in range(5):
            threads.append(threading.Thread(target=take, args=(name,)))
            threads[-1].start()
            wait_until(lambda: len(turns._line) == name + 2)  # noqa: B023 - it is over before the next
            asked.append(name)
    for thread in threads:
        thread.join(10)
    assert order == asked


def test_backlog_scrape_of_many_topics_releases_the_interpreter(rig: Rig) -> None:
    for number in range(200):
        rig.hot.put(f"t{number:03d}")
    breaths: list[int] = []
    assert rig.lifecycle.backlog(lambda: breaths.append(1)) == rig.lifecycle.backlog()
    assert len(rig.lifecycle.backlog()) == 200
    assert 5 <= len(breaths) <= 20


def test_segment_is_evicted_while_later_ones_are_archived(rig: Rig) -> None:
    backlog(rig).hot.disk = 0.95
    retention = threading.Thread(target=rig.lifecycle.evict.run)
    seen: list[int] = []

    def act(number: int) -> None:
        if number == 4:
            retention.start()
            retention.join(10)  # no job holds the turn during an upload
            seen.extend(rig.hot.evicted)

    on_upload(rig, act)
    rig.lifecycle.offload.run()
    assert seen[:3] == [0, SEGMENT, 2 * SEGMENT]
    assert rig.check_tiles("a") == 10 * SEGMENTS


def test_segment_kept_by_a_truncation_is_counted_once_evicted(rig: Rig) -> None:
    backlog(rig).offload()
    rig.hot.disk, rig.hot.cut_short = 0.95, 2
    evicted = rig.lifecycle.evict.run()
    assert evicted == rig.hot.evicted
    assert rig.lifecycle.evict.evicted == len(evicted) > 2


def test_ttl_and_retention_run_between_the_uploads_of_a_backlog(rig: Rig) -> None:
    """Each job runs completely during each upload and finds the work that was committed until then."""
    brief, topics = 6, ("a", "b")
    rig.policy = RetentionPolicy(
        archive_min_bytes=1, grace_ms=0, ttl_hours=lambda topic: 1 if topic == "brief" else None
    )
    for _ in range(brief):
        rig.hot.put("brief", count=10)
        rig.offload()
        rig.clock.advance(60_000)
    for _ in range(SEGMENTS):
        for topic in topics:
            rig.hot.put(topic, count=5)
    rig.hot.disk = 0.95
    archived_before = rig.hot.first_segment
    expired: list[int] = []
    gone: list[int] = []

    def act(number: int) -> None:
        rig.clock.advance(HOURS - brief * 60_000 if number == 1 else 60_000)  # another object of `brief` expires
        expired.append(rig.lifecycle.expire.run()["expired"])
        rig.lifecycle.evict.run()
        gone.append(rig.hot.first_segment // SEGMENT)

    uploads = on_upload(rig, act)
    rig.lifecycle.offload.run()
    assert archived_before == 0
    assert len(uploads) == len(expired) == len(gone) == len(topics) * SEGMENTS
    assert expired[:brief] == [1] * brief
    assert sum(expired) == brief
    # Both objects of a segment are committed before the next segment is begun. Then it is evicted.
    assert gone == [brief + number // len(topics) for number in range(len(uploads))]
    assert [rig.check_tiles(topic) for topic in topics] == [5 * SEGMENTS] * len(topics)


def test_pending_topics_are_not_tracked_by_the_garbage_collector(rig: Rig) -> None:
    for topic in range(200):
        rig.hot.put(f"t{topic}")
    found, ranges = rig.lifecycle.backlog(), rig.lifecycle._due.ranges(everything=True)
    assert len(found) == len(ranges) == 200
    assert [one for one in gc.get_objects() if isinstance(one, Pending | TopicRange | _Count)] == []


def test_stop_ends_a_round_after_the_current_object(rig: Rig) -> None:
    for topic in range(50):
        rig.hot.put(f"t{topic}")
    uploads = on_upload(rig, lambda number: rig.lifecycle.stop() if number == 2 else None)
    rig.offload()
    assert len(uploads) == 2
    assert len(rig.journal.catalog.objects()) == 2
    rig.restart()
    rig.offload()
    assert [rig.check_tiles(f"t{topic}") for topic in range(50)] == [1] * 50


def test_unavailable_store_is_not_called_for_each_object(rig: Rig) -> None:
    for topic in range(50):
        rig.hot.put(f"t{topic}")

    def act(number: int) -> None:
        if number == 3:
            rig.store.fail("*", StoreUnavailable("gone"), times=1000)

    uploads = on_upload(rig, act)
    with pytest.raises(StoreUnavailable):
        rig.offload()
    assert len(uploads) == 3
    rig.store.faults.clear()
    rig.restart()
    rig.offload()
    assert [rig.check_tiles(f"t{topic}") for topic in range(50)] == [1] * 50


def test_failed_upload_of_one_object_does_not_stop_others(rig: Rig) -> None:
    for topic in range(5):
        rig.hot.put(f"t{topic}")
    rig.store.fail("put", StoreUnavailable("slow down"), match="topic=t1/", times=1)
    (report,) = rig.lifecycle.offload.run()
    assert (len(report.committed), len(report.failed)) == (4, 1)


def test_long_round_commits_periodically(rig: Rig) -> None:
    for topic in range(6):
        rig.hot.put(f"t{topic}")
    commits: list[int] = []
    append = rig.journal.append

    def counting(entry: Any, **more: Any) -> int:
        if isinstance(entry, Commit):
            commits.append(len(entry.names))
        return append(entry, **more)

    rig.journal.append = counting  # type: ignore[method-assign]
    on_upload(rig, lambda number: rig.clock.advance(15_000))
    rig.lifecycle.offload.run()
    assert commits == [2, 2, 2]


def asked_for(rig: Rig) -> list[tuple[int, int]]:
    """Return the growing list of ranges whose entries are read."""
    ranges: list[tuple[int, int]] = []
    entries = rig.hot.entries

    def asking(topic: str, start: int, end: int) -> Mapping[int, EntryRun]:
        ranges.append((start, end))
        return entries(topic, start, end)

    rig.hot.entries = asking  # type: ignore[method-assign]
    return ranges


def test_work_of_a_backlog_is_linear_in_its_length(rig: Rig) -> None:
    """Each segment is counted, planned and written once, instead of again in each round."""
    ranges = asked_for(backlog(rig))
    rig.lifecycle.offload.run()
    assert sum(end - start for start, end in ranges) <= 3 * SEGMENTS * SEGMENT


def test_backlog_scan_reads_only_new_entries(rig: Rig) -> None:
    backlog(rig)
    rig.hot.put("a", count=3)
    before = rig.lifecycle.backlog()["a"]
    ranges = asked_for(rig)
    rig.hot.put("a", count=2)
    after = rig.lifecycle.backlog()["a"]
    assert ranges == [(rig.hot.tail - 200, rig.hot.tail)]
    assert (after.bytes - before.bytes, after.oldest_ms) == (200, before.oldest_ms)
    ranges.clear()
    assert rig.lifecycle.backlog()["a"] == after
    assert ranges == []


def test_idle_topic_is_not_scanned_again(rig: Rig) -> None:
    rig.policy = RetentionPolicy(archive_min_bytes=1 << 30)
    for topic in range(20):
        rig.hot.put(f"t{topic}")
    before = rig.lifecycle.backlog()
    ranges = asked_for(rig)
    rig.hot.put("t7")
    new = rig.hot.tail - RECORD
    after = rig.lifecycle.backlog()
    assert [end for _, end in ranges] == [rig.hot.tail], "of one of them, and not more than once"
    assert new >= ranges[0][0]
    assert {topic for topic in after if after[topic] != before[topic]} == {"t7"}
    rig.lifecycle.offload.run()
    assert len(ranges) == 1, "nor by the job"


def test_round_reads_its_topics_in_one_call(rig: Rig) -> None:
    for topic in range(100):
        rig.hot.put(f"t{topic}")
    asked = [0]
    entries_of = rig.hot.entries_of

    def asking(*arguments: Any, **more: Any) -> Any:
        asked[0] += 1
        return entries_of(*arguments, **more)

    rig.hot.entries_of = asking  # type: ignore[method-assign]
    (*_, last) = rig.lifecycle.offload.run(roll=True)
    assert len(rig.journal.catalog.objects()) == 100
    rounds = last.round
    # A round plans and reads. Each check for due topics reads once, and there is one more check than rounds.
    assert asked[0] <= 2 * rounds + 2 * (rounds + 1)


def test_recreated_topic_starts_new_backlog_counts(rig: Rig) -> None:
    gone = {"a": 0}
    rig.policy = RetentionPolicy(archive_min_bytes=1 << 30, deleted_up_to=gone.__getitem__)
    rig.hot.put("a", count=5)
    assert rig.lifecycle.backlog()["a"].bytes == 500
    rig.hot.delete_topic("a")
    gone["a"] = rig.hot.tail
    rig.hot.put("a")
    assert rig.lifecycle.backlog()["a"].bytes == 100


def test_recreated_topic_is_archived_below_the_expired_minimum(
    rig: Rig,
) -> None:
    """A broker records its own deletions first. Only in a copy of another log can a lower offset be a reused one."""
    rig.policy = RetentionPolicy(deleted_up_to=lambda topic: 1)
    rig.hot.put("a", count=5)
    rig.journal.append(Expire(keys=[], delete_after_ms=0, minimums={"a": {0: 2}}))
    rig.offload()
    assert rig.lifecycle.set_aside() == {}
    assert [name.queues[0][:2] for name in rig.journal.catalog.objects("a")] == [(0, 4)]


def test_full_disk_evicts_sealed_segments_before_and_without_a_roll(rig: Rig) -> None:
    rig.hot.put("a", count=15)
    rig.lifecycle.offload.run()
    rig.hot.put("a", count=10)
    happened: list[str] = []

    def no_room() -> bool:
        happened.append("roll")
        return False

    rig.hot.roll = no_room  # type: ignore[method-assign]
    rig.lifecycle.offload.run(roll=True, evict=True, progress=lambda item: happened.append(item["event"]))
    assert happened[:3] == ["evicted", "roll", "not_rolled"]
    assert rig.hot.evicted == [0, SEGMENT]


def test_messages_with_future_store_time_are_archived(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "state", RetentionPolicy(archive_max_age_ms=3_600_000))
    right = rig.clock.now_ms()
    rig.clock.set_wall(right + 86_400_000)
    rig.hot.put("a")
    rig.clock.set_wall(right)
    (report,) = rig.lifecycle.offload.run()
    assert len(report.committed) == 1
