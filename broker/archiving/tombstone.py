"""Deleted topics and the archive: what it has of one must not come back, and no offset is given twice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from broker.archiving.outside import InThread
from infra.disk.filesystem import Disk
from infra.objects.store import ObjectStoreError
from neve.archive.format.journal import Topic
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
        fails, and no start that can't read it may give one of them again. In a broker set the deletion is confirmed.
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

    def __init__(self, journal: JournalWriter, in_thread: InThread, *, is_member: bool) -> None:
        """`in_thread`: one after the other, as the journal takes them, and apart from what saves the broker's files: a
        store that hangs keeps a thread for minutes. `is_member`: of a broker set."""
        self._journal, self._in_thread, self._is_member = journal, in_thread, is_member

    def has_named(self, topic: str) -> bool:
        return topic in self._journal.named

    def begin_again(self, topic: str) -> bool:
        return self._journal.begin_again(topic)

    async def record(self, topic: str, minimums: Mapping[int, int]) -> None:
        if self._is_member:
            minimums = self._named_of(topic, minimums)
            standing = self._journal.catalog.topic_entry(topic)
            if not any(minimums.values()) or (standing and standing.deleted and standing.minimums == minimums):
                return
        entry = Topic(topic=topic, deleted=True, minimums=dict(minimums))
        try:
            await self._in_thread(self._journal.append, entry)
        except (ObjectStoreError, Fenced) as error:
            raise BrokerError(
                ResponseCode.SYSTEM_BUSY, f"topic {topic} can't be deleted now: the archive can't record it: {error}"
            ) from error

    def _named_of(self, topic: str, minimums: Mapping[int, int]) -> dict[int, int]:
        """Who may be elected has what the archive has named, and may give what lies above that again: it must not be
        named. The rest the archive's next look at what expires adds, once all have it.
        """
        catalog = self._journal.catalog
        named = catalog.named_offsets(topic)
        return {
            queue: max(min(offset, named.get(queue, -1) + 1), catalog.recorded_minimum(topic, queue))
            for queue, offset in minimums.items()
        }
