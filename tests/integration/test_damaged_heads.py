"""Rows pulled from a broker whose log has records with damaged headers equal the rows of the archive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from neve.archive import dataset
from neve.archive.rows.schema import SCHEMA
from neve.client.sync import Client, connect
from neve.record.layout import HEAD_V4
from neve.spark.hot_rows import rows_of_hot_task
from neve.spark.planning.options import Cluster, Options, TopicSelection
from neve.spark.planning.queues import HotSlice, Queue
from neve.spark.planning.wanted import RequestedRows
from tests.kit.server.neve import NeveServer

COUNT = 40
_SIZE_AT, _QUEUE_AT, _OFFSET_AT = 0, 12, 20

Damage = Callable[[bytearray], None]


def size_is(change: int) -> Damage:
    def damage(head: bytearray) -> None:
        size = int.from_bytes(head[_SIZE_AT : _SIZE_AT + 4], "big")
        head[_SIZE_AT : _SIZE_AT + 4] = (size + change).to_bytes(4, "big")

    return damage


def zeroed(head: bytearray) -> None:
    head[:] = bytes(len(head))


def another_queue(head: bytearray) -> None:
    head[_QUEUE_AT + 3] ^= 7


def another_offset(head: bytearray) -> None:
    head[_OFFSET_AT + 7] ^= 64


#: The damage by offset: some adjacent records, the first one and the last one.
DAMAGED: dict[int, Damage] = {
    0: zeroed, 5: size_is(-30), 9: size_is(60), 10: another_queue, 11: zeroed, 20: another_offset, 30: size_is(1 << 20),
    39: zeroed,
}  # fmt: skip


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NeveServer]:
    settings = {"archivePeriod": "1h", "archiveMaxAge": "1d", "archiveWorkerPriority": "normal"}
    with NeveServer(tmp_path / "neve", settings=settings) as running:
        yield running


def records_of(client: Client, topic: str) -> list[tuple[int, int]]:
    """Return (physical offset, size) of each record, read before the damage."""
    found: list[tuple[int, int]] = []
    (queue,) = client.admin.topic_route(topic).read_queues
    while len(found) < COUNT:
        answer = client.pull_records(queue, len(found), COUNT)
        at = 0
        while at < len(answer.records):
            size, *_, place = HEAD_V4.unpack_from(answer.records, at)[:7]
            found.append((place, size))
            at += size
    return found


def pulled(server: NeveServer, topic: str, wanted: RequestedRows | None = None) -> pa.Table:
    """Pull all messages in one task."""
    (queue,) = (Queue("broker-a", topic, 0),)
    options = Options(server.store, TopicSelection(frozenset({topic})))
    rows = rows_of_hot_task(
        options, Cluster(server.namesrv), [HotSlice(queue, 0, COUNT - 1)], wanted or RequestedRows(), SCHEMA
    )
    return pa.Table.from_batches(list(rows), SCHEMA)


def test_pulled_record_with_damaged_header_equals_its_archived_row(server: NeveServer) -> None:
    """The physical offset is an exception: a puller does not learn it."""
    with connect(server.namesrv) as client:
        client.admin.create_topic("orders", 1)
        for number in range(COUNT):
            client.send("orders", f"body {number}".encode() * 3, keys=[f"k{number}"], tags="a")
        records = records_of(client, "orders")
        before = pulled(server, "orders")
        log = next((server.directory / "data").rglob("commitlog/00000000000000000000"))
        with log.open("r+b") as file:
            for offset, damage in DAMAGED.items():
                place, _ = records[offset]
                file.seek(place)
                head = bytearray(file.read(HEAD_V4.size))
                damage(head)
                file.seek(place)
                file.write(head)
        after = pulled(server, "orders")

    assert before["queue_offset"].to_pylist() == after["queue_offset"].to_pylist() == list(range(COUNT))
    damaged = pc.is_in(after["queue_offset"], pa.array(sorted(DAMAGED)))
    assert after["damaged"].to_pylist() == damaged.to_pylist()
    assert after.filter(pc.invert(damaged)).equals(before.filter(pc.invert(damaged)))
    assert after.filter(damaged)["commit_log_offset"].null_count == len(DAMAGED)
    assert [len(wire) for wire in after.filter(damaged)["wire"].to_pylist()] == [
        records[at][1] for at in sorted(DAMAGED)
    ]

    server.post("/archive/offload?roll=1")
    archived = dataset(server.store, "orders", bodies="stored").to_table(columns=SCHEMA.names)
    told = sorted(archived.to_pylist(), key=lambda row: row["queue_offset"])
    assert [row["commit_log_offset"] for row in told] == [place for place, _ in records]
    assert without_place(told) == without_place(after.to_pylist())


def without_place(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "commit_log_offset": 0} for row in rows]
