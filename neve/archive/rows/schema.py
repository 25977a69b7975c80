"""The columns of a data object, how they are written, and the file metadata beside them.

    column                                          type                    from the record
    queue_id                                        int32
    queue_offset                                    int64                   dense within a queue
    store_timestamp, born_timestamp                 timestamp(ms, UTC)      null outside 1970-9999
    msg_id, tags                                    string                  properties UNIQ_KEY, TAGS
    keys                                            list<string>            property KEYS, split at blanks
    properties                                      map<string, string>     all, in wire order
    properties_tail                                 bool                    the string ended with 0x02
    body                                            binary                  as stored
    body_codec                                      string                  none, zlib, lz4, zstd: from sys_flag
    sys_flag, flag, reconsume_times, body_crc       int32
    prepared_transaction_offset, commit_log_offset  int64
    born_host, store_host                           string                  ip:port, [ip]:port for IPv6
    wire                                            binary                  the stored record, where the rest
                                                                            does not rebuild it exactly
    damaged                                         bool                    CRC or framing did not hold

File metadata (all keys begin with `neve.`) repeats what the journal says of the object, so that a catalog can be
rebuilt from the objects alone. Bloom filters stand on `msg_id` and `keys.list.element` (pyarrow 26 writes them);
`neve.filters` says that these columns hold all that a query by key may ask for, so that no means no.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import pyarrow as pa
import pyarrow.parquet as pq

from neve.archive.format.journal import FORMAT_VERSION, CommittedObject, NewerFormat, PlannedObject, RowGroup
from neve.record.layout import COMPRESSED, COMPRESSION_LZ4, COMPRESSION_MASK, COMPRESSION_ZLIB, COMPRESSION_ZSTD

FIELD_ID: Final = "PARQUET:field_id"  # as Arrow calls it
_TIME: Final = pa.timestamp("ms", tz="UTC")  # what a record has: no other unit says more

# Numbers that stand in each object for good: engines that read by id find a column whatever it is called. One that is
# added takes the next, one that goes leaves a hole; those of what is nested count on.
_IDS: Final = {
    "queue_id": 1,
    "queue_offset": 2,
    "store_timestamp": 3,
    "born_timestamp": 4,
    "msg_id": 5,
    "tags": 6,
    "keys": 7,
    "properties": 8,
    "properties_tail": 9,
    "body": 10,
    "body_codec": 11,
    "sys_flag": 12,
    "flag": 13,
    "reconsume_times": 14,
    "body_crc": 15,
    "prepared_transaction_offset": 16,
    "commit_log_offset": 17,
    "born_host": 18,
    "store_host": 19,
    "wire": 20,
    "damaged": 21,
    "element": 22,
    "key": 23,
    "value": 24,
}


def _field(name: str, kind: pa.DataType, *, nullable: bool = True) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={FIELD_ID: str(_IDS[name])})


SCHEMA: Final = pa.schema(
    [
        _field("queue_id", pa.int32()),
        _field("queue_offset", pa.int64()),
        _field("store_timestamp", _TIME),
        _field("born_timestamp", _TIME),
        _field("msg_id", pa.string()),
        _field("tags", pa.string()),
        _field("keys", pa.list_(_field("element", pa.string()))),
        _field("properties", pa.map_(_field("key", pa.string(), nullable=False), _field("value", pa.string()))),
        _field("properties_tail", pa.bool_()),
        _field("body", pa.binary()),
        _field("body_codec", pa.string()),
        _field("sys_flag", pa.int32()),
        _field("flag", pa.int32()),
        _field("reconsume_times", pa.int32()),
        _field("body_crc", pa.int32()),
        _field("prepared_transaction_offset", pa.int64()),
        _field("commit_log_offset", pa.int64()),
        _field("born_host", pa.string()),
        _field("store_host", pa.string()),
        _field("wire", pa.binary()),
        _field("damaged", pa.bool_()),
    ]
)

TIME_END_MS: Final = 253_402_300_800_000  # 10000-01-01: beyond it, Spark fails to read the file
GROUP_BYTES: Final = 4 << 20
GROUP_BYTES_AT_QUEUE_CHANGE: Final = 256 << 10
PAGE_BYTES: Final = 1 << 20
TINY_BYTES: Final = 64 << 10  # of wire: who wants a row of such an object reads it whole
STATISTICS: Final = [
    "queue_id",
    "queue_offset",
    "store_timestamp",
    "born_timestamp",
    "msg_id",
    "tags",
    "commit_log_offset",
    "damaged",
]
TINY_STATISTICS: Final = ["commit_log_offset"]  # rules an object out for who looks for a place in the log
DICTIONARY: Final = ["tags", "body_codec", "born_host", "store_host", "properties.key_value.key", "sys_flag", "flag"]
FILTERED: Final = ("msg_id", "keys.list.element")
FEW_ROWS: Final = 16
# What few rows may have so much of that there is something to compress; of a lone small one its body alone.
TEXTS: Final = [
    "msg_id",
    "keys.list.element",
    "properties.key_value.key",
    "properties.key_value.value",
    "body",
    "born_host",
    "store_host",
    "wire",
]
_LONE_ROWS, _LONE_BYTES = 3, 4 << 10
FILTERS_MARK: Final = "neve.filters"


class DamagedObject(ValueError):
    """The object's bytes do not hold what they say."""


class ObjectFacts(NamedTuple):
    """What the file metadata names beside the columns."""

    cluster: str
    broker: str
    topic: str
    day: str
    round: int
    start: int
    end: int

    @classmethod
    def of(cls, name: PlannedObject, told: Mapping[str, str]) -> Self:
        """`told`: what the intent does not name, as a worker is sent it."""
        return cls(
            cluster=told.get("cluster", ""),
            broker=told.get("broker", ""),
            topic=name.topic,
            day=name.day,
            round=int(told.get("round", "0")),
            start=name.start,
            end=name.end,
        )


