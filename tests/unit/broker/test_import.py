"""An Apache broker's directory is imported record by record, or refused with a reason.

An interrupted import resumes.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from broker.broker_controller import BrokerController
from broker.config import BrokerConfig
from broker.importing import stored_broker
from broker.importing.store_import import ImportReport, StoreImport
from broker.machine import Machine
from broker.store.config import StoreConfig
from broker.store.message_store import MessageStore
from infra.clock import ManualClock, SystemClock
from infra.config.properties import load
from infra.disk.filesystem import RealDisk
from infra.process.startup import StartupError
from neve.record.codec import decode_record
from neve.record.layout import MAGIC_BLANK, position_of
from neve.remoting.codes import RequestCode
from neve.remoting.command import RemotingCommand
from tests.kit.broker.in_process import ROOM_ENOUGH, running
from tests.unit.broker.apache_slave import put

FILE_SIZE = 1 << 20
NOW_MS = time.time_ns() // 1_000_000
RECORDS = 700


class ApacheDirectory:
    """A directory of an Apache broker: two and a half files of log, and tables in fastjson's format."""

    def __init__(self, root: Path, *, killed: bool = False) -> None:
        self.root = root
        clock, dice = ManualClock(), random.Random(1)
        clock.set_wall(NOW_MS)
        work = root.with_name("laid-out")
        config = StoreConfig(work, commit_log_file_size=FILE_SIZE, store_host=("127.0.0.1", 1))
        store = MessageStore(config, RealDisk(), clock)
        RealDisk().make_dirs(work)
        store.load()
        for number in range(RECORDS):
            clock.advance(10)
            put(store, "orders", number % 2, dice.randbytes(dice.randrange(7000)), UNIQ_KEY=f"U{number}", TAGS="a")
        self.end = store.max_physical_offset
        self.records = list(map(bytes, store.reader.records_from(0)))
        self.last = store.reader.last_record(self.end)
        store.shutdown()
        (root / "commitlog").mkdir(parents=True)
        for base in range(0, self.end, FILE_SIZE):
            name = f"{base:020}"
            data = (work / "commitlog" / name).read_bytes()
            assert len(data) == FILE_SIZE
            (root / "commitlog" / name).write_bytes(data)
        self.synced(FILE_SIZE)
        (root / "config").mkdir()
        version = '"dataVersion":{"counter":3,"stateVersion":0,"timestamp":5}'
        rows = ",".join(
            f'"{name}":{{"order":false,"perm":6,"readQueueNums":{queues},"topicFilterType":"SINGLE_TAG",'
            f'"topicName":"{name}","topicSysFlag":0,"writeQueueNums":{queues}}}'
            for name, queues in (("orders", 2), ("broker-a", 1), ("DefaultCluster", 16))
        )
        self.write("topics.json", f'{{\n\t{version},\n\t"topicConfigTable":{{{rows}}}\n}}')
        self.write("subscriptionGroup.json", f'{{{version},"subscriptionGroupTable":{{"g":{{"groupName":"g"}}}}}}')
        self.write("consumerOffset.json", f'{{{version},"offsetTable":{{"orders@g":{{0:41,1:7\n}}}}}}')
        self.write("delayOffset.json", f'{{{version},"offsetTable":{{1:3}}}}')
        (root / "config" / "timercheck").write_bytes(struct.pack(">4q", NOW_MS, 0, 0, 0).ljust(4096, b"\0"))
        if killed:
            (root / "abort").write_text("1")

    def synced(self, offset: int) -> None:
        """Set the checkpoint's time to that of the first record at or above an offset: it was fsynced."""
        found = next(one for one in map(decode_record, self.records) if one.physical_offset >= offset)
        stored = found.store_timestamp
        (self.root / "checkpoint").write_bytes(struct.pack(">5q", stored, stored, 0, 0, 0).ljust(4096, b"\0"))

    def write(self, name: str, text: str) -> None:
        (self.root / "config" / name).write_text(text)

    def file(self, number: int) -> Path:
        return self.root / "commitlog" / f"{number * FILE_SIZE:020}"

    def contents(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in sorted(self.root.rglob("*")) if path.is_file()}


@pytest.fixture
def apache(tmp_path: Path) -> ApacheDirectory:
    return ApacheDirectory(tmp_path / "apache")


