"""Finding archived messages by key and by place, over row groups made here."""

import mmap

import numpy as np

from neve.archive.catalog import Catalog
from neve.archive.journal import Commit, CommittedName, RowGroup, Topic
from neve.message import encode_record, properties_to_bytes
from tiered.cold_query import ColdQuery
from tiered.worker_client import DecodedGroup

ROWS = 4
GROUPS = 3


def record(offset: int) -> bytes:
    """Every other message has the key `odd`, and all of them have it in their body."""
    properties = {"UNIQ_KEY": f"ID{offset}", "KEYS": f"k{offset} {'odd' if offset % 2 else 'even'}"}
    return encode_record(
        topic=b"t", body=b"odd k1", properties=properties_to_bytes(properties), queue_id=0, flag=0,
        queue_offset=offset, physical_offset=offset * 1000, sys_flag=0, born_timestamp=1, born_host=("1.1.1.1", 1),
        store_timestamp=offset * 10, store_host=("1.1.1.1", 2),
    )  # fmt: skip


class Fetched:
    def __init__(self) -> None:
        self.groups: list[int] = []

    def __call__(self, name: CommittedName, index: int) -> DecodedGroup:
        self.groups.append(index)
        records = [record(offset) for offset in range(index * ROWS, (index + 1) * ROWS)]
        wire = b"".join(records)
        positions = np.cumsum([0, *map(len, records)], dtype=np.int64)
        numbers = np.concatenate([positions, np.zeros(3 * ROWS, np.int64)])
        mapped = mmap.mmap(-1, numbers.nbytes + len(wire))
        mapped.write(numbers.tobytes() + wire)
        return DecodedGroup(mapped, ROWS, len(wire))


def catalog() -> Catalog:
    groups = [
        RowGroup(i * ROWS, ROWS, 0, 1, (i * ROWS + 3) * 10, i * ROWS * 10, 600, [(0, i * ROWS, i * ROWS + 3)])
        for i in range(GROUPS)
    ]
    name = CommittedName(
        key="k", topic="t", day="", start=0, end=12_000, size=1, footer=1, etag="", checksum=("", ""), sha256="",
        rows=GROUPS * ROWS, wire_bytes=1, min_time=0, max_time=110, queues={0: (0, GROUPS * ROWS - 1, 0)},
        row_groups=groups,
    )  # fmt: skip
    made = Catalog()
    made.apply(0, Commit(round=1, names=[name]))
    return made


def test_a_key_is_found_newest_first_and_exactly() -> None:
    fetched = Fetched()
    query = ColdQuery(catalog(), fetched)
    assert query.by_key("t", "odd", 3, 0, 1000) == [record(11), record(9), record(7)]
    assert fetched.groups == [2, 1]
    assert query.by_key("t", "k1", 32, 0, 1000) == [record(1)]
    assert query.by_key("t", "ID5", 32, 0, 1000) == [record(5)]
    assert query.by_key("t", "dd", 32, 0, 1000) == []
    assert query.by_key("other", "odd", 32, 0, 1000) == []


def test_only_groups_of_the_time_are_read() -> None:
    fetched = Fetched()
    assert ColdQuery(catalog(), fetched).by_key("t", "odd", 32, 45, 65) == [record(5)]
    assert fetched.groups == [1]


def test_a_question_reads_no_more_than_its_budget() -> None:
    fetched = Fetched()
    assert ColdQuery(catalog(), fetched, budget=1300).at(11_000) is None
    assert fetched.groups == [0, 1]
    fetched.groups.clear()
    ColdQuery(catalog(), fetched, budget=1300).by_key("t", "none", 32, 0, 1000)
    assert fetched.groups == [2, 1]


def test_a_place_in_the_log_is_found_and_hidden_messages_are_not() -> None:
    made = catalog()
    query = ColdQuery(made, Fetched())
    assert query.at(6000) == record(6)
    assert query.at(6001) is None
    made.apply(1, Topic(topic="t", deleted=True, minimums={0: 12}))
    assert (query.at(6000), query.by_key("t", "odd", 32, 0, 1000)) == (None, [])