def writer_options(rows: int, wire_bytes: int) -> dict[str, Any]:
    """Arguments of ParquetWriter, for the rows at hand: their number sizes the bloom filters.

    What helps to leave out parts of an object costs as much for one row as for a million, and more than a tiny object
    has. Its filters stay: a query by key reads so many row groups, and no more.
    """
    is_tiny = wire_bytes <= TINY_BYTES
    distinct = max(16, min(rows, 1 << 20))
    bloom = {"ndv": distinct, "fpp": 0.01}
    compressed = _compressed(rows, wire_bytes)
    return {
        "compression": dict.fromkeys(compressed, "zstd") if compressed else "zstd",
        "compression_level": dict.fromkeys(compressed, 1) if compressed else 1,
        "use_dictionary": False if is_tiny else DICTIONARY,
        "write_statistics": TINY_STATISTICS if is_tiny else STATISTICS,
        "data_page_size": PAGE_BYTES,
        "write_page_index": not is_tiny,
        "write_page_checksum": True,
        "bloom_filter_options": dict.fromkeys(FILTERED, bloom),
        "sorting_columns": [pq.SortingColumn(0), pq.SortingColumn(1)],
        "store_schema": False,  # all types are Parquet's own
    }


def _compressed(rows: int, wire_bytes: int) -> Sequence[str]:
    """The columns that are worth it, of few rows; empty: all of them are.

    A column has a compressor of its own, which takes longer to set up than to write some bytes as they are.
    """
    if rows >= FEW_ROWS:
        return ()
    return ["body", "wire"] if rows <= _LONE_ROWS and wire_bytes <= _LONE_BYTES else TEXTS


def body_codec(sys_flag: int) -> str:
    """The name of a body's compression; old clients set no type bits and mean zlib."""
    if not sys_flag & COMPRESSED:
        return "none"
    types = {0: "zlib", COMPRESSION_ZLIB: "zlib", COMPRESSION_LZ4: "lz4", COMPRESSION_ZSTD: "zstd"}
    return types.get(sys_flag & COMPRESSION_MASK, "unknown")


def file_metadata(facts: ObjectFacts, sha256: str, groups: list[RowGroup]) -> dict[str, str]:
    """Byte ranges are left out: the Parquet footer itself has them."""
    described = [[g.wire_bytes, g.oldest_ms, g.newest_ms, g.runs] for g in groups]
    values = {**facts._asdict(), "format_version": FORMAT_VERSION, "sha256": sha256, "groups": json.dumps(described)}
    return {**{f"neve.{name}": str(value) for name, value in values.items()}, FILTERS_MARK: "1"}


def parse_footer(footer: bytes | memoryview) -> pq.FileMetaData:
    """The file metadata from the object's last `CommittedObject.footer` bytes."""
    try:
        return pq.read_metadata(pa.BufferReader(b"PAR1" + bytes(footer)))
    except (pa.ArrowException, OSError) as error:
        raise DamagedObject(f"the footer is not Parquet: {error}") from error


def group_range(metadata: pq.FileMetaData, index: int) -> tuple[int, int]:
    """(offset, length) of a row group: its column chunks lie side by side."""
    group = metadata.row_group(index)
    start, end = 1 << 62, 0
    for column in range(group.num_columns):
        chunk = group.column(column)
        begin = chunk.data_page_offset
        if chunk.has_dictionary_page and chunk.dictionary_page_offset:
            begin = min(begin, chunk.dictionary_page_offset)
        start, end = min(start, begin), max(end, begin + chunk.total_compressed_size)
    return start, end - start


def describe(  # what a journal says of an object, from its footer
    metadata: pq.FileMetaData, *, key: str, size: int, footer: int, etag: str, checksum: tuple[str, str]
) -> CommittedObject:
    """Raises NewerFormat, or DamagedObject when the file is none of neve's."""
    raw = {name.decode(): value.decode() for name, value in (metadata.metadata or {}).items() if name[:5] == b"neve."}
    try:
        if int(raw["neve.format_version"]) > FORMAT_VERSION:
            raise NewerFormat(f"{key} is of format {raw['neve.format_version']}")
        described = json.loads(raw["neve.groups"])
        groups, first_row = [], 0
        queues: dict[int, tuple[int, int, int]] = {}
        for index, (wire_bytes, oldest, newest, runs) in enumerate(described):
            rows = metadata.row_group(index).num_rows
            offset, length = group_range(metadata, index)
            typed = [(int(queue), int(first), int(last)) for queue, first, last in runs]
            groups.append(RowGroup(first_row, rows, offset, length, newest, oldest, wire_bytes, typed))
            row = first_row
            for queue, first, last in typed:
                begin, _, begin_row = queues.get(queue, (first, last, row))
                queues[queue] = (begin, last, begin_row)
                row += last - first + 1
            first_row += rows
        return CommittedObject(
            key=key,
            topic=raw["neve.topic"],
            day=raw["neve.day"],
            start=int(raw["neve.start"]),
            end=int(raw["neve.end"]),
            size=size,
            footer=footer,
            etag=etag,
            checksum=checksum,
            sha256=raw["neve.sha256"],
            rows=metadata.num_rows,
            wire_bytes=sum(group.wire_bytes for group in groups),
            min_time=min((group.oldest_ms for group in groups if group.oldest_ms >= 0), default=-1),
            max_time=max((group.newest_ms for group in groups), default=-1),
            queues=queues,
            row_groups=groups,
        )
    except (KeyError, IndexError, TypeError) as error:
        raise DamagedObject(f"{key} has no description of its rows: {error!r}") from error
