"""JSON table on disk, written as a whole, atomically and in a thread. A newer format is rejected.

{
 "neveFormat":1,
 "logOffset":n,       includes the changes below this offset of the metadata log; if missing, all changes of the log
 part:{
  key:row,            the rows of a table, one per line
 ...

The event loop only copies the references to the rows, for very large tables in slices. A thread encodes each row
separately, so that a table of ten thousand topics blocks neither the event loop nor the interpreter.

A table of offsets refers to messages of the log. It is captured, then the log is fsynced, then it is written. In any
other order, a power failure could leave an offset above the log's end. The group would then miss new messages below it.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from broker import rocketmqs_store
from broker.tables.journal import NO_JOURNAL, Journal
from infra.disk.filesystem import Disk
from infra.loop.in_steps import Steps, at_once, in_turns
from infra.loop.parts import Parts, run_here
from infra.loop.threads import SYSTEM_THREADS, Threads
from infra.process import collector
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode

FORMAT = 1
_LOG_OFFSET = "logOffset"
# Changes of the metadata log after which a file is written again, even without own changes. Limits replay at a start.
_BEHIND = 1024

#: Returns when the log's content at the call is on disk. Raises if no fsync can succeed any longer.
SyncLog = Callable[[], Awaitable[None]]
Snapshot = Callable[[], Mapping[str, Any] | Steps[Mapping[str, Any]]]


class Rows(list[dict[str, Any]]):
    """Rows of one table, copied in slices, because copying a large table in one step would block the event loop."""


class StateFile:
    """File of a table. Concurrent calls of `save` share one write."""

    def __init__(
        self,
        disk: Disk,
        path: Path,
        snapshot: Snapshot,
        *,
        sync_log: SyncLog | None = None,
        threads: Threads = SYSTEM_THREADS,
        journal: Journal = NO_JOURNAL,
    ) -> None:
        """Create the file's state; nothing is read yet.

        Args:
            snapshot: returns the table's parts as dictionaries that do not change any longer. A row may be written as
                it is a moment later. If it takes steps, each one captures whole rows. The last one precedes the fsync.
            sync_log: fsyncs the log before a write. Tables of offsets need it, tables without references to the log do
                not. In a broker set all tables have it, because a file must not include changes that the set may lose.
            journal: the log that contains the table's changes before they are applied.
        """
        self._disk, self._path, self._snapshot, self._sync_log = disk, path, snapshot, sync_log
        self._threads, self._journal = threads, journal
        self._lock = asyncio.Lock()
        self._writing = threads.lock()
        self._changes = 0
        self._saved = 0
        # Offsets of the metadata log: what the file includes (None: no offset stored). Then the range of this table's
        # own changes after that: the first, and the one after the last.
        self._log_offset: int | None = 0
        self._own_first = self._own_end = 0
        self._is_suspended = False
        self._loads = 0

    @property
    def dirty(self) -> bool:
        """Whether the file lacks changes, or lags far behind the metadata log."""
        return self._changes != self._saved or self._is_behind

    @property
    def _is_behind(self) -> bool:
        return self._journal.position - (self._log_offset or 0) >= _BEHIND

    @property
    def log_offset(self) -> int | None:
        """Offset of the metadata log below which the file includes all changes; None if the file has no offset.

        A file without it includes all changes that existed. A missing file includes none: 0.
        """
        return self._log_offset

    @property
    def needs_log_from(self) -> int | None:
        """Offset of the first change that a start may need, None without one."""
        saved = self._log_offset or 0
        return max(saved, self._own_first) if self._own_end > saved else None

    @property
    def changes(self) -> int:
        """Number of changes so far; `is_saved` of this number returns whether the latest one is on disk."""
        return self._changes

    def is_saved(self, change: int) -> bool:
        return self._saved >= change

    def touch(self) -> None:
        """Note a change that is not in the metadata log."""
        self._changes += 1

    def touch_logged(self) -> None:
        """Note a change that is already in the log."""
        self._changes += 1
        if self._own_end <= (self._log_offset or 0):
            self._own_first = self._journal.position - 1
        self._own_end = self._journal.position

    def suspend(self) -> None:
        """Reject every `save` until `resume` or the next `load`: the table differs from that of the broker's set."""
        self._is_suspended = True

    def resume(self) -> None:
        """Allow `save` again: the table holds exactly the changes below the journal's position."""
        self._is_suspended = False

    def load(self, **shapes: Any) -> dict[str, Any]:
        """Read the table; `shapes` are the types of its parts.

        Raises ValueError with the file's name if it is invalid.
        """
        value = run_here(self.load_parts(**shapes))
        self.resume()
        return value

    def load_parts(self, **shapes: Any) -> Parts[dict[str, Any]]:
        """Run `load` in parts, without `resume`; the yielded part reads and decodes the file in a thread."""
        found: list[tuple[dict[str, Any], int | None] | None] = []
        yield lambda: found.append(self._read(shapes))
        self._loads += 1
        if found[0] is None:
            return {}
        value, self._log_offset = found[0]
        self._own_first = self._own_end = 0
        return value

    def _read(self, shapes: Mapping[str, Any]) -> tuple[dict[str, Any], int | None] | None:
        """Return the table and its offset of the metadata log, None without a file; may run in any thread."""
        if not self._disk.exists(self._path):
            return None
        data = self._disk.read(self._path)
        try:
            value = json.loads(data)
        except ValueError as error:
            if rocketmqs_store.is_table(data):
                text = f"{self._path}: a table of Apache RocketMQ's, whose offsets belong to another log"
                raise ValueError(f"{text}: remove it, or {rocketmqs_store.WHAT_TO_DO}") from error
            raise ValueError(f"{self._path}: damaged: {error}") from error
        if not isinstance(value, dict) or value.get("neveFormat", FORMAT) != FORMAT:
            raise ValueError(f"{self._path}: written by a newer neve (this one reads format {FORMAT})")
        position = value.get(_LOG_OFFSET)
        if position is not None and not (type(position) is int and position >= 0):
            raise ValueError(f"{self._path}: damaged: {_LOG_OFFSET} {position!r}")
        try:
            shaped = {
                name: msgspec.convert(value[name], shape, strict=False, str_keys=True)
                for name, shape in shapes.items()
                if name in value
            }
        except msgspec.ValidationError as error:
            raise ValueError(f"{self._path}: damaged: {error}") from error
        return value | shaped, position

    async def save(self) -> None:
        """Capture the table, fsync the log, write the file; changes during the fsync are left to the next call.

        Raises BrokerError if the table is loaded again meanwhile.
        """
        wanted = self._changes
        async with self._lock:
            if self._saved >= wanted and not self._is_behind:
                return
            captured, position, loads, parts = self._changes, self._journal.position, self._loads, self._snapshot()
            if isinstance(parts, Generator):
                parts = await in_turns(parts)
            collector.freeze_new()
            data = await self._threads.run(self._encode, parts, position)
            if self._sync_log is not None:
                await self._sync_log()
            if self._is_suspended or loads != self._loads:
                raise BrokerError(ResponseCode.SYSTEM_BUSY, "this broker is no longer the master of its set")
            await self._threads.run(self._write, captured, position, data)

    def save_now(self) -> None:
        """Write the file synchronously, without yielding to the event loop; waits for a write in progress.

        For tables of offsets only at the start, when the whole log is on disk.
        """
        position = self._journal.position
        self._write(self._changes, position, self._encode(self._snapshot_now(), position))

    def save_parts(self) -> Parts[None]:
        """Run `save_now` in parts; the yielded part encodes and writes the table, which must not change meanwhile."""
        position, changes = self._journal.position, self._changes
        parts = self._snapshot_now()
        yield lambda: self._write(changes, position, self._encode(parts, position))

    def _snapshot_now(self) -> Mapping[str, Any]:
        parts = self._snapshot()
        return at_once(parts) if isinstance(parts, Generator) else parts

    def _encode(self, parts: Mapping[str, Any], position: int) -> bytes:
        fields = {} if self._journal is NO_JOURNAL else {_LOG_OFFSET: position}
        return encode_table({"neveFormat": FORMAT, **fields, **parts})

    def _write(self, changes: int, position: int, data: bytes) -> None:
        with self._writing:
            if changes >= self._saved:  # an older image never replaces a newer one
                self._disk.write_atomic(self._path, data)
                self._saved, self._log_offset = changes, position


