"""That an archive reaches above a place from which its log went on anew: written down, and for good.

    archive/overtaken.json    JSON: `Overtaken`; beside the journal's local copy, and gone with it

An Apache master that lost its log's tail gives those offsets again, and the slave that archives its log follows it.
Were it to go on archiving, offsets would be in the archive twice. So nothing is archived any more, expired or evicted
as archived, until an operator begins another archive.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from infra.disk.filesystem import Disk
from infra.disk.versioned_file import VersionedFile
from infra.process.startup import EXIT_FAILED, StartupError

NAME = "overtaken.json"
#: What an operator does to begin one.
ANOTHER_ARCHIVE = "give storeUrl another prefix, and move the directory `archive` in storePathRootDir away"


class Overtaken(msgspec.Struct, frozen=True):
    """See the module. `at`: where the log went on; `reaches`: up to where the archive may have what was there."""

    at: int
    reaches: int
    since_ms: int
    why: str

    @property
    def text(self) -> str:
        """For operators, and what they can do."""
        return (
            f"{self.why}, and the archive reaches {self.reaches}: above {self.at} it is of another log. To archive the "
            f"log as it is now begin another archive: {ANOTHER_ARCHIVE}"
        )


class OvertakenFile:
    """Where it is written down."""

    def __init__(self, disk: Disk, archive_files: Path) -> None:
        self._disk, self._directory = disk, archive_files
        self._file = VersionedFile(disk, archive_files / NAME, Overtaken, partial(StartupError, exit_code=EXIT_FAILED))

    def load(self) -> Overtaken | None:
        """Return the mark, or None. Raises StartupError if the file is unreadable."""
        return self._file.read()

    def save(self, overtaken: Overtaken) -> None:
        """On the disk when it returns."""
        self._disk.make_dirs(self._directory)
        self._file.write(overtaken)
