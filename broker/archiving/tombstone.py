"""Tombstones of deleted topics: the archive hides their messages, and no offset is assigned twice."""

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
    """Interface of the archive to topic deletion."""

    def has_named(self, topic: str) -> bool:
        """Return whether the archive names offsets of a topic, or may soon."""
        ...

    def begin_again(self, topic: str) -> bool:
        """Return whether a topic created again may start at offset 0; the caller deletes it in the same loop step."""
        ...

    async def record(self, topic: str, minimums: Mapping[int, int]) -> None:
        """Record that the archive hides a deleted topic's messages below these offsets.

        All these offsets have to be on the local disk, in the log or as a deleted queue's end. The entry may be written
        even if this fails, and a start that can't read it must not assign any of them again. In a broker set, the
        deletion has to be confirmed. Raises BrokerError if the archive can't record it.
        """
        ...


class NoTombstones:
    """Tombstones of a broker without an archive. If one was switched off, the offsets that it names are unknown."""

    def __init__(self, disk: Disk, local: Path) -> None:
        """Create it; `local` is the directory of an archive's local files, if there is one."""
        self._disk, self._local = disk, local

    def has_named(self, topic: str) -> bool:
        return self._disk.exists(self._local)

    def begin_again(self, topic: str) -> bool:
        return not self.has_named(topic)

    async def record(self, topic: str, minimums: Mapping[int, int]) -> None:
        """Do nothing: there is no journal."""


class JournalTombstones:
    """Tombstones in the journal."""

    def __init__(self, journal: JournalWriter, in_thread: InThread, *, is_member: bool) -> None:
        """Create it.

        `in_thread` runs calls one after the other, in a thread apart from those that save the broker's files: a store
        that hangs blocks a thread for minutes. `is_member`: the broker is a member of a broker set.
        """
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
        """Limit tombstone offsets in a broker set to those that the archive names.

        Electable members have all messages that the archive names. They may assign higher offsets again, so a tombstone
        must not cover those. The archive's next expiry run adds the rest, once all members have it.
        """
        catalog = self._journal.catalog
        named = catalog.named_offsets(topic)
        return {
            queue: max(min(offset, named.get(queue, -1) + 1), catalog.recorded_minimum(topic, queue))
            for queue, offset in minimums.items()
        }
