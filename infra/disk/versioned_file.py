"""A state file: one JSON document with a format number, replaced as a whole.

A server never guesses at a file: an unreadable one, or one that a newer release wrote, is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from infra.disk.filesystem import Disk

T = TypeVar("T", bound=msgspec.Struct)
#: The newest format that this release reads, of every file.
NEWEST = 1


class _Head(msgspec.Struct):
    version: int = 1
    neve_format: int = msgspec.field(default=1, name="neveFormat")


class VersionedFile(Generic[T]):
    """A document of the type `shape`. Its field `version` or `neveFormat`, by default 1, is the format number."""

    def __init__(
        self,
        disk: Disk,
        path: Path,
        shape: type[T],
        error: Callable[[str], Exception],
        *,
        indent: bool = False,
    ) -> None:
        """
        Args:
            error: makes the exception that `read` raises from its text.
            indent: write one value per line, for operators who read the file.
        """
        self.path = path
        self._disk, self._shape, self._error, self._indent = disk, shape, error, indent

    @property
    def exists(self) -> bool:
        return self._disk.exists(self.path)

    def read(self) -> T | None:
        """Return the document, or None if there is no file. Raises what `error` makes."""
        if not self.exists:
            return None
        data = self._disk.read(self.path)
        try:
            head = msgspec.json.decode(data, type=_Head)
            found = max(head.version, head.neve_format)
            if found <= NEWEST:
                return msgspec.json.decode(data, type=self._shape)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._error(f"{self.path} cannot be read: {error}") from error
        raise self._error(
            f"{self.path} has format {found}, this release reads formats up to {NEWEST}: "
            "start the release that wrote it"
        )

    def encode(self, document: T) -> bytes:
        """Return the content of the file, for `replace` on another thread."""
        data = msgspec.json.encode(document)
        return msgspec.json.format(data, indent=1) + b"\n" if self._indent else data

    def replace(self, content: bytes) -> None:
        """Replace the file; the new content is durable when this returns."""
        self._disk.write_atomic(self.path, content)

    def write(self, document: T) -> None:
        self.replace(self.encode(document))

    def remove(self) -> None:
        """Remove the file; it does not come back after a crash."""
        self._disk.remove(self.path)
        self._disk.fsync_dir(self.path.parent)
