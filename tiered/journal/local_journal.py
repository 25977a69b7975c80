"""What a broker keeps of its journal on its own disk: who it is, and all that it knows of the archive.

    <state>/identity.msgpack     {version, log_uuid, epoch, high, named, …}: synced before each INTENT is put
    <state>/journal.checkpoint   a checkpoint as it stands in the store; absent until the first one
    <state>/packs/<seq>-<n>.pack the packs that it names, and perhaps some that it does not
    <state>/journal.mirror       [u32 length][u32 crc32 of seq and entry][u64 seq][entry] …, big endian:
                                 the entries since that checkpoint; older ones may stand there and are passed over

A damaged or torn file costs a longer start, never a wrong one: the store has the truth.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import msgspec

from infra.disk import Disk
from neve.archive.catalog import Catalog
from neve.archive.checkpoint import PackName, decode_checkpoint
from neve.archive.journal import FORMAT_VERSION, AnyEntry, Epoch, NewerFormat, decode_entry
from neve.archive.keys import pack_file
from neve.archive.sealed import Damaged
from neve.archive.topic_parts import topics_in

log = logging.getLogger(__name__)
_FRAME = struct.Struct(">IIQ")

assert _FRAME.size == 16, "no padding: the mirror is read with the same layout"


class Identity(msgspec.Struct):
    """Who this data directory is for its archive, synced before each INTENT: epoch, `high` (journal seq), names given
    out.

    `log_uuid` ties it to the log beside it: another log under the same name may not write the archive.
    """

    version: int
    log_uuid: str
    epoch: int
    high: int  # A: the highest CommitLog offset of any INTENT
    named: dict[str, dict[int, int]]  # topic -> queue -> highest offset that any entry named
    offline_from: int | None = None  # the log's end when a start first had to do without the store
    broker: str = ""  # whose archive it is; empty: written before this was noted
    heard: int = 0  # the highest epoch that is known to stand in the store
    archive_uuid: str = ""  # of a broker set's log, where another member's directory gave it its name; empty: log_uuid


class OtherBroker(ValueError):
    """The local copy is of another broker's journal."""


class LocalJournal:
    """The identity and the mirror of the journal on the local disk.

    A mirror that is torn or damaged is cut where it stops being sound: the store has the rest.
    """

    def __init__(self, directory: Path, disk: Disk) -> None:
        self._disk = disk
        self._directory = directory
        self._identity_path = directory / "identity.msgpack"
        self._checkpoint_path = directory / "journal.checkpoint"
        self._mirror_path = directory / "journal.mirror"
        self._packs = directory / "packs"

    def read_identity(self) -> Identity | None:
        self._disk.make_dirs(self._directory)
        if not self._disk.exists(self._identity_path):
            return None
        identity = msgspec.msgpack.decode(self._disk.read(self._identity_path), type=Identity)
        if identity.version > FORMAT_VERSION:
            raise NewerFormat(f"{self._identity_path} is of format {identity.version}")
        return identity

    def write_identity(self, identity: Identity) -> None:
        self._disk.write_atomic(self._identity_path, msgspec.msgpack.encode(identity))

    def replay(self, catalog: Catalog, broker: str, apply: Callable[[int, AnyEntry], None]) -> bytes | None:
        """Bring an empty catalog to where the mirror ends; returns the last entry's bytes, None without one.

        Raises OtherBroker.
        """
        self._load_checkpoint(catalog, broker)
        if not self._disk.exists(self._mirror_path):
            return None
        data = self._disk.read(self._mirror_path)
        position, last = 0, None
        for seq, entry, end in _frames(data):
            if seq > catalog.next_seq:
                break
            if seq == catalog.next_seq:
                apply(seq, _of(broker, decode_entry(entry)))
            position, last = end, entry if seq == catalog.next_seq - 1 else last
        if position < len(data):
            log.warning("%s: %d torn bytes at the end dropped", self._mirror_path, len(data) - position)
            self._disk.write_atomic(self._mirror_path, data[:position])
        return last

    def _load_checkpoint(self, catalog: Catalog, broker: str) -> None:
        if not self._disk.exists(self._checkpoint_path):
            return
        data = self._disk.read(self._checkpoint_path)
        try:
            found = decode_checkpoint(data)
            if found.broker != broker:
                raise OtherBroker(found.broker)
            catalog.restore(found, topics_in(found, self.read_pack))
        except (Damaged, FileNotFoundError) as error:
            log.warning("%s is passed over: %s", self._checkpoint_path, error)
            self._drop_packs(())  # which of them is damaged is not known: the store has them

    # ---- packs

    def has_pack(self, name: PackName, size: int) -> bool:
        """As far as its size tells."""
        path = self._packs / pack_file(*name)
        return self._disk.exists(path) and self._disk.size(path) == size

    def keep_pack(self, name: PackName, data: bytes) -> None:
        """Before a checkpoint that names it."""
        self._disk.make_dirs(self._packs)
        self._disk.write_atomic(self._packs / pack_file(*name), data)

    def read_pack(self, name: PackName) -> bytes:
        """Raises FileNotFoundError."""
        return self._disk.read(self._packs / pack_file(*name))

    def _drop_packs(self, kept: Collection[PackName]) -> None:
        if not self._disk.exists(self._packs):
            return
        files = {pack_file(*name) for name in kept}
        for name in self._disk.list_dir(self._packs):
            if name not in files:
                self._disk.remove(self._packs / name)

    # ---- entries

    def append(self, seq: int, entry: bytes) -> None:
        self._disk.append(self._mirror_path, _frame(seq, entry))
        self._disk.fdatasync(self._mirror_path)

    def begin_at(self, checkpoint: bytes, through_seq: int, last: bytes, packs: Collection[PackName]) -> None:
        """The local copy goes on from a checkpoint; `last` is entry `through_seq`, by which a store is known again.

        `packs`: that it names; they are here. A crash between the two writes leaves entries that the checkpoint has
        already, one after them packs that it does not name.
        """
        kept = [(through_seq, last)]
        if self._disk.exists(self._mirror_path):
            frames = _frames(self._disk.read(self._mirror_path))
            kept += [(seq, entry) for seq, entry, _ in frames if seq > through_seq]
        self._disk.write_atomic(self._checkpoint_path, checkpoint)
        self._disk.write_atomic(self._mirror_path, b"".join(_frame(seq, entry) for seq, entry in kept))
        self._drop_packs(packs)


def renamed(before: str, now: str) -> str:
    """Why the data directory of one broker is refused to another."""
    return (
        f"the data directory has the archive of broker {before}, this is {now}: name it {before} again, or "
        "use another data directory"
    )


def _of(broker: str, entry: AnyEntry) -> AnyEntry:
    if isinstance(entry, Epoch) and entry.broker not in {"", broker}:
        raise OtherBroker(entry.broker)
    return entry


def _frame(seq: int, entry: bytes) -> bytes:
    return _FRAME.pack(len(entry), zlib.crc32(seq.to_bytes(8, "big") + entry), seq) + entry


def _frames(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """(number, entry, end of the frame) up to the first that is torn."""
    position = 0
    while position + _FRAME.size <= len(data):
        length, crc, seq = _FRAME.unpack_from(data, position)
        entry = data[position + _FRAME.size : position + _FRAME.size + length]
        if len(entry) < length or zlib.crc32(seq.to_bytes(8, "big") + entry) != crc:
            return
        position += _FRAME.size + length
        yield seq, entry, position
