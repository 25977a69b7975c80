"""Rows as messages. Columns have the names and types of the archive's, so that rows that were read can be written.

The property NEVE_SINK has the identity of the row: the query, its batch, the partition and the number of the row in it,
or the value of the column `id`. Spark repeats a batch whose end it did not see; a repeated row has the same identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from neve.client.model import Message
from neve.client.send.batch_sender import BatchItem
from neve.client.send.draft import timing
from neve.client.validators import RESERVED_PROPERTIES, body_bytes, check_body, check_properties, check_topic
from neve.errors import ClientError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

IDENTITY = "NEVE_SINK"

_WHOLE = ("tinyint", "smallint", "int", "bigint")
_COLUMNS: Mapping[str, Sequence[str]] = {
    "body": ("binary", "string"),
    "topic": ("string",),
    "tags": ("string",),
    "keys": ("string", "array<string>"),
    "properties": ("map<string,string>",),
    "queue_id": _WHOLE,
    "order_key": ("string", *_WHOLE),
    "delay_level": _WHOLE,
    "delay": ("float", "double", *_WHOLE),
    "deliver_at": ("timestamp",),
    "flag": _WHOLE,
    "id": ("string", *_WHOLE),
}
_OTHER_NAMES = {"tag": "tags", "key": "keys"}
_EXCLUDE_EACH_OTHER = (("queue_id", "order_key"), ("delay_level", "delay", "deliver_at"))


class BadColumn(ValueError):
    """A column is unknown, missing, of another type, or excluded by another."""


class BadRow(ValueError):
    """A row that brokers would reject."""


def check_columns(schema: StructType, *, has_topic: bool) -> None:
    """Check the columns of a write. Raises BadColumn."""
    kinds: dict[str, str] = {}
    for field in schema.fields:
        name, kind = _OTHER_NAMES.get(field.name, field.name), field.dataType.simpleString()
        if name not in _COLUMNS:
            raise BadColumn(f"column {field.name} is unknown; columns are {', '.join(_COLUMNS)}")
        if name in kinds:
            raise BadColumn(f"column {field.name} occurs twice" + f" ({name})" * (name != field.name))
        if kind not in _COLUMNS[name]:
            raise BadColumn(f"column {field.name} has type {kind}: cast it to {' or '.join(_COLUMNS[name])}")
        kinds[name] = kind
    if "body" not in kinds:
        raise BadColumn("the column body is missing: bytes or text of the message, such as to_json(struct(*)) AS body")
    if not has_topic and "topic" not in kinds:
        raise BadColumn("the option topic or the column topic is required")
    for names in _EXCLUDE_EACH_OTHER:
        if len(found := [name for name in names if name in kinds]) > 1:
            raise BadColumn(f"columns {' and '.join(found)} exclude each other")


class Partition(NamedTuple):
    """The partition of a task: query, batch and number."""

    query: str
    batch: int
    number: int

    def row(self, number: int) -> str:
        """Return the identity of a row."""
        return f"{self.query}/{self.batch}/{self.number}/{number}"


class _Row(NamedTuple):
    """A row; None for missing columns. The fields are those of `_COLUMNS`, in order."""

    body: bytes | str | None
    topic: str | None
    tags: str | None
    keys: str | Sequence[str] | None
    properties: Sequence[tuple[str, str]] | None  # Arrow's maps are lists of pairs
    queue_id: int | None
    order_key: str | int | None
    delay_level: int | None
    delay: float | None
    deliver_at: datetime | None
    flag: int | None
    id: str | int | None


_NULLS = repeat(None)


class PartitionMessages:
    """The messages of the rows of a partition."""

    def __init__(self, partition: Partition, *, topic: str | None, message_max: int, drops_reserved: bool) -> None:
        self._partition = partition
        self._topic = topic
        self._message_max = message_max
        self._drops_reserved = drops_reserved
        self._count = 0
        self.topics: set[str] = set()  # of the messages so far

    def of(self, batch: pa.RecordBatch) -> Iterator[BatchItem]:
        """Yield the messages of the next Arrow batch. Raises BadRow."""
        columns: dict[str, Iterable[Any]] = {
            _OTHER_NAMES.get(name, name): column.to_pylist()
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        }
        for row in map(_Row._make, zip(*(columns.get(name, _NULLS) for name in _COLUMNS), strict=False)):
            try:
                yield self._message(row)
            except (ClientError, TypeError, ValueError, OverflowError) as error:
                where = f"partition {self._partition.number}, row {self._count}"
                raise BadRow(f"{where}: {getattr(error, 'remark', error)}") from error
            self._count += 1

    def _message(self, row: _Row) -> BatchItem:
        topic = self._topic or row.topic
        if topic is None:
            raise ClientError("column topic is null")
        if topic not in self.topics:
            check_topic(topic)
            self.topics.add(topic)
        if row.body is None:
            raise ClientError("column body is null")
        body = body_bytes(row.body)
        check_body(len(body), self._message_max)
        properties = self._properties(row.properties) if row.properties else {}
        properties[IDENTITY] = self._partition.row(self._count) if row.id is None else f"id/{row.id}"
        message = Message(topic, body, row.tags or None, _keys(row.keys), properties, row.flag or 0)
        return BatchItem(message, row.queue_id, row.order_key, _timing(row))

    def _properties(self, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
        properties = dict(pairs)
        if self._drops_reserved:
            properties = {name: value for name, value in properties.items() if name not in RESERVED_PROPERTIES}
            properties = {name: value for name, value in properties.items() if name != IDENTITY}
        elif IDENTITY in properties:
            raise ClientError(f"property {IDENTITY} is reserved for the sink; {_DROPPED}")
        if properties:
            try:
                check_properties(properties)
            except ClientError as error:
                is_reserved = not RESERVED_PROPERTIES.isdisjoint(properties)
                raise ClientError(error.remark + f"; {_DROPPED}" * is_reserved) from error
        return properties


_DROPPED = "the option reservedProperties=drop omits the reserved properties of rows that were read"


def _keys(keys: str | Sequence[str] | None) -> tuple[str, ...]:
    if not keys:
        return ()
    return tuple(keys.split()) if isinstance(keys, str) else tuple(key for key in keys if key)


def _timing(row: _Row) -> Mapping[str, str]:
    level, delay, at = row.delay_level, row.delay, row.deliver_at
    if level is None and delay is None and at is None:
        return _AT_ONCE
    if isinstance(at, datetime):
        return timing(deliver_at=int(at.timestamp() * 1000))
    return timing(level or 0) if delay is None else timing(delay=delay)


_AT_ONCE: Mapping[str, str] = {}
