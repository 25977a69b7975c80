"""The log of one topic's Delta table, as one broker writes to it.

A commit is an object that is put if it is absent, under the next version. It carries a `txn` of its broker with the
number of the journal's entry that it tells: so whoever goes on, after a crash or on another machine, finds how far the
table is. What it says follows from the journal and from the table before it: it needs no lock, whoever writes it first.

Other brokers of the topic write to the same log. Where one was first, ours goes under the version after it: each speaks
of its own objects alone.
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

#: Commits from one checkpoint to the next; of a table of many files more, since a checkpoint names them all.
CHECKPOINT_COMMITS = 100
_FILES_A_COMMIT = 10
#: Files in one commit of who brings a table up to date: what is made in memory at a time.
BATCH = 5_000
_HINT = "_last_checkpoint"  # another program may write one; neve does not, and readers do without


class Overtaken(Exception):
    """Another process tells this broker's journal in this table, or what we knew of its log has been cleaned up.

    Whoever reads the log again can go on.
    """


class DeltaTable:
    """`synced`: the journal's entry through which the table says what the journal says; −1: of none."""

    def __init__(
        self, store: ObjectStore, topic: str, broker: str, *, prefix: str = "", entropy: Entropy = system_entropy
    ) -> None:
        """Reads the log. Raises ForeignTable, and the store's errors."""
        self._store, self.topic, self._broker = store, topic, broker
        self.root, self._app, self._entropy = table_root(prefix, topic), app_id(broker), entropy
        try:
            state = read_table(store, self.root)
        except FileNotFoundError as error:
            raise Overtaken(f"{self.root}: its log was cleaned up meanwhile: {error}") from error
        if state.version != NO_VERSION and not is_locked(state.protocol or {}):
            raise ForeignTable(f"{log_folder(self.root)} is of another program's table")
        self.version, self.synced = state.version, state.transactions.get(self._app, -1)
        self._since_checkpoint, self._file_count = state.since_checkpoint, len(state.files)
        self._files: dict[Key, dict[str, Any]] | None = state.of_broker(broker)  # until it is level
        self.commits = 0  # made by this process

    @property
    def is_level(self) -> bool:
        """Whether its files have been held against the journal."""
        return self._files is None

    def level(self, files: Iterable[VisibleFile], seq: int, time_ms: int) -> None:
        """Make the table's files of this broker these, as they are after entry `seq`; nothing is written if they are.

        Where files have to go for that, it is not told which of the rows that come were there before: the commit says
        that data changes, so that who follows the table stops, rather than take rows twice or miss any.
        """
        assert self._files is not None and seq >= self.synced
        wanted = {file_key(action["add"]): action for action in (self._add(file, True) for file in files)}
        gone = [told for key, told in self._files.items() if key not in wanted]
        came = [action for key, action in wanted.items() if key not in self._files]
        removed = [remove(told, time_ms=time_ms, data_change=True) for told in gone]
        if removed or came:
            # A file that goes and comes with other rows hidden does so in one commit.
            whole = [*removed, *came]
            step = len(whole) if removed else BATCH
            parts = [whole[at : at + step] for at in range(0, len(whole), step)]
            for number, part in enumerate(parts):
                is_last = number == len(parts) - 1
                self._commit(part, seq if is_last else self.synced, time_ms, "LEVEL")
            self._file_count += len(came) - len(removed)
        self._files = None

    def tell(self, change: Change, seq: int, time_ms: int, entry: str) -> None:
        """What an entry changes. Rows that come in other files, or go by their age, are no change of data to Delta."""
        assert self.is_level and seq > self.synced
        was = [remove(self._add(file, False)["add"], time_ms=time_ms, data_change=False) for file in change.gone]
        self._commit([*was, *(self._add(file, change.is_new) for file in change.came)], seq, time_ms, entry)
        self._file_count += len(change.came) - len(change.gone)

    def _add(self, file: VisibleFile, data_change: bool) -> Action:
        return add(self.root, self._broker, file, data_change=data_change)

    def _commit(self, actions: Sequence[Action], seq: int, time_ms: int, entry: str) -> None:
        """Raises Overtaken, and the store's errors: whether it stands is then known by who reads the log again."""
        data = self._encoded(actions, seq, time_ms, entry)
        while True:
            key = commit_key(self.root, self.version + 1)
            try:
                self._store.put(key, data, if_absent=True)
                break
            except PreconditionFailed:
                stands = self._got(key)
            if stands == data:
                break  # by an earlier attempt
            is_first = self.version == NO_VERSION
            self._take_notice(stands, key)
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
            raise Overtaken(f"{key} stood, and does not any more") from error

    def _take_notice(self, data: bytes, key: str) -> None:
        """Of a commit that somebody else has put where ours was to be."""
        for action in decode_lines(data):
            if "protocol" in action and not is_locked(action["protocol"]):
                raise ForeignTable(f"{key} is of another program's table")
            if action.get("txn", {}).get("appId") == self._app or _broker_of(action) == self._broker:
                raise Overtaken(f"{key} tells entries of {self._broker}'s journal, and is not of this process")
        self.version += 1
        self._since_checkpoint += 1

    def _check_position(self) -> None:
        """The version before ours stands, so nothing from there on has been cleaned up, and ours is the log's next.

        A process that slept, or had nothing to tell, for as long as old versions are kept may else have put one where
        no reader looks. Before the first version none stands: there it is asked whether any stands behind it.
        """
        if self.version == NO_VERSION:
            behind = (version_in(one.key) for one in self._store.list(log_folder(self.root)))
            if any(version is not None and version > 0 for version in behind):
                raise Overtaken(f"{self.root}: its log was begun by others meanwhile")
            return
        try:
            self._store.head(commit_key(self.root, self.version))
        except NotFound as error:
            raise Overtaken(f"{self.root}: version {self.version} has been cleaned up") from error

    # ---- keeping the log short

    @property
    def is_checkpoint_due(self) -> bool:
        return self._since_checkpoint >= max(CHECKPOINT_COMMITS, self._file_count // _FILES_A_COMMIT)

    def checkpoint(self, kept_since_ms: int) -> None:
        """Write all that the log says, so that nobody has to read what is before.

        `kept_since_ms`: what was removed before this is not told any more.
        """
        state = read_table(self._store, self.root)  # of all brokers
        key = checkpoint_file_key(self.root, state.version, unique_name(self._entropy))
        self._store.put(key, encode_lines(state.checkpoint(kept_since_ms)), if_absent=True)
        self._since_checkpoint, self._file_count = 0, len(state.files)

    def clean_up(self, until_ms: int) -> int:
        """Delete what nobody needs who asks for the table as it was at this time, or later; how many objects.

        All is kept from the newest checkpoint on that was there by then; the lowest versions go first.
        """
        listed = sorted(self._store.list(log_folder(self.root)), key=lambda one: one.key)
        known = [parse_log_key(one.key) for one in listed if one.modified_ms <= until_ms]
        kept_from = max((one.version for one in known if one is not None and one.is_checkpoint), default=0)
        due = [one.key for one in listed if (version := version_in(one.key)) is not None and version < kept_from]
        hint = log_folder(self.root) + _HINT
        if due and any(one.key == hint for one in listed):
            due.insert(0, hint)  # it may name one of those that go
        for key in due:
            self._store.delete(key)
        return len(due)


def _broker_of(action: Action) -> str | None:
    """Whose journal a commit of neve's tells."""
    parameters = action.get("commitInfo", {}).get("operationParameters") or {}
    broker = parameters.get("broker")
    return broker if isinstance(broker, str) else None


def _uuid(name: str) -> str:
    return "-".join((name[:8], name[8:12], name[12:16], name[16:20], name[20:]))
