"""Pure decisions about age and disk space: which topics are due for offload, which segments may be evicted.

Expiry is decided in `neve.archive.policy.expiry`.

Times are milliseconds. A time below 0 is unknown, and what is of unknown age is kept.

Local disk, by its fill. What is archived leaves it early and loses nothing; what no archive takes (all of it without
`storeUrl`, some system topics with one) goes as in RocketMQ:

disk_mark    diskMaxUsedSpaceRatio: archived segments go, the oldest first, until the fill is RELIEF below the mark
             again; what is older than fileReservedTime goes at any hour, not only at `deleteWhen`
force_mark   diskSpaceCleanForciblyRatio: what no archive takes goes whatever its age. With an archive this is
             `disk_mark`: a trace record must not keep archived messages on a crowded disk
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

import msgspec

from infra.process.priority import NORMAL
from lifecycle.hot_store import Segment
from neve.archive.policy.ttl import HOUR_MS, ttl_ms_of

MINUTE_MS = 60_000
DAY_MS = 24 * HOUR_MS
# A crowded disk is relieved until its fill is this far below the mark: brokers that share it don't evict all they have.
RELIEF = 0.05
# Archiving is behind when a message waits for so many times archiveMaxAge.
_LATE = 2


class Pending(msgspec.Struct, frozen=True, gc=False):
    """What of a topic is not archived yet. A look at ten thousand topics is no business of the garbage collector."""

    bytes: int
    oldest_ms: int


@dataclass(frozen=True, slots=True)
class Policy:
    """What the configuration says about age and room, as the decisions take it: times in ms, marks as shares of the
    disk.

    The functions answer for one topic: whether it is archived, is the broker's own, where it ended, its TTL in hours.
    """

    archive_min_bytes: int = 8 << 20
    archive_max_age_ms: int = HOUR_MS
    own_max_age_ms: Callable[[str], int | None] = field(default=lambda topic: None)  # archiveMaxAgeByTopic
    reserved_ms: int = 72 * HOUR_MS  # local retention, fileReservedTime
    delete_hours: frozenset[int] | None = None  # deleteWhen, for what no archive takes; None: at any hour
    disk_mark: float = 0.75  # diskMaxUsedSpaceRatio
    force_mark: float = 0.75
    journal_retention_ms: int = 7 * 24 * HOUR_MS  # archiveJournalRetention
    grace_ms: int = 24 * HOUR_MS  # expireGrace
    replaced_grace_ms: int = HOUR_MS  # archiveReplacedGrace
    upload_bytes_per_second: int = 0  # 0: no limit
    compaction: bool = False  # by itself
    compaction_bytes_per_second: int = 0  # of objects that are read; 0: no limit
    delta_topics: tuple[str, ...] = ()  # archiveDeltaTopics
    worker_priority: str = NORMAL  # archiveWorkerPriority
    archived: Callable[[str], bool] = field(default=lambda topic: True)
    # Topics of the broker's own, of which it needs what is pinned and nothing else.
    internal: Callable[[str], bool] = field(default=lambda topic: False)
    # The CommitLog offset below which a topic's records are those of a deleted one. Only a deletion says so: a topic
    # that is missing from a table is not known to be gone.
    gone_below: Callable[[str], int] = field(default=lambda topic: 0)
    # Whether a table has it now: it may have come again, with no message yet.
    exists: Callable[[str], bool] = field(default=lambda topic: False)
    ttl_hours: Callable[[str], int | None] = field(default=lambda topic: None)  # None: for ever

    def max_age_ms(self, topic: str) -> int:
        """How long what a topic has may be in the local copies alone."""
        own = self.own_max_age_ms(topic)
        return self.archive_max_age_ms if own is None else own

    def ttl_ms(self, topic: str) -> int | None:
        return ttl_ms_of(self.ttl_hours(topic))


def wanted_segments(segments: Iterable[Segment], policy: Policy, now_ms: int, disk_ratio: float) -> list[Segment]:
    """Sealed segments that should leave the local disk: too old, or the disk is above its mark."""
    crowded = disk_ratio > policy.disk_mark
    return [
        segment
        for segment in segments
        if segment.sealed and (crowded or _is_aged(segment.newest_store_time, policy, now_ms))
    ]


def due_topics(
    pending: Mapping[str, Pending], wanted: Iterable[Segment], through: Mapping[str, int], policy: Policy, now_ms: int
) -> list[str]:
    """Topics whose time has come, oldest first."""
    asked = {
        topic for segment in wanted for topic, (last, _) in segment.topics.items() if last >= through.get(topic, 0)
    }
    due = [
        topic
        for topic, what in pending.items()
        if what.bytes > 0
        and (
            what.bytes >= policy.archive_min_bytes
            or topic in asked
            or _has_waited(what.oldest_ms, policy.max_age_ms(topic), now_ms)
        )
    ]
    return sorted(due, key=lambda topic: (pending[topic].oldest_ms, topic))


def _has_waited(oldest_ms: int, max_age_ms: int, now_ms: int) -> bool:
    """Whether a message is as old as it may be, or will be before the next day is over.

    An object has messages of one day. Who has a day or more to wait goes when a day has ended: at any other time a
    round makes an object of what the day before has left, and another of what the day has so far.
    """
    if oldest_ms < 0:
        return False
    if not now_ms - max_age_ms < oldest_ms <= now_ms + MINUTE_MS:
        return True  # from the future: stored while the clock was ahead, of unknown age
    midnight = now_ms // DAY_MS * DAY_MS
    return max_age_ms >= DAY_MS and oldest_ms < midnight and oldest_ms + max_age_ms < midnight + DAY_MS


def waited_as_by_default(pending: Mapping[str, Pending], policy: Policy, now_ms: int) -> int:
    """From when a message would be that by archiveMaxAge has waited as many times too long as any by its topic's own.

    Below 0: nothing waits, or it is of unknown age.
    """
    waited = [
        (now_ms - what.oldest_ms) * policy.archive_max_age_ms // policy.max_age_ms(topic)
        for topic, what in pending.items()
        if what.oldest_ms >= 0
    ]
    return max(0, now_ms - max(waited)) if waited else -1


def upload_rate(policy: Policy, oldest_ms: int, now_ms: int, disk_ratio: float) -> int:
    """Bytes per second for uploads, 0 for no limit.

    The limit rises with the age of the backlog, n times at n times archiveMaxAge, so that offloading keeps up in the
    end; above the disk's mark there is none.
    """
    if not policy.upload_bytes_per_second or disk_ratio > policy.disk_mark:
        return 0
    age = max(0, now_ms - oldest_ms) if oldest_ms >= 0 else 0
    return int(policy.upload_bytes_per_second * max(1.0, age / policy.archive_max_age_ms))


def worker_priority(policy: Policy, oldest_ms: int, now_ms: int, disk_ratio: float, *, is_awaited: bool) -> str:
    """What the encoding worker asks of the processor: who sends comes first, but only as long as archiving keeps up.

    It keeps up no longer when the oldest message waits for twice archiveMaxAge, or the disk is above its mark: what
    never leaves it ends in refused sends. `is_awaited`: somebody has asked for the round, and waits for its end.
    """
    is_late = 0 <= oldest_ms < now_ms - _LATE * policy.archive_max_age_ms
    return NORMAL if is_awaited or is_late or disk_ratio > policy.disk_mark else policy.worker_priority


class Moment(NamedTuple):
    """When, and how full the disk is, as an eviction goes by it.

    `expired_by_ms` is the time by which a TTL or fileReservedTime lets go of what no archive has: late rather than
    early. `crowded`: archived segments go whatever their age; `forced`: so does what no archive takes.
    """

    now_ms: int
    expired_by_ms: int
    crowded: bool = False
    forced: bool = False


def moment_of(policy: Policy, now_ms: int, expired_by_ms: int, disk_ratio: float, before: Moment | None) -> Moment:
    """`before`: of the segment that has just gone; what goes for want of room goes on down to the lower mark."""
    crowded = disk_ratio > policy.disk_mark - (RELIEF if before is not None and before.crowded else 0.0)
    forced = disk_ratio > policy.force_mark - (RELIEF if before is not None and before.forced else 0.0)
    return Moment(now_ms, expired_by_ms, crowded, forced)


def may_evict(segment: Segment, through: Mapping[str, int], policy: Policy, moment: Moment, pinned: int | None) -> bool:
    """Whether the log's oldest segment should go, and nothing is lost by it that is not to be lost.

    Each topic's part is archived, expired, deleted, or what no archive takes and RocketMQ's rule lets go of.

    Waiting timers, half messages and their like are not archived: as long as one waits, it pins its segment. Without
    one their topics hold nothing up, or a broker with delayed messages could not free a crowded disk.
    """
    if not segment.sealed or (pinned is not None and pinned < segment.end):
        return False
    if not moment.crowded and not _is_aged(segment.newest_store_time, policy, moment.now_ms):
        return False
    return all(_settled(topic, record, through, policy, moment) for topic, record in segment.topics.items())


def _settled(topic: str, record: tuple[int, int], through: Mapping[str, int], policy: Policy, moment: Moment) -> bool:
    last, newest = record
    if last < max(through.get(topic, 0), policy.gone_below(topic)) or policy.internal(topic):
        return True
    ttl = policy.ttl_ms(topic)
    if ttl is not None and newest >= 0 and newest + ttl <= moment.expired_by_ms:
        return True
    if policy.archived(topic):
        return False
    if moment.forced:
        return True
    return _is_aged(newest, policy, moment.expired_by_ms) and (moment.crowded or _is_delete_hour(policy, moment.now_ms))


def _is_aged(newest_ms: int, policy: Policy, now_ms: int) -> bool:
    return newest_ms >= 0 and newest_ms + policy.reserved_ms <= now_ms


def _is_delete_hour(policy: Policy, now_ms: int) -> bool:
    """By the machine's own time zone, as RocketMQ has it."""
    return policy.delete_hours is None or datetime.fromtimestamp(now_ms / 1000).hour in policy.delete_hours  # noqa: DTZ006
