"""The log of a topic's Delta table: its schema, its protocol and the actions that add and remove files. Pure.

    <prefix>/topic=<T>/_delta_log/<version, 20 digits>.json                        one commit: a line for each action
    <prefix>/topic=<T>/_delta_log/<version, 20 digits>.checkpoint.<uuid>.json      the state after that commit

The files are the topic's objects in place; `dt` and `broker` are partition values from the key. A deletion vector hides
expired rows of an object in view.
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

#: A writer feature unknown to other programs: Delta's protocol forbids them to write, compact or vacuum the table.
LOCK = "neveManaged"
# v2Checkpoint allows JSON checkpoints. It also excludes readers such as Polars 2.1, which look up deletion vectors by
# the text of a path: for a name with a `%` they find none, and return hidden rows.
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
#: The columns of objects with Delta's type names; a test compares them with `neve.archive.rows.schema`.
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
    """A file in view and its hidden rows."""

    name: CommittedObject
    hidden: tuple[tuple[int, int], ...]  # (first row, last row), ordered and disjoint

    @property
    def vector(self) -> DeletionVector | None:
        """The deletion vector of the hidden rows; None if no row is hidden."""
        return deletion_vector(self.hidden) if self.hidden else None


def visible_file(name: CommittedObject, minimums: Mapping[int, int]) -> VisibleFile | None:
    """Return the file of an object in view, given the minimums of queues; None if all its rows have expired."""
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
    """Return the key prefix of the table."""
    return "/".join(part for part in (prefix.strip("/"), topic_component(topic)) if part)


def app_id(broker: str) -> str:
    """Return the application id of a broker: its `txn` action contains the number of the last mirrored entry."""
    return f"{_APP}{broker}"


def is_locked(protocol: Mapping[str, Any]) -> bool:
    """Return whether neve manages a table with this protocol."""
    return LOCK in protocol.get("writerFeatures", ())


def metadata(topic: str, table_id: str, created_ms: int) -> Action:
    """Return the metaData action: the columns and the settings of the table."""
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in COLUMNS]
    schema = msgspec.json.encode({"type": "struct", "fields": fields}).decode()
    return {
        "metaData": {
            "id": table_id,
            "name": topic,
            "description": "Written by neve from its archive's journal; no other program may write here.",
            "format": {"provider": "parquet", "options": {}},
            "schemaString": schema,
            "partitionColumns": list(PARTITIONS),
            "configuration": {
                "delta.checkpointPolicy": "v2",
                # neve alone cleans up the log: with these values no other program finds expired files.
                "delta.logRetentionDuration": _NEVER,
                "delta.deletedFileRetentionDuration": _NEVER,
                "delta.enableExpiredLogCleanup": "false",
                "delta.dataSkippingStatsColumns": "queue_id,queue_offset,store_timestamp",
            },
            "createdTime": created_ms,
        }
    }


def add(root: str, broker: str, file: VisibleFile, *, data_change: bool) -> Action:
    """Return the action that adds a file, or changes its hidden rows."""
    name, vector = file.name, file.vector
    content: dict[str, Any] = {
        "path": path_in(root, name.key),
        "partitionValues": {"topic": name.topic, "dt": name.day, "broker": broker},
        "size": name.size,
        "modificationTime": max(name.max_time, 0),
        "dataChange": data_change,
        "stats": msgspec.json.encode(_statistics(file)).decode(),
    }
    if vector is not None:
        content["deletionVector"] = vector.action()
    return {"add": content}


def remove(added: Mapping[str, Any], *, time_ms: int, data_change: bool) -> Action:
    """Return the action that removes a file as its `add` described it.

    `time_ms` is the time of the removal, from which retention counts.
    """
    content = {
        "path": added["path"],
        "deletionTimestamp": time_ms,
        "dataChange": data_change,
        "extendedFileMetadata": True,
        "partitionValues": added["partitionValues"],
        "size": added["size"],
    }
    if added.get("deletionVector") is not None:
        content["deletionVector"] = added["deletionVector"]
    return {"remove": content}


def path_in(root: str, key: str) -> str:
    """Return a key as a path relative to the table: a URI, in which the key's own `%` becomes `%25`."""
    assert key.startswith(f"{root}/"), f"{key} is not below {root}"
    return key.removeprefix(f"{root}/").replace("%", "%25")


def encode_lines(actions: Iterable[Action]) -> bytes:
    """Encode a file of the log."""
    return b"".join(msgspec.json.encode(action) + b"\n" for action in actions)


def _statistics(file: VisibleFile) -> dict[str, Any]:
    """Return the statistics for data skipping; bounds are wide if rows are hidden, and absent for unknown times."""
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
