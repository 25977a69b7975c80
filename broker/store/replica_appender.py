"""Append of a slave: bytes of its master's log, with the consume queue entries and keys that they imply.

    master's bytes ─▶ records, as many as one write can take: position, lengths, body CRC and queue offset are checked
                   ─▶ one write to the log, CRC entries, queue entries, keys, tails ─▶ visibility, up to the confirmed
                      offset

The input is a stream that may be split anywhere. The first part of an incomplete record is kept in memory only: a
request from the log's end offset gets the whole record again. The first byte that cannot be the master's raises
LogMismatch. Records before it are stored; the record with it and everything after it are not.

Files end where the master's do, marked by END records. The rest of a file may be sent or not; neve's members omit it.
The next file begins with the next byte. If it begins higher, behind a hole in the master's log, `continue_at` is called
first.

Store times come from the master. They are not checked, because the clock of the next master may be an hour behind.

If the master sends a description of an append (`described`), its CRC replaces the check of each record. The records are
still parsed if a file or a queue has to be prepared first, or if the last record of a queue contradicts the
description.

A queue may continue at a higher offset than it ended, because the master's queue may continue above its archive; never
at a lower one. The exception is `queues_may_restart_at_zero`: offset 0 of a non-empty queue is then the first message
of a topic that was deleted and created again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from operator import sub
from struct import Struct

import msgspec
from zlib_ng.zlib_ng import crc32

from broker.store import described
from broker.store.commit_log import LogFile
from broker.store.config import StoreConfig
from broker.store.consume_queue import ConsumeQueue
from broker.store.errors import LogMismatch, MessageIllegal, StoreNotWritable
from broker.store.key_index import KeyIndex, hashes_of, start_of
from broker.store.layout import CRC_ENTRY_SIZE, END_SIZE, QUEUE_ENTRY, QUEUE_ENTRY_SIZE
from broker.store.log_end import LogEnd
from broker.store.queue_table import QueueTable
from broker.store.topic_tails import TopicTails
from broker.store.visibility import Visibility, VisibleEntry
from neve.record.codec import MalformedRecord, decode_record
from neve.record.layout import (
    HEAD_V4,
    HOST_FLAGS,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    PROPERTIES_LENGTH_MAX,
    RECORD_SIZE_MIN,
    SIZE_AND_MAGIC,
    host_sizes,
    struct_of,
    struct_without,
)
from neve.record.properties import PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQUE_KEY, last_value, tags_code

_RECORD_OVERHEAD = 64 << 10
_NAMES_KEPT = 10_000
# Fields of a head that are not read.
_UNSEEN = ("flag", "born_timestamp", "born_host", "store_host", "reconsume_times", "prepared_transaction_offset")
_HEAD = struct_without(*_UNSEEN)
_unpack_head = _HEAD.unpack_from
_entry_pack_into = QUEUE_ENTRY.pack_into
_HEAD_SIZE = _HEAD.size
_unpack_place = struct_of("size", "physical_offset").unpack_from
assert RECORD_SIZE_MIN == _HEAD_SIZE + 3 == HEAD_V4.size + 3
assert SIZE_AND_MAGIC.size == END_SIZE

_PAIR_END, _PAIR_END_BYTE = 2, b"\x02"
_TAGS, _UNIQUE, _KEYS = (f"{name}\x01".encode() for name in (PROPERTY_TAGS, PROPERTY_UNIQUE_KEY, PROPERTY_KEYS))
_code_of_tags = lru_cache(4096)(tags_code)


def _code_in(properties: bytes) -> int:
    tags = last_value(properties, _TAGS)
    return _code_of_tags(tags) if tags else 0


class _Topic(msgspec.Struct, frozen=True, gc=False):
    """Values that all records of a topic share."""

    name: str
    key_start: int
    is_coded: bool


_NO_TOPIC = _Topic("", 0, False)


@lru_cache
def _head_of(sizes: tuple[int, int]) -> Struct:
    born, store = sizes
    return struct_without(*_UNSEEN, born=born, store=store)


class ReplicaAppender:
    """Parser of a master's byte stream; appends its records. Runs on the event loop."""

    def __init__(  # noqa: PLR0917 - each is owned by another module
        self,
        config: StoreConfig,
        end: LogEnd,
        queues: QueueTable,
        index: KeyIndex,
        tails: TopicTails,
        visibility: Visibility,
    ) -> None:
        self._end, self._queues, self._index = end, queues, index
        self._tails, self._visibility = tails, visibility
        self._code_of, self._coded_topics = config.code_of, config.coded_topics
        self._may_restart_at_zero = config.queues_may_restart_at_zero
        self._max_record = config.max_message_size + _RECORD_OVERHEAD
        self._names: dict[bytes, _Topic] = {}
        # Offset of the next byte of the stream; first part of a record, and the size up to which bytes must be
        # collected.
        self._next = -1
        self._held = bytearray()
        self._wanted = 0

    @property
    def next_offset(self) -> int:
        """Offset of the next bytes of the same stream, including the padding of a file that has ended.

        The bytes of another stream, and those of the next file, begin at the end of the log.
        """
        return self._end.appended if self._next < 0 else self._next

    def forget(self) -> None:
        """Forget the stream and any incomplete record, which is sent again from the end of the log on."""
        self._next, self._wanted = -1, 0
        self._held.clear()

    def continue_at(self, physical_offset: int) -> None:
        """Continue at the begin of the master's next file, above the end of this log. Raises StoreFull or LogMismatch.

        This log must end at the end of a file.
        """
        end = self._end
        end.check_following()
        if not (end.is_at_a_border or end.position == 0) or physical_offset < end.appended:
            raise LogMismatch(f"the log ends at {end.appended}, inside a file: it can't resume at {physical_offset}")
        self.forget()
        end.begin_file(physical_offset)

    def append(self, data: bytes | memoryview, at: int, description: bytes | memoryview = b"") -> None:
        """Store bytes of the master from an offset on, which is `next_offset` or the end of the log.

        `description` describes exactly these bytes; see `described`. Raises LogMismatch, StoreNotWritable or StoreFull.
        Records stored before the error stay stored, and `next_offset` shows how far.
        """
        end = self._end
        end.check_following()
        if at == end.appended and end.file is not None:
            self.forget()
        elif end.file is None and self._next < 0:
            end.begin_file(at)  # an empty log begins at the offset that the master names
        elif at != self._next:
            raise LogMismatch(
                f"bytes at {at}, where {self.next_offset} is the next of the log that ends at {end.appended}"
            )
        self._next = at + len(data)
        skipped = min(max(end.appended - at, 0), len(data))  # padding of a file that has ended
        if self._held:
            self._held += data
            if len(self._held) < self._wanted:
                return
            data, skipped = bytes(self._held), 0
            self._held.clear()
        try:
            if not description or not self._append_described(data, description, at):
                self._append(bytes(data), skipped)
        except BaseException:
            self.forget()
            raise

    def _append(self, data: bytes, at: int) -> None:
        while at < len(data):
            if self._end.is_at_a_border:
                self._end.begin_file(self._end.appended)
            following = self._append_run(data, at)
            if following == at:
                following = self._take_first(data, at)
            if following == at:
                self._held += data[at:]
                return
            at = following

    def _take_first(self, data: bytes, at: int) -> int:
        """Process bytes with which `_append_run` cannot begin, and return the next position.

        These are an END record, a record whose queue or file needs preparation, an incomplete record, or wrong bytes.
        If the position is unchanged, more bytes are needed.
        """
        end, file, rest = self._end, self._end.file, len(data) - at
        assert file is not None
        self._wanted = END_SIZE
        if rest < END_SIZE:
            return at
        size: int
        size, magic = SIZE_AND_MAGIC.unpack_from(data, at)
        left = file.size - end.position
        if magic == MAGIC_BLANK:
            if size != left:
                raise self._wrong(f"an END record of {size} bytes where {left} are left: are files of the same size?")
            end.finish_file()
            return min(at + size, len(data))
        if magic not in (MAGIC_V1, MAGIC_V2):
            raise self._wrong(f"no record: its magic is {magic & 0xFFFFFFFF:#010x}")
        if not RECORD_SIZE_MIN <= size <= min(left - END_SIZE, self._max_record):
            raise self._wrong(f"a record of {size} bytes; {left} are left in the file, the limit is {self._max_record}")
        if rest < size:
            self._wanted = size
            return at
        self._make_way(data[at : at + size])
        following = self._append_run(data, at)
        if following == at:
            raise self._wrong("a record that readers would refuse")
        return following

    def _make_way(self, raw: bytes) -> None:
        """Ensure that a record has room in the log, the CRC file and its queue, or raise."""
        end, queues = self._end, self._queues
        try:
            record = decode_record(raw)
        except (MalformedRecord, IndexError) as error:
            raise self._wrong(f"malformed: {error}") from error
        if record.physical_offset != end.appended:
            raise self._wrong(f"a record with the physical offset {record.physical_offset}")
        if crc32(record.body) & 0x7FFFFFFF != record.body_crc:
            raise self._wrong("the CRC of the body differs")
        end.make_followed_room()
        topic, queue_id, offset = record.topic, record.queue_id, record.queue_offset
        self._keep_name(topic)
        if record.physical_offset < queues.deleted_up_to(topic):
            return
        try:
            queue = queues.go_to(topic, queue_id, offset)
            if queue is None and offset == 0 and self._may_restart_at_zero:
                queues.restart_at_zero(topic, queue_id)
                queue = queues.go_to(topic, queue_id, offset)
        except MessageIllegal as error:
            raise self._wrong(str(error)) from error
        if queue is None:
            here = queues.next_offset(topic, queue_id)
            raise self._wrong(f"offset {offset} of {topic!r}, queue {queue_id}, which has all below {here} already")
        if queue.map is None or queue.position + QUEUE_ENTRY_SIZE > queue.limit:
            queue.make_room()

    def _keep_name(self, topic: str) -> None:
        if len(self._names) >= _NAMES_KEPT:
            self._names.clear()
        raw = topic.encode("utf-8", "surrogateescape")
        self._names[raw] = _Topic(topic, start_of(topic), topic in self._coded_topics)

    def _wrong(self, what: str) -> LogMismatch:
        return LogMismatch(f"at {self._end.appended} the master sent {what}")

    def _append_run(self, data: bytes, start: int) -> int:
        """Store the records from a position on that need only one write; return the position behind them."""
        end = self._end
        file = end.file
        if file is None or file.writer is None:
            return start
        run = _Run(end.last_time, end.high_time)
        at = self._collect(run, data, start, file)
        if at == start:
            return start
        self._write(run, data if at - start == len(data) else data[start:at], run.marks)
        return at

    def _write(self, run: _Run, records: bytes | memoryview, marks: list[int] | bytes) -> None:
        """Write a run whose queue entries exist already, then update tails, dirty queues, keys and visibility."""
        end = self._end
        try:
            end.write(records, marks)
        except StoreNotWritable:
            run.take_back()
            raise
        end.last_time, end.high_time = run.last_time, run.high_time
        for topic, (physical, store_time) in run.newest.items():
            self._tails.touch(topic, physical, store_time)
        for queue, _, _ in run.shown:
            queue.used = True
            if not queue.dirty:
                self._queues.mark_dirty(queue)
        if run.hashes:
            self._index.want_hashed((run.hashes, run.places, run.times))
        if run.shown:
            self._visibility.appended(run.shown, run.ends)

    # -- described records

    def _append_described(self, data: bytes | memoryview, description: bytes | memoryview, at: int) -> bool:
        """Store described records; return whether this was possible.

        If not, nothing was stored, and the records have to be parsed. Raises LogMismatch if the bytes or the
        description are damaged.
        """
        end, file = self._end, self._end.file
        try:
            parsed = described.parse_description(description, data)
        except described.DamagedAppend as fault:
            raise self._wrong(str(fault)) from fault
        if file is None or file.writer is None or at != end.appended:
            return False
        if (
            end.position + len(data) > file.size - END_SIZE
            or file.crc_position + len(parsed.crc_entries) > file.crc_size
        ):
            return False
        if parsed.marks[0] != end.position + 1:
            return False  # the CRC entries are for a file that begins elsewhere
        run = self._described_run(parsed, data)
        if run is None:
            return False
        self._write(run, data, parsed.crc_entries)
        return True

    def _described_run(self, parsed: described.ParsedDescription, data: bytes | memoryview) -> _Run | None:
        """Return a run with its queue entries; None if a file or queue has to be prepared first. Raises LogMismatch."""
        end, marks, size = self._end, parsed.marks, len(data)
        sizes = list(map(sub, (*marks[1:], marks[0] + size), marks))
        begin = end.appended
        if min(sizes) < RECORD_SIZE_MIN or (
            parsed.keys and not begin <= min(parsed.keys) <= max(parsed.keys) < begin + size
        ):
            raise self._wrong("the positions of the records differ from the description")
        queues = self._described_queues(parsed)
        if queues is None or max(sizes) > self._max_record:
            return None
        run, shift = _Run(parsed.store_time, end.high_time), begin - end.position - 1
        starts, shown = [shift + mark for mark in marks], run.shown
        lasts = [parsed.whose.rfind(number) for number in range(len(queues))]
        for number, (queue, last) in enumerate(zip(queues, lasts, strict=True)):
            length, _, _, queue_id, _, offset, physical = _unpack_place(data, starts[last] - begin)
            place = queue.queue_id, queue.end + parsed.whose.count(number) - 1, starts[last], sizes[last]
            if place != (queue_id, offset, physical, length):
                return None
        for whose, start, length, code in zip(parsed.whose, starts, sizes, parsed.codes, strict=True):
            queue = queues[whose]
            entry_position, offset = queue.position, queue.end
            assert queue.map is not None
            # No reader sees this entry before the record is written: readers stop at `visible`.
            _entry_pack_into(queue.map, entry_position, start, length, code)
            queue.position, queue.end = entry_position + QUEUE_ENTRY_SIZE, offset + 1
            shown.append((queue, offset, code))
        run.ends = [*starts[1:], begin + size]
        if parsed.store_time < end.last_time and end.position:
            run.high_time = max(run.high_time, end.last_time)
        for queue, last in zip(queues, lasts, strict=True):
            run.newest[queue.topic] = max(run.newest.get(queue.topic, (0, 0)), (starts[last], parsed.store_time))
        run.hashes, run.places = list(parsed.hashes), list(parsed.keys)
        run.times = [parsed.store_time] * len(parsed.hashes)
        return run

    def _described_queues(self, parsed: described.ParsedDescription) -> list[ConsumeQueue] | None:
        """Return the queues of described records; None unless all exist, have room, and continue as described."""
        queues, marks, begin = list[ConsumeQueue](), self._queues.records.deletion_marks, self._end.appended
        for number, (name, queue_id, first) in enumerate(parsed.queues):
            topic = self._names.get(name, _NO_TOPIC)
            queue = self._queues.by_id(topic.name).get(queue_id)
            space = parsed.whose.count(number) * QUEUE_ENTRY_SIZE
            if topic is _NO_TOPIC or queue is None or queue.end != first or queue in queues:
                return None
            if (
                not space
                or queue.map is None
                or queue.position + space > queue.limit
                or begin < marks.get(topic.name, 0)
            ):
                return None
            queues.append(queue)
        return queues

    # -- parsed records

    def _collect(self, run: _Run, data: bytes, start: int, file: LogFile) -> int:
        """Parse records and make their queue entries, up to the first one that needs preparation."""
        names, marks = self._names, self._queues.records.deletion_marks
        last_time = run.last_time
        view = memoryview(data)
        begin = self._end.position - start  # offset of `data` relative to the begin of the file
        shift = file.base + begin
        length = min(len(data), file.size - END_SIZE - begin)
        space = (file.crc_size - file.crc_position) // CRC_ENTRY_SIZE
        at, name, topic, stored = start, b"", _NO_TOPIC, _NO_TOPIC
        queues: Mapping[int, ConsumeQueue] = {}
        while space and (found := _parse(data, view, at, length)) is not None:
            body_at, topic_at, name_at, name_end, following, queue_id, offset, physical, store_time = found
            if data[name_at:name_end] != name:
                name = data[name_at:name_end]
                topic = names.get(name, _NO_TOPIC)
                queues = self._queues.by_id(topic.name)
            if topic is _NO_TOPIC or physical != shift + at:
                break
            properties = data[name_end + 2 : following]
            if topic.is_coded:
                code = self._code_of(decode_record(view[at:following]))
            else:  # `find` is twice as fast as `in`
                code = _code_in(properties) if properties.find(_TAGS) >= 0 else 0
            if not marks or physical >= marks.get(topic.name, 0):
                queue = queues.get(queue_id)
                if queue is None or queue.end != offset:
                    break
                entry_map, entry_position = queue.map, queue.position
                if entry_map is None or entry_position + QUEUE_ENTRY_SIZE > queue.limit:
                    break
                # No reader sees this entry before the record is written: readers stop at `visible`.
                _entry_pack_into(entry_map, entry_position, physical, following - at, code)
                queue.position, queue.end = entry_position + QUEUE_ENTRY_SIZE, offset + 1
                run.shown.append((queue, offset, code))
                run.ends.append(shift + following)
                run.add_keys(topic.key_start, properties, physical, store_time)
            head_crc = crc32(data[at:body_at], (code ^ code >> 32) & 0xFFFFFFFF)
            run.marks += (at + begin + 1, crc32(data[topic_at:following], head_crc), code)
            if stored is not topic:
                run.newest[stored.name] = run.last
                stored = topic
            run.last = physical, store_time
            if store_time < last_time and at + begin:
                run.high_time = max(run.high_time, last_time)
            last_time = store_time
            at, space = following, space - 1
        run.newest[stored.name] = run.last
        run.newest.pop("", None)
        run.last_time = last_time
        return at


