"""Job that writes Delta tables: the transaction log of each topic's table follows the journal, entry by entry.

The only state is in these logs: each records the journal entry through which it is complete. A start loads the topics
from a checkpoint of the journal that is no newer than any log. It reads on from there without writing, and writes a
table from where its log ends. After any failure the job starts again in this way. No checkpoint may be old enough if
a table was just enabled or if the broker was off for long. Then one commit adds the missing files and removes the
superfluous ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from infra.clock import Clock
from infra.objects.store import ObjectStore
from lifecycle.safe_clock import ClocksDisagree
from neve.archive.catalog.journal_reader import checkpointed_topics, checkpoints, following
from neve.archive.delta.changes import Change, MirroredTopics
from neve.archive.delta.log import NO_VERSION, ForeignTable
from neve.archive.format.journal import AnyEntry, EntriesDeleted, anchor
from neve.entropy import Entropy, system_entropy
from tiered.write.delta_table import CommitConflict, DeltaTable
from tiered.write.set_aside import SetAside
from tiered.write.symlink_manifest import SymlinkManifests

log = logging.getLogger(__name__)


class FollowedJournal(Protocol):
    """The journal to follow. It is read from its store, as by any reader."""

    @property
    def store(self) -> ObjectStore: ...

    @property
    def prefix(self) -> str: ...

    @property
    def broker(self) -> str: ...


class DeltaRules(Protocol):
    """The configuration of the job."""

    @property
    def delta_topics(self) -> Sequence[str]: ...

    @property
    def journal_retention_ms(self) -> int: ...


class DeltaTables:
    """The job. It needs no turn and no epoch, because it writes only logs that follow from the journal's entries."""

    def __init__(
        self,
        journal: FollowedJournal,
        rules: Callable[[], DeltaRules],
        clock: Clock,
        safe_ms: Callable[[], int],
        *,
        is_closed: Callable[[], bool] = lambda: False,
        entropy: Entropy = system_entropy,
    ) -> None:
        """`safe_ms`: the safe time, for the deletion of old versions. `is_closed`: whether the broker is stopping."""
        self._journal, self._rules, self._clock, self._safe_ms = journal, rules, clock, safe_ms
        self._is_closed, self._entropy = is_closed, entropy
        self._wanted: tuple[str, ...] = ()
        self._topics: MirroredTopics | None = None
        self._tables: dict[str, DeltaTable | None] = {}  # None: skipped until the job starts again
        self._ahead: dict[int, list[str]] = {}  # entry -> tables that are complete through it already
        self._manifests: SymlinkManifests | None = None  # None: not compared with the journal yet
        self.set_aside = SetAside("written to its Delta table")
        self.commits = 0  # since the start

    def behind(self, next_seq: int) -> int:
        """Return how many journal entries below `next_seq` are not in the tables, as far as known; 0 without tables."""
        if not self._rules().delta_topics:
            return 0
        return max(next_seq - (0 if self._topics is None else self._topics.next_seq), 0)

    def run(self) -> int:
        """Write new journal entries to the tables; returns the number of commits.

        Raises the store's errors, and those of an unreadable journal; the next run starts from the stored logs.
        """
        before, wanted = self.commits, tuple(self._rules().delta_topics)
        if wanted != self._wanted:
            self._forget()
        if not wanted:
            return 0
        try:
            topics = self._topics or self._begin(wanted)
            changed = self._follow(topics)
            self._write_manifests(topics)
            self._keep_short(changed)
        except (EntriesDeleted, CommitConflict) as error:
            self._forget()
            log.info("reading the logs of the Delta tables again: %s", error)
        except BaseException:
            self._forget()
            raise
        return self.commits - before

    def _forget(self) -> None:
        self._wanted, self._topics, self._tables, self._ahead = (), None, {}, {}
        self._manifests = None

    def _begin(self, wanted: tuple[str, ...]) -> MirroredTopics:
        """Load the newest checkpoint that is older than the last entry of every table; else the oldest checkpoint."""
        journal = self._journal

        def is_wanted(topic: str) -> bool:
            return is_among(topic, wanted)

        def taken(through: int | None) -> MirroredTopics:
            next_seq, topics, anchor = checkpointed_topics(
                journal.store, journal.broker, journal.prefix, is_wanted, through=through
            )
            return MirroredTopics(is_wanted, next_seq, topics, anchor)

        found = taken(None)
        for topic in found.topics():
            self._open(topic)
        synced_seqs = [
            table.synced for table in self._tables.values() if table is not None and table.version != NO_VERSION
        ]
        if min(synced_seqs, default=found.next_seq) < found.next_seq - 1:
            there = checkpoints(journal.store, journal.broker, journal.prefix)
            found = taken(max(min(synced_seqs), there[-1]))
        for topic, table in list(self._tables.items()):
            if table is None:
                continue
            if table.synced < found.next_seq:
                self._level(topic, found, found.next_seq - 1, self._clock.now_ms())
            else:
                self._ahead.setdefault(table.synced, []).append(topic)
        self._wanted, self._topics = wanted, found
        return found

    def _open(self, topic: str) -> DeltaTable | None:
        journal = self._journal
        try:
            table = DeltaTable(journal.store, topic, journal.broker, prefix=journal.prefix, entropy=self._entropy)
        except ForeignTable as error:
            self.set_aside.note(topic, error)
            self._tables[topic] = None
            return None
        self.set_aside.clear(topic)
        self._tables[topic] = table
        return table

    def _follow(self, topics: MirroredTopics) -> list[str]:
        """Follow the journal to its end; returns the topics whose tables changed."""
        journal, changed = self._journal, set[str]()
        were_ahead = list(self._ahead)
        entries = following(journal.store, journal.broker, journal.prefix, topics.next_seq, topics.anchor)
        for seq, entry, data in entries:
            if self._is_closed():
                return sorted(changed)
            for topic, change in topics.apply(seq, entry, anchor(data)).items():
                changed.add(topic)
                if self._manifests is not None:
                    self._manifests.change(topic, change.removed, change.added)
                if topic not in self._tables:
                    self._meet(topic, topics, seq, entry.time_ms)
                else:
                    self._add(topic, change, seq, entry)
            for topic in self._ahead.pop(seq, ()):
                self._level(topic, topics, seq, entry.time_ms)
        for seq in were_ahead:  # their logs are beyond the end of this journal
            for topic in self._ahead.pop(seq, ()):
                self._put_aside(topic, ForeignTable(f"its log has entry {seq}, which this journal does not have"))
        return sorted(changed)

    def _meet(self, topic: str, topics: MirroredTopics, seq: int, time_ms: int) -> None:
        """Open the table of a topic that had no object before."""
        table = self._open(topic)
        if table is None:
            return
        if table.synced > seq:
            self._ahead.setdefault(table.synced, []).append(topic)
        else:
            self._level(topic, topics, seq, time_ms)

    def _add(self, topic: str, change: Change, seq: int, entry: AnyEntry) -> None:
        table = self._tables[topic]
        if table is None or not table.is_level:
            return
        try:
            table.commit_change(change, seq, entry.time_ms, type(entry).__name__.upper())
            self.commits += 1
        except ForeignTable as error:
            self._put_aside(topic, error)

    def _level(self, topic: str, topics: MirroredTopics, seq: int, time_ms: int) -> None:
        table = self._tables[topic]
        assert table is not None
        before = table.commits
        try:
            table.level(topics.files(topic), seq, time_ms)
        except ForeignTable as error:
            self._put_aside(topic, error)
        self.commits += table.commits - before

    def _put_aside(self, topic: str, error: ForeignTable) -> None:
        self.set_aside.note(topic, error)
        self._tables[topic] = None

    def _write_manifests(self, topics: MirroredTopics) -> None:
        """Write the symlink manifests of the topics that changed; the first time, of all topics that differ."""
        journal, manifests = self._journal, self._manifests
        if manifests is None:
            manifests = SymlinkManifests(journal.store, journal.broker, journal.prefix)
            differing, write = topics.topics(), manifests.rewrite
        else:
            if self._is_closed():
                return
            differing, write = manifests.flush(), manifests.add_missing
        for topic in differing:
            if self._is_closed():
                return
            write(topic, topics.files(topic))
        self._manifests = manifests

    def _keep_short(self, changed: Iterable[str]) -> None:
        retention = self._rules().journal_retention_ms
        for topic in changed:
            table = self._tables[topic]
            if table is None or not table.is_checkpoint_due or self._is_closed():
                continue
            table.checkpoint(self._clock.now_ms() - retention)
            try:
                table.clean_up(self._safe_ms() - retention)
            except ClocksDisagree as error:
                log.warning("topic %s: old files of its Delta log not deleted: %s", topic, error)


def is_among(topic: str, wanted: Sequence[str]) -> bool:
    """Whether a name in `wanted` is the topic, or is a prefix of it followed by `*`."""
    return any(topic == pattern or (pattern.endswith("*") and topic.startswith(pattern[:-1])) for pattern in wanted)
