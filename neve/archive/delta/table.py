"""What the log of a topic's Delta table says: its schema, who may write it, and which files a reader sees.

    <prefix>/topic=<T>/_delta_log/<version, 20 digits>.json                        one commit: a line for each action
    <prefix>/topic=<T>/_delta_log/<version, 20 digits>.checkpoint.<uuid>.json      what all commits up to it add up to

Files are the topic's objects, where they lie; `dt` and `broker` are partition values, from the key. Rows that have
expired in an object that is in view are left out by a deletion vector. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from neve.archive.delta.deletion_vector import DeletionVector, deletion_vector
from neve.archive.format.journal import CommittedObject
from neve.archive.format.keys import topic_component

Action = dict[str, dict[str, Any]]

#: A feature that no other writer knows: by Delta's protocol none of them may write, delete, compact or clean here.
LOCK = "neveManaged"
# The second lets checkpoints be JSON. And it keeps out who looks deletion vectors up by a path's text, as Polars 2.1
# does: where a name has a `%` it finds none, and shows rows that are hidden.
READER_FEATURES = ("deletionVectors", "v2Checkpoint")
PROTOCOL: Action = {
    "protocol": {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": list(READER_FEATURES),
        "writerFeatures": [*READER_FEATURES, LOCK],
    }
}
PARTITIONS = ("topic", "dt", "broker")
_APP = "neve:"
_NEVER = "interval 36500 days"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_TEXTS = {"type": "array", "elementType": "string", "containsNull": True}
_PROPERTIES = {"type": "map", "keyType": "string", "valueType": "string", "valueContainsNull": True}
#: The objects' columns, by Delta's names of their types; a test holds them against `neve.archive.rows.schema`.
COLUMNS: tuple[tuple[str, str | dict[str, Any]], ...] = (
    ("queue_id", "integer"),
    ("queue_offset", "long"),
    ("store_timestamp", "timestamp"),
    ("born_timestamp", "timestamp"),
    ("msg_id", "string"),
    ("tags", "string"),
    ("keys", _TEXTS),
    ("properties", _PROPERTIES),
    ("properties_tail", "boolean"),
    ("body", "binary"),
    ("body_codec", "string"),
    ("sys_flag", "integer"),
    ("flag", "integer"),
    ("reconsume_times", "integer"),
    ("body_crc", "integer"),
    ("prepared_transaction_offset", "long"),
    ("commit_log_offset", "long"),
    ("born_host", "string"),
    ("store_host", "string"),
    ("wire", "binary"),
    ("damaged", "boolean"),
    ("topic", "string"),
    ("dt", "date"),
    ("broker", "string"),
)


class VisibleFile(NamedTuple):
    """A file that readers see, and which of its rows they do not."""

    name: CommittedObject
    hidden: tuple[tuple[int, int], ...]  # (first row, last row), in order and apart

    @property
    def vector(self) -> DeletionVector | None:
        return deletion_vector(self.hidden) if self.hidden else None


def visible_file(name: CommittedObject, minimums: Mapping[int, int]) -> VisibleFile | None:
    """An object in view, by the minimums of its topic's queues; None: all of its rows have expired."""
    spans: list[tuple[int, int]] = []
    for group in name.row_groups:
        row = group.first_row
        for queue, first, last in group.runs:
            below = min(max(minimums.get(queue, 0) - first, 0), last - first + 1)
            if below and spans and spans[-1][1] == row - 1:
                spans[-1] = spans[-1][0], row + below - 1
            elif below:
                spans.append((row, row + below - 1))
            row += last - first + 1
    hidden = sum(last - first + 1 for first, last in spans)
    return None if hidden == name.rows else VisibleFile(name, tuple(spans))


def table_root(prefix: str, topic: str) -> str:
    """Where the table lies, in the store."""
    return "/".join(part for part in (prefix.strip("/"), topic_component(topic)) if part)


def app_id(broker: str) -> str:
    """By which the log knows how far it has a broker's journal: the `txn` of this id has the entry's number."""
    return f"{_APP}{broker}"


def is_locked(protocol: Mapping[str, Any]) -> bool:
    """Whether a table is one of these."""
    return LOCK in protocol.get("writerFeatures", ())


def metadata(topic: str, table_id: str, created_ms: int) -> Action:
    """Which columns there are."""
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in COLUMNS]
    schema = msgspec.json.encode({"type": "struct", "fields": fields}).decode()
    return {
        "metaData": {
            "id": table_id,
            "name": topic,
            "description": "Written by neve from its archive's journal; nobody else may write here.",
            "format": {"provider": "parquet", "options": {}},
            "schemaString": schema,
            "partitionColumns": list(PARTITIONS),
            "configuration": {
                "delta.checkpointPolicy": "v2",
                # What is old in the log goes as neve says: no other program's clean-up finds anything due.
                "delta.logRetentionDuration": _NEVER,
                "delta.deletedFileRetentionDuration": _NEVER,
                "delta.enableExpiredLogCleanup": "false",
                "delta.dataSkippingStatsColumns": "queue_id,queue_offset,store_timestamp",
            },
            "createdTime": created_ms,
        }
    }


def add(root: str, broker: str, file: VisibleFile, *, data_change: bool) -> Action:
    """A file that enters the table, or has other rows hidden from here on."""
    name, vector = file.name, file.vector
    told: dict[str, Any] = {
        "path": path_in(root, name.key),
        "partitionValues": {"topic": name.topic, "dt": name.day, "broker": broker},
        "size": name.size,
        "modificationTime": max(name.max_time, 0),
        "dataChange": data_change,
        "stats": msgspec.json.encode(_statistics(file)).decode(),
    }
    if vector is not None:
        told["deletionVector"] = vector.action()
    return {"add": told}


def remove(added: Mapping[str, Any], *, time_ms: int, data_change: bool) -> Action:
    """A file that leaves the table, or this view of it, as its `add` had it.

    `time_ms`: after which nobody reads it; who cleans up would count his retention from there.
    """
    told = {
        "path": added["path"],
        "deletionTimestamp": time_ms,
        "dataChange": data_change,
        "extendedFileMetadata": True,
        "partitionValues": added["partitionValues"],
        "size": added["size"],
    }
    if added.get("deletionVector") is not None:
        told["deletionVector"] = added["deletionVector"]
    return {"remove": told}


def path_in(root: str, key: str) -> str:
    """A key as a path below the table's root: a URI, in which a key's own `%` is written `%25`."""
    assert key.startswith(f"{root}/"), f"{key} is not below {root}"
    return key.removeprefix(f"{root}/").replace("%", "%25")


def encode_lines(actions: Iterable[Action]) -> bytes:
    """A file of the log."""
    return b"".join(msgspec.json.encode(action) + b"\n" for action in actions)


def _statistics(file: VisibleFile) -> dict[str, Any]:
    """By which readers leave files out. Of a file with hidden rows the bounds may be wide; of unknown times none is."""
    name = file.name
    low: dict[str, Any] = {
        "queue_id": min(name.queues),
        "queue_offset": min(first for first, _, _ in name.queues.values()),
    }
    high: dict[str, Any] = {
        "queue_id": max(name.queues),
        "queue_offset": max(last for _, last, _ in name.queues.values()),
    }
    if name.min_time >= 0:
        low["store_timestamp"], high["store_timestamp"] = _text(name.min_time), _text(name.max_time)
    return {"numRecords": name.rows, "minValues": low, "maxValues": high, "tightBounds": not file.hidden}


def _text(time_ms: int) -> str:
    moment = _EPOCH + timedelta(milliseconds=time_ms)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{time_ms % 1000:03d}Z"