def configuration(root: Path, *settings: str) -> BrokerConfig:
    own = [f"storePathRootDir={root}", f"mappedFileSizeCommitLog={FILE_SIZE}", "listenPort=0", "bindAddress=127.0.0.1"]
    own += ["brokerIP1=127.0.0.1", ROOM_ENOUGH, "brokerRole=SLAVE", "brokerId=1", "namesrvAddr=127.0.0.1:1"]
    own += ["brokerName=broker-a", *settings]
    return load(BrokerConfig, None, own)


class Names:
    """A name server's answer, and whether the broker accepts connections."""

    def __init__(self, *, reached: str = "", known: str | None = None) -> None:
        self.reached, self.known = reached, known

    async def ask(self, address: str, code: RequestCode, ext: dict[str, str]) -> RemotingCommand:
        assert code == RequestCode.GET_BROKER_CLUSTER_INFO
        brokers = {} if self.known is None else {"broker-a": {"brokerAddrs": {"0": self.known}}}
        return RemotingCommand(0, body=json.dumps({"brokerAddrTable": brokers}).encode())

    async def reaches(self, address: str) -> bool:
        return address == self.reached

    def close(self) -> None:
        """Do nothing: there is no connection."""


GONE = Names()


def take_in(
    root: Path, source: Path, *settings: str, disk: RealDisk | None = None, names: Names = GONE
) -> ImportReport:
    config, disk = configuration(root, *settings), disk or RealDisk()
    broker = BrokerController(config, Machine(clock=SystemClock(), disk=disk))

    async def main() -> ImportReport:
        async with asyncio.timeout(60):
            return await broker.take_in(StoreImport(config, disk, source), names)

    return asyncio.run(main())


def refused(root: Path, source: Path, *settings: str) -> str:
    with pytest.raises(StartupError) as why:
        take_in(root, source, *settings)
    return str(why.value)


def records(root: Path) -> Iterator[bytes]:
    store = MessageStore(StoreConfig(root, commit_log_file_size=FILE_SIZE), RealDisk(), SystemClock())
    store.load(following=True)
    try:
        yield from map(bytes, store.reader.records_from(store.min_physical_offset))
        assert store.queues.max_offset("orders", 0) == sum(
            decode_record(raw).queue_id == 0 for raw in store.reader.records_from(store.min_physical_offset)
        )
    finally:
        store.shutdown()


def test_imported_log_and_tables_equal_a_slaves_and_source_is_unchanged(
    tmp_path: Path, apache: ApacheDirectory
) -> None:
    before, root = apache.contents(), tmp_path / "neve"
    report = take_in(root, apache.root)
    assert (report.log_begin, report.log_end, report.cut, report.topics, report.groups) == (0, apache.end, 0, 3, 1)
    assert apache.contents() == before
    assert list(records(root)) == apache.records
    offsets = json.loads((root / "config" / "consumerOffset.json").read_text())["offsetTable"]
    assert offsets == {"orders@g": {"0": 41, "1": 7}}
    poll = json.loads((root / "config" / "lastPoll.json").read_text())["poll"]
    assert poll["master"] == "127.0.0.1:1", "where its newest record says that it was"
    assert (poll["delays"], poll["askedAt"]) == ({"1": 3}, apache.end)
    assert not (root / "import.json").exists()
    assert (root / "ha" / "followed.json").exists()
    assert "is not empty" in refused(root, apache.root)


class Breaking(RealDisk):
    """Reads of the source's log fail from the n-th on."""

    def __init__(self, source: Path, reads: int) -> None:
        super().__init__()
        self._source, self.left = source, reads

    @override
    def read_at(self, path: Path, offset: int, size: int) -> bytes:
        if path.is_relative_to(self._source):
            self.left -= 1
            if self.left < 0:
                raise OSError(5, "the machine stops")
        return super().read_at(path, offset, size)


def test_interrupted_import_resumes_and_blocks_any_other_start(
    tmp_path: Path, apache: ApacheDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_broker, "_CHUNK", 100_000)
    root, reads, cuts = tmp_path / "neve", 5, 0
    report: ImportReport | None = None
    while report is None:
        try:
            report = take_in(root, apache.root, disk=Breaking(apache.root, reads))
        except (StartupError, OSError):
            reads, cuts = reads + 3, cuts + 1
        if (root / "import.json").exists():

            async def start() -> None:
                async with running(root):
                    raise AssertionError("it started")

            with pytest.raises(StartupError, match="an import has not finished here; start again with --import-from"):
                asyncio.run(start())
    assert cuts > 5
    assert report.log_end == apache.end
    assert list(records(root)) == apache.records


