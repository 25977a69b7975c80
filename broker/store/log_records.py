"""Records found in the files of the log by their CRC entries, without a scan of the log.

Offsets are physical offsets. CRC entries below the given offset must be written already.
"""

from __future__ import annotations

from collections.abc import Iterator

from broker.store.commit_log import CommitLog, LogFile
from broker.store.layout import CRC_ENTRY, CRC_ENTRY_SIZE, END_SIZE
from neve.record.layout import SIZE_AND_MAGIC


def records_ending_above(log: CommitLog, physical_offset: int) -> Iterator[tuple[int, int, int]]:
    """Yield physical offset, size and tags code of the records that end above an offset, in log order."""
    for file in log.files:
        if file.end <= physical_offset:
            continue
        position = find_crc_position(file, max(physical_offset - file.base, 0))
        before = _record_before(file, position)
        if before is not None and file.base + before[1] > physical_offset:
            position -= CRC_ENTRY_SIZE
        while position + CRC_ENTRY_SIZE <= file.crc_size:
            mark, _, tags = CRC_ENTRY.unpack_from(file.crc_map, position)
            if not mark:
                break
            yield file.base + mark - 1, SIZE_AND_MAGIC.unpack_from(file.map, mark - 1)[0], tags
            position += CRC_ENTRY_SIZE


def last_record_below(log: CommitLog, physical_offset: int) -> memoryview | None:
    """Return the newest record that begins below an offset."""
    for file in reversed(log.files):
        if file.base < physical_offset:
            place = _record_before(file, find_crc_position(file, physical_offset - file.base))
            if place is not None:
                return memoryview(file.map)[place[0] : place[1]]
    return None


def record_start(log: CommitLog, physical_offset: int) -> int:
    """Return the highest offset at or below the given one where a record begins or could begin."""
    file = log.at(physical_offset)
    if file is None:  # between files, or at the end of one
        return max((below.end for below in log.files if below.end <= physical_offset), default=physical_offset)
    position = physical_offset - file.base
    before = _record_before(file, find_crc_position(file, position))
    if before is None:
        return file.base
    begin, end = before
    return file.base + (end if position >= end else begin)


def is_record_start(log: CommitLog, physical_offset: int) -> bool:
    """Return whether a record begins or could begin at the offset: at the start of a file or behind a record."""
    file = log.at(physical_offset)
    if file is None:
        return log.ending_at(physical_offset) is not None
    return record_start(log, physical_offset) == physical_offset


def used_size(file: LogFile) -> int:
    """Return the number of bytes of a sealed file up to and including its END record; the rest is unused."""
    if file.used_size < 0:
        last = _record_before(file, find_crc_position(file, file.size))
        file.used_size = min((0 if last is None else last[1]) + END_SIZE, file.size)
    return file.used_size


def find_crc_position(file: LogFile, relative: int) -> int:
    """Return the position of the first CRC entry at or above an offset in the file.

    Entries below the offset must be durable.
    """
    low, high = 0, file.crc_size // CRC_ENTRY_SIZE
    while low < high:
        middle = (low + high) // 2
        mark = CRC_ENTRY.unpack_from(file.crc_map, middle * CRC_ENTRY_SIZE)[0]
        if 0 < mark <= relative:
            low = middle + 1
        else:
            high = middle
    return low * CRC_ENTRY_SIZE


def _record_before(file: LogFile, crc_position: int) -> tuple[int, int] | None:
    """Return begin and end, within the file, of the record whose CRC entry precedes this position."""
    if not crc_position:
        return None
    begin = CRC_ENTRY.unpack_from(file.crc_map, crc_position - CRC_ENTRY_SIZE)[0] - 1
    return begin, begin + SIZE_AND_MAGIC.unpack_from(file.map, begin)[0]
