"""The archive: formats, catalog, Parquet rows, policy decisions, and readers that need no broker.

A reader gets bytes from an `ObjectSource`; `store` has one for a directory and one for S3 (boto3). The packages `rows`
and `read` need the `[archive]` extra; all others run on the standard library and msgspec.
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
    """Open the archive of a store as of now; no broker needs to run.

    Args:
        source: `dir:PATH`, `s3://BUCKET/PREFIX?endpoint=URL&region=NAME`, or anything with the methods of
            `ObjectSource`. Credentials come from the AWS variables, a profile or the machine's role.
        prefix: the prefix of the archive in the source; a URL contains it.

    Raises:
        FileNotFoundError: there is no archive.
        ValueError: the URL is invalid.
        ImportError: the [archive] extra is not installed.
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
    """Return a topic's archived messages as a PyArrow dataset, for DuckDB, Polars, pandas and other engines.

    The dataset contains each message of the current catalog once. No broker is contacted.

    Args:
        store: `dir:PATH` or `s3://BUCKET/PREFIX?endpoint=URL&region=NAME`, as for `open`.
        topic: the topic.
        start: the lowest store time: a datetime, ISO 8601 text, or milliseconds since 1970; UTC without a zone.
        end: the store time before which messages are included.
        queues: only messages of these queues.
        offsets: the lowest and the highest queue offset, both included.
        broker: only messages of this broker; of all brokers by default.
        tags: only messages with one of these tags.
        keys: only messages with one of these keys, or with one as their unique key (`msg_id`).
        bodies: `inflated` decompresses bodies, `stored` returns them as stored (`body_codec`).
        on_error: the treatment of a body that cannot be decompressed: `null` sets `body_error`, `stop` raises.
        max_body: the highest size in bytes of a decompressed body.

    Raises:
        FileNotFoundError: there is no archive, or the topic has never been archived.
        ValueError: the URL is invalid.
        ImportError: the [archive] extra is not installed.
    """
    if bodies not in ("inflated", "stored") or on_error not in ("null", "stop"):
        raise ValueError(
            f"bodies must be 'inflated' or 'stored', on_error 'null' or 'stop'; got {bodies!r} and {on_error!r}"
        )
    try:
        from neve.archive.catalog.journal_reader import catalogs  # noqa: PLC0415
        from neve.archive.read.selection import Selection, choose, instant_ms  # noqa: PLC0415
        from neve.archive.read.topic_dataset import BodyForm, RowFilter, topic_dataset  # noqa: PLC0415
        from neve.archive.store.source import open_source  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        raise _explained(missing) from None
    known = catalogs(open_source(store), broker)
    if not any(catalog.has_topic(topic) for catalog in known.values()):
        raise FileNotFoundError(f"topic {topic} is not in this archive")
    selection = Selection(instant_ms(start), instant_ms(end), _frozen(queues), *offsets)
    wanted = RowFilter(selection, _frozen(tags), _frozen(keys))
    given = BodyForm(bodies == "inflated", on_error == "stop", max_body)
    return topic_dataset(choose(known, topic, selection), topic, store, wanted, given)


def _frozen(values: Collection[T] | None) -> frozenset[T] | None:
    if isinstance(values, str):
        raise TypeError(f"expected a collection of strings, got the string {values!r}")
    return None if values is None else frozenset(values)


def _explained(missing: ModuleNotFoundError) -> ImportError:
    if missing.name is None or missing.name.split(".")[0] not in _EXTRA:
        return missing
    return ImportError(f"reading an archive needs {missing.name}: pip install 'neve[archive]'")
