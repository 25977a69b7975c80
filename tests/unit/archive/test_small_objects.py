"""Tests of batches of small objects: each equals the object made alone and is verified."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from infra.objects.store import StoreUnavailable
from neve.archive.format.journal import CommittedObject, PlannedObject
from neve.archive.format.keys import data_key
from neve.archive.rows import column_encoder as columns
from neve.archive.rows.row_encoder import Entries
from neve.archive.rows.schema import ObjectFacts
from neve.record.codec import encode_record
from tests.kit.clock.waiting import wait_until
from tiered.worker import frames
from tiered.worker.client import WorkerClient
from tiered.worker.pipeline import UploadBatch, described
from tiered.worker.process import Worker, encoders_of
from tiered.write import segment_writer, small_objects
from tiered.write.entry_run import PartOfRun
from tiered.write.segment_writer import LogFiles, encode
from tiered.write.small_objects import SmallObject, encode_small
from tiered.write.uploader import NamedEntries

T0 = 1_700_000_000_000
TOPICS = ("orders", "a", "käse", "t" * 127, "long-" + "x" * 180, "none of it common", "%RETRY%group")


class SmallLog(NamedTuple):
    files: list[tuple[str, int, int]]
    objects: list[SmallObject]
    entries: Entries

    def of(self, number: int) -> Entries:
        rows = [one.rows for one in self.objects]
        return self.entries.at(slice(sum(rows[:number]), sum(rows[: number + 1])))


def make_log(path: Path, topics: Sequence[str], odd: str = "none of it common") -> SmallLog:
    """Write a log with two queues per topic, and records with wrong CRCs in topic `odd`."""
    log = bytearray()
    objects: list[SmallObject] = []
    rows: list[tuple[int, int, int, int]] = []
    for topic in topics:
        runs = []
        for queue, count in ((0, 1 + len(objects)), (3, 2)):
            runs.append((queue, 5, count))
            for offset in range(5, 5 + count):
                record = bytearray(
                    encode_record(
                        topic=topic.encode(), body=b"%s %d" % (topic.encode(), offset), queue_id=queue, flag=0,
                        queue_offset=offset, properties=b"KEYS\x01k%d l\x02TAGS\x01t\x02" % offset,
                        physical_offset=len(log), sys_flag=0, born_timestamp=T0, born_host=("10.0.0.1", 5),
                        store_timestamp=T0 + len(rows), store_host=("10.0.0.2", 10911),
                    )
                )  # fmt: skip
                if topic == odd:
                    record[-20] ^= 1  # in the properties
                    record[8] ^= 1  # in the CRC
                rows.append((queue, offset, len(log), len(record)))
                log += record
        key = data_key("", topic, "2026-01-02", "b", start=0, end=1 << 20, epoch=1)
        facts = ObjectFacts("c", "b", topic, "2026-01-02", 1, 0, 1 << 20)
        objects.append(SmallObject(key, facts, runs))
    path.write_bytes(log)
    queue_id, queue_offset, physical, size = np.array(rows, np.int64).T
    entries = Entries(queue_id.astype(np.int32), queue_offset, physical, size.astype(np.int32))
    return SmallLog([(str(path), 0, len(log))], objects, entries)


def runs_of(log: SmallLog, number: int) -> dict[int, PartOfRun]:
    mine = log.of(number)
    return {
        queue: PartOfRun(first, mine.physical[mine.queue_id == queue], mine.size[mine.queue_id == queue])
        for queue, first, _ in log.objects[number].runs
    }


def test_object_of_a_batch_equals_the_object_made_alone(tmp_path: Path) -> None:
    log = make_log(tmp_path / "log", TOPICS)
    with LogFiles(log.files) as files:
        together = encode_small(log.objects, log.entries, files)
    for number, (one, written) in enumerate(zip(log.objects, together, strict=True)):
        alone = encode(runs_of(log, number), log.files, tmp_path / "alone", facts=one.facts, key=one.key)
        if one.facts.topic == "none of it common":
            assert written is None, "a record of another shape is not made beside others"
            assert alone.wire_rows or alone.damaged_rows
            continue
        assert written is not None
        assert isinstance(written.content, pa.Buffer)
        assert written.content.to_pybytes() == (tmp_path / "alone").read_bytes()
        assert written == (written.content, alone.name, 0, 0)


def test_batch_leaves_out_only_the_object_that_rebuilds_differently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log(tmp_path / "log", ("a", "b", "c"))
    common = columns.common_tables

    def wrong(*arguments: Any) -> Any:
        (table,), rows = common(*arguments)
        of_b = len(log.of(0).size)
        flags = table.column("flag").to_numpy().copy()
        flags[of_b] += 1
        return [table.set_column(table.schema.get_field_index("flag"), table.schema.field("flag"), [flags])], rows

    monkeypatch.setattr(small_objects, "common_tables", wrong)
    with LogFiles(log.files) as files:
        written = encode_small(log.objects, log.entries, files)
    assert [one is not None for one in written] == [True, False, True]


def test_batch_builds_and_verifies_columns_once_without_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = make_log(tmp_path / "log", tuple(f"t{number}" for number in range(50)))
    calls = {"common_tables": 0, "rebuild_of": 0, "fsync": 0}

    def counted(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            calls[name] += 1
            return inner(*arguments, **keywords)

        monkeypatch.setattr(owner, name, call)

    counted(small_objects, "common_tables")
    counted(small_objects, "rebuild_of")
    counted(os, "fsync")
    with LogFiles(log.files) as files:
        assert all(encode_small(log.objects, log.entries, files))
    assert calls == {"common_tables": 1, "rebuild_of": 1, "fsync": 0}
    one = log.objects[0]
    segment_writer.encode(runs_of(log, 0), log.files, tmp_path / "alone", facts=one.facts, key=one.key)
    assert calls["fsync"] == 0, "a crash may lose what is not uploaded"


def named(log: SmallLog) -> list[NamedEntries]:
    found = []
    for number, one in enumerate(log.objects):
        queues = {queue: (first, first + count - 1) for queue, first, count in one.runs}
        name = PlannedObject(one.key, one.facts.topic, one.facts.day, one.facts.start, one.facts.end, queues)
        found.append(NamedEntries(name, runs_of(log, number)))
    return found


def test_batch_request_isolates_the_failure_of_one_object(tmp_path: Path) -> None:
    log = make_log(tmp_path / "log", TOPICS)
    objects = named(log)
    beyond = PartOfRun(5, np.array([1 << 40]), np.array([100], np.int32))
    objects[1] = NamedEntries(objects[1].name, {0: beyond})
    with closing(WorkerClient(work_dir=tmp_path)) as worker:
        uploads = worker.uploads(f"dir:{tmp_path / 'store'}", {"cluster": "c", "broker": "b", "round": "1"})
        uploads.begin(objects, log.files)
        (outcomes,) = [uploads.done()]
        assert worker._next_id == 1, "requests"
        assert uploads.done() == []
    assert [name.key for name, _ in outcomes] == [one.name.key for one in objects]
    assert [isinstance(outcome, CommittedObject) for _, outcome in outcomes] == [True, False, *[True] * 5]
    assert "lie in none of the files" in str(outcomes[1][1])
    assert list(tmp_path.glob("neve-offload-*")) == []


def test_rate_limit_covers_concurrent_uploads_and_skips_cancelled(tmp_path: Path) -> None:
    log = make_log(tmp_path / "log", tuple(f"t{number}" for number in range(40)))
    staged = tmp_path / "store" / ".upload"
    with closing(WorkerClient(work_dir=tmp_path)) as worker:
        worker.set_upload_rate(1)  # one byte per second: the uploads would take hours
        uploads = worker.uploads(f"dir:{tmp_path / 'store'}", {"cluster": "c", "broker": "b", "round": "1"})
        uploads.begin(named(log), log.files)
        # The first passes in advance and another one follows, so 32 wait and 7 are still queued.
        wait_until(lambda: staged.is_dir() and len(list((tmp_path / "store").rglob("*.parquet"))) == 1)
        wait_until(lambda: len(list(staged.iterdir())) == 32)
        uploads.give_up()
        worker.set_upload_rate(0)
        outcomes = [outcome for _, outcome in uploads.done()]
        assert worker.upload_waited > 0
    assert [type(outcome).__name__ for outcome in outcomes].count("GivenUp") == 7
    assert sum(isinstance(outcome, CommittedObject) for outcome in outcomes) == 33
    assert not any(isinstance(outcome, StoreUnavailable) for outcome in outcomes)


def test_worker_with_low_priority_is_replaced_when_priority_returns(tmp_path: Path) -> None:
    log = make_log(tmp_path / "log", ("a", "b"))
    files, store = log.files, f"dir:{tmp_path / 'store'}"
    with closing(WorkerClient(work_dir=tmp_path, priority="idle")) as worker:

        def upload(number: int) -> set[int]:
            uploads = worker.uploads(store, {})
            uploads.begin(named(log)[number : number + 1], files)
            assert all(isinstance(outcome, CommittedObject) for _, outcome in uploads.done())
            threads = Path(f"/proc/{worker.pid}/task").iterdir()
            return {os.sched_getscheduler(int(thread.name)) for thread in threads}

        assert upload(0) == {os.SCHED_IDLE}
        worker.set_priority("low")
        assert worker.starts == 1, "it may be at work"
        is_idle = os.sched_getscheduler(0) == os.SCHED_IDLE  # the priority of this test process
        assert upload(1) == {os.SCHED_IDLE if is_idle else os.SCHED_BATCH}
        assert worker.pid is not None
        assert os.getpriority(os.PRIO_PROCESS, worker.pid) == (os.getpriority(os.PRIO_PROCESS, 0) if is_idle else 19)
        assert worker.starts == 2


def test_worker_does_not_load_pandas(tmp_path: Path) -> None:
    assert importlib.util.find_spec("pandas") is not None, "else this shows nothing"
    log = make_log(tmp_path / "log", ("a", "b"))
    with closing(WorkerClient(work_dir=tmp_path)) as worker:
        uploads = worker.uploads(f"dir:{tmp_path / 'store'}", {})
        uploads.begin(named(log), log.files)
        assert all(isinstance(outcome, CommittedObject) for _, outcome in uploads.done())
        assert "pandas" not in Path(f"/proc/{worker.pid}/maps").read_text()


def test_worker_processes_requests_in_parallel_on_more_cores(tmp_path: Path) -> None:
    assert [encoders_of(processors) for processors in (1, 2, 3, 5, 64)] == [1, 1, 2, 4, 4]
    log = make_log(tmp_path / "log", ("a", "b"))
    ours, theirs = socket.socketpair()
    worker = Worker(theirs, encoders=2)
    both = threading.Barrier(2)
    encoded = worker.writer.encoded

    def beside_another(request: frames.EncodeUpload, descriptor: int | None) -> Any:
        both.wait(60)
        return encoded(request, descriptor)

    worker.writer.encoded = beside_another  # type: ignore[method-assign]
    serving = threading.Thread(target=worker.serve)
    serving.start()
    url, one = f"dir:{tmp_path / 'store'}", named(log)
    for number in (0, 1):
        request, arrays = described(UploadBatch([one[number]], log.files), url, {}, str(tmp_path))
        request.id = number + 1
        descriptor = frames.shared([array.data for array in arrays])
        frames.send(ours, request, descriptor)
        os.close(descriptor)
    answers = [frames.decode_reply.decode(frames.receive(ours)[0]) for _ in (0, 1)]
    ours.close()
    serving.join(60)
    assert {answer.id for answer in answers} == {1, 2}
    outcomes = [outcome for answer in answers if isinstance(answer, frames.Uploaded) for outcome in answer.outcomes]
    assert [type(outcome) for outcome in outcomes] == [frames.Committed] * 2


def test_worker_never_raises_its_priority_above_the_brokers() -> None:
    script = (
        "import os\nfrom infra.process.processor import take_priority\n"
        "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
        "for priority in ('low', 'normal', 'idle'):\n"
        "    take_priority(priority)\n"
        "    assert os.sched_getscheduler(0) == os.SCHED_IDLE, priority\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