def test_torn_end_of_a_killed_brokers_log_is_truncated_and_reported(tmp_path: Path) -> None:
    apache = ApacheDirectory(tmp_path / "apache", killed=True)
    assert apache.last is not None
    at, raw = apache.last
    with apache.file(at // FILE_SIZE).open("r+b") as file:
        file.seek(at % FILE_SIZE + len(raw) // 2)
        file.write(bytes(len(raw) - len(raw) // 2))
    report = take_in(tmp_path / "neve", apache.root)
    assert report.was_killed
    assert (report.log_end, report.cut) == (at, len(raw))
    assert list(records(tmp_path / "neve")) == apache.records[:-1]


@pytest.mark.parametrize(("file", "killed"), [(0, True), (0, False), (2, False)])
def test_damage_that_a_kill_does_not_explain_is_refused(tmp_path: Path, file: int, killed: bool) -> None:
    apache = ApacheDirectory(tmp_path / "apache", killed=killed)
    with apache.file(file).open("r+b") as opened:
        opened.seek(5000)
        opened.write(b"\xff" * 4000)
    told = refused(tmp_path / "neve", apache.root)
    assert "is damaged" in told
    assert "CRC" in told or "magic" in told or "malformed" in told or "record" in told


@pytest.mark.parametrize("number", [0, 7])
def test_damaged_record_that_was_fsynced_is_refused(tmp_path: Path, number: int) -> None:
    """Also in the newest file: the records behind it are intact and would be lost silently."""
    apache = ApacheDirectory(tmp_path / "apache", killed=True)
    frames = _frames(apache, 2)
    at, after = 2 * FILE_SIZE + frames[number], 2 * FILE_SIZE + frames[number + 1]
    with apache.file(2).open("r+b") as file:
        file.seek(frames[number] + 30)
        file.write(b"\xff" * 40)
    for synced in (after, at):  # the damaged record, and the one behind it
        apache.synced(synced)
        told = refused(tmp_path / "neve", apache.root)
        assert f"is damaged at {at}" in told
        assert "does not explain it" in told
        shutil.rmtree(tmp_path / "neve", ignore_errors=True)
    apache.synced(2 * FILE_SIZE - 20_000)
    with apache.file(2).open("r+b") as file:
        file.seek(frames[number])
        file.write(bytes(8))
    report = take_in(tmp_path / "whole", apache.root)
    assert (report.log_end, report.cut) == (at, apache.end - at)


@pytest.mark.parametrize("names", [Names(reached="127.0.0.1:1"), Names(known="127.0.0.1:1")])
def test_running_broker_is_not_imported(tmp_path: Path, apache: ApacheDirectory, names: Names) -> None:
    """Messages that it accepts until it is stopped would be missing, and a directory is not imported twice."""
    with pytest.raises(StartupError, match=r"stop (it|that one) first"):
        take_in(tmp_path / "neve", apache.root, names=names)
    assert not (tmp_path / "neve").exists()
    assert take_in(tmp_path / "neve", apache.root).log_end == apache.end


def _frames(apache: ApacheDirectory, number: int) -> list[int]:
    """Return the offsets of the records within a file."""
    data, at = apache.file(number).read_bytes(), [0]
    end = min(apache.end - number * FILE_SIZE, FILE_SIZE)
    while at[-1] + 8 < end and struct.unpack_from(">i", data, at[-1] + 4)[0] != MAGIC_BLANK:
        at.append(at[-1] + struct.unpack_from(">i", data, at[-1])[0])
    return at[:-1]


@pytest.mark.parametrize("number", [0, 7])
def test_records_behind_a_damaged_header_are_not_skipped(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_broker, "_CHUNK", 10_007)
    apache = ApacheDirectory(tmp_path / "apache")
    at = _frames(apache, 2)[number]
    with apache.file(2).open("r+b") as file:
        file.seek(at)
        file.write(bytes(8))
    assert f"is damaged at {2 * FILE_SIZE + at}" in refused(tmp_path / "neve", apache.root)
    (apache.root / "abort").touch()
    report = take_in(tmp_path / "neve", apache.root)
    assert (report.log_end, report.cut) == (2 * FILE_SIZE + at, apache.end - 2 * FILE_SIZE - at)


def test_records_behind_a_truncation_are_not_imported(apache: ApacheDirectory, tmp_path: Path) -> None:
    *_, before, cut, left = _frames(apache, 2)
    with apache.file(2).open("r+b") as file:
        file.seek(cut)
        file.write(bytes(8))
        file.seek(left + position_of("store_timestamp"))
        file.write(struct.pack(">q", NOW_MS))  # older than the records before it
    assert before < cut < left
    report = take_in(tmp_path / "neve", apache.root)
    assert (report.log_end, report.cut) == (2 * FILE_SIZE + cut, 0)


def test_killed_broker_whose_newest_file_has_no_whole_record_is_imported(tmp_path: Path) -> None:
    apache = ApacheDirectory(tmp_path / "apache", killed=True)
    with apache.file(2).open("r+b") as file:
        file.seek(20)  # only the first bytes of the header reached the disk
        file.write(bytes(apache.end - 2 * FILE_SIZE - 20))
    assert take_in(tmp_path / "neve", apache.root).log_end == 2 * FILE_SIZE


def _elsewhere(apache: ApacheDirectory) -> None:
    (apache.root / "kvStore").mkdir()
    (apache.root / "kvStore" / "000001.log").touch()


def _torn_table(apache: ApacheDirectory) -> None:
    apache.write("topics.json", '{"topicConfigTable":{"orders":')


def _no_topics(apache: ApacheDirectory) -> None:
    (apache.root / "config" / "topics.json").unlink()


def _hole(apache: ApacheDirectory) -> None:
    apache.file(1).unlink()


def _empty(apache: ApacheDirectory) -> None:
    for number in range(3):
        apache.file(number).write_bytes(bytes(FILE_SIZE))


def _no_store(apache: ApacheDirectory) -> None:
    (apache.root / "checkpoint").unlink()


def _odd_size(apache: ApacheDirectory) -> None:
    apache.file(2).write_bytes(apache.file(2).read_bytes()[:-1])


@pytest.mark.parametrize(
    ("change", "settings", "why"),
    [
        (_elsewhere, [], "the state of pops"),
        (_torn_table, [], "a table can't be read"),
        (_no_topics, [], "the topics are unknown"),
        (_hole, [], "a file of the log is missing"),
        (_empty, [], "is empty"),
        (_no_store, [], "is not a store of RocketMQ"),
        (_odd_size, [], "has another size than"),
        (lambda _: None, ["brokerName=other"], "is of another broker than brokerName=other"),
        (lambda _: None, ["mappedFileSizeCommitLog=2m"], f"set mappedFileSizeCommitLog={FILE_SIZE}"),
    ],
)
def test_unsuitable_directory_is_refused_before_any_write(
    tmp_path: Path, apache: ApacheDirectory, change: Any, settings: list[str], why: str
) -> None:
    change(apache)
    assert why in refused(tmp_path / "neve", apache.root, *settings)
    assert not (tmp_path / "neve" / "import.json").exists()


def test_torn_table_is_read_from_its_backup(tmp_path: Path, apache: ApacheDirectory) -> None:
    path = apache.root / "config" / "consumerOffset.json"
    path.with_name("consumerOffset.json.bak").write_text('{"offsetTable":{"orders@g":{0:40}}}')
    path.write_bytes(b"")
    take_in(tmp_path / "neve", apache.root)
    offsets = json.loads((tmp_path / "neve" / "config" / "consumerOffset.json").read_text())["offsetTable"]
    assert offsets == {"orders@g": {"0": 40}}


def test_broker_that_writes_during_the_import_is_reported(tmp_path: Path, apache: ApacheDirectory) -> None:
    class Writing(RealDisk):
        """A disk on which another record is appended during the last read."""

        @override
        def read_at(self, path: Path, offset: int, size: int) -> bytes:
            data = super().read_at(path, offset, size)
            is_begun = (tmp_path / "neve" / "import.json").exists()
            if is_begun and path == apache.file(2) and offset + size == apache.end % FILE_SIZE:
                with path.open("r+b") as file:
                    file.seek(apache.end % FILE_SIZE)
                    file.write(struct.pack(">ii", 100, -626843481))
            return data

    with pytest.raises(StartupError, match="is written to: stop its broker"):
        take_in(tmp_path / "neve", apache.root, disk=Writing())
