"""The catalog of a broker's archive: apply the entries of its journal in order, then query it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from neve.archive.catalog.catalog_reader import CatalogReader, ObjectTotals
from neve.archive.catalog.entry_changes import TopicChange, topic_changes
from neve.archive.catalog.lazy_topics import LazyTopics
from neve.archive.catalog.queue_runs import GapHit, Location
from neve.archive.catalog.topic_catalog import TopicCatalog
from neve.archive.catalog.topic_parts import Packed, pack, packed_already
from neve.archive.format.checkpoint import CheckpointHead, JournalMarks, PackName, encode_head
from neve.archive.format.journal import NO_CHECKPOINT, AnyEntry, Checkpoint, Commit, Epoch, Forget

__all__ = ["Catalog", "GapHit", "Location", "ObjectTotals", "OutOfOrder", "WrittenCheckpoint"]


class OutOfOrder(ValueError):
    """An entry was applied whose number does not follow the last one."""


class WrittenCheckpoint(NamedTuple):
    """A checkpoint whose packs are stored, and whose head is not yet."""

    through_seq: int
    content: bytes  # of the head
    packed: Packed


class Catalog(CatalogReader):
    """A catalog that one thread changes.

    The cost of an entry depends on what it changes, not on the size of the catalog: a broker's loop queries the
    catalog while an entry of fifty thousand objects is applied.
    """

    def __init__(self) -> None:
        super().__init__()
        # Topics remember their places in packs as of this checkpoint; other checkpoints must not refer to those places.
        self._packed_at = NO_CHECKPOINT
        self._packs: dict[PackName, int] = {}

    # ---- entries

    def apply(self, seq: int, entry: AnyEntry, anchor: bytes = b"") -> None:
        """Apply entry `seq`, whose object has this anchor. Raises OutOfOrder."""
        with self._lock:
            if seq != self.next_seq:
                raise OutOfOrder(f"entry {seq} does not follow {self.next_seq - 1}")
            self.next_seq = seq + 1
            self.anchor = anchor
            self.rounds.apply(entry)
            match entry:
                case Epoch():
                    self._apply_epoch(entry)
                case Checkpoint():
                    self.checkpoint = entry.through_seq
                case Forget():
                    self._remove(entry.topics)
                case _:
                    lowest = self.rounds.lowest_starts(entry.round) if isinstance(entry, Commit) else {}
                    for change in topic_changes(entry, self._keys_by_topic, lowest):
                        self._change(change)

    def _apply_epoch(self, entry: Epoch) -> None:
        # Master epochs of different logs are not comparable.
        known = self.master_epoch if entry.log_uuid == self.log_uuid else 0
        self.epoch, self.owner, self.log_uuid = entry.epoch, entry.owner, entry.log_uuid
        self.master_epoch = max(known, entry.master_epoch)

    def _remove(self, topics: Iterable[str]) -> None:
        """Remove topics of which nothing is left; every follower has applied the same entries."""
        for topic in topics:
            found = self._topics.pop(topic, None)
            if found is not None:
                self._object_count -= found.count
                self._gap_count -= len(found.gaps)
            if self._lazy is not None:
                self._lazy.forget(topic)

    def _change(self, change: TopicChange) -> None:
        if self._lazy is not None and change.topic in self._lazy:
            self._lazy.change(change.topic, change.apply)
            return
        found = self._topics.get(change.topic)
        if found is None:
            found = self._topics[change.topic] = TopicCatalog(change.topic)
        objects, gaps = found.count, len(found.gaps)
        found.own = None  # its part in the checkpoint is no longer current
        change.apply(found)
        self._object_count += found.count - objects
        self._gap_count += len(found.gaps) - gaps

    # ---- checkpoints

    def write_checkpoint(self, broker: str, put: Callable[[int, bytes], None]) -> WrittenCheckpoint:
        """Write the packs of a checkpoint after the last applied entry, and return its head.

        Parts that have not changed since the newest checkpoint stay in its packs. Only the thread that applies entries
        may call this.

        Args:
            broker: the owner of the archive.
            put: stores a pack, given its number and content.
        """
        assert self._lazy is None, "a lazily loaded catalog writes no checkpoint"
        topics = [self._topics[topic] for topic in sorted(self._topics)]
        if self._packed_at == self.next_seq - 1:
            packed = packed_already(topics, self._packs)  # only the CHECKPOINT entry is missing
        else:
            known = self._packs if self.checkpoint == self._packed_at else {}
            packed = pack(topics, known, self.next_seq - 1, put)
        rows = (one.row() for one in packed.topics)
        content = encode_head(self.marks(broker), packed.sizes.items(), rows, self.anchor)
        return WrittenCheckpoint(self.next_seq - 1, content, packed)

    def adopt_checkpoint(self, written: WrittenCheckpoint) -> None:
        """Let later checkpoints refer to this one, whose head is stored now; no entry was applied since."""
        assert written.through_seq == self.next_seq - 1, "no entry was applied since"
        written.packed.adopt()
        self._packed_at, self._packs = written.through_seq, written.packed.sizes

    def marks(self, broker: str) -> JournalMarks:
        """Return the state of the journal without its topics."""
        rounds = self.rounds
        return JournalMarks(
            broker=broker,
            through_seq=self.next_seq - 1,
            epoch=self.epoch,
            owner=self.owner,
            log_uuid=self.log_uuid,
            master_epoch=self.master_epoch,
            last_round=rounds.last_round,
            checkpoint=self.checkpoint,
            open=rounds.open_intents(),
            intent_end=rounds.intent_end,
            rewrites=rounds.open_rewrites(),
            last_rewrite=rounds.last_rewrite,
        )

    def restore(self, head: CheckpointHead, topics: Iterable[TopicCatalog] | LazyTopics = ()) -> None:
        """Replace the content with that of a checkpoint; concurrent readers see it change in one step.

        Args:
            head: the checkpoint.
            topics: all topics of the head; or LazyTopics, which load a topic when a reader asks for it and then raise
                the store's errors to that reader.

        Raises:
            OutOfOrder: the checkpoint is older than the catalog.
            Damaged: a topic is damaged. The catalog is unchanged, as after any other error of loading a topic.
        """
        made = Catalog()
        made.next_seq = head.through_seq + 1
        made.epoch, made.owner, made.log_uuid = head.epoch, head.owner, head.log_uuid
        made.master_epoch, made.checkpoint, made.anchor = head.master_epoch, head.checkpoint, head.entry
        made.rounds.load(head)
        made.rounds.lock = self._lock
        if isinstance(topics, LazyTopics):
            made._lazy = topics
        else:
            for one in topics:
                made._topics[one.topic] = one
                made._object_count += one.count
                made._gap_count += len(one.gaps)
            made._packed_at, made._packs = head.through_seq, head.sizes()
        del made._lock
        with self._lock:
            if head.through_seq < self.next_seq - 1:
                raise OutOfOrder(f"checkpoint {head.through_seq} is older than entry {self.next_seq - 1}")
            vars(self).update(vars(made))
