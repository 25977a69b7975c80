"""A slave of an Apache master with an archive: what it archives, also if the master lost archived messages."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench.wire import pull_ext
from broker.archiving.archivable_limit import Divergence, DivergenceFile
from broker.archiving.archive import BrokerArchive
from broker.broker_controller import BrokerController
from broker.doctor import checks
from broker.ha import stock_archivable_limit
from infra.disk.filesystem import RealDisk
from infra.net.remoting_server import Connection
from infra.process.startup import StartupError
from lifecycle.safe_clock import SafeClock
from neve.archive.catalog.catalog import Catalog
from neve.record.codec import iter_records
from neve.remoting.codes import RequestCode as Code
from tests.kit.broker.in_process import ask, running, send
from tests.kit.clock.waiting import until
from tests.kit.wire.admin_port import post_request
from tests.unit.broker.apache_slave import FILE_SIZE, SLAVE, Front, run

BODY = 100_000
IN_A_FILE = FILE_SIZE // (BODY + 200)


async def fill(connection: Connection, count: int, mark: bytes = b"") -> None:
    for number in range(count):
        await send(connection, "t", (mark + b"%08d" % number).ljust(BODY, b"."))


@asynccontextmanager
async def two_lives(root: Path, *, kept: int, lost: int) -> AsyncIterator[tuple[Front, BrokerController, Connection]]:
    """Yield a master's log, its log after a power cut that lost the last messages, and a connection to the latter."""
    before, after = root / "before", root / "after"
    async with running(before) as (_, connection):
        await fill(connection, kept)
    shutil.copytree(before, after)
    async with running(before) as (source, connection), running(after) as (cut, theirs):
        await fill(connection, lost)
        front = Front(source)
        front.ha.end_at_start = 0
        await front.start()
        try:
            yield front, cut, theirs
        finally:
            await front.stop()


async def power_cut(front: Front, cut: BrokerController) -> None:
    front.source = cut
    await front.ha.restart(cut.store)


def options(root: Path, front: Front) -> list[str]:
    return [*SLAVE, f"namesrvAddr={front.address}", f"storeUrl=dir:{root}/bucket"]


@asynccontextmanager
async def archiving(
    root: Path, front: Front, directory: str = "slave", *, ttl: str = "0"
) -> AsyncIterator[tuple[BrokerController, Connection]]:
    own = [*options(root, front), f"defaultTtlHours={ttl}"]
    async with running(root / directory, *own) as (slave, connection):
        yield slave, connection


async def caught_up(slave: BrokerController, front: Front) -> None:
    await until(lambda: slave.store.max_physical_offset == front.source.store.max_physical_offset)
    await until(lambda: front.ha.acks[-1:] == [slave.store.max_physical_offset])


async def looked(slave: BrokerController) -> int:
    """Look at the master once and return the archivable limit."""
    assert slave.plain_slave is not None
    followed = slave.parts.archive.local_side.followed
    assert followed is not None
    await slave.plain_slave.look()
    return followed.safe_below


def archived(slave: BrokerController) -> int:
    """Return the number of archived messages of the topic."""
    assert isinstance(slave.archive, BrokerArchive)
    catalog = slave.archive.journal.catalog
    return sum(last - first + 1 for name in catalog.objects("t") for first, last, _ in name.queues.values())


async def page(slave: BrokerController, path: str = "/readyz", method: str = "GET") -> str:
    assert slave.admin_address is not None
    url = "http://{}:{}{}".format(*slave.admin_address, path)

    def read() -> str:
        request = urllib.request.Request(url) if method == "GET" else post_request(url)
        return str(urllib.request.urlopen(request, timeout=60).read().decode())

    return await asyncio.to_thread(read)


async def offload(slave: BrokerController, *, evict: bool = False) -> str:
    """Archive up to the limit and return the admin port's answer."""
    return await page(slave, f"/archive/offload?roll=1&evict={int(evict)}", "POST")


def evict_all(slave: BrokerController) -> None:
    lifecycle = slave.archive.lifecycle
    with lifecycle.turns:
        lifecycle.evict.in_turn(everything=True)


async def pulled(connection: Connection, offset: int) -> bytes:
    """Return one message in its format in the log."""
    answer = await ask(connection, Code.PULL_MESSAGE, **pull_ext("g", "t", 0, offset, 1))
    assert answer.code == 0, (answer.code, answer.remark)
    return bytes(answer.body)