class _Run:
    """Records of one write, and the follow-up work."""

    __slots__ = ("ends", "hashes", "high_time", "last", "last_time", "marks", "newest", "places", "shown", "times")

    def __init__(self, last_time: int, high_time: int) -> None:
        self.last_time, self.high_time = last_time, high_time
        self.marks: list[int] = []
        self.shown: list[VisibleEntry] = []
        self.ends: list[int] = []
        self.last = 0, 0  # physical offset and store time of the last record
        # topic -> its newest record; includes records of topics deleted later
        self.newest: dict[str, tuple[int, int]] = {}
        # For each key: its hash, the physical offset of its record, the store time.
        self.hashes: list[int] = []
        self.places: list[int] = []
        self.times: list[int] = []

    def take_back(self) -> None:
        """Undo the queue entries, because the records were not stored."""
        for queue, offset, _ in reversed(self.shown):
            queue.position, queue.end = queue.position - QUEUE_ENTRY_SIZE, offset
        self.shown.clear()

    def add_keys(self, start: int, properties: bytes, physical: int, store_time: int) -> None:
        """Add the keys of a record. Most have only a unique id, of characters that every encoding shares."""
        at = properties.rfind(_UNIQUE)
        unique = b""
        if at == 0 or (at > 0 and properties[at - 1] == _PAIR_END):
            at += len(_UNIQUE)
            end = properties.find(_PAIR_END_BYTE, at)  # RocketMQ omits the last separator
            unique = properties[at:] if end < 0 else properties[at:end]
        if properties.find(_KEYS) < 0 and unique.isalnum():
            self.hashes.append(crc32(unique, start))
            self.places.append(physical)
            self.times.append(store_time)
            return
        hashes = hashes_of(start, f"{last_value(properties, _UNIQUE)} {last_value(properties, _KEYS)}")
        self.hashes += hashes
        self.places += [physical] * len(hashes)
        self.times += [store_time] * len(hashes)


