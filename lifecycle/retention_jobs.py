"""Jobs of every broker, with an archive or without one: eviction, the TTL, and trims."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from infra.clock import Clock
from infra.loop.pace import Pace
from infra.loop.threads import SYSTEM_THREADS, Threads
from lifecycle.evict import ArchivedShare, Evict, no_limit
from lifecycle.expire import ExpireMessages
from lifecycle.hot_expiry import ExpiryRecord, HotExpiry
from lifecycle.hot_store import HotStore
from lifecycle.retention import RetentionPolicy
from lifecycle.safe_clock import SafeClock
from lifecycle.trim import TrimTopic
from lifecycle.turns import Turns
from lifecycle.unexpire import UnexpireMessages
from neve.archive.format.journal import CommittedObject
from tiered.journal.writer import JournalWriter


class RetentionJobs:
    """The jobs, which take turns (`turns`)."""

    def __init__(
        self,
        hot: HotStore,
        policy: Callable[[], RetentionPolicy],
        clock: Clock,
        safe_clock: SafeClock,
        threads: Threads = SYSTEM_THREADS,
        *,
        is_member: bool = False,
        journal: JournalWriter | None = None,
        described_below: Callable[[], int] | None = None,
        forget: Callable[[Sequence[CommittedObject]], None] | None = None,
    ) -> None:
        """`is_member`: whether other brokers hold this log. `journal`: of the archive, if there is one.

        `described_below`: returns the CommitLog offset up to which the archive describes this log, of a copy of
        an Apache master's; None: all of it. `forget`: removes objects from the caches.
        """
        is_copy, described_below = described_below is not None, described_below or no_limit
        self.safe_clock = safe_clock
        turns = self.turns = Turns(threads)
        self.hot_expiry = HotExpiry(
            hot, ExpiryRecord(journal, policy, clock), policy, is_member=is_member and journal is not None
        )
        self.evict = Evict(
            hot,
            ArchivedShare(journal, safe_clock, described_below),
            policy,
            clock,
            turns,
            is_member=is_member,
            admits_members=journal is not None and is_member and not is_copy,
        )
        self.expire = ExpireMessages(
            hot,
            journal,
            self.hot_expiry,
            policy,
            safe_clock,
            turns,
            pace=functools.partial(Pace, clock, threads),
            is_member=is_member,
            described_below=described_below,
            forget=forget or _nothing,
        )
        self.unexpire = UnexpireMessages(journal, self.hot_expiry, policy, safe_clock, turns)
        self.trim = TrimTopic(hot, journal, policy, safe_clock, turns, is_member=is_member, is_copy=is_copy)

    def stop(self) -> None:
        """Start no further step."""
        self.turns.close()

    def set_aside(self) -> dict[str, str]:
        """Return the topics that no job can read, each with the reason."""
        return dict(self.hot_expiry.set_aside.reasons())

    def status(self) -> dict[str, Any]:
        """Return the figures for metrics and the admin page."""
        return {"archive": "off", **common_status(self.evict, self.expire.deleted, self.safe_clock, self.set_aside())}


def _nothing(names: Sequence[CommittedObject]) -> None:
    """Do nothing, for a broker without caches."""


def common_status(evict: Evict, deleted: int, clock: SafeClock, set_aside: Mapping[str, str]) -> dict[str, Any]:
    """Return the figures that brokers with and without an archive have."""
    return {
        "evicted_segments": evict.evicted,
        "deleted_objects": deleted,
        "clock": msgspec.to_builtins(clock.state()),
        "topics_set_aside": len(set_aside),
        "set_aside": set_aside,
    }
