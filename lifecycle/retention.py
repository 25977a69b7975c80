"""Pure decisions about age and disk space: which topics are due for offload, which segments may be evicted.

Expiry is decided in `neve.archive.policy.expiry`.

Times are milliseconds. A time below 0 is unknown, and data of unknown age is kept.

Eviction depends on the fill of the local disk. Archived data is evicted early and nothing is lost. Data that is not
archived (all of it without `storeUrl`, some system topics with it) is deleted by RocketMQ's rules:

disk_mark    diskMaxUsedSpaceRatio. Above it, archived segments are evicted, the oldest first, until the fill is RELIEF
             below the mark. Unarchived data older than fileReservedTime is deleted at any hour, not only at
             `deleteWhen`.
force_mark   diskSpaceCleanForciblyRatio. Above it, unarchived data is deleted whatever its age. With an archive it
             equals `disk_mark`: a trace record must not keep archived messages on a full disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

import msgspec

from infra.process.priority import NORMAL
from lifecycle.hot_store import LogSegment
from neve.archive.policy.ttl import HOUR_MS, ttl_ms_of

MINUTE_MS = 60_000
DAY_MS = 24 * HOUR_MS
# A full disk is relieved until its fill is this far below the mark, so that brokers on one disk don't evict everything.
RELIEF = 0.05
# Archiving is late when a message has waited for this many times archiveMaxAge.
_LATE = 2


class Pending(msgspec.Struct, frozen=True, gc=False):
    """The unarchived records of a topic. `gc=False`: ten thousand of them should not trigger garbage collections."""

    bytes: int
    oldest_ms: int


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """The configuration of age and disk space for the decisions. Times are milliseconds, marks are shares of the disk.

    The functions return a property of one topic: whether it is archived or internal, where its deleted records end,
    its TTL in hours.
    """

    archive_min_bytes: int = 8 << 20
    archive_max_age_ms: int = HOUR_MS
    own_max_age_ms: Callable[[str], int | None] = field(default=lambda topic: None)  # archiveMaxAgeByTopic
    reserved_ms: int = 72 * HOUR_MS  # local retention, fileReservedTime
    delete_hours: frozenset[int] | None = None  # deleteWhen, for unarchived data; None: at any hour
    disk_mark: float = 0.75  # diskMaxUsedSpaceRatio
    force_mark: float = 0.75
    journal_retention_ms: int = 7 * 24 * HOUR_MS  # archiveJournalRetention
    grace_ms: int = 24 * HOUR_MS  # expireGrace
    replaced_grace_ms: int = HOUR_MS  # archiveReplacedGrace
    upload_bytes_per_second: int = 0  # 0: no limit
    compaction: bool = False  # whether the job runs without a request
    compaction_bytes_per_second: int = 0  # of the objects that are read; 0: no limit
    delta_topics: tuple[str, ...] = ()  # archiveDeltaTopics
    worker_priority: str = NORMAL  # archiveWorkerPriority
    archived: Callable[[str], bool] = field(default=lambda topic: True)
    # Internal topics of the broker. It needs only their pinned records.
    internal: Callable[[str], bool] = field(default=lambda topic: False)
    # The CommitLog offset below which a topic's records belong to a deleted topic. Only a deletion sets it: a topic
    # that is missing from a table is not necessarily deleted.
    deleted_up_to: Callable[[str], int] = field(default=lambda topic: 0)
    # Whether the topic exists now. A deleted topic may have been created again and have no message yet.
    exists: Callable[[str], bool] = field(default=lambda topic: False)
    ttl_hours: Callable[[str], int | None] = field(default=lambda topic: None)  # None: for ever

    def max_age_ms(self, topic: str) -> int:
        """Return how long messages of the topic may exist only in local copies, in milliseconds."""
        own = self.own_max_age_ms(topic)
        return self.archive_max_age_ms if own is None else own

    def ttl_ms(self, topic: str) -> int | None:
        return ttl_ms_of(self.ttl_hours(topic))


def wanted_segments(
    segments: Iterable[LogSegment], policy: RetentionPolicy, now_ms: int, disk_ratio: float
) -> list[LogSegment]:
    """Return sealed segments that should leave the local disk: they are too old, or the disk is above its mark."""
    crowded = disk_ratio > policy.disk_mark
    return [
        segment
        for segment in segments
        if segment.sealed and (crowded or _is_aged(segment.newest_store_time, policy, now_ms))
    ]


def due_topics(
    pending: Mapping[str, Pending],
    wanted: Iterable[LogSegment],
    through: Mapping[str, int],
    policy: RetentionPolicy,
    now_ms: int,
) -> list[str]:
    """Return the topics that are due for offload, oldest first."""
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
    """Whether a message has reached its maximum age, or will before the end of the day.

    An object has messages of one day. With a maximum age of a day or more, messages are archived after the end of
    their day. At any other time, a round would make one object of the day before and another of the day so far.
    """
    if oldest_ms < 0:
        return False
    if not now_ms - max_age_ms < oldest_ms <= now_ms + MINUTE_MS:
        return True  # a store time in the future: stored while the clock was ahead, so its age is unknown
    midnight = now_ms // DAY_MS * DAY_MS
    return max_age_ms >= DAY_MS and oldest_ms < midnight and oldest_ms + max_age_ms < midnight + DAY_MS


def waited_as_by_default(pending: Mapping[str, Pending], policy: RetentionPolicy, now_ms: int) -> int:
    """Return the store time of the oldest unarchived message, normalized to archiveMaxAge.

    Topics have different maximum ages (archiveMaxAgeByTopic). The wait of each topic's oldest message is scaled to
    archiveMaxAge, and the longest scaled wait is subtracted from now. Below 0: nothing waits, or its age is unknown.
    """
    waited = [
        (now_ms - what.oldest_ms) * policy.archive_max_age_ms // policy.max_age_ms(topic)
        for topic, what in pending.items()
        if what.oldest_ms >= 0
    ]
    return max(0, now_ms - max(waited)) if waited else -1


def upload_rate(policy: RetentionPolicy, oldest_ms: int, now_ms: int, disk_ratio: float) -> int:
    """Return the upload rate limit in bytes per second; 0 for no limit.

    With a backlog of n times archiveMaxAge the limit is n times as high, so that offloading keeps up in the end. Above
    the disk's mark there is no limit.
    """
    if not policy.upload_bytes_per_second or disk_ratio > policy.disk_mark:
        return 0
    age = max(0, now_ms - oldest_ms) if oldest_ms >= 0 else 0
    return int(policy.upload_bytes_per_second * max(1.0, age / policy.archive_max_age_ms))


def worker_priority(
    policy: RetentionPolicy, oldest_ms: int, now_ms: int, disk_ratio: float, *, is_awaited: bool
) -> str:
    """Return the processor priority of the worker. Clients come first, but only while archiving keeps up.

    Archiving is late if the oldest message has waited for twice archiveMaxAge, or if the disk is above its mark: a
    full disk ends in rejected sends. `is_awaited`: a caller waits for the end of the round.
    """
    is_late = 0 <= oldest_ms < now_ms - _LATE * policy.archive_max_age_ms
    return NORMAL if is_awaited or is_late or disk_ratio > policy.disk_mark else policy.worker_priority


class Moment(NamedTuple):
    """The time and the fill of the disk for an eviction.

    `expired_by_ms` is the safe time for TTL and fileReservedTime of unarchived data, rather late than early. `crowded`:
    archived segments are evicted whatever their age. `forced`: unarchived data is deleted whatever its age.
    """

    now_ms: int
    expired_by_ms: int
    crowded: bool = False
    forced: bool = False


def moment_of(
    policy: RetentionPolicy, now_ms: int, expired_by_ms: int, disk_ratio: float, before: Moment | None
) -> Moment:
    """Return the moment for the next segment. An eviction for space (`before`) continues down to the lower mark."""
    crowded = disk_ratio > policy.disk_mark - (RELIEF if before is not None and before.crowded else 0.0)
    forced = disk_ratio > policy.force_mark - (RELIEF if before is not None and before.forced else 0.0)
    return Moment(now_ms, expired_by_ms, crowded, forced)


def may_evict(
    segment: LogSegment, through: Mapping[str, int], policy: RetentionPolicy, moment: Moment, pinned: int | None
) -> bool:
    """Whether the log's oldest segment should be evicted without losing data that must be kept.

    Each topic's part must be archived, expired, deleted, or unarchived and released by RocketMQ's rule.

    Topics of waiting timers, half messages and the like are not archived: a waiting record pins its segment. Without
    one, these topics hold up no segment. Otherwise a broker with delayed messages could not relieve a full disk.
    """
    if not segment.sealed or (pinned is not None and pinned < segment.end):
        return False
    if not moment.crowded and not _is_aged(segment.newest_store_time, policy, moment.now_ms):
        return False
    return all(_settled(topic, record, through, policy, moment) for topic, record in segment.topics.items())


def _settled(
    topic: str, record: tuple[int, int], through: Mapping[str, int], policy: RetentionPolicy, moment: Moment
) -> bool:
    last, newest = record
    if last < max(through.get(topic, 0), policy.deleted_up_to(topic)) or policy.internal(topic):
        return True
    ttl = policy.ttl_ms(topic)
    if ttl is not None and newest >= 0 and newest + ttl <= moment.expired_by_ms:
        return True
    if policy.archived(topic):
        return False
    if moment.forced:
        return True
    return _is_aged(newest, policy, moment.expired_by_ms) and (moment.crowded or _is_delete_hour(policy, moment.now_ms))


def _is_aged(newest_ms: int, policy: RetentionPolicy, now_ms: int) -> bool:
    return newest_ms >= 0 and newest_ms + policy.reserved_ms <= now_ms


def _is_delete_hour(policy: RetentionPolicy, now_ms: int) -> bool:
    """Whether it is a deleteWhen hour in the machine's time zone, as in RocketMQ."""
    return policy.delete_hours is None or datetime.fromtimestamp(now_ms / 1000).hour in policy.delete_hours  # noqa: DTZ006
