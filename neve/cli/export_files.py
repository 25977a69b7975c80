"""The directory of an export, which any tool can read.

    export.json                    settings and queues of topics, settings of groups, committed offsets
    TOPIC/BROKER.QUEUE.jsonl       the messages of one queue in order, as `neve consume -o json` prints them
    import.CLUSTER.json            the progress of an import to that cluster

The last complete line of a message file is its progress. After a kill, bytes after the last line feed are truncated.
After a power cut, unsynced bytes may contain zeros, which JSON never does: the line with the first zero and all later
lines are truncated. Names are quoted as in URLs.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import quote

from neve.cli.failures import FAILED, NOT_FOUND, Failure
from neve.client.model import MessageQueue

_VERSION = 1
_STEP = 64 * 1024
# At most this much of a file is unsynced while it is written, or one line.
UNSYNCED_BYTES = 4 << 20
_LONGEST_LINE = 64 << 20


class GroupOffset(NamedTuple):
    """The committed offset of a group in a queue."""

    group: str
    queue: MessageQueue
    offset: int


class Last(NamedTuple):
    """The last message of a file."""

    offset: int
    msg_id: str


class Export(NamedTuple):
    """The content of export.json. `topics` has settings by topic and broker, `groups` settings by name."""

    topics: Mapping[str, Mapping[str, Mapping[str, Any]]]
    queues: tuple[MessageQueue, ...]
    groups: Mapping[str, Mapping[str, Any]]
    offsets: tuple[GroupOffset, ...]


def message_file(directory: Path, queue: MessageQueue) -> Path:
    """Return the file with the messages of a queue."""
    name = f"{quote(queue.broker_name, safe='')}.{queue.queue_id}.jsonl"
    return directory / quote(queue.topic, safe="") / name


def joined(earlier: Export, now: Export) -> Export:
    """Return both exports together; `now` overrides entries of `earlier`."""
    elsewhere = [one for one in earlier.offsets if one.queue not in now.queues]
    return Export(
        {**earlier.topics, **now.topics},
        tuple(dict.fromkeys((*earlier.queues, *now.queues))),
        {**earlier.groups, **now.groups},
        (*elsewhere, *now.offsets),
    )


def write_export(directory: Path, export: Export) -> None:
    """Write export.json atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    queues = [list(queue) for queue in export.queues]
    offsets = [[one.group, *one.queue, one.offset] for one in export.offsets]
    row = {"version": _VERSION, "topics": export.topics, "queues": queues, "groups": export.groups}
    write_whole(directory / "export.json", {**row, "offsets": offsets})


def read_export(directory: Path) -> Export:
    """Return the content of export.json.

    Raises:
        Failure: the file does not exist, or cannot be read.
    """
    file = directory / "export.json"
    try:
        row = json.loads(file.read_text("utf-8"))
        if row["version"] != _VERSION:
            raise Failure(FAILED, f"{file} has version {row['version']}, but this neve reads version {_VERSION}")
        return Export(
            row["topics"],
            tuple(MessageQueue(*queue) for queue in row["queues"]),
            row["groups"],
            tuple(GroupOffset(group, MessageQueue(*queue), offset) for group, *queue, offset in row["offsets"]),
        )
    except FileNotFoundError as error:
        raise Failure(NOT_FOUND, f"{directory} is not an export: it has no export.json") from error
    except (ValueError, KeyError, TypeError) as error:
        raise Failure(FAILED, f"{file} cannot be read: {error!r}") from error


def write_whole(file: Path, row: Any) -> None:
    """Replace the file atomically and durably."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as new:
        json.dump(row, new, ensure_ascii=False)
        sync(new)
    Path(new.name).replace(file)
    sync_directory(file.parent)


def sync(file: IO[Any]) -> None:
    """Flush and fsync the file."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Fsync the directory."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def truncate_to_whole_lines(file: Path) -> Last | None:
    """Truncate the file after its last complete line; return the last message, None if there is none.

    Raises:
        Failure: the last line is not a message.
    """
    if not file.exists():
        return None
    with file.open("r+b") as lines:
        size = lines.seek(0, 2)
        end = _after_last_line_feed(
            lines, _end_before_zeros(lines, max(size - max(UNSYNCED_BYTES, _LONGEST_LINE), 0), size)
        )
        lines.truncate(end)
        if end == 0:
            return None
        lines.seek(_after_last_line_feed(lines, end - 1))
        last = lines.readline()
    try:
        row = json.loads(last)
        return Last(int(row["offset"]), str(row["msg_id"]))
    except (ValueError, KeyError, TypeError) as error:
        raise Failure(FAILED, f"the last line of {file} is not a message: {error!r}") from error


def _end_before_zeros(lines: Any, begin: int, end: int) -> int:
    """Return the position of the first zero byte between `begin` and `end`; `end` if there is none."""
    lines.seek(begin)
    while begin < end:
        block = lines.read(min(_STEP, end - begin))
        found = block.find(b"\0")
        if found >= 0:
            return int(begin + found)
        begin += len(block)
    return end


def _after_last_line_feed(lines: Any, before: int) -> int:
    """Return the position after the last line feed below `before`; 0 if there is none."""
    end = before
    while end > 0:
        start = max(0, end - _STEP)
        lines.seek(start)
        found = lines.read(end - start).rfind(b"\n")
        if found >= 0:
            return int(start + found + 1)
        end = start
    return 0


def lines_from(file: Path, position: int) -> Iterator[tuple[int, bytes]]:
    """Yield (position after it, line) for each complete line from a position on."""
    if not file.exists():
        return
    with file.open("rb") as lines:
        lines.seek(position)
        for line in lines:
            if not line.endswith(b"\n"):
                return
            position += len(line)
            yield position, line