async def is_served(connection: Connection, start: int, end: int, source: BrokerController) -> None:
    """Check that the slave serves the master's messages byte by byte."""
    for offset in range(start, end):
        (record,) = iter_records(body := await pulled(connection, offset))
        entry = source.store.reader.entry("t", 0, offset)
        assert entry is not None
        assert record.physical_offset == entry[0]
        assert body == b"".join(source.store.reader.get("t", 0, offset, 1, 1 << 20).buffers)


def test_full_files_are_archived_evicted_and_served_byte_by_byte(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            two_lives(tmp_path, kept=20, lost=9) as (front, _, _connection),
            archiving(tmp_path, front) as (slave, connection),
        ):
            await caught_up(slave, front)
            await offload(slave)
            assert archived(slave) == 0, "nobody has said yet how safe it is"
            assert await looked(slave) == 2 * FILE_SIZE
            await offload(slave, evict=True)
            assert archived(slave) == 2 * IN_A_FILE
            assert slave.store.min_physical_offset == 0, "what waits there nobody else has, should the master be gone"
            front.dropped = 2 * FILE_SIZE
            await looked(slave)
            await offload(slave, evict=True)
            assert slave.store.min_physical_offset == 2 * FILE_SIZE
            await is_served(connection, 0, 29, front.source)
            assert slave.tiered.cold_reads > 0
            assert "archive" not in await page(slave)

    run(scenario)


def test_reader_below_the_masters_log_begin_stays_with_the_slave(tmp_path: Path) -> None:
    """The master would answer that the offset is illegal, and the reader would skip to a higher one."""

    async def scenario() -> None:
        async with (
            two_lives(tmp_path, kept=20, lost=9) as (front, _, _connection),
            archiving(tmp_path, front) as (slave, connection),
        ):

            async def suggested(offset: int) -> str:
                answer = await ask(connection, Code.PULL_MESSAGE, **pull_ext("g", "t", 0, offset, 1))
                return answer.ext["suggestWhichBrokerId"]

            await caught_up(slave, front)
            await until(lambda: slave.role.has_master)
            await looked(slave)
            assert await suggested(0) == "0", "the master has it"
            front.source.store.take_out(0)()
            await looked(slave)
            last_of_file = 2 * IN_A_FILE - 1
            for is_cold in (False, True):
                if is_cold:
                    await offload(slave, evict=True)
                assert [await suggested(offset) for offset in (0, last_of_file - 1)] == ["1", "1"]
                assert await suggested(2 * IN_A_FILE) == await suggested(28) == "0", "the master has what comes next"

    run(scenario)


def test_bytes_unflushed_or_missing_on_another_slave_are_not_archived(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            two_lives(tmp_path, kept=20, lost=9) as (front, _, _connection),
            archiving(tmp_path, front) as (slave, _ours),
        ):
            await caught_up(slave, front)
            front.behind = "1.0 MiB"
            assert await looked(slave) == FILE_SIZE
            front.others = [{"slaveAckOffset": FILE_SIZE - 1, "inSync": True}]
            assert await looked(slave) == 0
            await offload(slave)
            assert archived(slave) == 0
            front.others = [{"slaveAckOffset": 0, "inSync": False}]
            assert await looked(slave) == FILE_SIZE
            await offload(slave)
            assert archived(slave) == IN_A_FILE

    run(scenario)


def test_archiving_continues_after_the_master_lost_unarchived_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock_archivable_limit, "WRITTEN_BACK_S", 0.0)

    async def scenario() -> None:
        async with (
            two_lives(tmp_path, kept=IN_A_FILE + 2, lost=3) as (front, cut, theirs),
            archiving(tmp_path, front) as (slave, connection),
        ):
            await caught_up(slave, front)
            assert await looked(slave) == FILE_SIZE
            await offload(slave)
            assert archived(slave) == IN_A_FILE
            await power_cut(front, cut)
            await fill(theirs, IN_A_FILE, b"anew")
            await caught_up(slave, front)
            assert len(list((tmp_path / "slave" / "diverged").iterdir())) == 1
            assert await looked(slave) == 2 * FILE_SIZE
            await offload(slave, evict=True)
            assert archived(slave) == 2 * IN_A_FILE
            assert "diverged" not in await page(slave)
            await is_served(connection, 0, 2 * IN_A_FILE + 2, cut)

    run(scenario)


