"""Master and slaves over real connections: catch-up, the live tail, restarts of both, refused connections."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker.ha import ha_service, master_session
from broker.ha.confirm import Confirm
from broker.ha.frames import (
    DESCRIBES_FROM,
    FORMAT,
    SlaveHandshake,
    encode_ack,
    encode_hello,
    encode_slave_handshake,
)
from broker.ha.ha_service import HaService
from broker.ha.master_session import StreamRules
from broker.store.errors import StoreFull
from broker.store.log_end import LogEnd
from broker.store.replica_appender import ReplicaAppender
from infra.clock import SystemClock
from infra.net.tls import client_context, server_tls
from neve.entropy import system_entropy
from tests.kit.broker.ha_member import A, B, C, HaMember, assert_same, run
from tests.kit.broker.ha_session import hello
from tests.kit.clock.waiting import until
from tests.kit.store.replicas import log_of

# -- replication


def test_new_slave_catches_up_and_then_gets_each_message() -> None:
    async def main() -> None:
        master, slave = HaMember(A), HaMember(B)
        await master.lead(1, B)
        master.put(400)
        async with slave.follows(master, 1):
            await until(lambda: slave.has_all_of(master))
            for _ in range(20):
                master.put(3)
                await until(lambda: slave.has_all_of(master))
            await until(lambda: master.confirmed_to == master.store.max_physical_offset)
            await until(lambda: slave.confirmed_to == master.store.max_physical_offset)
        assert_same(slave.store, master.store)
        assert slave.epochs.entries() == slave.epoch_file.load().entries() == ((1, 0),)
        await master.stop()

    run(main())


def test_message_is_confirmed_only_when_every_in_sync_slave_has_it() -> None:
    async def main() -> None:
        master, b, c = HaMember(A), HaMember(B), HaMember(C)
        await master.lead(1, B, C)
        master.put(5)
        async with b.follows(master, 1):
            await until(lambda: b.has_all_of(master))
            assert master.confirmed_to == 0
            async with c.follows(master, 1):
                await until(lambda: master.confirmed_to == master.store.max_physical_offset)
            await until(lambda: C not in master.ha.slaves)
            before = master.confirmed_to
            master.put(5)
            await until(lambda: b.has_all_of(master))
            assert master.confirmed_to == before
        await master.stop()

    run(main())


def test_sync_flush_slave_acknowledges_only_after_its_fsync() -> None:
    async def main() -> None:
        master, slave = HaMember(A), HaMember(B)
        may_sync, syncs = asyncio.Event(), 0

        async def sync() -> None:
            nonlocal syncs
            syncs += 1
            if slave.store.max_physical_offset:
                await may_sync.wait()
            slave.store.after_flush(slave.store.visibility.flush())

        await master.lead(1, B)
        master.put(5)
        async with slave.follows(master, 1, slave.client(sync=sync)):
            await until(lambda: slave.has_all_of(master))
            assert (master.confirmed_to, syncs) == (0, 2)
            may_sync.set()
            await until(lambda: master.confirmed_to == master.store.max_physical_offset)
            assert master.confirm is not None
            assert master.confirm.synced(1 << 60) == master.confirmed_to
        await master.stop()

    run(main())


def test_received_bytes_are_stored_and_acked_in_the_same_loop_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task is woken for the bytes, and each report covers a whole write."""

    async def main() -> None:
        master, slave = HaMember(A), HaMember(B)
        tasks: list[asyncio.Task[None] | None] = []
        reports: list[int] = []
        append, reported = ReplicaAppender.append, Confirm.reported

        def append_replica(replica: ReplicaAppender, data: bytes, at: int, description: bytes) -> None:
            tasks.append(asyncio.current_task())
            append(replica, data, at, description)

        def report(confirm: Confirm, member: int, connection: object, end: int, now: float, *, synced: int) -> bool:
            reports.append(end)
            return reported(confirm, member, connection, end, now, synced=synced)

        monkeypatch.setattr(ReplicaAppender, "append", append_replica)
        monkeypatch.setattr(Confirm, "reported", report)
        await master.lead(1, B)
        async with slave.follows(master, 1):
            master.put(1)  # the first message brings the epoch, which is saved first
            await until(lambda: master.confirmed_to == master.store.max_physical_offset)
            tasks.clear()
            reports.clear()
            for _ in range(20):
                master.put(10)
                await until(lambda: master.confirmed_to == master.store.max_physical_offset)
            assert set(tasks) == {None}
            assert len(set(reports)) <= len(tasks) < 200, "not one for each record"
        await master.stop()

    run(main())


