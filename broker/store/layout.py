"""The bytes of the store's files. The record itself is RocketMQ's (see `neve.record.layout`).

    commitlog/<base>      records back to back; each file ends with an END record or fewer than 8 bytes
      END record          i32 bytes to the end of the file, i32 MAGIC_BLANK
    commitlogcrc/<base>   one entry per record of the file of the same name, in order
      entry               u32 position in the file + 1, u32 CRC-32, i64 tags code
    consumequeue/T/Q/<n>  n = first entry * 20
      entry               i64 physical offset, i32 size, i64 tags code
    consumequeue.removed/<n>/Q/<n>  files of deleted queues until a thread has removed them; nothing reads them

The CRC covers the record without its body, and begins from the tags code; the body's own CRC is a field of the record.
So it covers all without a second walk over the body. The tags code is there so that recovery repeats the entry
exactly (of a delayed message it is a time, not a hash).

Store times never run backwards by STANDS_STILL_MS or less: the store's time stands still then. A larger step back is
the clock's, which was ahead and has been set right, or is behind: searches by time are as good as the clock was.
"""

from __future__ import annotations

from struct import Struct

# the same CRC-32 as zlib's, in a sixth of its time for a body of 1 KiB
from zlib_ng.zlib_ng import crc32

from neve.record.layout import MAGIC_BLANK

FILE_NAME_DIGITS = 20
STANDS_STILL_MS = 1_000
END = Struct(">ii")
END_SIZE = END.size
CRC_ENTRY = Struct(">IIq")
CRC_ENTRY_SIZE = CRC_ENTRY.size
QUEUE_ENTRY = Struct(">qiq")
QUEUE_ENTRY_SIZE = QUEUE_ENTRY.size
LONG = Struct(">q")
INT = Struct(">i")
SHORT = Struct(">H")

assert END_SIZE == 8
assert CRC_ENTRY_SIZE == 16
assert QUEUE_ENTRY_SIZE == 20


def file_name(number: int) -> str:
    """A file is named by its first offset."""
    return f"{number:0{FILE_NAME_DIGITS}d}"


def is_file_name(name: str) -> bool:
    """Whether a directory entry is one of ours (and not a temporary one)."""
    return len(name) == FILE_NAME_DIGITS and name.isdigit()


def end_record(size: int) -> bytes:
    """The END record for the last `size` bytes of a file."""
    return END.pack(size, MAGIC_BLANK)


def record_crc(head: bytes | memoryview, tail: bytes | memoryview, tags_code: int) -> int:
    """The CRC kept beside the log."""
    return crc32(tail, crc32(head, (tags_code ^ tags_code >> 32) & 0xFFFFFFFF))
