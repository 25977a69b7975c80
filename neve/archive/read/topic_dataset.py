"""A topic's archive as a `pyarrow.dataset.Dataset`, which DuckDB, Polars and pandas read directly.

Engines request columns and filters, and receive Arrow batches without a copy. The dataset contains each row once, as of
the moment of its creation, with bodies as the producer sent them. PyArrow cannot express filters by key and
decompressed bodies; both are applied batch by batch between PyArrow's own scan and the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow import fs

from neve.archive.read.selection import Chosen, Selection
from neve.archive.rows.inflation import BadBody, inflated_pieces
from neve.archive.rows.schema import SCHEMA
from neve.archive.store.url import DirUrl, parse_store_url

_PATH_COLUMNS = ("topic", "dt", "broker")
_ERROR = "body_error"
_BODY = frozenset({"body", _ERROR})
_TO_INFLATE = frozenset({"body", "sys_flag"})
_TO_NAME = frozenset({"broker", "queue_id", "queue_offset"})
_OF_KEYS = frozenset({"keys", "msg_id"})

Columns = Sequence[str] | Mapping[str, pc.Expression] | None


class RowFilter(NamedTuple):
    """The filters of rows within the opened objects."""

    selection: Selection
    tags: frozenset[str] | None = None
    keys: frozenset[str] | None = None


class BodyForm(NamedTuple):
    """The form of bodies."""

    inflate: bool
    stop: bool  # raise at a body that cannot be decompressed
    max_bytes: int  # of a decompressed body


def open_files(url: str) -> tuple[fs.FileSystem, str]:
    """Return PyArrow's file system for a store URL, and the prefix of keys in it."""
    where = parse_store_url(url)
    if isinstance(where, DirUrl):
        return fs.LocalFileSystem(), f"{where.path.absolute()}/"
    options = {"endpoint_override": where.endpoint or None, "region": where.region or None}
    bucket = fs.S3FileSystem(**{name: value for name, value in options.items() if value})
    return bucket, f"{where.bucket}/{where.prefix}/" if where.prefix else f"{where.bucket}/"