@pytest.mark.parametrize(("slaves_format", "told"), [(FORMAT, True), (DESCRIBES_FROM - 1, False)])
def test_batch_description_is_sent_to_slaves_that_support_it(
    monkeypatch: pytest.MonkeyPatch, slaves_format: int, told: bool
) -> None:
    """The slave does not parse these records. A slave of an older format gets the plain frame."""

    async def main() -> None:
        master, slave = HaMember(A, commit_log_file_size=1 << 20), HaMember(B, commit_log_file_size=1 << 20)
        stored: list[bool] = []
        write = LogEnd.write

        def written(end: LogEnd, records: bytes, marks: list[int] | bytes) -> None:
            stored.append(isinstance(marks, bytes))
            write(end, records, marks)

        monkeypatch.setattr(LogEnd, "write", written)
        await master.lead(1, B)
        async with slave.follows(master, 1, slave.client(hello(B, format=slaves_format, master_epoch=1))):
            master.put(1)
            await until(lambda: slave.has_all_of(master))
            for count in (40, 3, 64):
                queues = [master.store.queue_for("batch", queue) for queue in range(2)]
                sends = [
                    (queues[number % 2], bytes(100), b"", 0, f"k{number}", 0, 0, 1, 0, 0) for number in range(count)
                ]
                for _ in range(3):
                    assert len(master.store.append(sends, ("10.1.2.3", 4), 1)) == count
                    master.ha.appended()
                await until(lambda: slave.has_all_of(master))
            assert_same(slave.store, master.store)
        assert any(stored) is told
        assert not told or sum(stored) > 3
        await until(lambda: not master.ha.slaves)
        assert master.store.described.at(0) is None
        assert not master.store.described.is_wanted, "nobody is there who takes it"
        await master.stop()

    run(main())


def test_bytes_received_during_a_sync_are_covered_by_one_more_sync() -> None:
    async def main() -> None:
        master, slave = HaMember(A), HaMember(B)
        may_sync, waiting, syncs = asyncio.Event(), asyncio.Event(), 0

        async def sync() -> None:
            nonlocal syncs
            if slave.store.max_physical_offset:
                syncs += 1
                waiting.set()
                await may_sync.wait()
            slave.store.after_flush(slave.store.visibility.flush())

        await master.lead(1, B)
        async with slave.follows(master, 1, slave.client(sync=sync)) as client:
            await until(lambda: bool(master.ha.slaves))
            master.put(1)
            await waiting.wait()
            for _ in range(20):
                master.put(1)
                await asyncio.sleep(0)
            ends = (slave.store, master.store)
            await until(lambda: client.held > ends[1].max_physical_offset - ends[0].max_physical_offset)
            may_sync.set()
            await until(lambda: master.confirmed_to == master.store.max_physical_offset)
            assert syncs == 2
        await master.stop()

    run(main())


def test_slave_far_behind_gets_bytes_that_a_thread_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_session, "FAR_BEHIND", 20_000)
    monkeypatch.setattr(master_session, "TURN_BYTES", 10_000)

    async def main() -> None:
        master, slave = HaMember(A), HaMember(B)
        await master.lead(1, B)
        master.put(1000)
        async with slave.follows(master, 1):
            await until(lambda: slave.has_all_of(master))
        assert_same(slave.store, master.store)
        await master.stop()

    run(main())


def test_holes_and_early_ends_of_files_are_replicated() -> None:
    async def main() -> None:
        master, slave = HaMember(A), HaMember(B)
        await master.lead(1, B)
        async with slave.follows(master, 1):
            for step in range(6):
                master.put(30)
                if step % 2:
                    master.store.end.roll()
                else:
                    master.store.restart_log_at(master.store.max_physical_offset + 50_000)
            master.put(3)
            await until(lambda: slave.has_all_of(master))
        assert_same(slave.store, master.store)
        await master.stop()

    run(main())


# -- restarts


def test_slave_resumes_at_its_log_end_after_a_broken_connection() -> None:
    async def main() -> None:
        master, slave = HaMember(A), HaMember(B)
        service = await master.lead(1, B)
        master.put(50)
        async with slave.follows(master, 1) as client:
            await until(lambda: slave.has_all_of(master))
            for link in tuple(service._links):
                link.abort()
            master.put(50)
            await until(lambda: slave.has_all_of(master))
            assert client.connections == 2
        assert_same(slave.store, master.store)
        await master.stop()

    run(main())


