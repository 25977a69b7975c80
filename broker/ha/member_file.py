"""What a member keeps on its disk about itself.

ha/member.json              JSON: `Kept`; replaced whole
ha/epochFileCheckpoint      the epochs of its log, in RocketMQ's format (`epoch_file`), and a .bak of it
ha/place                    made once; a file that says another number of itself than member.json does lies in a copy of
                            the directory

A copy has the same id and counts its starts alike: both might be taken for the one that acknowledged.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from broker.ha.member_events import Saved
from infra.disk.filesystem import Disk
from infra.disk.versioned_file import VersionedFile
from infra.loop.locks import NewLock, new_lock

DIRECTORY = "ha"
_NAME, _PLACE = "member.json", "place"


class MemberFileDamaged(ValueError):
    """Who this member is can't be read; it must not be guessed."""


class Kept(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """`followed_epoch`: the master epoch for which the log was cut last, so that all of it is that master's.
    `log_name`: by which the archive knows the log, as that master told it; empty: it has none, or did not say.

    `lacks_tables`: the log began where its master's had let go of what was below, and with that of changes of topics
    and groups; or it was cut below changes that files of tables hold. All tables have not come since.
    """

    version: int = 1
    place: int = 0
    followed_epoch: int = -1
    log_name: str = ""
    lacks_tables: bool = False
    saved: Saved = Saved()


class MemberFile:
    """Each save is on the disk when it returns. Of any thread."""

    def __init__(self, disk: Disk, root: Path, new_lock: NewLock = new_lock) -> None:
        self._disk = disk
        self.directory = root / DIRECTORY
        self._place = self.directory / _PLACE
        self._file = VersionedFile(disk, self.directory / _NAME, Kept, MemberFileDamaged)
        self._writing = new_lock()
        self._kept = Kept()

    @property
    def is_there(self) -> bool:
        """Whether this directory was a member's."""
        return self._file.exists

    @property
    def saved(self) -> Saved:
        """As it is on the disk."""
        return self._kept.saved

    @property
    def followed_epoch(self) -> int:
        """-1: none."""
        return self._kept.followed_epoch

    @property
    def log_name(self) -> str:
        """Empty: none was told."""
        return self._kept.log_name

    @property
    def lacks_tables(self) -> bool:
        """Such a member must not be elected: topics would be gone."""
        return self._kept.lacks_tables

    def load(self) -> bool:
        """What was kept; whether the directory is a copy of the one that it was kept in. Raises MemberFileDamaged."""
        disk = self._disk
        disk.make_dirs(self.directory)
        if not disk.exists(self._place):
            disk.write_atomic(self._place, b"a copy of this file has another number\n")
        place = disk.number(self._place)
        self._kept = self._file.read() or Kept(place=place)
        is_copy = self._kept.place != place
        self._kept = msgspec.structs.replace(self._kept, place=place)
        return is_copy

    def save(self, saved: Saved) -> None:
        """What the member says."""
        with self._writing:
            self._write(msgspec.structs.replace(self._kept, saved=saved))

    def follows(self, master_epoch: int, log_name: str) -> None:
        """All that is in the log is of this master's."""
        with self._writing:
            kept = msgspec.structs.replace(
                self._kept, followed_epoch=master_epoch, log_name=log_name or self._kept.log_name
            )
            if kept != self._kept:
                self._write(kept)

    def tables_are_whole(self, whole: bool) -> None:
        """The log is begun without them, or was cut below what they hold; or all of them have come."""
        with self._writing:
            if self._kept.lacks_tables is whole:
                self._write(msgspec.structs.replace(self._kept, lacks_tables=not whole))

    def _write(self, kept: Kept) -> None:
        self._file.write(kept)
        self._kept = kept
