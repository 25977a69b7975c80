"""Who a data directory is for its archive, and which offsets it has named: the whole now and then, and what came since.

    <state>/identity.msgpack   {version, log_uuid, epoch, high, named, …, serial}: whole
    <state>/identity.since     `numbered_frames`: {high, heard, named} of an entry each, by the serial of that

An entry costs what it names, not what all that came before it named. Either is synced when its call returns. Frames of
another serial are older than the whole, which has what they say: a crash between the two files leaves them. A torn one
was never relied upon. Where an addition failed, and at each start, the whole is written before anything is added.

Version 1 had no frames: a neve that knows no other would miss what they name, and refuses version 2.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from infra.disk.filesystem import Disk
from neve.archive.format.journal import NewerFormat
from tiered.journal.named_topics import Lasts, raise_lasts
from tiered.journal.numbered_frames import frame, frames

log = logging.getLogger(__name__)

VERSION = 2
_ADDED_MIN = 1 << 16  # bytes that are added at least before the whole is written again


class Identity(msgspec.Struct):
    """What is known.

    `log_uuid` ties it to the log beside it: another log under the same name may not write the archive.
    """

    log_uuid: str
    epoch: int
    high: int  # A: the highest CommitLog offset of any INTENT
    named: Lasts  # the highest offset that any entry named
    offline_from: int | None = None  # the log's end when a start first had to do without the store
    broker: str = ""  # whose archive it is; empty: written before this was noted
    heard: int = 0  # the highest epoch that is known to stand in the store
    archive_uuid: str = ""  # of a broker set's log, where another member's directory gave it its name; empty: log_uuid
    serial: int = 0  # of the whole; another one each time that it is written
    version: int = VERSION


class Since(msgspec.Struct):
    """What one entry adds to it; of what it has no field for, a change is written with the whole."""

    high: int
    heard: int
    named: Lasts


class IdentityFile:
    """Of one thread at a time."""

    def __init__(self, directory: Path, disk: Disk) -> None:
        self._directory, self._disk = directory, disk
        self._whole, self._since = directory / "identity.msgpack", directory / "identity.since"
        self._serial = 0
        self._room = 0  # bytes that may be added; below 0: the whole comes first

    def read(self) -> Identity | None:
        """None: there is none yet. Raises NewerFormat."""
        self._disk.make_dirs(self._directory)
        if not self._disk.exists(self._whole):
            return None
        identity = msgspec.msgpack.decode(self._disk.read(self._whole), type=Identity)
        if identity.version > VERSION:
            raise NewerFormat(f"{self._whole} is of format {identity.version}, this program knows up to {VERSION}")
        self._serial, self._room = identity.serial, -1
        if self._disk.exists(self._since):
            self._add_since(identity)
        return identity

    def _add_since(self, identity: Identity) -> None:
        data, sound = self._disk.read(self._since), 0
        for serial, content, sound in frames(data):  # noqa: B007 - the last one is told below
            if serial == identity.serial:
                since = msgspec.msgpack.decode(content, type=Since)
                identity.high = max(identity.high, since.high)
                identity.heard = max(identity.heard, since.heard)
                for topic, lasts in since.named.items():
                    raise_lasts(identity.named.setdefault(topic, {}), lasts)
        if sound < len(data):
            log.warning("%s: %d torn bytes at the end passed over", self._since, len(data) - sound)

    @property
    def takes_more(self) -> bool:
        """Whether something may be added; else the whole has to be written."""
        return self._room > 0

    def add(self, since: Since) -> None:
        """Durable when this returns. Where it fails the whole is to be written."""
        assert self.takes_more
        added = frame(self._serial, msgspec.msgpack.encode(since))
        room, self._room = self._room - len(added), -1
        self._disk.append(self._since, added)
        self._disk.fdatasync(self._since)
        self._room = room

    def write(self, identity: Identity) -> None:
        """The whole, which has all that was added. Durable when this returns."""
        self._room = -1
        identity.serial = self._serial = self._serial + 1
        data = msgspec.msgpack.encode(identity)
        self._disk.write_atomic(self._whole, data)
        self._disk.write_atomic(self._since, b"")  # so that its name is on the disk before anything is added
        self._room = max(len(data), _ADDED_MIN)  # so that what is written in all stays in proportion to what came
