"""The columns of a data object, its Parquet settings and its file metadata.

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
    wire                                            binary                  the stored record, if the other columns
                                                                            do not rebuild it exactly
    damaged                                         bool                    wrong CRC or framing

File metadata, with keys that begin with `neve.`, repeats the journal's record of the object, so that a catalog can be
rebuilt from the objects alone. `msg_id` and `keys.list.element` have bloom filters (pyarrow 26 writes them). The mark
`neve.filters` guarantees that these columns contain every key that a query may ask for, so a negative result is final.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import pyarrow as pa
import pyarrow.parquet as pq

from neve.archive.format.journal import FORMAT_VERSION, CommittedObject, NewerFormat, PlannedObject, RowGroup
from neve.record.layout import COMPRESSED, COMPRESSION_LZ4, COMPRESSION_MASK, COMPRESSION_ZLIB, COMPRESSION_ZSTD

FIELD_ID: Final = "PARQUET:field_id"  # Arrow's metadata key
_TIME: Final = pa.timestamp("ms", tz="UTC")  # the unit of a record's times

# Permanent ids, by which engines find renamed columns. A new column takes the next number; a removed number is not used
# again. Nested fields are numbered after the columns.
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
TINY_BYTES: Final = 64 << 10  # of wire; a reader of one row reads such an object whole
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
TINY_STATISTICS: Final = ["commit_log_offset"]  # excludes objects in a search by physical offset
DICTIONARY: Final = ["tags", "body_codec", "born_host", "store_host", "properties.key_value.key", "sys_flag", "flag"]
FILTERED: Final = ("msg_id", "keys.list.element")
FEW_ROWS: Final = 16
# The columns worth compressing in an object of few rows; in one of a few small rows, only the body is.
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
    """The bytes of an object are inconsistent."""


class ObjectFacts(NamedTuple):
    """The facts in the file metadata."""

    cluster: str
    broker: str
    topic: str
    day: str
    round: int
    start: int
    end: int

    @classmethod
    def of(cls, name: PlannedObject, further: Mapping[str, str]) -> Self:
        """Combine a planned object with the `further` facts that a worker receives: cluster, broker and round."""
        return cls(
            cluster=further.get("cluster", ""),
            broker=further.get("broker", ""),
            topic=name.topic,
            day=name.day,
            round=int(further.get("round", "0")),
            start=name.start,
            end=name.end,
        )


def writer_options(rows: int, wire_bytes: int) -> dict[str, Any]:
    """Return the arguments of ParquetWriter for an object of this size.

    The indexes that let a reader skip parts of an object have a fixed cost, which exceeds the content of a tiny object,
    so a tiny one has only bloom filters. They limit the number of objects that a query by key reads.
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
    """Return the columns worth compressing; empty means all.

    Each column needs its own compressor, whose set-up takes longer than writing a few bytes uncompressed.
    """
    if rows >= FEW_ROWS:
        return ()
    return ["body", "wire"] if rows <= _LONE_ROWS and wire_bytes <= _LONE_BYTES else TEXTS


def body_codec(sys_flag: int) -> str:
    """Return the name of a body's compression; old clients set no type bits and use zlib."""
    if not sys_flag & COMPRESSED:
        return "none"
    types = {0: "zlib", COMPRESSION_ZLIB: "zlib", COMPRESSION_LZ4: "lz4", COMPRESSION_ZSTD: "zstd"}
    return types.get(sys_flag & COMPRESSION_MASK, "unknown")


def file_metadata(facts: ObjectFacts, sha256: str, groups: list[RowGroup]) -> dict[str, str]:
    """Return the file metadata; byte ranges are left out, because the Parquet footer has them."""
    described = [[g.wire_bytes, g.oldest_ms, g.newest_ms, g.runs] for g in groups]
    values = {**facts._asdict(), "format_version": FORMAT_VERSION, "sha256": sha256, "groups": json.dumps(described)}
    return {**{f"neve.{name}": str(value) for name, value in values.items()}, FILTERS_MARK: "1"}


def parse_footer(footer: bytes | memoryview) -> pq.FileMetaData:
    """Parse the Parquet footer: the last `CommittedObject.footer` bytes of an object. Raises DamagedObject."""
    try:
        return pq.read_metadata(pa.BufferReader(b"PAR1" + bytes(footer)))
    except (pa.ArrowException, OSError) as error:
        raise DamagedObject(f"the footer is not Parquet: {error}") from error


def group_range(metadata: pq.FileMetaData, index: int) -> tuple[int, int]:
    """Return (offset, length) of a row group, whose column chunks are contiguous."""
    group = metadata.row_group(index)
    start, end = 1 << 62, 0
    for column in range(group.num_columns):
        chunk = group.column(column)
        begin = chunk.data_page_offset
        if chunk.has_dictionary_page and chunk.dictionary_page_offset:
            begin = min(begin, chunk.dictionary_page_offset)
        start, end = min(start, begin), max(end, begin + chunk.total_compressed_size)
    return start, end - start


def describe(
    metadata: pq.FileMetaData, *, key: str, size: int, footer: int, etag: str, checksum: tuple[str, str]
) -> CommittedObject:
    """Build the journal's record of an object from its footer.

    Raises:
        NewerFormat: the object has a higher format version.
        DamagedObject: neve did not write the file.
    """
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
        raise DamagedObject(f"{key} lacks the metadata of its rows: {error!r}") from error