def test_slave_resumes_under_a_restarted_master() -> None:
    async def main() -> None:
        master, slave = HaMember(A), HaMember(B)
        await master.lead(1, B)
        master.put(50)
        async with slave.follows(master, 1) as client:
            await until(lambda: master.confirmed_to == master.store.max_physical_offset)
            await master.stop()
            await until(lambda: client.session is None)
        begin = master.store.max_physical_offset
        master = master.restarted()
        assert master.store.max_physical_offset == begin
        await master.lead(2, B)
        master.put(50)
        async with slave.follows(master, 2, slave.client(hello(B, master_epoch=2))):
            await until(lambda: slave.has_all_of(master))
        assert slave.epochs.entries() == ((1, 0), (2, begin))
        assert_same(slave.store, master.store)
        await master.stop()

    run(main())


def test_slave_killed_inside_a_record_gets_it_whole_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(master_session, "TURN_BYTES", 100)

    async def main() -> None:
        master, slave = HaMember(A), HaMember(B)
        await master.lead(1, B, rules=StreamRules(batch=64))
        master.put(3)
        master.put(1, 12_000)
        whole = master.store.max_physical_offset
        middle, append = asyncio.Event(), slave.store.replica.append

        def append_until_the_middle(data: bytes | memoryview, at: int, _description: bytes | memoryview = b"") -> None:
            end = whole - 6_000
            append(memoryview(data)[: end - at], at)
            if at + len(data) > end:
                middle.set()
                raise StoreFull("the process ends here")

        slave.store.replica.append = append_until_the_middle  # type: ignore[method-assign,assignment]
        async with slave.follows(master, 1):
            await middle.wait()
        assert 0 < slave.store.max_physical_offset < whole
        slave = slave.restarted()
        assert 0 < slave.store.max_physical_offset < whole
        async with slave.follows(master, 1):
            await until(lambda: master.confirmed_to == whole)
        assert_same(slave.store, master.store)
        await master.stop()

    run(main())


def test_new_connection_of_a_slave_replaces_its_older_one() -> None:
    """As after a pulled cable: the master has not noticed the end of the older connection."""

    async def main() -> None:
        master, slave = HaMember(A), HaMember(B)
        service = await master.lead(1, B)
        _, older = await shaken(service)
        await until(lambda: B in service.slaves)
        stale = service.slaves[B]
        async with slave.follows(master, 1):
            await until(lambda: service.slaves[B] is not stale)
            master.put(3)
            await until(lambda: master.confirmed_to == master.store.max_physical_offset)
        older.close()
        await master.stop()

    run(main())


# -- roles


def test_deposed_master_counts_no_acknowledgements() -> None:
    async def main() -> None:
        master, slave = HaMember(A), HaMember(B)
        service = await master.lead(1, B)
        master.put(3)
        async with slave.follows(master, 1) as client:
            await until(lambda: master.confirmed_to == master.store.max_physical_offset)
            before = master.confirmed_to
            service.stop_leading()
            master.put(3)
            await until(lambda: client.ended["not-master"] > 0)
            assert not slave.has_all_of(master)
        assert (master.confirmed_to, service.slaves) == (before, {})
        await master.stop()

    run(main())


def test_slave_saves_the_epoch_of_a_new_masters_bytes() -> None:
    async def main() -> None:
        first, second = HaMember(A), HaMember(B)
        await first.lead(1, B)
        first.put(20)
        async with second.follows(first, 1):
            await until(lambda: second.has_all_of(first))
        await first.stop()
        begin = second.store.max_physical_offset
        await second.lead(2)
        second.put(20)
        third = HaMember(C)
        append, known = third.store.replica.append, list[tuple[tuple[int, int], ...]]()

        def append_and_look(data: bytes | memoryview, at: int, description: bytes | memoryview = b"") -> None:
            known.append(third.epoch_file.load().entries())
            append(data, at, description)

        third.store.replica.append = append_and_look  # type: ignore[method-assign]
        async with third.follows(second, 2, third.client(hello(C, master_epoch=2))):
            await until(lambda: third.has_all_of(second))
        assert (known[0], known[-1]) == (((1, 0),), ((1, 0), (2, begin))), "on the disk before the first byte"
        assert third.followed == 2
        assert_same(third.store, second.store)
        await second.stop()

    run(main())


