"""The message record: what a producer's message looks like in the CommitLog and on the wire of a pull.

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

Positions after bornHost hold for two IPv4 hosts. bodyCRC covers the stored body only.
properties = (name 0x01 value 0x02)*.
A record with magic BLANK fills the end of a CommitLog file: 4 bytes of size, 4 of magic; it is never sent.
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

HEAD = Struct(">iiiiiqqiq")
HOST_V4 = Struct(">4si")
HOST_V6 = Struct(">16si")
AFTER_STORE_HOST = Struct(">iqi")
I16 = Struct(">h")
I32 = Struct(">i")
I64 = Struct(">q")
assert HEAD.size == 48
