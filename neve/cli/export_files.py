"""What an export is: a directory that any tool reads.

    export.json                    which topics with their settings and queues, groups with theirs, where groups stood
    TOPIC/BROKER.QUEUE.jsonl       the messages of one queue in their order, lines as `neve consume -o json` prints them
    import.CLUSTER.json            how far an import into that cluster has come

A file of messages says itself how far it is: after a kill what is behind its last line feed is cut, and the next
message is the one behind the last offset. After a power cut its last bytes, which were not synced, may have a hole of
zeros, which no JSON has: the line with it is cut and all behind it. Names are quoted as in URLs.
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
#: So much of a file may not be on the disk yet while it is written, or one line.
UNSYNCED_BYTES = 4 << 20
_LONGEST_LINE = 64 << 20


class Standing(NamedTuple):
    """Where a group stood: the next offset that it would read."""

    group: str
    queue: MessageQueue
    offset: int


class Last(NamedTuple):
    """The message that a file ends with."""

    offset: int
    msg_id: str


class Export(NamedTuple):
    """Of one cluster. `topics` are settings by topic and broker, `groups` settings by name."""

    topics: Mapping[str, Mapping[str, Mapping[str, Any]]]
    queues: tuple[MessageQueue, ...]
    groups: Mapping[str, Mapping[str, Any]]
    standings: tuple[Standing, ...]


def message_file(directory: Path, queue: MessageQueue) -> Path:
    name = f"{quote(queue.broker_name, safe='')}.{queue.queue_id}.jsonl"
    return directory / quote(queue.topic, safe="") / name


def joined(earlier: Export, now: Export) -> Export:
    """Both: of what both have, as it is now."""
    elsewhere = [one for one in earlier.standings if one.queue not in now.queues]
    return Export(
        {**earlier.topics, **now.topics},
        tuple(dict.fromkeys((*earlier.queues, *now.queues))),
        {**earlier.groups, **now.groups},
        (*elsewhere, *now.standings),
    )


def write_export(directory: Path, export: Export) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    queues = [list(queue) for queue in export.queues]
    standings = [[one.group, *one.queue, one.offset] for one in export.standings]
    row = {"version": _VERSION, "topics": export.topics, "queues": queues, "groups": export.groups}
    write_whole(directory / "export.json", {**row, "standings": standings})


def read_export(directory: Path) -> Export:
    """
    Raises:
        Failure: there is none, or it can't be read.
    """
    file = directory / "export.json"
    try:
        row = json.loads(file.read_text("utf-8"))
        if row["version"] != _VERSION:
            raise Failure(FAILED, f"{file} is of version {row['version']}, this neve reads {_VERSION}")
        return Export(
            row["topics"],
            tuple(MessageQueue(*queue) for queue in row["queues"]),
            row["groups"],
            tuple(Standing(group, MessageQueue(*queue), offset) for group, *queue, offset in row["standings"]),
        )
    except FileNotFoundError as error:
        raise Failure(NOT_FOUND, f"{directory} is no export: it has no export.json") from error
    except (ValueError, KeyError, TypeError) as error:
        raise Failure(FAILED, f"{file} can't be read: {error!r}") from error


def write_whole(file: Path, row: Any) -> None:
    """All of it or nothing of it, and on the disk."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as new:
        json.dump(row, new, ensure_ascii=False)
        sync(new)
    Path(new.name).replace(file)
    sync_directory(file.parent)


def sync(file: IO[Any]) -> None:
    """Returns when all that was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """The names in it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cut_to_whole_lines(file: Path) -> Last | None:
    """The last message; None where there is none. What a kill left behind it is cut.

    Raises:
        Failure: the last line is no message.
    """
    if not file.exists():
        return None
    with file.open("r+b") as lines:
        size = lines.seek(0, 2)
        end = _behind_line_feed(lines, _before_a_hole(lines, max(size - max(UNSYNCED_BYTES, _LONGEST_LINE), 0), size))
        lines.truncate(end)
        if end == 0:
            return None
        lines.seek(_behind_line_feed(lines, end - 1))
        last = lines.readline()
    try:
        row = json.loads(last)
        return Last(int(row["offset"]), str(row["msg_id"]))
    except (ValueError, KeyError, TypeError) as error:
        raise Failure(FAILED, f"the last line of {file} is no message: {error!r}") from error


def _before_a_hole(lines: Any, begin: int, end: int) -> int:
    """Where the first zero is from `begin` on; `end` if there is none."""
    lines.seek(begin)
    while begin < end:
        block = lines.read(min(_STEP, end - begin))
        found = block.find(b"\0")
        if found >= 0:
            return int(begin + found)
        begin += len(block)
    return end


def _behind_line_feed(lines: Any, before: int) -> int:
    """Where the line begins that has the byte before `before`; of no line feed 0."""
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
    """(position behind it, line) of each whole line from a position on."""
    if not file.exists():
        return
    with file.open("rb") as lines:
        lines.seek(position)
        for line in lines:
            if not line.endswith(b"\n"):
                return
            position += len(line)
            yield position, line
