"""Read Delta logs that neve writes, whose commits and checkpoints are JSON, from a store.

A listing shows the versions. The newest checkpoint is loaded, and the dense commits behind it are applied. Neither
reading nor writing uses `_last_checkpoint`: no object of the log is ever overwritten.
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

Key = tuple[str, str]  # of a file in a table: its path and its deletion vector


class ForeignTable(ValueError):
    """A Delta log that neve did not write, or that another program has written to."""


class ListedFile(Protocol):
    """An object in a listing."""

    @property
    def key(self) -> str: ...


class DeltaLogSource(Protocol):
    """A store to read from; `get` raises FileNotFoundError if there is no such object."""

    def get(self, key: str) -> bytes: ...

    def list(self, prefix: str) -> Iterable[ListedFile]: ...


class DeltaLogFile(NamedTuple):
    """A commit or a checkpoint."""

    version: int
    is_checkpoint: bool
    key: str


class TableState:
    """The state of a table after the commits up to `version`."""

    def __init__(self) -> None:
        self.version = NO_VERSION
        self.protocol: dict[str, Any] | None = None
        self.metadata: dict[str, Any] | None = None
        self.transactions: dict[str, int] = {}  # application -> its last transaction
        self.files: dict[Key, dict[str, Any]] = {}  # the `add` of each file in view
        self.removed: dict[Key, dict[str, Any]] = {}
        self.since_checkpoint = 0  # number of commits

    def apply(self, version: int, actions: Iterable[Action]) -> None:
        """Apply the actions of a commit or a checkpoint. Raises ForeignTable."""
        for action in actions:
            for kind, content in action.items():
                try:
                    self._apply(kind, content)
                except (LookupError, TypeError) as error:
                    raise ForeignTable(
                        f"version {version} of its log has an incomplete {kind} action: {error!r}"
                    ) from error
        self.version = version

    def _apply(self, kind: str, content: dict[str, Any]) -> None:
        match kind:
            case "protocol":
                self.protocol = content
            case "metaData":
                self.metadata = content
            case "txn":
                self.transactions[content["appId"]] = content["version"]
            case "add":
                self.removed.pop(file_key(content), None)
                self.files[file_key(content)] = content
            case "remove":
                self.files.pop(file_key(content), None)
                self.removed[file_key(content)] = content
            case _:
                pass  # commitInfo, checkpointMetadata

    def of_broker(self, broker: str) -> dict[Key, dict[str, Any]]:
        """Return the files in view of one broker."""
        return {key: content for key, content in self.files.items() if _broker_of(content) == broker}

    def checkpoint(self, kept_since_ms: int) -> list[Action]:
        """Return the actions of a checkpoint; removed files are included if they were removed after `kept_since_ms`."""
        assert self.protocol is not None and self.metadata is not None
        return [
            {"checkpointMetadata": {"version": self.version}},
            {"protocol": self.protocol},
            {"metaData": self.metadata},
            *({"txn": {"appId": app, "version": at}} for app, at in sorted(self.transactions.items())),
            *({"add": {**content, "dataChange": False}} for _, content in sorted(self.files.items())),
            *(
                {"remove": {**content, "dataChange": False}}
                for _, content in sorted(self.removed.items())
                if content.get("deletionTimestamp") is None or content["deletionTimestamp"] >= kept_since_ms
            ),
        ]


def file_key(content: dict[str, Any]) -> Key:
    """Return the key that connects a `remove` with its `add`."""
    vector = content.get("deletionVector")
    return content["path"], "" if vector is None else vector["pathOrInlineDv"]


def _broker_of(added: dict[str, Any]) -> object:
    partition = added.get("partitionValues")
    return partition.get("broker") if isinstance(partition, dict) else None


def log_folder(root: str) -> str:
    """Return the prefix whose listing shows the files of a table's log."""
    return f"{root}/_delta_log/"


def commit_key(root: str, version: int) -> str:
    """Return the key of a commit."""
    return f"{log_folder(root)}{version:020d}.json"


def checkpoint_file_key(root: str, version: int, name: str) -> str:
    """Return the key of a checkpoint; `name` is 32 unique hex digits."""
    uuid = "-".join((name[:8], name[8:12], name[12:16], name[16:20], name[20:]))
    return f"{log_folder(root)}{version:020d}.checkpoint.{uuid}.json"


def log_files(source: DeltaLogSource, root: str) -> list[DeltaLogFile]:
    """Return the files of a log, ordered by version; a commit precedes a checkpoint of the same version."""
    found = (parse_log_key(one.key) for one in source.list(log_folder(root)))
    return sorted(one for one in found if one is not None)


def parse_log_key(key: str) -> DeltaLogFile | None:
    """Parse a key of a log; None for a file that neve does not write."""
    match = _FILE.fullmatch(key.rpartition("/")[2])
    return None if match is None else DeltaLogFile(int(match["version"]), match["checkpoint"] is not None, key)


def version_in(key: str) -> int | None:
    """Return the version in the name of any file of a log; None if it has none."""
    match = _ANY.fullmatch(key.rpartition("/")[2])
    return None if match is None else int(match["version"])


def decode_lines(data: bytes) -> Iterator[Action]:
    """Decode a file of the log. Raises ForeignTable if it is invalid."""
    for line in data.splitlines():
        if line:
            try:
                yield msgspec.json.decode(line, type=dict[str, dict[str, Any]])
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ForeignTable(f"a line of its log cannot be read: {error}") from error


def read_table(source: DeltaLogSource, root: str) -> TableState:
    """Read a table from its log; `version` is NO_VERSION if there is none.

    Raises:
        ForeignTable: commits are missing or damaged, or the table is another program's.
        FileNotFoundError: a file of the log was deleted meanwhile; a retry finds a newer checkpoint.
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
