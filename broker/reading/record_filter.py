"""Selection of a read's records by a predicate over their properties."""

from collections.abc import Iterator

from broker.reading.sql92 import SqlFilter
from broker.store.reading import GetResult
from neve.record.codec import raw_properties
from neve.record.layout import I32, I64, QUEUE_OFFSET_AT
from neve.record.properties import bytes_to_properties
from neve.remoting.codes import GetMessageStatus


def select(result: GetResult, wanted: SqlFilter, max_count: int, max_bytes: int) -> GetResult:
    """Return the result with only the selected records; it ends before the first one that exceeds a limit."""
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
    return GetResult(status, following, result.min_offset, result.max_offset, taken, len(taken))


def _records(buffers: list[memoryview]) -> Iterator[tuple[int, memoryview, dict[str, str]]]:
    for buffer in buffers:
        view, position = memoryview(buffer), 0
        while position < len(view):
            (size,) = I32.unpack_from(view, position)
            (offset,) = I64.unpack_from(view, position + QUEUE_OFFSET_AT)
            record = view[position : position + size]
            yield offset, record, bytes_to_properties(raw_properties(record))
            position += size
