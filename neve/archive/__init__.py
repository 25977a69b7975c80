"""The archive's format: keys, journal entries, the catalog they add up to, and rows that rebuild to records.

Reading lives here, free of sockets: it asks for bytes through `ObjectSource`; `source` has one for a directory and one
for S3 (boto3). Only that, `schema`, `rebuild`, `reader`, `inflation` and `topic_dataset` need the `[archive]` extra;
the rest runs on the standard library and msgspec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

from neve.record.bodies import INFLATED_LENGTH_MAX

if TYPE_CHECKING:
    from collections.abc import Collection

    from neve.archive.read.reader import Archive, ObjectSource
    from neve.archive.read.selection import Instant
    from neve.archive.read.topic_dataset import TopicDataset

__all__ = ["dataset", "open"]

T = TypeVar("T")
_EXTRA = ("numpy", "pyarrow")


def open(source: str | ObjectSource, prefix: str = "") -> Archive:
    """The archive of a store, read with no broker alive, as it stands now.

    Args:
        source: `dir:PATH`, `s3://BUCKET/PREFIX?endpoint=URL&region=NAME`, or anything with the methods of
            `ObjectSource`. Credentials come from the AWS variables, a profile or the machine's role.
        prefix: below which the archive lies in the source; a URL has it already.

    Raises:
        FileNotFoundError: there is no archive.
        ValueError: the URL is none.
        ImportError: the [archive] extra is not installed; clients come without it.
    """
    try:
        from neve.archive.read.reader import Archive as _Archive  # noqa: PLC0415
        from neve.archive.store.source import open_source  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        raise _explained(missing) from None
    return _Archive(open_source(source) if isinstance(source, str) else source, prefix)


def dataset(
    store: str,
    topic: str,
    *,
    start: Instant | None = None,
    end: Instant | None = None,
    queues: Collection[int] | None = None,
    offsets: tuple[int | None, int | None] = (None, None),
    broker: str | None = None,
    tags: Collection[str] | None = None,
    keys: Collection[str] | None = None,
    bodies: Literal["inflated", "stored"] = "inflated",
    on_error: Literal["null", "stop"] = "null",
    max_body: int = INFLATED_LENGTH_MAX,
) -> TopicDataset:
    """A topic's archived messages for DuckDB, Polars, pandas and whoever else takes a PyArrow dataset.

    Exactly what the catalog holds now, each message once; no broker is asked.

    Args:
        store: `dir:PATH` or `s3://BUCKET/PREFIX?endpoint=URL&region=NAME`, as for `open`.
        topic: its name, as clients say it.
        start: stored at or after this datetime, ISO 8601 text, or milliseconds since 1970; UTC without a zone.
        end: stored before this.
        queues: of these alone.
        offsets: the lowest and the highest queue offset, both included.
        broker: of this one alone; otherwise of all.
        tags: with one of these.
        keys: with one of these among their keys, or as their unique key (`msg_id`).
        bodies: `inflated` gives them as the producer had them, `stored` as they lie there (`body_codec`).
        on_error: what becomes of a body that does not inflate: `null`, with the reason in `body_error`; or `stop`.
        max_body: how many bytes a body may be when inflated.

    Raises:
        FileNotFoundError: there is no archive, or the topic has never been archived.
        ValueError: the URL is none.
        ImportError: the [archive] extra is not installed.
    """
    if bodies not in ("inflated", "stored") or on_error not in ("null", "stop"):
        raise ValueError("bodies is 'inflated' or 'stored', on_error is 'null' or 'stop'")
    try:
        from neve.archive.catalog.journal_reader import catalogs  # noqa: PLC0415
        from neve.archive.read.selection import Selection, choose, instant_ms  # noqa: PLC0415
        from neve.archive.read.topic_dataset import Bodies, RowFilter, topic_dataset  # noqa: PLC0415
        from neve.archive.store.source import open_source  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        raise _explained(missing) from None
    known = catalogs(open_source(store), broker)
    if not any(catalog.has_topic(topic) for catalog in known.values()):
        raise FileNotFoundError(f"topic {topic} is not in this archive")
    selection = Selection(instant_ms(start), instant_ms(end), _frozen(queues), *offsets)
    wanted = RowFilter(selection, _frozen(tags), _frozen(keys))
    given = Bodies(bodies == "inflated", on_error == "stop", max_body)
    return topic_dataset(choose(known, topic, selection), topic, store, wanted, given)


def _frozen(values: Collection[T] | None) -> frozenset[T] | None:
    if isinstance(values, str):
        raise TypeError(f"a collection of texts, not {values!r} itself")
    return None if values is None else frozenset(values)


def _explained(missing: ModuleNotFoundError) -> ImportError:
    if missing.name is None or missing.name.split(".")[0] not in _EXTRA:
        return missing
    return ImportError(f"reading an archive needs {missing.name}: pip install 'neve[archive]'")
