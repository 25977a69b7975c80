"""Append of messages: records, their consume queue entries and their keys, with one write to the log.

Everything here runs on the event loop's thread. A message is written at once; `visibility` decides when readers see it.
The records of a master are appended by `replica_appender` instead; see `log_end`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from zlib_ng.zlib_ng import crc32

from broker.store.born_hosts import BornHost, BornHosts
from broker.store.config import StoreConfig
from broker.store.consume_queue import ConsumeQueue
from broker.store.described import LEAST, Described, Queue, describe
from broker.store.errors import MessageIllegal, NotThisTurn, StoreFull, StoreNotWritable
from broker.store.key_index import IndexItem, KeyIndex, hashed
from broker.store.layout import CRC_ENTRY_SIZE, QUEUE_ENTRY, QUEUE_ENTRY_SIZE, SHORT
from broker.store.log_end import LogEnd
from broker.store.queue_table import QueueTable
from broker.store.visibility import Visibility, VisibleEntry
from neve.record.codec import pack_host
from neve.record.layout import HOST_FLAGS, PROPERTIES_LENGTH_MAX

# Queue, body, properties, tags code, keys in one string, flag, system flag, born timestamp, reconsume times, prepared
# transaction offset. A tuple, because creating an object would cost the hot path more than all its checks.
Send = tuple[ConsumeQueue, bytes | memoryview, bytes, int, str, int, int, int, int, int]
# Physical offset, size in bytes and queue offset of an appended record.
AppendResult = tuple[int, int, int]

_RECORD_OVERHEAD = 64 << 10
_entry_pack_into = QUEUE_ENTRY.pack_into
_length_pack = SHORT.pack

assert PROPERTIES_LENGTH_MAX <= 0x7FFF


class PutResult(msgspec.Struct, frozen=True, gc=False):
    """Place of a stored message (RocketMQ's AppendMessageResult)."""

    physical_offset: int
    queue_offset: int
    size: int
    store_timestamp: int


class Appender:
    """Encoder of messages into records; writes records, consume queue entries and keys."""

    def __init__(  # noqa: PLR0917 - each is owned by another module
        self,
        config: StoreConfig,
        end: LogEnd,
        queues: QueueTable,
        index: KeyIndex,
        visibility: Visibility,
        described: Described,
    ) -> None:
        self._end, self._queues, self._index, self._visibility = end, queues, index, visibility
        self._described = described
        self._max_record = config.max_message_size + _RECORD_OVERHEAD
        self._store_host = pack_host(config.store_host)
        self._hosts = BornHosts(self._store_host)

    def append(self, sends: Sequence[Send], born_host: tuple[str, int], now: int) -> list[AppendResult]:
        """Append messages of one sender in order, with one write for those that fit; return their places.

        If fewer places than sends are returned, the next send cannot be stored: append it alone to get the reason as an
        exception. Or the file of its queue is not mapped and the budget of `FileBudget` is spent. Raises as `put` does
        if that applies to the first send.
        """
        host = self._hosts[born_host]
        self._end.advance_time(now)
        places: list[AppendResult] = []
        self._append_run(sends, places, host)  # nearly always all of them fit
        while len(places) < len(sends):
            try:
                self._make_room(sends[len(places)], host)
            except (StoreFull, MessageIllegal, StoreNotWritable, NotThisTurn):
                if places:
                    break
                raise
            count = len(places)
            self._append_run(sends, places, host)
            assert len(places) > count, "there was room for one"
        return places

    def append_both(self, send: Send, beside: Send, born_host: tuple[str, int], now: int) -> list[AppendResult]:
        """Append two records of two queues with one write; both or neither."""
        host = self._hosts[born_host]
        self._end.advance_time(now)
        size = self._make_room(beside, host)
        self._make_room(send, host, behind=size)
        places: list[AppendResult] = []
        self._append_run([send, beside], places, host)
        assert len(places) == 2, "there was room for both"
        return places

    def _make_room(self, send: Send, host: BornHost, *, behind: int = 0) -> int:
        """Ensure that the log, the CRC file and the consume queue have room for the next record, or raise.

        The log also gets room for a record of `behind` bytes that follows directly. Returns the record's size.
        """
        queue, body, properties = send[:3]
        size = host[1].size + len(body) + len(queue.topic_part) + 2 + len(properties)
        if size > self._max_record or len(properties) > PROPERTIES_LENGTH_MAX:
            raise MessageIllegal(f"a record of {size} bytes with {len(properties)} of properties is too large")
        self._end.make_room(size + behind, 2 if behind else 1)
        if queue.map is None or queue.position + QUEUE_ENTRY_SIZE > queue.limit:
            queue.make_room()
        return size

    def _append_run(self, sends: Sequence[Send], places: list[AppendResult], host: BornHost) -> None:
        """Append the sends that have no place yet, as far as there is room."""
        end = self._end
        file, position, limit, now = end.file, end.position, end.limit, end.last_time
        if file is None or file.writer is None:
            return
        base, max_record, store_host = file.base, self._max_record, self._store_host
        born, head_struct, host_flags = host
        head_pack, head_size = head_struct.pack, head_struct.size
        first = len(places)
        crc_room = (file.crc_size - file.crc_position) // CRC_ENTRY_SIZE
        pieces: list[bytes | memoryview] = []
        marks: list[int] = []
        shown: list[VisibleEntry] = []
        keyed: list[IndexItem] = []
        for (
            queue, body, properties, tags_code, keys, flag, sys_flag, born_timestamp, reconsume_times, prepared
        ) in sends[first : first + crc_room]:  # fmt: skip
            properties_length, body_length = len(properties), len(body)
            tail = b"".join((queue.topic_part, _length_pack(properties_length & 0xFFFF), properties))
            size = head_size + body_length + len(tail)
            entry_position, entry_map, queue_offset = queue.position, queue.map, queue.end
            if (
                position + size > limit
                or size > max_record
                or properties_length > PROPERTIES_LENGTH_MAX
                or entry_map is None
                or entry_position + QUEUE_ENTRY_SIZE > queue.limit
            ):
                break
            physical_offset = base + position
            head = head_pack(
                size, queue.magic, crc32(body) & 0x7FFFFFFF, queue.queue_id, flag, queue_offset, physical_offset,
                sys_flag & ~HOST_FLAGS | host_flags, born_timestamp, born, now, store_host, reconsume_times, prepared,
                body_length,
            )  # fmt: skip
            pieces += (head, body, tail)
            marks += (position + 1, crc32(tail, crc32(head, (tags_code ^ tags_code >> 32) & 0xFFFFFFFF)), tags_code)
            # No reader sees this entry before the record is written: readers stop at `visible`, and recovery checks the
            # log.
            _entry_pack_into(entry_map, entry_position, physical_offset, size, tags_code)
            queue.position, queue.end = entry_position + QUEUE_ENTRY_SIZE, queue_offset + 1
            if keys:
                keyed.append((queue.topic, keys, physical_offset, now))
            places.append((physical_offset, size, queue_offset))
            shown.append((queue, queue_offset, tags_code))
            position += size
        if not shown:
            return
        records = b"".join(pieces)
        try:
            end.write(records, marks)
        except StoreNotWritable:
            for queue, queue_offset, _ in reversed(shown):
                queue.position, queue.end = queue.position - QUEUE_ENTRY_SIZE, queue_offset
            del places[first:]
            raise
        for (queue, _, _), (physical_offset, _, _) in zip(shown, places[first:], strict=True):
            newest = queue.topic_tail
            newest.physical_offset, newest.store_time = physical_offset, now
            queue.used = True
            if not queue.dirty:
                self._queues.mark_dirty(queue)
        if self._described.is_wanted and len(shown) >= LEAST:
            self._describe(records, shown, keyed)
        elif keyed:
            self._index.want(keyed)
        self._visibility.appended(shown)

    def _describe(self, records: bytes, shown: list[VisibleEntry], keyed: list[IndexItem]) -> None:
        """Keep a description of the appended records for slaves. Each key is hashed once, here."""
        end = self._end
        start, now = end.appended - len(records), end.last_time
        numbers: dict[ConsumeQueue, int] = {}
        firsts: list[Queue] = []
        whose: list[int] = []
        for queue, offset, _ in shown:
            number = numbers.get(queue)
            if number is None:
                number = numbers[queue] = len(firsts)
                firsts.append((queue.topic, queue.queue_id, offset))
            whose.append(number)
        hashes: list[int] = []
        places: list[int] = []
        if keyed:
            keys = hashes, places, _ = hashed(keyed)
            self._index.want_hashed(keys)
        crc_entries = end.newest_crc_entries(len(shown))
        description = describe(records, crc_entries, whose, firsts, places, hashes, now)
        if description is not None:
            self._described.add(start, description, records)