async def parted(first: HaMember, second: HaMember, *, also: bool) -> int:
    """Make `first` a former master with a diverged tail, and `second` the master of epoch 2.

    Return where they diverge.
    """
    await first.lead(1, *([B] if also else []))
    first.put(20)
    async with second.follows(first, 1):
        await until(lambda: second.has_all_of(first))
        await until(lambda: first.confirmed_to == first.store.max_physical_offset)
    point = first.store.max_physical_offset
    await until(lambda: B not in first.ha.slaves)
    first.put(20)
    await first.stop()
    await second.lead(2)
    second.put(50)
    first.store.follow()
    return point


def test_former_master_truncates_and_keeps_its_tail_and_follows() -> None:
    async def main() -> None:
        first, second = HaMember(A), HaMember(B)
        point = await parted(first, second, also=True)
        own = b"".join(bytes(data)[max(point - at, 0) :] for at, data in log_of(first.store) if at + len(data) > point)
        end = first.store.max_physical_offset
        async with first.follows(second, 2, first.client(hello(A, master_epoch=2))) as client:
            await until(lambda: first.has_all_of(second))
            second.put(20)
            await until(lambda: first.has_all_of(second))
            assert client.connections == 1
        assert_same(first.store, second.store)
        assert first.diverged() == {f"1-{point}-{end}.log": own}
        assert first.epoch_file.load().entries() == ((1, 0), (2, point))
        again = first.restarted()
        assert_same(again.store, second.store)
        await second.stop()

    run(main())


def test_confirmed_bytes_are_never_truncated_automatically() -> None:
    """As after an unclean election: the old master alone acknowledged bytes that the new one lacks."""

    async def main() -> None:
        first, second = HaMember(A), HaMember(B)
        await parted(first, second, also=False)
        end = first.store.max_physical_offset
        assert first.confirmed_to == end
        async with first.follows(second, 2, first.client(hello(A, master_epoch=2))) as client:
            await until(lambda: client.trouble is not None)
            assert client.trouble is not None
            assert client.trouble.reason == "cut-needs-an-operator"
        assert (first.store.max_physical_offset, first.diverged()) == (end, {})
        assert first.epochs.entries() == ((1, 0),)
        await second.stop()

    run(main())


def test_failed_save_of_an_epoch_is_repeated_before_its_bytes_are_stored() -> None:
    async def main() -> None:
        master, slave = HaMember(A), HaMember(B)
        await master.lead(1, B)
        master.put(20)
        save, failures = slave.epoch_file.save, 2

        def fail_at_first(entries: Iterable[tuple[int, int]]) -> None:
            nonlocal failures
            assert slave.store.max_physical_offset == 0
            if failures:
                failures -= 1
                raise OSError("no room")
            save(entries)

        slave.epoch_file.save = fail_at_first  # type: ignore[method-assign]
        async with slave.follows(master, 1) as client:
            await until(lambda: slave.has_all_of(master))
            assert client.connections == 3
        assert slave.epoch_file.load().entries() == slave.epochs.entries() == ((1, 0),)
        await master.stop()

    run(main())


def test_dropped_epoch_is_removed_from_disk_before_new_bytes_are_stored() -> None:
    """Otherwise a start would assign the bytes to a master that never wrote them."""

    async def main() -> None:
        master, slave = HaMember(A), HaMember(B)
        await master.lead(1, B)
        master.put(20)
        async with slave.follows(master, 1):
            await until(lambda: slave.has_all_of(master))
        end = slave.store.max_physical_offset
        slave.epochs.assign(2, end)  # by a heartbeat of a master that wrote nothing
        slave.epoch_file.save(slave.epochs.entries())
        master.put(20)
        await master.stop()
        later = master.store.max_physical_offset
        await master.lead(3, B)
        save, failures = slave.epoch_file.save, 1

        def fail_at_first(entries: Iterable[tuple[int, int]]) -> None:
            nonlocal failures
            if failures:
                failures -= 1
                raise OSError("no room")
            save(entries)

        append = slave.store.replica.append

        def append_and_look(data: bytes | memoryview, at: int, description: bytes | memoryview = b"") -> None:
            assert (2, end) not in slave.epoch_file.load().entries()
            append(data, at, description)

        slave.epoch_file.save = fail_at_first  # type: ignore[method-assign]
        slave.store.replica.append = append_and_look  # type: ignore[method-assign]
        async with slave.follows(master, 3, slave.client(hello(B, master_epoch=3))):
            await until(lambda: slave.has_all_of(master))
            master.put(1)
            await until(lambda: slave.has_all_of(master))
        assert slave.epoch_file.load().entries() == ((1, 0), (3, later))
        assert_same(slave.store, master.store)
        await master.stop()

    run(main())


