"""Diverged tails, which a member truncated from its log to follow another master: `diverged/` in its data directory.

<epoch>-<from>-<to>.log   the bytes of the log between two physical offsets; `epoch` is that of their end
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from neve.cli.failures import FAILED, Failure
from neve.cli.message_lines import to_line
from neve.client.model import message_from_record
from neve.record.codec import MalformedRecord, MessageRecord, decode_record
from neve.record.layout import MAGIC_BLANK
from neve.remoting.names import is_system_topic

_NAME = re.compile(r"(\d+)-(\d+)-(\d+)(?:\.\d+)?\.log")
_END = struct.Struct(">ii")  # end of a file of the log: size, MAGIC_BLANK


class _File(NamedTuple):
    path: Path
    epoch: int
    start: int
    end: int


def files(data: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each diverged tail."""
    for path, epoch, start, end in _files(data):
        topics = Counter(record.topic for record in records(path))
        yield {
            "file": path.name,
            "epoch": epoch,
            "from": start,
            "to": end,
            "messages": sum(count for name, count in topics.items() if not is_system_topic(name)),
            "topics": dict(sorted(topics.items())),
        }


def lines(data: Path) -> Iterator[str]:
    """Yield the messages as JSON lines, except those in topics of servers."""
    for path, *_ in _files(data):
        for record in records(path):
            if not is_system_topic(record.topic):
                yield to_line(message_from_record(record, ""), "auto")


def _files(data: Path) -> list[_File]:
    folder = data / "diverged"
    found = [(path, _NAME.fullmatch(path.name)) for path in folder.iterdir()] if folder.is_dir() else []
    named = [_File(path, *(int(part) for part in match.groups())) for path, match in found if match]
    return sorted(named, key=lambda one: (one.start, one.epoch, one.path))


def records(path: Path) -> Iterator[MessageRecord]:
    """Yield the records of a file.

    Raises:
        Failure: the file is damaged.
    """
    view, position = memoryview(path.read_bytes()), 0
    while position < len(view):
        if len(view) - position >= _END.size and _END.unpack_from(view, position)[1] == MAGIC_BLANK:
            position += _END.size
            continue
        try:
            record = decode_record(view, position)
        except MalformedRecord as error:
            raise Failure(FAILED, f"{path} is damaged at byte {position}: {error}") from error
        yield record
        position += record.size
