"""Durable mark that a log diverged below the end of its archive.

    archive/overtaken.json    JSON: `Overtaken`; deleted together with the journal's local copy beside it

An Apache master that lost its log's tail assigns those offsets again, and the slave that archives its log follows it.
If archiving continued, offsets would be in the archive twice. Therefore archiving, expiry and eviction of archived
segments stop until an operator starts another archive.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from infra.disk.filesystem import Disk
from infra.disk.versioned_file import VersionedFile
from infra.process.startup import EXIT_FAILED, StartupError

NAME = "overtaken.json"
#: Instruction for operators to start another archive.
ANOTHER_ARCHIVE = "give storeUrl another prefix, and move the directory `archive` in storePathRootDir away"


class Overtaken(msgspec.Struct, frozen=True):
    """Divergence of a log: it resumed at offset `at`, while the archive may reach up to offset `reaches`."""

    at: int
    reaches: int
    since_ms: int
    why: str

    @property
    def text(self) -> str:
        """Return the cause and the remedy for operators."""
        return (
            f"{self.why}, and the archive reaches {self.reaches}: above {self.at} it is of another log. To archive the "
            f"log as it is now begin another archive: {ANOTHER_ARCHIVE}"
        )


class OvertakenFile:
    """File of the mark."""

    def __init__(self, disk: Disk, archive_files: Path) -> None:
        self._disk, self._directory = disk, archive_files
        self._file = VersionedFile(disk, archive_files / NAME, Overtaken, partial(StartupError, exit_code=EXIT_FAILED))

    def load(self) -> Overtaken | None:
        """Return the mark, or None. Raises StartupError if the file is unreadable."""
        return self._file.read()

    def save(self, overtaken: Overtaken) -> None:
        """Write the mark; it is on disk when this returns."""
        self._disk.make_dirs(self._directory)
        self._file.write(overtaken)
