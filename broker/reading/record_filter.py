"""Picks the records of a read that a predicate over their properties wants."""

from collections.abc import Callable, Iterator, Mapping
from struct import Struct

from broker.reading.tiered_store import ReadResult
from neve.record.layout import BORN_HOST_V6, MAGIC_V2, STORE_HOST_V6
from neve.record.properties import bytes_to_properties
from neve.remoting.codes import GetMessageStatus

Predicate = Callable[[Mapping[str, str]], bool]

# size, magic, CRC, queue, flag, queue offset, physical offset, sysFlag; the rest of the head is skipped.
_HEAD = Struct(">iiiiiqqi")
_INT = Struct(">i")
_SHORT = Struct(">h")
_HEAD_V4 = 88 - 4  # up to the length of the body, both hosts with 4-byte addresses
_V6_MORE = 12


def select(result: ReadResult, wanted: Predicate, max_count: int, max_bytes: int) -> ReadResult:
    """The same read with only what is wanted; ends before the first wanted record that has no room."""
    if result.status != GetMessageStatus.FOUND:
        return result
    taken: list[memoryview] = []
    room = max_bytes
    for offset, record, properties in _records(result.buffers):
        if not wanted(properties):
            continue
        if taken and (len(taken) >= max_count or len(record) > room):
            following = offset
            break
        taken.append(record)
        room -= len(record)
    else:
        following = result.next_offset
    status = GetMessageStatus.FOUND if taken else GetMessageStatus.NO_MATCHED_MESSAGE
    return ReadResult(status, following, result.min_offset, result.max_offset, list(taken), len(taken))


def _records(buffers: list[memoryview]) -> Iterator[tuple[int, memoryview, dict[str, str]]]:
    for buffer in buffers:
        view, position = memoryview(buffer), 0
        while position < len(view):
            size, magic, _, _, _, offset, _, sys_flag = _HEAD.unpack_from(view, position)
            record = view[position : position + size]
            yield offset, record, _properties(record, magic, sys_flag)
            position += size


def _properties(record: memoryview, magic: int, sys_flag: int) -> dict[str, str]:
    at = _HEAD_V4 + _V6_MORE * (bool(sys_flag & BORN_HOST_V6) + bool(sys_flag & STORE_HOST_V6))
    (body,) = _INT.unpack_from(record, at)
    at += 4 + body
    if magic == MAGIC_V2:
        at += 2 + _SHORT.unpack_from(record, at)[0]
    else:
        at += 1 + record[at]
    (length,) = _SHORT.unpack_from(record, at)
    return bytes_to_properties(bytes(record[at + 2 : at + 2 + length]))