class TopicDataset(ds.Dataset):  # type: ignore[misc]  # untyped there
    """The rows of one topic. It exposes no fragments, because a file may contain expired rows."""

    def __init__(
        self, files: ds.Dataset, rows: pc.Expression | None, keys: frozenset[str] | None, bodies: BodyForm
    ) -> None:  # the base class has no constructor for subclasses
        self._files, self._rows, self._keys, self._bodies = files, rows, keys, bodies
        error = [pa.field(_ERROR, pa.string())] if bodies.inflate else []
        self._schema = pa.schema([*files.schema, *error])

    @property
    def schema(self) -> pa.Schema:
        """The columns of the archive, the path columns, and `body_error` for decompressed bodies."""
        return self._schema

    def scanner(self, columns: Columns = None, filter: pc.Expression | None = None, **options: Any) -> ds.Scanner:
        """Return a scanner; a filter by `body` or `body_error` is applied after decompression."""
        asked = list(self._schema.names) if columns is None else columns
        wanted = self._asked_for(asked)
        of_filter = self._named_by(filter)
        after = self._bodies.inflate and bool(of_filter & _BODY)
        with_bodies = self._bodies.inflate and bool((wanted | of_filter) & _BODY)
        pushed = _both(self._rows, None if after else filter)
        if not with_bodies and self._keys is None:
            return self._files.scanner(columns=asked, filter=pushed, **options)
        needed = wanted | (of_filter if after else frozenset())
        needed |= (_TO_INFLATE | (_TO_NAME if self._bodies.stop else frozenset())) if with_bodies else frozenset()
        needed |= frozenset() if self._keys is None else _OF_KEYS
        read = [name for name in self._files.schema.names if name in needed]
        source = self._files.scanner(columns=read, filter=pushed, **options)
        finish = _Finish(asked, filter if after else None, self._schema_of(read, with_bodies))
        return _StepwiseScanner(finish.schema, lambda: finish.each(self._stepwise(source, with_bodies)))

    def count_rows(self, filter: pc.Expression | None = None, **options: Any) -> int:
        """Return the number of rows."""
        return int(self.scanner(columns=[], filter=filter, **options).count_rows())

    def filter(self, expression: pc.Expression) -> TopicDataset:
        """Return the dataset of the rows that match an expression without `body`."""
        if self._bodies.inflate and self._named_by(expression) & _BODY:
            raise ValueError("a filter by body must be passed to the scan: scanner(filter=…), to_table(filter=…)")
        return TopicDataset(self._files, _both(self._rows, expression), self._keys, self._bodies)

    def get_fragments(self, filter: pc.Expression | None = None) -> NoReturn:
        raise NotImplementedError("an object may contain expired rows: scan the dataset, not its files")

    def replace_schema(self, schema: pa.Schema) -> NoReturn:
        raise NotImplementedError("the columns are those of the archive: rename and cast them in the query")

    @property
    def partition_expression(self) -> pc.Expression:
        """True: the dataset is not part of a partition."""
        return pc.scalar(True)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.scanner().to_reader().__arrow_c_stream__(requested_schema)

    def _schema_of(self, read: Collection[str], with_bodies: bool) -> pa.Schema:
        return pa.schema([one for one in self._schema if one.name in read or (with_bodies and one.name == _ERROR)])

    def _asked_for(self, columns: Sequence[str] | Mapping[str, pc.Expression]) -> frozenset[str]:
        if not isinstance(columns, Mapping):
            return frozenset(columns)
        return frozenset().union(*(self._named_by(expression) for expression in columns.values()))

    def _named_by(self, expression: pc.Expression | None) -> frozenset[str]:
        """Return the columns of an expression: those without which PyArrow rejects it."""
        if expression is None:
            return frozenset()
        names = self._schema.names
        return frozenset(name for at, name in enumerate(names) if not _binds(expression, self._schema.remove(at)))

    def _stepwise(self, source: ds.Scanner, with_bodies: bool) -> Iterator[pa.RecordBatch]:
        for batch in source.to_batches():
            rows = batch if self._keys is None else batch.filter(with_key(batch, self._keys))
            if not with_bodies:
                yield rows
                continue
            for piece, bodies, errors in inflated_pieces(rows, self._bodies.max_bytes):
                if self._bodies.stop and errors.null_count < len(errors):
                    raise BadBody(_place_and_error(piece, errors))
                at = piece.schema.get_field_index("body")
                yield piece.set_column(at, "body", bodies).append_column(_ERROR, errors)


class _StepwiseScanner(ds.Scanner):  # type: ignore[misc]  # untyped there
    """A scanner over batches that are computed one after another."""

    def __init__(self, schema: pa.Schema, batches: Callable[[], Iterator[pa.RecordBatch]]) -> None:
        self._schema, self._batches = schema, batches

    @property
    def projected_schema(self) -> pa.Schema:
        return self._schema

    @property
    def dataset_schema(self) -> pa.Schema:
        return self._schema

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        return self._batches()

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self._schema, self._batches())

    def to_table(self) -> pa.Table:
        return pa.Table.from_batches(self._batches(), self._schema)

    def count_rows(self) -> int:
        return sum(batch.num_rows for batch in self._batches())

    def head(self, num_rows: int) -> pa.Table:
        return self._first(num_rows)

    def take(self, indices: Any) -> pa.Table:
        return self.to_table().take(indices)

    def scan_batches(self) -> Iterator[ds.TaggedRecordBatch]:
        raise NotImplementedError("batches do not belong to single files: use to_batches()")

    def _first(self, rows: int) -> pa.Table:
        kept: list[pa.RecordBatch] = []
        for batch in self._batches():
            kept.append(batch.slice(0, rows))
            rows -= kept[-1].num_rows
            if rows <= 0:
                break
        return pa.Table.from_batches(kept, self._schema)