# Begin of the body, of the topic's length, of the topic, of the properties' length, and of the next record; then queue
# id, queue offset, physical offset and store time. A tuple, because an object would cost more than all the checks.
_Parsed = tuple[int, int, int, int, int, int, int, int, int]


def _parse(data: bytes, view: memoryview, at: int, length: int) -> _Parsed | None:
    """Return the fields of the record at a position; None if no complete and valid record begins there."""
    if length - at < RECORD_SIZE_MIN:
        return None
    size, magic, body_crc, queue_id, offset, physical, sys_flag, store_time, body_length = _unpack_head(data, at)
    body_at = at + _HEAD_SIZE
    if sys_flag & HOST_FLAGS:
        head = _head_of(host_sizes(sys_flag))
        body_at = at + head.size
        if body_at > length:
            return None
        *_, store_time, body_length = head.unpack_from(data, at)
    following, topic_at = at + size, body_at + body_length
    if not body_at <= topic_at < following - 2 or following > length:
        return None
    if magic == MAGIC_V1:
        name_at = topic_at + 1
        name_end = name_at + data[topic_at]
    elif magic == MAGIC_V2:
        name_at = topic_at + 2
        name_end = name_at + (data[topic_at] << 8 | data[topic_at + 1])
    else:
        return None
    properties = following - name_end - 2
    if not 0 <= properties <= PROPERTIES_LENGTH_MAX or data[name_end] << 8 | data[name_end + 1] != properties:
        return None
    if crc32(view[body_at:topic_at]) & 0x7FFFFFFF != body_crc:
        return None
    return body_at, topic_at, name_at, name_end, following, queue_id, offset, physical, store_time
