"""Files of a member's own state.

ha/member.json              JSON: `Kept`; replaced as a whole
ha/epochFileCheckpoint      the epochs of its log, in RocketMQ's format (`epoch_file`), and a .bak of it
ha/place                    created once; if its inode number differs from the one in member.json, the directory is a
                            copy

A copy has the same id and the same count of starts. Without this check, either could pass for the member that
acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

import msgspec

from broker.ha.member_events import SavedMember
from infra.disk.filesystem import Disk
from infra.disk.versioned_file import VersionedFile
from infra.loop.threads import SYSTEM_THREADS, Threads

P = ParamSpec("P")

DIRECTORY = "ha"
_NAME, _PLACE = "member.json", "place"


class MemberFileDamaged(ValueError):
    """The identity of this member is unreadable. It must not be guessed."""


class Kept(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Contents of member.json.

    `followed_epoch`: the master epoch for which the log was truncated last, so that the whole log is that master's.
    `log_name`: name of the log in the archive, as that master sent it; empty: it has none, or did not send it.

    `lacks_tables`: the tables of topics and groups are incomplete. Either the log began where its master's was evicted
    below, or it was truncated below changes that table files contain. A full copy of all tables has not arrived since.
    """

    version: int = 1
    place: int = 0
    followed_epoch: int = -1
    log_name: str = ""
    lacks_tables: bool = False
    saved: SavedMember = SavedMember()


class MemberFile:
    """Access to the files of a member. Each save is durable when it returns. Thread-safe."""

    def __init__(self, disk: Disk, root: Path, threads: Threads = SYSTEM_THREADS) -> None:
        self._disk = disk
        self.directory = root / DIRECTORY
        self._place = self.directory / _PLACE
        self._file = VersionedFile(disk, self.directory / _NAME, Kept, MemberFileDamaged)
        self._threads, self._writing = threads, threads.lock()
        self._kept = Kept()

    @property
    def is_there(self) -> bool:
        """Return whether this directory was a member's."""
        return self._file.exists

    @property
    def saved(self) -> SavedMember:
        """Return the state on the disk."""
        return self._kept.saved

    @property
    def followed_epoch(self) -> int:
        """Return the followed epoch; -1: none."""
        return self._kept.followed_epoch

    @property
    def log_name(self) -> str:
        """Return the name of the log; empty: unknown."""
        return self._kept.log_name

    @property
    def lacks_tables(self) -> bool:
        """Return whether tables are incomplete. Such a member must not be elected, because topics would be lost."""
        return self._kept.lacks_tables

    def load(self) -> bool:
        """Load the state. Return whether the directory is a copy of another. Raise MemberFileDamaged."""
        disk = self._disk
        disk.make_dirs(self.directory)
        if not disk.exists(self._place):
            disk.write_atomic(self._place, b"a copy of this file has another number\n")
        place = disk.number(self._place)
        self._kept = self._file.read() or Kept(place=place)
        is_copy = self._kept.place != place
        self._kept = msgspec.structs.replace(self._kept, place=place)
        return is_copy

    def save(self, saved: SavedMember) -> None:
        """Save the member's state."""
        with self._writing:
            self._write(msgspec.structs.replace(self._kept, saved=saved))

    def follows(self, master_epoch: int, log_name: str) -> None:
        """Record that the whole log is this master's."""
        with self._writing:
            kept = msgspec.structs.replace(
                self._kept, followed_epoch=master_epoch, log_name=log_name or self._kept.log_name
            )
            if kept != self._kept:
                self._write(kept)

    def tables_are_whole(self, whole: bool) -> None:
        """Record whether the tables are complete."""
        with self._writing:
            if self._kept.lacks_tables is whole:
                self._write(msgspec.structs.replace(self._kept, lacks_tables=not whole))

    async def in_thread(self, change: Callable[P, None], *arguments: P.args, **keywords: P.kwargs) -> None:
        """Run one of the changes above on a thread."""
        await self._threads.run(change, *arguments, **keywords)

    def _write(self, kept: Kept) -> None:
        self._file.write(kept)
        self._kept = kept
