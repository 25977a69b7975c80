"""Binary formats of the store's files. Records have RocketMQ's format (see `neve.record.layout`).

    commitlog/<base>      records back to back; each file ends with an END record or fewer than 8 bytes
      END record          i32 bytes to the end of the file, i32 MAGIC_BLANK
    commitlogcrc/<base>   one entry per record of the file of the same name, in order
      entry               u32 position in the file + 1, u32 CRC-32, i64 tags code
    consumequeue/T/Q/<n>  n = first entry * 20
      entry               i64 physical offset, i32 size, i64 tags code
    consumequeue.removed/<n>/Q/<n>  files of deleted queues until a thread has removed them; nothing reads them

The CRC covers the record without its body, and is seeded with the tags code. The body has its own CRC, which is a field
of the record's head. So the entry covers all bytes without a second pass over the body. The tags code is stored so that
recovery can rebuild the exact queue entry: for a delayed message it is a time, not a hash.

If the clock steps back by STANDS_STILL_MS or less, store times stay constant until the clock catches up. A larger step
means that the clock was wrong before or is wrong now; store times then step back too. Searches by time are only as
exact as the clock was.
"""

from __future__ import annotations

from struct import Struct

# same CRC-32 as zlib's, in a sixth of the time for a body of 1 KiB
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
    """Return the name of a file: its first offset."""
    return f"{number:0{FILE_NAME_DIGITS}d}"


def is_file_name(name: str) -> bool:
    """Return whether a directory entry is a file of this format, not a temporary one."""
    return len(name) == FILE_NAME_DIGITS and name.isdigit()


def end_record(size: int) -> bytes:
    """Return the END record for the last `size` bytes of a file."""
    return END.pack(size, MAGIC_BLANK)


def record_crc(head: bytes | memoryview, tail: bytes | memoryview, tags_code: int) -> int:
    """Return the CRC of a record that is stored in the CRC file."""
    return crc32(tail, crc32(head, (tags_code ^ tags_code >> 32) & 0xFFFFFFFF))