class _Finish:
    """Applies the engine's filter and columns to batches in memory."""

    def __init__(
        self, columns: Sequence[str] | Mapping[str, pc.Expression], rows: pc.Expression | None, read: pa.Schema
    ) -> None:
        self._columns = columns if isinstance(columns, Mapping) else list(columns)
        self._rows = rows
        self.schema = self._scan(read.empty_table()).projected_schema

    def each(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from self._scan(batch).to_batches()

    def _scan(self, rows: pa.RecordBatch | pa.Table) -> ds.Scanner:
        return ds.dataset(rows).scanner(columns=self._columns, filter=self._rows, use_threads=False)


def topic_dataset(
    chosen: Iterable[Chosen], topic: str, store: str, wanted: RowFilter, bodies: BodyForm
) -> TopicDataset:
    """Make a dataset of the objects that `selection` chose; their sizes come from the journal, without requests."""
    files, root = open_files(store)
    parquet = ds.ParquetFileFormat()
    schema = pa.schema(
        [*(field.remove_metadata() for field in SCHEMA), *(pa.field(name, pa.string()) for name in _PATH_COLUMNS)]
    )
    fragments, rows = [], _rows(wanted)
    minimums: set[tuple[str, int, int]] = set()
    for broker, name, groups, cut in chosen:
        partition = (pc.field("topic") == topic) & (pc.field("dt") == name.day) & (pc.field("broker") == broker)
        fragments.append(
            parquet.make_fragment(
                root + name.key, files, partition_expression=partition, row_groups=groups, file_size=name.size
            )
        )
        minimums.update((broker, queue, minimum) for queue, minimum in cut.items())
    for broker, queue, minimum in sorted(minimums):
        of_queue = (pc.field("broker") == broker) & (pc.field("queue_id") == queue)
        rows = _both(rows, ~of_queue | (pc.field("queue_offset") >= minimum))
    return TopicDataset(ds.FileSystemDataset(fragments, schema, parquet, files), rows, wanted.keys, bodies)


def _rows(wanted: RowFilter) -> pc.Expression | None:
    start, end, queues, first, last = wanted.selection
    at, offset = pc.field("store_timestamp"), pc.field("queue_offset")
    parts = [
        None if start is None else at >= pa.scalar(start, SCHEMA.field("store_timestamp").type),
        None if end is None else at < pa.scalar(end, SCHEMA.field("store_timestamp").type),
        None if queues is None else pc.field("queue_id").isin(pa.array(sorted(queues), pa.int32())),
        None if first is None else offset >= first,
        None if last is None else offset <= last,
        None if wanted.tags is None else pc.field("tags").isin(pa.array(sorted(wanted.tags), pa.string())),
    ]
    rows: pc.Expression | None = None
    for part in parts:
        rows = _both(rows, part)
    return rows


def _both(one: pc.Expression | None, other: pc.Expression | None) -> pc.Expression | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _binds(expression: pc.Expression, schema: pa.Schema) -> bool:
    try:
        ds.dataset(schema.empty_table()).scanner(columns={"asked": expression})
    except (pa.ArrowInvalid, pa.ArrowKeyError):
        return False
    return True


def with_key(rows: pa.RecordBatch, keys: frozenset[str]) -> pa.Array:
    """Return which rows have one of the keys: a word of KEYS, or the unique key."""
    asked = pa.array(sorted(keys), pa.string())
    having = pc.filter(pc.list_parent_indices(rows["keys"]), pc.is_in(pc.list_flatten(rows["keys"]), asked))
    mask = pc.is_in(rows["msg_id"], asked).to_numpy(zero_copy_only=False).copy()
    mask[np.asarray(having)] = True
    return pa.array(mask)


def _place_and_error(rows: pa.RecordBatch, errors: pa.Array) -> str:
    at = pc.indices_nonzero(errors.is_valid())[0].as_py()
    broker, queue, offset = (rows[name][at].as_py() for name in ("broker", "queue_id", "queue_offset"))
    return f"{broker}, queue {queue}, offset {offset}: {errors[at].as_py()}"
