"""What a broker keeps of its journal on its own disk: all that it knows of the archive; who it is, `identity` keeps.

    <state>/journal.checkpoint   a checkpoint as it stands in the store; absent until the first one
    <state>/packs/<seq>-<n>.pack the packs that it names, and perhaps some that it does not
    <state>/journal.mirror       `numbered_frames`, by the entry's number: the entries since that checkpoint; older
                                 ones may stand there and are passed over

A damaged or torn file costs a longer start, never a wrong one: the store has the truth.
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
    """The local copy is of another broker's journal."""


class LocalJournal:
    """The mirror of the journal on the local disk.

    A mirror that is torn or damaged is cut where it stops being sound: the store has the rest.
    """

    def __init__(self, directory: Path, disk: Disk) -> None:
        self._disk = disk
        self._directory = directory
        self._checkpoint_path = directory / "journal.checkpoint"
        self._mirror_path = directory / "journal.mirror"
        self._packs = directory / "packs"

    def replay(self, catalog: Catalog, broker: str, apply: Callable[[int, AnyEntry, bytes], None]) -> bytes | None:
        """Bring an empty catalog to where the mirror ends; returns the last entry's bytes, None without one.

        Raises OtherBroker.
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
        if not self._disk.exists(self._mirror_path):
            self._disk.write_atomic(self._mirror_path, frame(seq, entry))  # its name has to be on the disk, too
            return
        self._disk.append(self._mirror_path, frame(seq, entry))
        self._disk.fdatasync(self._mirror_path)

    def begin_at(self, checkpoint: bytes, through_seq: int, last: bytes, packs: Collection[PackName]) -> None:
        """The local copy goes on from a checkpoint; `last` is entry `through_seq`, by which a store is known again.

        `packs`: that it names; they are here. A crash between the two writes leaves entries that the checkpoint has
        already, one after them packs that it does not name.
        """
        kept = [(through_seq, last)]
        if self._disk.exists(self._mirror_path):
            mirrored = frames(self._disk.read(self._mirror_path))
            kept += [(seq, entry) for seq, entry, _ in mirrored if seq > through_seq]
        self._disk.write_atomic(self._checkpoint_path, checkpoint)
        self._disk.write_atomic(self._mirror_path, b"".join(frame(seq, entry) for seq, entry in kept))
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