def test_archiving_ends_for_good_after_the_master_lost_archived_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with two_lives(tmp_path, kept=IN_A_FILE + 2, lost=IN_A_FILE) as (front, cut, theirs):
            kept = cut.store.max_physical_offset
            async with archiving(tmp_path, front) as (slave, connection):
                await caught_up(slave, front)
                assert await looked(slave) == 2 * FILE_SIZE
                await offload(slave)
                assert archived(slave) == 2 * IN_A_FILE
                front.dropped = FILE_SIZE
                await power_cut(front, cut)
                await fill(theirs, 3 * IN_A_FILE, b"anew")
                await caught_up(slave, front)
                await diverged(slave, kept)
                assert slave.store.min_physical_offset == FILE_SIZE, "what is the archive's as the log has it may go"
                await is_served(connection, 0, 4 * IN_A_FILE + 2, cut)
            async with archiving(tmp_path, front) as (slave, connection):
                await caught_up(slave, front)
                await diverged(slave, kept)
                assert slave.store.min_physical_offset == FILE_SIZE
                await is_served(connection, 0, 4 * IN_A_FILE + 2, cut)

    async def diverged(slave: BrokerController, at: int) -> None:
        assert await looked(slave) == -1
        told = await offload(slave, evict=True)
        await asyncio.to_thread(evict_all, slave)
        assert "the master lost its log above" in told
        assert archived(slave) == 2 * IN_A_FILE
        assert "archive diverged since" in (text := await page(slave)), text
        assert f"above {at} it has another log" in text
        assert "neve_archive_diverged 1" in await page(slave, "/metrics")
        with monkeypatch.context() as expired:  # the messages before the power cut
            expired.setattr(Catalog, "recorded_minimum", lambda *_: 1 << 40)
            assert (await asyncio.to_thread(slave.archive.lifecycle.expire.run))["raised"] == 0

    run(scenario)


