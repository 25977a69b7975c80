"""Deleted topics and the archive: what it has of one must not come back, and no offset is given twice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from broker.archiving.outside import InThread
from broker.archiving.reach import Reach
from infra.disk import Disk
from infra.object_store.protocol import ObjectStoreError
from neve.archive.journal import Topic
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode
from tiered.journal.errors import Fenced
from tiered.journal.writer import JournalWriter


class Tombstones(Protocol):
    """What a topic's deletion asks."""

    def has_named(self, topic: str) -> bool:
        """Whether the archive knows offsets of a topic, or may soon."""
        ...

    def begin_again(self, topic: str) -> bool:
        """Whether a topic that comes again may give its offsets again; the caller deletes it in the same step."""
        ...

    async def record(self, topic: str, minimums: Mapping[int, int]) -> None:
        """The archive hides what a deleted topic has below these offsets too: it must not come back.

        All of them are on the local disk, in the log or as a deleted queue's end: the entry may stand though this
        fails, and no start that can't read it may give one of them again.
        """
        ...


class NoTombstones:
    """Of a broker without an archive. One that is switched off may know offsets: nobody can ask it."""

    def __init__(self, disk: Disk, local: Path) -> None:
        """`local`: where an archive keeps its local copy, where there is one."""
        self._disk, self._local = disk, local

    def has_named(self, topic: str) -> bool:
        return self._disk.exists(self._local)

    def begin_again(self, topic: str) -> bool:
        return not self.has_named(topic)

    async def record(self, topic: str, minimums: Mapping[int, int]) -> None:
        """There is no journal to record it in."""


class JournalTombstones:
    """By the journal."""

    def __init__(self, journal: JournalWriter, in_thread: InThread, reach: Reach) -> None:
        """`reach`: what a member of a broker set must not name yet, the archive's next look at what expires adds."""
        self._journal, self._in_thread, self._reach = journal, in_thread, reach

    def has_named(self, topic: str) -> bool:
        return self._journal.has_named(topic)

    def begin_again(self, topic: str) -> bool:
        return self._journal.begin_again(topic)

    async def record(self, topic: str, minimums: Mapping[int, int]) -> None:
        journal, within = self._journal, self._reach.offsets_within(topic, minimums)
        standing = journal.catalog.topic_entry(topic) if within != minimums else None
        if standing is not None:  # the newest counts: it must say no less
            within = {queue: max(offset, standing.minimums.get(queue, 0)) for queue, offset in within.items()}
            if standing.deleted and within == standing.minimums:
                return
        entry = Topic(topic=topic, deleted=True, minimums=within)
        try:
            await self._in_thread(journal.append, entry)
        except (ObjectStoreError, Fenced) as error:
            raise BrokerError(
                ResponseCode.SYSTEM_BUSY, f"topic {topic} can't be deleted now: the archive can't record it: {error}"
            ) from error
