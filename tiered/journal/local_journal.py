"""A broker's local copy of its journal: its complete knowledge of the archive. `identity` stores the ownership.

    <state>/journal.checkpoint   a checkpoint as in the store; absent before the first one
    <state>/packs/<seq>-<n>.pack the packs that it references, and possibly others
    <state>/journal.mirror       `numbered_frames`, numbered by entry: the entries since that checkpoint; older ones may
                                 precede them and are ignored

A damaged or torn file makes the start longer, never wrong, because the store is authoritative.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from infra.disk.filesystem import Disk
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.topic_parts import topics_in
from neve.archive.format.checkpoint import PackName, decode_checkpoint
from neve.archive.format.envelope import Damaged
from neve.archive.format.journal import AnyEntry, Epoch, decode_entry
from neve.archive.format.keys import pack_file
from tiered.journal.numbered_frames import frame, frames

log = logging.getLogger(__name__)


class OtherBroker(ValueError):
    """The local copy belongs to another broker's journal."""


class LocalJournal:
    """The copy of the journal on the local disk.

    A torn or damaged mirror is truncated at the first invalid frame, because the store has the rest.
    """

    def __init__(self, directory: Path, disk: Disk) -> None:
        self._disk = disk
        self._directory = directory
        self._checkpoint_path = directory / "journal.checkpoint"
        self._mirror_path = directory / "journal.mirror"
        self._packs = directory / "packs"

    def replay(self, catalog: Catalog, broker: str, apply: Callable[[int, AnyEntry, bytes], None]) -> bytes | None:
        """Load the checkpoint and the mirror into an empty catalog.

        Args:
            catalog: receives the checkpoint.
            broker: the expected owner.
            apply: applies an entry, given its number and bytes.

        Returns:
            The bytes of the last entry; None if there is none.

        Raises:
            OtherBroker: the copy belongs to another broker.
        """
        self._load_checkpoint(catalog, broker)
        if not self._disk.exists(self._mirror_path):
            return None
        data = self._disk.read(self._mirror_path)
        position, last = 0, None
        for seq, entry, end in frames(data):
            if seq > catalog.next_seq:
                break
            if seq == catalog.next_seq:
                apply(seq, _of(broker, decode_entry(entry)), entry)
            position, last = end, entry if seq == catalog.next_seq - 1 else last
        if position < len(data):
            log.warning("torn bytes at the end dropped: path=%s bytes=%d", self._mirror_path, len(data) - position)
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
            log.warning("local checkpoint ignored: path=%s error=%s", self._checkpoint_path, error)
            self._drop_packs(())  # any of them may be damaged, and the store has them

    # ---- packs

    def has_pack(self, name: PackName, size: int) -> bool:
        """Return whether a pack of this size exists locally."""
        path = self._packs / pack_file(*name)
        return self._disk.exists(path) and self._disk.size(path) == size

    def keep_pack(self, name: PackName, data: bytes) -> None:
        """Store a pack; called before the checkpoint that references it."""
        self._disk.make_dirs(self._packs)
        self._disk.write_atomic(self._packs / pack_file(*name), data)

    def read_pack(self, name: PackName) -> bytes:
        """Return the content of a pack. Raises FileNotFoundError."""
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
        """Append an entry; durable on return."""
        if not self._disk.exists(self._mirror_path):
            self._disk.write_atomic(self._mirror_path, frame(seq, entry))  # makes the directory entry durable as well
            return
        self._disk.append(self._mirror_path, frame(seq, entry))
        self._disk.fdatasync(self._mirror_path)

    def begin_at(self, checkpoint: bytes, through_seq: int, last: bytes, packs: Collection[PackName]) -> None:
        """Restart the local copy at a checkpoint.

        A crash between the two writes leaves entries that the checkpoint contains; a crash after them leaves
        unreferenced packs.

        Args:
            checkpoint: the content of the checkpoint.
            through_seq: its last entry.
            last: the bytes of that entry, which identify the store at the next start.
            packs: the packs that it references, all stored locally.
        """
        kept = [(through_seq, last)]
        if self._disk.exists(self._mirror_path):
            mirrored = frames(self._disk.read(self._mirror_path))
            kept += [(seq, entry) for seq, entry, _ in mirrored if seq > through_seq]
        self._disk.write_atomic(self._checkpoint_path, checkpoint)
        self._disk.write_atomic(self._mirror_path, b"".join(frame(seq, entry) for seq, entry in kept))
        self._drop_packs(packs)


def renamed(before: str, now: str) -> str:
    """Explain why a broker refuses the data directory of another."""
    return (
        f"the data directory has the archive of broker {before}, this is {now}: name it {before} again, or "
        "use another data directory"
    )


def _of(broker: str, entry: AnyEntry) -> AnyEntry:
    if isinstance(entry, Epoch) and entry.broker not in {"", broker}:
        raise OtherBroker(entry.broker)
    return entry
