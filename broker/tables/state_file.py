"""A JSON table on disk: written whole, atomically, in a thread; a newer format is refused, not guessed.

{
 "neveFormat":1,
 "logOffset":n,       changes below this offset of the metadata log are in it; without it: all that the log has
 part:{
  key:row,            the rows of a table, one a line
 ...

The loop only copies the references to the rows, in slices where they may be very many; each is encoded by itself, in a
thread, so that a table of ten thousand topics holds neither the loop nor the interpreter.

A table of positions claims what the log holds: it is captured, then the log is synced, then it is written. In any other
order a power cut finds a position above the log's end, and what was delivered or acknowledged below it is gone.
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
# A file that is so many changes behind is written again, though none is its own: a start reads no more than that.
_BEHIND = 1024

#: Returns when all that the log had at its call is on the disk; raises when no sync succeeds any more.
SyncLog = Callable[[], Awaitable[None]]
Snapshot = Callable[[], Mapping[str, Any] | Steps[Mapping[str, Any]]]


class Rows(list[dict[str, Any]]):
    """Those of one table, taken a slice at a time: a table that is copied at once holds the loop for all that it is."""


class StateFile:
    """`save` returns when what the table held at its call is on disk; calls that wait together share one write."""

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
        """`journal`: where the table's changes are before they are in it.

        `sync_log` is what a table of positions needs, one that says nothing of the log has none; and in a broker set
        every table, whose file must not have what the set may yet lose.

        `snapshot` gives dictionaries that nobody changes any more; a row may be written as it is a moment later. It may
        take steps: each row is then captured in one of them, and all of them before the log is synced.
        """
        self._disk, self._path, self._snapshot, self._sync_log = disk, path, snapshot, sync_log
        self._threads, self._journal = threads, journal
        self._lock = asyncio.Lock()
        self._writing = threads.lock()
        self._changes = 0
        self._saved = 0
        # Of the metadata log: what the file says that it holds, None: nothing; this table's own changes behind that, if
        # there are any: the first, and behind the last.
        self._log_offset: int | None = 0
        self._own_first = self._own_end = 0
        self._is_suspended = False
        self._loads = 0

    @property
    def dirty(self) -> bool:
        return self._changes != self._saved or self._is_behind

    @property
    def _is_behind(self) -> bool:
        return self._journal.position - (self._log_offset or 0) >= _BEHIND

    @property
    def log_offset(self) -> int | None:
        """The file holds the changes below this offset of the metadata log; None: it does not say, so all there were.

        A file that is missing holds none.
        """
        return self._log_offset

    @property
    def needs_log_from(self) -> int | None:
        """The first change that a start may need; None: none."""
        saved = self._log_offset or 0
        return max(saved, self._own_first) if self._own_end > saved else None

    @property
    def changes(self) -> int:
        """So many; `is_saved` of this number tells whether the latest is on disk."""
        return self._changes

    def is_saved(self, change: int) -> bool:
        return self._saved >= change

    def touch(self) -> None:
        self._changes += 1

    def touch_logged(self) -> None:
        """By a change that was in the log first."""
        self._changes += 1
        if self._own_end <= (self._log_offset or 0):
            self._own_first = self._journal.position - 1
        self._own_end = self._journal.position

    def suspend(self) -> None:
        """Refuse every `save` until `resume` or the next `load`: the table differs from that of the broker's set."""
        self._is_suspended = True

    def resume(self) -> None:
        """Allow `save` again: the table holds exactly the changes below the journal's position."""
        self._is_suspended = False

    def load(self, **shapes: Any) -> dict[str, Any]:
        """The table; what `shapes` names has that type. ValueError with the file's name for anything else."""
        value = run_here(self.load_parts(**shapes))
        self.resume()
        return value

    def load_parts(self, **shapes: Any) -> Parts[dict[str, Any]]:
        """As `load`, without `resume`: the yielded part reads and decodes the file."""
        found: list[tuple[dict[str, Any], int | None] | None] = []
        yield lambda: found.append(self._read(shapes))
        self._loads += 1
        if found[0] is None:
            return {}
        value, self._log_offset = found[0]
        self._own_first = self._own_end = 0
        return value

    def _read(self, shapes: Mapping[str, Any]) -> tuple[dict[str, Any], int | None] | None:
        """Return the table and the position in the log that its file names; None without a file. For any thread."""
        if not self._disk.exists(self._path):
            return None
        data = self._disk.read(self._path)
        try:
            value = json.loads(data)
        except ValueError as error:
            if rocketmqs_store.is_table(data):
                text = f"{self._path}: a table of Apache RocketMQ's, whose positions are of another log"
                raise ValueError(f"{text}: take it away, or {rocketmqs_store.WHAT_TO_DO}") from error
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
        """Capture, sync, save: what changes while the log is synced is for the next call.

        BrokerError where the table is read anew instead.
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
                raise BrokerError(ResponseCode.SYSTEM_BUSY, "this broker is the master of its set no more")
            await self._threads.run(self._write, captured, position, data)

    def save_now(self) -> None:
        """Before an answer that rests on the table, where nothing may come between; waits for a write under way.

        Of positions only at the start, when all of the log is on the disk.
        """
        position = self._journal.position
        self._write(self._changes, position, self._encode(self._snapshot_now(), position))

    def save_parts(self) -> Parts[None]:
        """As `save_now`, of a table that nothing changes meanwhile; the yielded part encodes and writes it."""
        position, changes = self._journal.position, self._changes
        parts = self._snapshot_now()
        yield lambda: self._write(changes, position, self._encode(parts, position))

    def _snapshot_now(self) -> Mapping[str, Any]:
        parts = self._snapshot()
        return at_once(parts) if isinstance(parts, Generator) else parts

    def _encode(self, parts: Mapping[str, Any], position: int) -> bytes:
        stands = {} if self._journal is NO_JOURNAL else {_LOG_OFFSET: position}
        return encode_table({"neveFormat": FORMAT, **stands, **parts})

    def _write(self, changes: int, position: int, data: bytes) -> None:
        with self._writing:
            if changes >= self._saved:  # an older image never replaces a newer one
                self._disk.write_atomic(self._path, data)
                self._saved, self._log_offset = changes, position


def encode_table(parts: Mapping[str, Any]) -> bytes:
    """JSON of a table, row by row; for a thread."""
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


class DataVersion:
    """RocketMQ's stamp of a table: name servers compare it to see a change."""

    def __init__(self, now_ms: int) -> None:
        self.timestamp, self.counter, self.state_version = now_ms, 0, 0

    def after(self, now_ms: int) -> dict[str, int]:
        """What it becomes with a change now, as `read` takes it."""
        return {"counter": self.counter + 1, "stateVersion": self.state_version, "timestamp": now_ms}

    def read(self, value: Mapping[str, Any]) -> None:
        self.timestamp = int(value.get("timestamp", self.timestamp))
        self.counter = int(value.get("counter", 0))
        self.state_version = int(value.get("stateVersion", 0))

    def to_wire(self) -> dict[str, int]:
        return {"counter": self.counter, "stateVersion": self.state_version, "timestamp": self.timestamp}