def encode_table(parts: Mapping[str, Any]) -> bytes:
    """Encode a table as JSON row by row; runs in a thread."""
    encode, pieces = msgspec.json.encode, list[bytes]()
    for name, part in parts.items():
        pieces.append(b"%b\n %b:" % (b"," if pieces else b"{", encode(name)))
        if isinstance(part, dict | Rows):
            tables = part if isinstance(part, Rows) else (part,)
            rows = [b"\n  %b:%b" % (encode(key), encode(row)) for table in tables for key, row in table.items()]
            pieces.append(b"{%b}" % b",".join(rows))
        else:
            pieces.append(encode(part))
    return b"".join((*pieces, b"\n}\n"))


class TableVersion:
    """Version of a table (RocketMQ's DataVersion); name servers compare it to detect changes."""

    def __init__(self, now_ms: int) -> None:
        self.timestamp, self.counter, self.state_version = now_ms, 0, 0

    def after(self, now_ms: int) -> dict[str, int]:
        """Return the version after a change at `now_ms`, in the form that `read` accepts."""
        return {"counter": self.counter + 1, "stateVersion": self.state_version, "timestamp": now_ms}

    def read(self, value: Mapping[str, Any]) -> None:
        """Take over a version, as returned by `after` or read from a file."""
        self.timestamp = int(value.get("timestamp", self.timestamp))
        self.counter = int(value.get("counter", 0))
        self.state_version = int(value.get("stateVersion", 0))

    def to_wire(self) -> dict[str, int]:
        return {"counter": self.counter, "stateVersion": self.state_version, "timestamp": self.timestamp}
