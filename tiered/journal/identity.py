"""The identity of a data directory toward its archive, and the offsets that its journal entries have named.

    <state>/identity.msgpack   {version, log_uuid, epoch, high, named, …, serial}: a snapshot
    <state>/identity.since     `numbered_frames`: {high, heard, named} of one entry each, numbered by the serial

A frame costs what its entry names, not what all earlier entries named. Each write is synced before its call returns.
Frames with another serial are older than the snapshot, which contains them: a crash between the two files leaves such
frames. A torn frame was never relied upon. After a failed addition, and at each start, the next write is a snapshot.
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

VERSION = 1
_ADDED_MIN = 1 << 16  # bytes of additions before a new snapshot, at least


class ArchiveIdentity(msgspec.Struct):
    """The snapshot.

    `log_uuid` ties it to the log beside it: another log under the same broker name may not write the archive.
    """

    broker: str
    log_uuid: str
    epoch: int  # the epoch that the last start tried to take
    high: int  # the highest CommitLog offset of any INTENT
    named: Lasts  # the highest offset that any entry named
    offline_from: int | None = None  # the log's end at the first start without a reachable store
    heard: int = 0  # the highest epoch known to be in the store
    archive_uuid: str = ""  # the log's name in the archive, if another member of the broker set chose it
    serial: int = 0  # changes with each snapshot
    version: int = VERSION


class Since(msgspec.Struct):
    """The additions of one entry; a change of any other field needs a snapshot."""

    high: int
    heard: int
    named: Lasts


class IdentityFile:
    """The two files; used by one thread at a time."""

    def __init__(self, directory: Path, disk: Disk) -> None:
        self._directory, self._disk = directory, disk
        self._whole, self._since = directory / "identity.msgpack", directory / "identity.since"
        self._serial = 0
        self._room = 0  # bytes that may be added before the next snapshot; negative: it is due

    def read(self) -> ArchiveIdentity | None:
        """Return the snapshot with all additions; None before the first one. Raises NewerFormat."""
        self._disk.make_dirs(self._directory)
        if not self._disk.exists(self._whole):
            return None
        identity = msgspec.msgpack.decode(self._disk.read(self._whole), type=ArchiveIdentity)
        if identity.version > VERSION:
            raise NewerFormat(f"{self._whole} has format {identity.version}: this program knows up to {VERSION}")
        self._serial, self._room = identity.serial, -1
        if self._disk.exists(self._since):
            self._add_since(identity)
        return identity

    def _add_since(self, identity: ArchiveIdentity) -> None:
        data, sound = self._disk.read(self._since), 0
        for serial, content, sound in frames(data):  # noqa: B007 - logged below
            if serial == identity.serial:
                since = msgspec.msgpack.decode(content, type=Since)
                identity.high = max(identity.high, since.high)
                identity.heard = max(identity.heard, since.heard)
                for topic, lasts in since.named.items():
                    raise_lasts(identity.named.setdefault(topic, {}), lasts)
        if sound < len(data):
            log.warning("torn bytes at the end ignored: path=%s bytes=%d", self._since, len(data) - sound)

    @property
    def takes_more(self) -> bool:
        """Whether an addition is allowed; otherwise the caller writes a snapshot."""
        return self._room > 0

    def add(self, since: Since) -> None:
        """Append an addition; it is durable on return. After a failure the caller writes a snapshot."""
        assert self.takes_more
        added = frame(self._serial, msgspec.msgpack.encode(since))
        room, self._room = self._room - len(added), -1
        self._disk.append(self._since, added)
        self._disk.fdatasync(self._since)
        self._room = room

    def write(self, identity: ArchiveIdentity) -> None:
        """Write a snapshot that contains all additions; it is durable on return."""
        self._room = -1
        identity.serial = self._serial = self._serial + 1
        data = msgspec.msgpack.encode(identity)
        self._disk.write_atomic(self._whole, data)
        self._disk.write_atomic(self._since, b"")  # the directory entry is durable before the first addition
        self._room = max(len(data), _ADDED_MIN)  # keeps the bytes written proportional to the bytes added
