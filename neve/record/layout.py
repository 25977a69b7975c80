"""The layout of a message record in the CommitLog and in a pull response.

Source: RocketMQ's MessageDecoder, MessageExtEncoder, MessageSysFlag.

All integers are signed and big endian. A record, version 1 (version 2 differs in the magic and has a
topic length of two bytes):

    pos  bytes  field                          pos  bytes  field
    0    4      totalSize, of the whole        56   8      storeTimestamp, ms
    4    4      magic                          64   8|20   storeHost, as bornHost
    8    4      bodyCRC = crc32 & 0x7FFFFFFF   72   4      reconsumeTimes
    12   4      queueId                        76   8      preparedTransactionOffset
    16   4      flag, the user's               84   4      bodyLength
    20   8      queueOffset                    88   n      body, as sent
    28   8      physicalOffset                      1|2    topicLength (2 in version 2)
    36   4      sysFlag                             n      topic
    40   8      bornTimestamp, ms                   2      propertiesLength
    48   8|20   bornHost: IPv4|IPv6, port i32       n      properties

Positions after bornHost assume two IPv4 hosts. bodyCRC covers the stored body only.
properties = (name 0x01 value 0x02)*.
A record with magic BLANK fills the end of a CommitLog file: 4 bytes of size, 4 of magic. It is never sent.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

MAGIC_V1: Final = -626843481
MAGIC_V2: Final = -626843477
MAGIC_BLANK: Final = -875286124

COMPRESSED: Final = 0x1
MULTI_TAGS: Final = 0x2
TRANSACTION_PREPARED: Final = 0x4
TRANSACTION_COMMIT: Final = 0x8
TRANSACTION_ROLLBACK: Final = 0xC
BORN_HOST_V6: Final = 0x10
STORE_HOST_V6: Final = 0x20
COMPRESSION_LZ4: Final = 0x100
COMPRESSION_ZSTD: Final = 0x200
COMPRESSION_ZLIB: Final = 0x300
COMPRESSION_MASK: Final = 0x700

PROPERTIES_LENGTH_MAX: Final = 32767
RECORD_SIZE_MIN: Final = 91

HOST_FLAGS: Final = BORN_HOST_V6 | STORE_HOST_V6

HOST_V4_SIZE: Final = 8
HOST_V6_SIZE: Final = 20
_HOST: Final = 0  # variable width: HOST_V4_SIZE or HOST_V6_SIZE, by the sysFlag

#: The fields of a record up to its body, with their widths in bytes. All structures below derive from this table.
FIELDS: Final = (
    ("size", 4),
    ("magic", 4),
    ("body_crc", 4),
    ("queue_id", 4),
    ("flag", 4),
    ("queue_offset", 8),
    ("physical_offset", 8),
    ("sys_flag", 4),
    ("born_timestamp", 8),
    ("born_host", _HOST),
    ("store_timestamp", 8),
    ("store_host", _HOST),
    ("reconsume_times", 4),
    ("prepared_transaction_offset", 8),
    ("body_length", 4),
)
_NAMES: Final = tuple(name for name, _ in FIELDS)


def widths(
    first: str = "size", last: str = "body_length", *, born: int = HOST_V4_SIZE, store: int = HOST_V4_SIZE
) -> list[tuple[str, int]]:
    """Return the fields from `first` to `last` with their widths in bytes, given the widths of hosts."""
    hosts = {"born_host": born, "store_host": store}
    chosen = FIELDS[_NAMES.index(first) : _NAMES.index(last) + 1]
    return [(name, width or hosts[name]) for name, width in chosen]


def struct_of(first: str = "size", last: str = "body_length", **hosts: int) -> Struct:
    """Return a Struct of the fields; a host is its packed address and port."""
    codes = {4: "i", 8: "q"}
    fields = widths(first, last, **hosts)
    return Struct(">" + "".join(f"{width}s" if name.endswith("_host") else codes[width] for name, width in fields))


def struct_without(*unseen: str, born: int = HOST_V4_SIZE, store: int = HOST_V4_SIZE) -> Struct:
    """Return a Struct of the fields up to the body that skips the `unseen` ones."""
    codes = {4: "i", 8: "q"}
    fields = widths(born=born, store=store)
    return Struct(">" + "".join(f"{width}x" if name in unseen else codes[width] for name, width in fields))


def dtype_of(first: str = "size", last: str = "body_length", **hosts: int) -> list[tuple[str, str]]:
    """Return the fields as a numpy dtype description; a host is opaque bytes."""
    return [
        (name, f"V{width}" if name.endswith("_host") else f">i{width}") for name, width in widths(first, last, **hosts)
    ]


def position_of(field: str) -> int:
    """Return the position of a field; behind the born host, for two IPv4 hosts."""
    return sum(width for name, width in widths() if _NAMES.index(name) < _NAMES.index(field))


#: Structs of all fields up to the body, by the widths of the born host and the store host.
HEADS: Final = {
    (born, store): struct_of(born=born, store=store)
    for born in (HOST_V4_SIZE, HOST_V6_SIZE)
    for store in (HOST_V4_SIZE, HOST_V6_SIZE)
}
HEAD_V4: Final = HEADS[HOST_V4_SIZE, HOST_V4_SIZE]
#: The additional bytes of an IPv6 host.
V6_EXTRA: Final = HOST_V6_SIZE - HOST_V4_SIZE
SIZE_AND_MAGIC: Final = struct_of("size", "magic")
QUEUE_OFFSET_AT: Final = position_of("queue_offset")
PHYSICAL_OFFSET_AT: Final = position_of("physical_offset")
SYS_FLAG_AT: Final = position_of("sys_flag")
BORN_HOST_AT: Final = position_of("born_host")
assert (HEAD_V4.size, PHYSICAL_OFFSET_AT, SYS_FLAG_AT, BORN_HOST_AT) == (88, 28, 36, 48)

HOST_V4 = Struct(">4si")
HOST_V6 = Struct(">16si")
assert (HOST_V4.size, HOST_V6.size) == (HOST_V4_SIZE, HOST_V6_SIZE)
I16 = Struct(">h")
I32 = Struct(">i")
I64 = Struct(">q")

_LONGEST_V1_TOPIC: Final = 127
assert HEAD_V4.size + 1 + 2 == RECORD_SIZE_MIN


def host_sizes(sys_flag: int) -> tuple[int, int]:
    """Return the widths of born host and store host given by a sysFlag."""
    return (
        HOST_V6_SIZE if sys_flag & BORN_HOST_V6 else HOST_V4_SIZE,
        HOST_V6_SIZE if sys_flag & STORE_HOST_V6 else HOST_V4_SIZE,
    )


def host_flags(born: int, store: int) -> int:
    """Return the sysFlag bits for these widths."""
    flags = (BORN_HOST_V6 if born == HOST_V6_SIZE else 0) | (STORE_HOST_V6 if store == HOST_V6_SIZE else 0)
    assert host_sizes(flags) == (born, store), "a host is 8 or 20 bytes"
    return flags


def topic_field(topic: bytes) -> tuple[int, bytes]:
    """Return the magic of a topic's records, and the length-prefixed topic; version 2 is used above 127 bytes."""
    if len(topic) <= _LONGEST_V1_TOPIC:
        return MAGIC_V1, bytes((len(topic),)) + topic
    return MAGIC_V2, len(topic).to_bytes(2, "big") + topic