def test_topic_recreated_at_the_master_is_no_longer_archived(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_lives(tmp_path, kept=IN_A_FILE + 2, lost=0) as (front, source, theirs):
            front.source, front.ha.store = source, source.store
            async with archiving(tmp_path, front) as (slave, connection):
                await caught_up(slave, front)
                assert await looked(slave) == FILE_SIZE
                await offload(slave)
                assert archived(slave) == IN_A_FILE
                assert (await ask(theirs, Code.DELETE_TOPIC_IN_BROKER, topic="t")).code == 0
                await fill(theirs, IN_A_FILE, b"anew")
                for _ in range(IN_A_FILE):
                    await send(theirs, "u", bytes(BODY))
                await is_stopped(slave, front)
                await is_served(connection, 0, IN_A_FILE, source)
            async with archiving(tmp_path, front) as (slave, connection):
                await is_stopped(slave, front)

    async def is_stopped(slave: BrokerController, front: Front) -> None:
        await caught_up(slave, front)
        front.dropped = 2 * FILE_SIZE
        assert await looked(slave) == 3 * FILE_SIZE
        await offload(slave, evict=True)
        assert archived(slave) == IN_A_FILE
        assert slave.store.min_physical_offset == FILE_SIZE, "its messages are nowhere else"
        assert isinstance(slave.archive, BrokerArchive)
        assert slave.archive.journal.catalog.objects("u")
        told = json.loads(await page(slave, "/archive/status"))["set_aside"]
        assert told.keys() == {"t"}
        assert f"offsets up to {IN_A_FILE - 1} of one that was deleted" in told["t"]

    run(scenario)


@pytest.mark.parametrize("again", [2, 2 * IN_A_FILE])
def test_slave_with_a_recreated_topic_needs_a_new_archive_to_be_master(tmp_path: Path, again: int) -> None:
    """If it had fewer messages than the archive, they would be hidden.

    If it had more, offsets would be archived twice.
    """

    async def scenario() -> None:
        async with two_lives(tmp_path, kept=IN_A_FILE + 2, lost=0) as (front, source, theirs):
            front.source, front.ha.store = source, source.store
            async with archiving(tmp_path, front) as (slave, _):
                await caught_up(slave, front)
                assert await looked(slave) == FILE_SIZE
                await offload(slave)
                assert archived(slave) == IN_A_FILE
                assert (await ask(theirs, Code.DELETE_TOPIC_IN_BROKER, topic="t")).code == 0
                await fill(theirs, again, b"anew")
                await caught_up(slave, front)
                await until(lambda: slave.last_poll.current is not None)
            await front.retire()
            with pytest.raises(
                StartupError, match=r": t \(1 in all\) began again.*It can continue with brokerRole=SLAVE"
            ):
                async with promoted(tmp_path, front, "bucket"):
                    raise AssertionError
            async with archiving(tmp_path, front) as (slave, connection):
                assert slave.store.max_physical_offset == source.store.max_physical_offset
                await is_served(connection, 0, again, source)
            (tmp_path / "slave" / "archive").rename(tmp_path / "archive of before")
            async with promoted(tmp_path, front, "another") as (broker, connection):
                await is_served(connection, 0, again, source)
                await offload(broker)
                assert archived(broker) == again

    run(scenario)


def test_topic_recreated_before_it_was_archived_allows_a_promotion(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_lives(tmp_path, kept=2, lost=0) as (front, source, theirs):
            front.source, front.ha.store = source, source.store
            assert (await ask(theirs, Code.DELETE_TOPIC_IN_BROKER, topic="t")).code == 0
            await fill(theirs, IN_A_FILE, b"anew")
            async with archiving(tmp_path, front) as (slave, _):
                await caught_up(slave, front)
                assert slave.store.queues.deleted_up_to("t") > 0, "it began again here, too"
                assert await looked(slave) == FILE_SIZE
                await offload(slave)
                assert archived(slave) == IN_A_FILE - 2
                await until(lambda: slave.last_poll.current is not None)
            await front.retire()
            async with promoted(tmp_path, front, "bucket") as (broker, connection):
                await is_served(connection, 0, IN_A_FILE, source)
                await offload(broker)
                assert archived(broker) == IN_A_FILE

    run(scenario)


def test_slave_with_a_superseded_archive_needs_a_new_one_to_be_master(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_lives(tmp_path, kept=2, lost=IN_A_FILE) as (front, cut, theirs):
            async with archiving(tmp_path, front) as (slave, _):
                await caught_up(slave, front)
                assert await looked(slave) == FILE_SIZE
                await offload(slave)
                await power_cut(front, cut)
                await fill(theirs, 2, b"anew")
                await caught_up(slave, front)
                await until(lambda: slave.archive.divergence is not None)
                await until(lambda: slave.last_poll.current is not None)
            await front.retire()
            with pytest.raises(StartupError, match=r"it has another log.*It can continue with brokerRole=SLAVE"):
                async with promoted(tmp_path, front, "bucket"):
                    raise AssertionError
            async with archiving(tmp_path, front) as (slave, connection):
                assert slave.store.max_physical_offset == cut.store.max_physical_offset
                await is_served(connection, 0, 4, cut)
            (tmp_path / "slave" / "archive").rename(tmp_path / "archive of before")
            async with promoted(tmp_path, front, "another") as (broker, connection):
                await is_served(connection, 0, 4, cut)
                await offload(broker)
                assert archived(broker) == 4

    run(scenario)


@asynccontextmanager
async def promoted(root: Path, front: Front, bucket: str) -> AsyncIterator[tuple[BrokerController, Connection]]:
    """Start the slave's directory as a master, after its master has gone."""
    own = [f"namesrvAddr={front.address}", f"storeUrl=dir:{root}/{bucket}"]
    async with running(root / "slave", *own) as found:
        yield found


def test_ttl_expires_only_archivable_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offset that the master may assign again must not be expired in the journal."""

    async def scenario() -> None:
        async with two_lives(tmp_path, kept=IN_A_FILE + 5, lost=0) as (front, source, _theirs):
            front.source, front.ha.store = source, source.store
            async with archiving(tmp_path, front, ttl="1") as (slave, connection):
                await caught_up(slave, front)
                assert isinstance(slave.archive, BrokerArchive)
                expire, catalog = slave.archive.lifecycle.expire, slave.archive.journal.catalog
                later = slave.clock.now_ms() + 2 * 3_600_000
                monkeypatch.setattr(SafeClock, "now_ms", lambda _self, _store=None: later)
                await asyncio.to_thread(expire.run)
                assert (catalog.recorded_minimum("t", 0), slave.store.queues.min_offset("t", 0)) == (0, 0)
                assert await looked(slave) == FILE_SIZE
                await offload(slave)
                await asyncio.to_thread(expire.run)
                assert catalog.recorded_minimum("t", 0) == slave.store.queues.min_offset("t", 0) == IN_A_FILE
                assert not catalog.objects("t")
                await is_served(connection, IN_A_FILE, IN_A_FILE + 5, source)

    run(scenario)


def test_log_restored_from_a_copy_older_than_its_archive_archives_nothing(tmp_path: Path) -> None:
    """It cannot be known whether the master still has the archived messages."""

    async def scenario() -> None:
        async with two_lives(tmp_path, kept=2, lost=IN_A_FILE) as (front, cut, _connection):
            end = cut.store.max_physical_offset
            before, front.source = front.source, cut
            front.ha.store = cut.store
            async with archiving(tmp_path, front) as (slave, _ours):
                await caught_up(slave, front)
            shutil.copytree(tmp_path / "slave", tmp_path / "older")
            front.source = before
            front.ha.store = before.store
            async with archiving(tmp_path, front) as (slave, _ours):
                await caught_up(slave, front)
                assert await looked(slave) == FILE_SIZE
                await offload(slave)
                assert archived(slave) == IN_A_FILE
            async with archiving(tmp_path, front, "older") as (slave, _ours):
                await caught_up(slave, front)
                assert f"the log ended at {end} at a start" in await page(slave)
                assert await looked(slave) == -1

    run(scenario)


def test_log_is_truncated_only_after_the_end_of_archiving_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with (
            two_lives(tmp_path, kept=2, lost=IN_A_FILE) as (front, cut, _connection),
            archiving(tmp_path, front) as (slave, _ours),
        ):
            await caught_up(slave, front)
            assert await looked(slave) == FILE_SIZE
            await offload(slave)
            ends, is_broken = list[int](), True
            save = DivergenceFile.save

            def fails(file: DivergenceFile, divergence: Divergence) -> None:
                ends.append(slave.store.max_physical_offset)
                if is_broken:
                    raise OSError("the disk is ill")
                save(file, divergence)

            monkeypatch.setattr(DivergenceFile, "save", fails)
            end = slave.store.max_physical_offset
            await power_cut(front, cut)
            await until(lambda: len(ends) >= 2)
            assert set(ends) == {end}
            journal = slave.archive.journal
            assert not journal or not journal.ownership.leads, "nothing is archived meanwhile"
            is_broken = False
            await caught_up(slave, front)
            assert slave.store.max_physical_offset < end

    run(scenario)


def test_second_slave_cannot_use_the_archive_of_the_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_lives(tmp_path, kept=2, lost=0) as (front, _, _connection), archiving(tmp_path, front):
            with pytest.raises(StartupError, match=r"belongs to another data directory: .* prefix of this slave's own"):
                async with archiving(tmp_path, front, "second"):
                    raise AssertionError

    run(scenario)


def test_slave_cannot_be_restored_from_a_bucket(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_lives(tmp_path, kept=2, lost=0) as (front, _, _connection):
            async with archiving(tmp_path, front):
                pass
            with pytest.raises(StartupError, match="--restore-from with brokerRole=SLAVE"):
                async with running(tmp_path / "new", *options(tmp_path, front), restoring=True):
                    raise AssertionError

    run(scenario)


def test_superseded_archive_is_refused_by_a_standalone_broker(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = f"storeUrl=dir:{tmp_path}/bucket"
        async with running(tmp_path / "own", settings) as (broker, connection):
            await send(connection, "t")
            end = broker.store.max_physical_offset
        file = DivergenceFile(RealDisk(), tmp_path / "own" / "archive")
        file.save(Divergence(at=end - 1, reaches=end, since_ms=1, why="the master lost its log"))
        with pytest.raises(StartupError, match="begin another archive"):
            async with running(tmp_path / "own", settings):
                raise AssertionError
        conf = tmp_path / "broker.conf"
        conf.write_text(f"storePathRootDir={tmp_path}/own\n{settings}\n")
        assert next(check.found for check in checks(conf, []) if check.check == "archive").startswith(
            "archiving has stopped: the master lost its log"
        )
        file.save(Divergence(at=end, reaches=end + 1, since_ms=1, why="the master lost its log"))
        async with running(tmp_path / "own", settings):
            pass  # the archived offsets were not assigned again: the log resumes above them

    run(scenario)
