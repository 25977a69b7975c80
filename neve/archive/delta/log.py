"""What a Delta log adds up to, read from a store: of tables that neve writes, whose commits and checkpoints are JSON.

A listing says which versions there are. The newest checkpoint is taken, and the commits behind it are applied; they are
dense. No `_last_checkpoint` is asked for, or written: nothing in the log is ever overwritten.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import msgspec

from neve.archive.delta.table import Action

_FILE = re.compile(r"(?P<version>\d{20})(?P<checkpoint>\.checkpoint\.[0-9a-f-]+)?\.json")
_ANY = re.compile(r"(?P<version>\d{20})\..+")
NO_VERSION = -1

Key = tuple[str, str]  # of a file in a table: its path, and which deletion vector it has


class ForeignTable(ValueError):
    """A Delta log that neve did not write, or that somebody else has written to."""


class Listed(Protocol):
    """An object as a listing names it."""

    @property
    def key(self) -> str: ...


class LogSource(Protocol):
    """What reading a log asks of a store; `get` raises FileNotFoundError where there is no object."""

    def get(self, key: str) -> bytes: ...

    def list(self, prefix: str) -> Iterable[Listed]: ...


class LogFile(NamedTuple):
    """A commit, or a checkpoint."""

    version: int
    is_checkpoint: bool
    key: str


class TableState:
    """What the commits up to `version` say."""

    def __init__(self) -> None:
        self.version = NO_VERSION
        self.protocol: dict[str, Any] | None = None
        self.metadata: dict[str, Any] | None = None
        self.transactions: dict[str, int] = {}  # application -> how far it is
        self.files: dict[Key, dict[str, Any]] = {}  # those that readers see: what their `add` says
        self.removed: dict[Key, dict[str, Any]] = {}
        self.since_checkpoint = 0  # commits

    def apply(self, version: int, actions: Iterable[Action]) -> None:
        """A commit's, or a checkpoint's. Raises ForeignTable."""
        for action in actions:
            for kind, told in action.items():
                try:
                    self._apply(kind, told)
                except (LookupError, TypeError) as error:
                    raise ForeignTable(
                        f"version {version} of its log has a {kind} without what it needs: {error!r}"
                    ) from error
        self.version = version

    def _apply(self, kind: str, told: dict[str, Any]) -> None:
        match kind:
            case "protocol":
                self.protocol = told
            case "metaData":
                self.metadata = told
            case "txn":
                self.transactions[told["appId"]] = told["version"]
            case "add":
                self.removed.pop(file_key(told), None)
                self.files[file_key(told)] = told
            case "remove":
                self.files.pop(file_key(told), None)
                self.removed[file_key(told)] = told
            case _:
                pass  # commitInfo, checkpointMetadata

    def of_broker(self, broker: str) -> dict[Key, dict[str, Any]]:
        """The files that readers see of one broker."""
        return {key: told for key, told in self.files.items() if _broker_of(told) == broker}

    def checkpoint(self, kept_since_ms: int) -> list[Action]:
        """All of it; of what was removed, what nobody looks at from this time on."""
        assert self.protocol is not None and self.metadata is not None
        return [
            {"checkpointMetadata": {"version": self.version}},
            {"protocol": self.protocol},
            {"metaData": self.metadata},
            *({"txn": {"appId": app, "version": at}} for app, at in sorted(self.transactions.items())),
            *({"add": {**told, "dataChange": False}} for _, told in sorted(self.files.items())),
            *(
                {"remove": {**told, "dataChange": False}}
                for _, told in sorted(self.removed.items())
                if told.get("deletionTimestamp") is None or told["deletionTimestamp"] >= kept_since_ms
            ),
        ]


def file_key(told: dict[str, Any]) -> Key:
    """By which a `remove` finds its `add`."""
    vector = told.get("deletionVector")
    return told["path"], "" if vector is None else vector["pathOrInlineDv"]


def _broker_of(added: dict[str, Any]) -> object:
    partition = added.get("partitionValues")
    return partition.get("broker") if isinstance(partition, dict) else None


def log_folder(root: str) -> str:
    """Listing this names the files of a table's log."""
    return f"{root}/_delta_log/"


def commit_key(root: str, version: int) -> str:
    """The name of a commit."""
    return f"{log_folder(root)}{version:020d}.json"


def checkpoint_file_key(root: str, version: int, name: str) -> str:
    """The name of a checkpoint; `name`: 32 hex digits that nobody else has."""
    uuid = "-".join((name[:8], name[8:12], name[12:16], name[16:20], name[20:]))
    return f"{log_folder(root)}{version:020d}.checkpoint.{uuid}.json"


def log_files(source: LogSource, root: str) -> list[LogFile]:
    """By version; of a commit and a checkpoint the commit first."""
    found = (parse_log_key(one.key) for one in source.list(log_folder(root)))
    return sorted(one for one in found if one is not None)


def parse_log_key(key: str) -> LogFile | None:
    """None for a file that neve does not write."""
    match = _FILE.fullmatch(key.rpartition("/")[2])
    return None if match is None else LogFile(int(match["version"]), match["checkpoint"] is not None, key)


def version_in(key: str) -> int | None:
    """Of any file in a log, whoever wrote it; None where it has none."""
    match = _ANY.fullmatch(key.rpartition("/")[2])
    return None if match is None else int(match["version"])


def decode_lines(data: bytes) -> Iterator[Action]:
    """A file of the log. Raises ForeignTable: it is none."""
    for line in data.splitlines():
        if line:
            try:
                yield msgspec.json.decode(line, type=dict[str, dict[str, Any]])
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ForeignTable(f"a line of its log can't be read: {error}") from error


def read_table(source: LogSource, root: str) -> TableState:
    """As its log stands; `version` is NO_VERSION where there is none.

    Raises:
        ForeignTable: commits are missing or damaged, or another program's table lies here.
        FileNotFoundError: a file of the log was deleted meanwhile; who reads again finds a newer checkpoint.
    """
    files = log_files(source, root)
    state = TableState()
    checkpoints = [one for one in files if one.is_checkpoint]
    if checkpoints:
        state.apply(checkpoints[-1].version, decode_lines(source.get(checkpoints[-1].key)))
    for one in files:
        if one.is_checkpoint or one.version <= state.version:
            continue
        if one.version != state.version + 1:
            raise ForeignTable(f"{log_folder(root)}: version {state.version + 1} is missing")
        state.apply(one.version, decode_lines(source.get(one.key)))
        state.since_checkpoint += 1
    return state
