"""An archive written entry by entry, without the broker code that writes one."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from infra.objects.store import ObjectStore
from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import (
    AnyEntry,
    Checkpoint,
    Commit,
    CommittedObject,
    Epoch,
    Intent,
    PlannedObject,
    Replace,
    RowGroup,
    encode_entry,
)
from neve.archive.format.keys import checkpoint_key, data_key, journal_key
from neve.archive.rows.schema import SCHEMA
from tests.kit.archive.checkpoints import put_checkpoint

Change = Callable[[dict[str, Any]], dict[str, Any]]

HOUR = 3_600_000
T0 = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1000)


# The form of objects before their columns had field ids.
WITHOUT_IDS = pa.schema(
    [
        *(pa.field(field.name, field.type) for field in SCHEMA if field.name not in {"keys", "properties"}),
        pa.field("keys", pa.list_(pa.field("element", pa.string()))),
        pa.field("properties", pa.map_(pa.string(), pa.string())),
    ]
)


class ArchiveOnPaper:
    """An archive written entry by entry, so that the reader is not tested against its own writer."""

    def __init__(self, store: ObjectStore, broker: str, topic: str) -> None:
        self.store, self.broker, self.topic, self.seq = store, broker, topic, 0
        self.catalog, self.checkpointed = Catalog(), -1
        self.append(Epoch(epoch=1, owner="o", log_uuid="l", broker=broker))

    def append(self, entry: AnyEntry) -> None:
        stands = msgspec.structs.replace(entry, checkpoint=self.checkpointed)
        self.store.put(journal_key("", self.broker, self.seq), encode_entry(stands), if_absent=True)
        self.catalog.apply(self.seq, stands)
        self.seq += 1

    def checkpoint(self) -> None:
        through = self.seq - 1
        put_checkpoint(self.store, self.catalog, self.broker)
        self.append(Checkpoint(key=checkpoint_key("", self.broker, through), through_seq=through))
        self.checkpointed = through

    def write(
        self,
        start: int,
        queue: int,
        first: int,
        count: int,
        hour: int,
        *,
        commit: bool = True,
        ids: bool = True,
        change: Change = dict,
    ) -> str:
        """Write `count` messages of one queue, a minute apart, as one object; `change` modifies its rows."""
        key = data_key("", self.topic, "2026-01-01", self.broker, start=start, end=start + 100, epoch=1)
        self.append(
            Intent(
                round=start,
                names=[
                    PlannedObject(
                        key, self.topic, "2026-01-01", start, start + 100, {queue: (first, first + count - 1)}
                    )
                ],
            )
        )
        name = self._put(key, start, start + 100, (queue, first, count), hour, SCHEMA if ids else WITHOUT_IDS, change)
        if commit:
            self.append(Commit(round=start, names=[name]))
        return key

    def replace(self, queue: int, first: int, count: int, hour: int) -> list[str]:
        """Replace these objects with one; return their keys."""
        old = self.catalog.objects(self.topic)
        start, end = old[0].start, old[-1].end
        key = data_key("", self.topic, "2026-01-01", self.broker, start=start, end=end, epoch=1, rewrite=1)
        new = self._put(key, start, end, (queue, first, count), hour, SCHEMA, dict)
        keys = [name.key for name in old]
        self.append(Replace(old=keys, new=[new], delete_after_ms=T0))
        return keys

    def _put(
        self, key: str, start: int, end: int, run: tuple[int, int, int], hour: int, schema: pa.Schema, change: Change
    ) -> CommittedObject:
        queue, first, count = run
        times = [T0 + hour * HOUR + number * 60_000 for number in range(count)]
        rows = [change(row(queue, first + number, at, start + number)) for number, at in enumerate(times)]
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows, schema), sink, compression="zstd", store_schema=schema is WITHOUT_IDS)
        data = sink.getvalue().to_pybytes()
        self.store.put(key, data, if_absent=True)
        last = first + count - 1
        group = RowGroup(0, count, 4, len(data), times[-1], times[0], 100, [(queue, first, last)])
        return CommittedObject(
            key=key, topic=self.topic, day="2026-01-01", start=start, end=end, size=len(data), footer=0,
            etag="", checksum=("", ""), sha256="", rows=count, wire_bytes=100, min_time=times[0], max_time=times[-1],
            queues={queue: (first, last, 0)}, row_groups=[group],
        )  # fmt: skip


def row(queue: int, offset: int, at: int, physical: int) -> dict[str, Any]:
    body = f'{{"n": {offset}, "q": {queue}}}'.encode()
    packed = offset % 2 == 1
    return {
        "queue_id": queue, "queue_offset": offset, "store_timestamp": at, "born_timestamp": at,
        "msg_id": f"{queue}-{offset}",
        "tags": "even" if offset % 2 == 0 else "odd", "keys": ["k"], "properties": [("TAGS", "x")],
        "properties_tail": True,
        "body": zlib.compress(body) if packed else body, "body_codec": "zlib" if packed else "none",
        "sys_flag": 1 if packed else 0, "flag": 0, "reconsume_times": 0, "body_crc": 0,
        "prepared_transaction_offset": 0,
        "commit_log_offset": physical, "born_host": "127.0.0.1:1", "store_host": "127.0.0.1:2", "damaged": False,
    }  # fmt: skip