# -- refused connections


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"cluster": "staging"}, "another-cluster"),
        ({"broker_set": "x"}, "another-broker-set"),
        ({"mapped_file_size_commit_log": 1}, "unequal-file-size"),
        ({"format": 9}, "another-format"),
        ({"member_id": 9}, "no-member"),
    ],
)
def test_refused_slave_gets_the_reason(other: dict[str, object], reason: str) -> None:
    async def main() -> None:
        master, slave = HaMember(A), HaMember(B)
        service = await master.lead(1)
        master.put(3)
        async with slave.follows(master, 1, slave.client(replace(hello(B), **other))) as client:
            await until(lambda: client.trouble is not None)
            assert client.trouble is not None
            assert client.trouble.reason == reason
        assert service.refused[reason] >= 1
        assert slave.store.max_physical_offset == 0
        await master.stop()

    run(main())


def test_malformed_bytes_end_only_their_own_connection() -> None:
    async def main() -> None:
        master, slave = HaMember(A), HaMember(B)
        service = await master.lead(1, B)
        async with slave.follows(master, 1):
            for stranger in (b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"nevH\x7f\xff\xff\xff" + bytes(100)):
                reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
                writer.write(stranger)
                assert await reader.read() == b""
                writer.close()
            master.put(3)
            await until(lambda: master.confirmed_to == master.store.max_physical_offset)
        await master.stop()

    run(main())


def test_enforced_tls_admits_members_and_refuses_plain_text(tmp_path: Path) -> None:
    pem, key = tmp_path / "ha.pem", tmp_path / "ha.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=neve", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(pem)],
        check=True, capture_output=True,
    )  # fmt: skip

    async def main() -> None:
        master, slave, plain = HaMember(A), HaMember(B), HaMember(C)
        await master.lead(1, B, tls=server_tls("enforcing", str(pem), str(key)))
        master.put(400)
        async with slave.follows(master, 1, slave.client(tls=client_context(str(pem)))):
            await until(lambda: slave.has_all_of(master))
            async with plain.follows(master, 1) as client:
                await until(lambda: client.ended["lost"] > 0)
            master.put(20)
            await until(lambda: slave.confirmed_to == master.store.max_physical_offset)
        assert_same(slave.store, master.store)
        assert (plain.store.max_physical_offset, plain.followed) == (0, 0)
        await master.stop()

    run(main())


def test_slave_that_does_not_read_delays_only_itself() -> None:
    async def main() -> None:
        master, slave = (HaMember(member, commit_log_file_size=4 << 20) for member in (A, B))
        service = await master.lead(1, B)
        _, writer = await shaken(service, C)
        await until(lambda: C in service.slaves)
        async with slave.follows(master, 1):
            for _ in range(340):
                master.put(1, 50_000)
                await asyncio.sleep(0)
            await until(lambda: master.tick() and master.confirmed_to == master.store.max_physical_offset)
            sent, whole = service.slaves[C].sent, master.store.max_physical_offset
            assert whole > 16 << 20
            assert sent < whole - (1 << 20), "what it has not read is not taken from the log"
        writer.transport.abort()
        await master.stop()

    run(main())


def test_connection_to_a_slave_is_closed() -> None:
    async def main() -> None:
        service = HaService(HaMember(A).store, SystemClock(), system_entropy, host="127.0.0.1")
        await service.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        assert service.refused["not-master"] == 1
        writer.close()
        await service.shutdown()

    run(main())


def test_connection_limit_drops_silent_strangers_and_keeps_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ha_service, "MAX_CONNECTIONS", 3)

    async def main() -> None:
        master, slave = HaMember(A), HaMember(B)
        service = await master.lead(1, B)
        async with slave.follows(master, 1):
            await until(lambda: B in service.slaves)
            writers = []
            for _ in range(7):
                _, writer = await asyncio.open_connection("127.0.0.1", service.port)
                writers.append(writer)
            await until(lambda: service.refused["too-many"] == 5)
            assert len(service._links) == 3
            master.put(3)
            await until(lambda: master.confirmed_to == master.store.max_physical_offset)
            third = HaMember(C)
            async with third.follows(master, 1):
                await until(lambda: third.has_all_of(master))
            for writer in writers:
                writer.close()
        await master.stop()

    run(main())


async def shaken(service: HaService, member: int = B) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a hand-made slave connection that has requested the log."""
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    own = hello(member, master_epoch=1)
    writer.write(encode_hello(own) + encode_slave_handshake(SlaveHandshake(member)) + encode_ack(0, 0))
    return reader, writer
