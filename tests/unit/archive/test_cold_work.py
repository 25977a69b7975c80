"""Work of an archive replay for the worker, the store and broker memory, counted over real objects."""

from pathlib import Path
from typing import Any

import msgspec

from infra.disk.filesystem import RealDisk
from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import CommittedObject
from neve.archive.rows.schema import ObjectFacts
from tests.kit.archive.cold_reads import read_cold
from tests.kit.archive.records import TOPIC
from tests.kit.archive.rounds import Round, commit, make_round
from tests.kit.store.memory_store import MemoryStore
from tiered.read.cold_reader import ColdReader, ColdResult
from tiered.read.read_request import ReadRequest
from tiered.worker import frames
from tiered.worker.client import WorkerClient
from tiered.worker.disk_cache import DiskCache
from tiered.worker.group_memory import MemoryPiece
from tiered.worker.process import Worker
from tiered.write.entry_run import PartOfRun
from tiered.write.segment_writer import GroupSizes, encode

QUEUES, ROWS, BODY, OBJECTS = 4, 500, 5000, 8
MIB = 1 << 20
CACHE = 16 * MIB
PULL = 32


class InProcess(WorkerClient):
    """A client of a real worker in the same process."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        socket: Any = None
        self._worker = Worker(socket, open_store=lambda url: store)
        self.asked: list[tuple[str, int]] = []

    def _wait_for(self, request: frames.Request, descriptor: int | None) -> Any:
        assert isinstance(request, frames.ReadGroup)
        self.asked.append((request.key, request.index))
        return self._worker.read_group(request, descriptor)

    @property
    def pieces(self) -> int:
        """Return the number of memory pieces created."""
        return self._memory.made


def put(store: MemoryStore, made: Round, directory: Path) -> CommittedObject:
    runs = {queue: PartOfRun(run.first_offset, run.physical, run.sizes) for queue, run in made.entries.items()}
    facts = ObjectFacts("c", "b", TOPIC, made.name.day, 1, made.name.start, made.name.end)
    path = directory / "object.parquet"
    sizes = GroupSizes(most=MIB, at_queue_change=MIB // 4)
    written = encode(runs, made.files, path, facts=facts, key=made.name.key, sizes=sizes)
    outcome = store.put(made.name.key, path.read_bytes())
    return msgspec.structs.replace(written.name, etag=outcome.etag)


def archived(
    directory: Path, store: MemoryStore
) -> tuple[Catalog, list[CommittedObject], dict[tuple[int, int], bytes]]:
    catalog, names, records = Catalog(), [], dict[tuple[int, int], bytes]()
    for number in range(OBJECTS):
        made = make_round(directory, number << 24, number * ROWS, dict.fromkeys(range(QUEUES), ROWS), body=BODY)
        names.append(put(store, made, directory))
        commit(catalog, made, names[-1])
        records |= made.records
    return catalog, names, records


def test_replay_fetches_each_row_group_once_and_reuses_memory(tmp_path: Path) -> None:
    store = MemoryStore()
    catalog, names, records = archived(tmp_path, store)
    groups = {(name.key, index) for name in names for index in range(len(name.row_groups))}
    assert len(groups) > 80
    store.requests.clear()
    worker = InProcess(store)
    reader = ColdReader(catalog, worker, "", CACHE)
    offsets = dict.fromkeys(range(QUEUES), 0)
    waited, pulls, ahead_most = 0, 0, 0
    while any(offset < OBJECTS * ROWS for offset in offsets.values()):
        for queue, offset in offsets.items():
            if offset == OBJECTS * ROWS:
                continue
            got = reader.at_hand(ReadRequest("g", TOPIC, queue, offset, PULL, MIB))
            if got is None:
                waited += 1
                got = read_cold(reader, ReadRequest("g", TOPIC, queue, offset, PULL, MIB))
            assert_is(got, records, queue, offset)
            offsets[queue] = got.next_offset
            pulls += 1
            fetches = reader._groups
            ahead_most = max(ahead_most, fetches._cache.ahead_bytes + fetches._ahead_coming)
            assert fetches.cached_bytes <= CACHE
    assert sorted(worker.asked) == sorted(groups), "each of them once"
    assert store.requests == {"get_range": len(groups) + len(names)}, "and the footer of each object"
    assert waited <= len(groups) < pulls / 3
    assert 0 < ahead_most <= CACHE // 4 + QUEUES * MIB, "wire bytes; what lies there is rounded up"
    assert worker.pieces < len(groups) * 2 / 3, "one for each, if none were used again"
    reader.close()
    worker.close()


def test_row_group_forgotten_during_its_fetch_is_not_cached(tmp_path: Path) -> None:
    store = MemoryStore()
    made = make_round(tmp_path, 0, 0, {0: 60})
    name = put(store, made, tmp_path)
    cache = DiskCache(RealDisk(), tmp_path / "cache", MIB)
    socket: Any = None
    worker = Worker(socket, cache, open_store=lambda url: store)
    (group,) = name.row_groups
    stored = frames.ObjectParts(name.key, name.size, name.footer, [(group.offset, group.length)])
    read = frames.ReadGroup(
        1, "", name.key, TOPIC, name.size, name.footer, 0, group.offset, group.length,
        group.wire_bytes, group.runs, keep=True,
    )  # fmt: skip
    piece = MemoryPiece(frames.size_of_group(group.rows, group.wire_bytes))

    def forget(verb: str, key: str) -> None:
        worker._forget(frames.ForgetObjects(2, "", [stored]))

    store.on_call = forget
    assert worker.read_group(read, piece.descriptor).rows == 60, "it is answered as ever"
    assert (list((tmp_path / "cache").iterdir()), cache.nbytes, len(worker._footers)) == ([], 0, 0)
    piece.drop()


def assert_is(got: ColdResult, records: dict[tuple[int, int], bytes], queue: int, offset: int) -> None:
    """Assert that the result is one buffer of the sealed records from this offset on."""
    wanted = b"".join(records[queue, place] for place in range(offset, got.next_offset))
    assert [bytes(buffer) for buffer in got.buffers] == [wanted]
    assert got.count == got.next_offset - offset
