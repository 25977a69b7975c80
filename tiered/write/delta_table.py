"""One broker's writer of a topic's Delta table log.

A commit is an object that is put only if it is absent, under the next version. Its `txn` action has the number of the
journal entry that it reflects. From it, a process after a crash or on another machine learns how far the table is
complete. The content of a commit is determined by the journal and the table before it. So no lock is needed: the first
writer may be any process.

Other brokers of the topic write to the same log. If one of them takes a version first, this broker uses the next one:
each broker's commits concern only its own objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from infra.objects.store import NotFound, ObjectStore, PreconditionFailed
from neve.archive.delta.changes import Change
from neve.archive.delta.log import (
    NO_VERSION,
    ForeignTable,
    Key,
    checkpoint_file_key,
    commit_key,
    decode_lines,
    file_key,
    log_folder,
    parse_log_key,
    read_table,
    version_in,
)
from neve.archive.delta.table import (
    PROTOCOL,
    Action,
    VisibleFile,
    add,
    app_id,
    encode_lines,
    is_locked,
    metadata,
    remove,
    table_root,
)
from neve.entropy import Entropy, system_entropy, unique_name

#: Commits between two checkpoints. Tables with many files have more, because a checkpoint names all files.
CHECKPOINT_COMMITS = 100
_FILES_A_COMMIT = 10
#: Files per commit when a table is brought up to date, which limits the memory.
BATCH = 5_000
_HINT = "_last_checkpoint"  # other programs may write this file; neve does not, and readers don't need it


class CommitConflict(Exception):
    """Another process writes this broker's journal to the table, or the known part of its log was cleaned up.

    A caller that reads the log again can continue.
    """


class DeltaTable:
    """A topic's table. `synced`: the journal entry through which the table is complete; -1 for none."""

    def __init__(
        self, store: ObjectStore, topic: str, broker: str, *, prefix: str = "", entropy: Entropy = system_entropy
    ) -> None:
        """Read the log. Raises ForeignTable, CommitConflict, and the store's errors."""
        self._store, self.topic, self._broker = store, topic, broker
        self.root, self._app, self._entropy = table_root(prefix, topic), app_id(broker), entropy
        try:
            state = read_table(store, self.root)
        except FileNotFoundError as error:
            raise CommitConflict(f"{self.root}: its log was cleaned up meanwhile: {error}") from error
        if state.version != NO_VERSION and not is_locked(state.protocol or {}):
            raise ForeignTable(f"{log_folder(self.root)} is of another program's table")
        self.version, self.synced = state.version, state.transactions.get(self._app, -1)
        self._since_checkpoint, self._file_count = state.since_checkpoint, len(state.files)
        self._files: dict[Key, dict[str, Any]] | None = state.of_broker(broker)  # None after `level`
        self.commits = 0  # made by this process

    @property
    def is_level(self) -> bool:
        """Whether the table's files have been compared with the journal."""
        return self._files is None

    def level(self, files: Iterable[VisibleFile], seq: int, time_ms: int) -> None:
        """Make the table's files of this broker equal to `files`, the state after entry `seq`; writes only differences.

        If files are removed, it is unknown which rows of the added ones were in the table before. The commit then
        states a change of data, so that a reader of changes stops instead of reading rows twice or missing some.
        """
        assert self._files is not None and seq >= self.synced
        wanted = {file_key(action["add"]): action for action in (self._add(file, True) for file in files)}
        dropped = [former for key, former in self._files.items() if key not in wanted]
        added = [action for key, action in wanted.items() if key not in self._files]
        removed = [remove(former, time_ms=time_ms, data_change=True) for former in dropped]
        if removed or added:
            # A file that is removed and added again with other hidden rows must be in a single commit.
            whole = [*removed, *added]
            step = len(whole) if removed else BATCH
            parts = [whole[at : at + step] for at in range(0, len(whole), step)]
            for number, part in enumerate(parts):
                is_last = number == len(parts) - 1
                self._commit(part, seq if is_last else self.synced, time_ms, "LEVEL")
            self._file_count += len(added) - len(removed)
        self._files = None

    def commit_change(self, change: Change, seq: int, time_ms: int, entry: str) -> None:
        """Commit the changes of one entry. Rows that move to other files or expire are no change of data to Delta."""
        assert self.is_level and seq > self.synced
        was = [remove(self._add(file, False)["add"], time_ms=time_ms, data_change=False) for file in change.removed]
        self._commit([*was, *(self._add(file, change.is_new) for file in change.added)], seq, time_ms, entry)
        self._file_count += len(change.added) - len(change.removed)

    def _add(self, file: VisibleFile, data_change: bool) -> Action:
        return add(self.root, self._broker, file, data_change=data_change)

    def _commit(self, actions: Sequence[Action], seq: int, time_ms: int, entry: str) -> None:
        """Commit under the next free version. After any error the outcome is unknown until the log is read again.

        Raises CommitConflict, ForeignTable, and the store's errors.
        """
        data = self._encoded(actions, seq, time_ms, entry)
        while True:
            key = commit_key(self.root, self.version + 1)
            try:
                self._store.put(key, data, if_absent=True)
                break
            except PreconditionFailed:
                existing = self._got(key)
            if existing == data:
                break  # written by an earlier attempt
            is_first = self.version == NO_VERSION
            self._take_notice(existing, key)
            if is_first:
                data = self._encoded(actions, seq, time_ms, entry)
        self._check_position()
        self.version, self.synced = self.version + 1, seq
        self.commits += 1
        self._since_checkpoint += 1

    def _encoded(self, actions: Sequence[Action], seq: int, time_ms: int, entry: str) -> bytes:
        head: list[Action] = [
            {
                "commitInfo": {
                    "timestamp": time_ms,
                    "operation": entry,
                    "operationParameters": {"broker": self._broker, "entry": str(seq)},
                    "engineInfo": "neve",
                }
            }
        ]
        if self.version == NO_VERSION:
            head += [PROTOCOL, metadata(self.topic, _uuid(unique_name(self._entropy)), time_ms)]
        if seq >= 0:
            head.append({"txn": {"appId": self._app, "version": seq, "lastUpdated": time_ms}})
        return encode_lines([*head, *actions])

    def _got(self, key: str) -> bytes:
        try:
            return self._store.get(key)
        except NotFound as error:
            raise CommitConflict(f"{key} existed, and does not any longer") from error

    def _take_notice(self, data: bytes, key: str) -> None:
        """Check a commit that another writer has put under the version of ours, and continue after it."""
        for action in decode_lines(data):
            if "protocol" in action and not is_locked(action["protocol"]):
                raise ForeignTable(f"{key} is of another program's table")
            if action.get("txn", {}).get("appId") == self._app or _broker_of(action) == self._broker:
                raise CommitConflict(f"{key} has entries of {self._broker}'s journal, and is not of this process")
        self.version += 1
        self._since_checkpoint += 1

    def _check_position(self) -> None:
        """Check that the version before ours exists: then none after it has been cleaned up, and ours is the next one.

        A process that was suspended or idle for longer than old versions are kept might otherwise have written a
        version that no reader finds. Before the first version, it checks instead that no later version exists.
        """
        if self.version == NO_VERSION:
            behind = (version_in(one.key) for one in self._store.list(log_folder(self.root)))
            if any(version is not None and version > 0 for version in behind):
                raise CommitConflict(f"{self.root}: its log was started by another program")
            return
        try:
            self._store.head(commit_key(self.root, self.version))
        except NotFound as error:
            raise CommitConflict(f"{self.root}: version {self.version} has been cleaned up") from error

    # ---- checkpoints and clean-up

    @property
    def is_checkpoint_due(self) -> bool:
        return self._since_checkpoint >= max(CHECKPOINT_COMMITS, self._file_count // _FILES_A_COMMIT)

    def checkpoint(self, kept_since_ms: int) -> None:
        """Write a checkpoint of the whole table, so that readers need no earlier version.

        `kept_since_ms`: files that were removed before this time are left out.
        """
        state = read_table(self._store, self.root)  # includes all brokers
        key = checkpoint_file_key(self.root, state.version, unique_name(self._entropy))
        self._store.put(key, encode_lines(state.checkpoint(kept_since_ms)), if_absent=True)
        self._since_checkpoint, self._file_count = 0, len(state.files)

    def clean_up(self, until_ms: int) -> int:
        """Delete versions that are not needed to read the table as of this time or later; returns how many objects.

        Keeps everything from the newest checkpoint that existed then. Deletes the lowest versions first.
        """
        listed = sorted(self._store.list(log_folder(self.root)), key=lambda one: one.key)
        known = [parse_log_key(one.key) for one in listed if one.modified_ms <= until_ms]
        kept_from = max((one.version for one in known if one is not None and one.is_checkpoint), default=0)
        due = [one.key for one in listed if (version := version_in(one.key)) is not None and version < kept_from]
        hint = log_folder(self.root) + _HINT
        if due and any(one.key == hint for one in listed):
            due.insert(0, hint)  # it may name one of the deleted versions
        for key in due:
            self._store.delete(key)
        return len(due)


def _broker_of(action: Action) -> str | None:
    """Return the broker whose journal a commit by neve reflects; None for other programs' commits."""
    parameters = action.get("commitInfo", {}).get("operationParameters") or {}
    broker = parameters.get("broker")
    return broker if isinstance(broker, str) else None


def _uuid(name: str) -> str:
    return "-".join((name[:8], name[8:12], name[12:16], name[16:20], name[20:]))
