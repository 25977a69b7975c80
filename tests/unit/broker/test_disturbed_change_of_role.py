"""A change of role in which a step fails, or which interrupts another one, is completed or undone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from bench.wire import pull_ext, send_ext
from broker.ha import master_term
from broker.ha.member import State
from broker.ha.member_status import faults
from broker.ha.replicas_manager import SwitchoverRefused
from broker.metadata.metadata_log import MetadataLog
from broker.metadata.slave_synchronize import SlaveSynchronize
from broker.role import Role
from broker.store.message_store import MessageStore
from broker.tables.changes import CHANGES
from broker.tables.state_file import StateFile
from infra.disk.filesystem import RealDisk
from neve.errors import BrokerError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.names import METADATA_LOG
from tests.kit.broker.in_process import ask
from tests.kit.broker.set_in_process import BrokerMember, Set, broker_set
from tests.kit.clock.waiting import until
from tests.unit.broker.role_changes import TOPIC, bodies, hand_to, put, shows


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


@asynccontextmanager
async def of_three(root: Path) -> AsyncIterator[tuple[Set, BrokerMember, BrokerMember, BrokerMember]]:
    """Yield a set with one message, its master and its slaves."""
    async with broker_set(root) as brokers:
        former = await brokers.master()
        heir, other = await brokers.slaves()
        await put(former, b"1")
        yield brokers, former, heir, other


async def test_member_elected_during_a_truncation_leads(tmp_path: Path) -> None:
    """The election interrupts a truncation that has removed bytes but not their epochs yet."""

    async with broker_set(tmp_path) as brokers:
        heir = (await brokers.slaves())[0]
        heir.replicas.epochs.assign(40, heir.end + 1000)
        await hand_to(brokers, heir)
        await put(heir, b"1")
        assert [epoch for epoch, _ in heir.replicas.epochs.entries() if epoch == 40] == []
        assert heir.replicas.epochs.last_epoch == heir.replicas.member.record.view.master_epoch


async def test_truncation_reports_a_disk_error_to_its_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    async with broker_set(tmp_path, replication="async") as brokers:
        slave = (await brokers.slaves())[0]
        await put(await brokers.master(), b"1")
        await shows(slave, b"1")
        monkeypatch.setattr(slave.broker.store, "truncation", refused)
        with pytest.raises(OSError, match="Input/output"):
            await slave.replicas.request_truncation(slave.end)


@pytest.mark.parametrize("failures", [0, 2])
def test_async_masters_truncated_changes_are_in_none_of_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """Otherwise the first changes of the next master, at the positions of the truncated ones, would be skipped."""
    store, end = cast("MessageStore", None), 0
    reload, reloads = MetadataLog.reload_parts, list[int]()

    def at_last(self: MetadataLog) -> Any:
        reloads.append(store.max_physical_offset)
        if store.max_physical_offset < end and len(reloads) < 2 + failures:
            raise OSError(5, "Input/output error")
        yield from reload(self)

    async def never(*_: object) -> None:
        """Disable polling: changes come only by the log."""

    async def scenario() -> None:
        nonlocal store, end
        async with broker_set(tmp_path, replication="async") as brokers:
            former = await brokers.master()
            heir, other = await brokers.slaves()
            await put(former, b"1")
            for slave in (heir, other):
                await shows(slave, b"1")
            store = former.broker.store
            monkeypatch.setattr(SlaveSynchronize, "poll", never)
            with monkeypatch.context() as patch:  # its slaves get nothing more of it
                patch.setattr(store, "log_bytes", lambda start, *_, **__: (start, memoryview(b"")))
                patch.setattr(store.described, "at", lambda _: None)
                for name in ("alone-1", "alone-2", "alone-3"):
                    former.broker.topics.create_plain(name, 1)
                await put(former, b"alone")
                assert bodies(former) == [b"1", b"alone"]
                end = former.end
                monkeypatch.setattr(MetadataLog, "reload_parts", at_last)
                await hand_to(brokers, heir)
                heir.broker.topics.create_plain("of the set", 1)
                await put(heir, b"2")
                await shows(former, b"1", b"2")
            for member in (former, heir):
                names = {name for name in member.broker.topics.topics if name.startswith(("alone", "of "))}
                assert names == {"of the set"}
            assert former.broker.journal.position == store.queues.max_offset(METADATA_LOG, CHANGES)
            first, *behind_the_cut = reloads
            assert first >= end > behind_the_cut[0]
            assert behind_the_cut == [behind_the_cut[0]] * (1 + failures)

    run(scenario)


async def test_master_that_fails_to_load_its_state_at_first_leads_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    lead = MetadataLog.lead_steps

    def at_the_third(self: MetadataLog) -> Any:
        tried.append(1)
        if len(tried) < 3:
            raise OSError(5, "Input/output error")
        return lead(self)

    async with broker_set(tmp_path) as brokers:
        heir = (await brokers.slaves())[0]
        monkeypatch.setattr(MetadataLog, "lead_steps", at_the_third)
        await hand_to(brokers, heir)
        await put(heir, b"1")
        assert len(tried) == 3


async def test_master_that_cannot_load_its_state_stops_and_another_one_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with of_three(tmp_path) as (brokers, former, heir, other):

        def unreadable(epoch: int) -> None:
            raise ValueError("what nobody can read")

        monkeypatch.setattr(heir.broker.topics, "lead", unreadable)
        assert await former.replicas.switch_over(heir.replicas.member.broker_id)
        await heir.broker.life.end_requested.wait()
        await heir.stop()
        await until(lambda: former.leads or other.leads, "another one leads")
        await put(await brokers.master(), b"2")


async def test_member_deposed_before_it_could_lead_follows_with_the_sets_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with of_three(tmp_path) as (brokers, former, heir, other):
        monkeypatch.setattr(master_term, "LEAD_TRIES", 1 << 30)
        failed = asyncio.Event()
        registered = heir.broker.topics.lead

        def half_way(epoch: int) -> None:
            registered(epoch)
            failed.set()
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(heir.broker.topics, "lead", half_way)
        target = heir.replicas.member.broker_id
        handing = asyncio.create_task(former.replicas.switch_over(target))
        await failed.wait()
        assert await handing == target
        assert not heir.leads
        in_sync = heir.replicas.member.record.view.sync_state_set - {target}
        next_master = next(one for one in (former, other) if one.replicas.member.broker_id in in_sync)
        await hand_to(brokers, next_master)
        await until(lambda: heir.state is State.SLAVE and heir.role is Role.SLAVE_IN_SYNC, "it follows")
        assert heir.broker.store.end.is_following
        await put(next_master, b"2")
        await shows(heir, b"1", b"2")
        heir.broker.topics.file.touch()
        await heir.broker.topics.file.save()  # saving is no longer suspended


async def test_log_that_cannot_be_marked_as_following_refuses_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with of_three(tmp_path) as (brokers, former, heir, _):
        store: MessageStore = former.broker.store

        def refused() -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(store._directory, "begin_following", refused)
        end = former.end
        await hand_to(brokers, heir)
        assert former.end == end
        assert store.end.failure is not None


async def test_second_switchover_during_one_is_refused(tmp_path: Path) -> None:
    async with of_three(tmp_path) as (_, former, heir, other):
        target = heir.replicas.member.broker_id
        asked = [former.replicas.switch_over(member.replicas.member.broker_id) for member in (heir, other)]
        asked.append(former.replicas.switch_over())
        first, second, anyone = await asyncio.gather(*asked, return_exceptions=True)
        assert first == anyone == target, "who names nobody waits for the one that is under way"
        assert isinstance(second, SwitchoverRefused)
        assert "already" in str(second)
        await put(heir, b"2")


async def test_table_reloaded_during_a_sync_is_not_saved_in_its_old_state(tmp_path: Path) -> None:
    """The master was deposed meanwhile: the table may include changes that only its own log had, which is truncated."""
    path, table, inside, go = tmp_path / "table.json", {"of": "the set"}, asyncio.Event(), asyncio.Event()

    async def sync_log() -> None:
        inside.set()
        await go.wait()

    file = StateFile(RealDisk(), path, lambda: {"rows": dict(table)}, sync_log=sync_log)

    async def save(meanwhile: Callable[[], object]) -> None:
        inside.clear()
        go.clear()
        file.touch()
        saving = asyncio.create_task(file.save())
        await inside.wait()
        meanwhile()
        go.set()
        await saving

    def deposed() -> None:
        file.suspend()
        file.load(rows=dict)

    await save(lambda: None)
    table["of"] = "one member"
    for meanwhile in (file.suspend, deposed):
        with pytest.raises(BrokerError, match="no longer the master of its set"):
            await save(meanwhile)
        assert file.load(rows=dict)["rows"] == {"of": "the set"}
    await save(lambda: None)
    assert file.load(rows=dict)["rows"] == {"of": "one member"}, "once it was read anew it is saved again"


async def test_promotion_sends_heartbeats_and_refuses_sends_while_it_allocates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    async with broker_set(tmp_path) as brokers:
        heir = (await brokers.slaves())[0]
        await put(await brokers.master(), b"1")
        await shows(heir, b"1")
        prepare = heir.broker.store.prepare_to_lead

        def slow() -> None:
            begun.set()
            assert may_end.wait(60)
            prepare()

        monkeypatch.setattr(heir.broker.store, "prepare_to_lead", slow)
        try:
            elected = asyncio.create_task(hand_to(brokers, heir))
            await until(lambda: begun.is_set() and heir.state is State.MASTER, "the elected one allocates a file")
            asked = heir.replicas.requests.sent["Heartbeat"]
            await until(lambda: heir.replicas.requests.sent["Heartbeat"] >= asked + 2, "its heartbeats go on")
            assert not heir.leads
            connection = await heir.connect()
            refused = await ask(connection, Code.SEND_MESSAGE_V2, b"x", **send_ext(TOPIC, 0))
            assert refused.code == ResponseCode.SYSTEM_BUSY
            connection.close()
        finally:
            may_end.set()
        await elected
        await put(heir, b"2")
        await shows(heir, b"1", b"2")


async def test_promotion_does_not_wait_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running checkpoint fsyncs thousands of queues."""
    begun, may_end = threading.Event(), threading.Event()

    async with broker_set(tmp_path) as brokers:
        heir = (await brokers.slaves())[0]
        store = heir.broker.store
        await put(await brokers.master(), b"1")
        await shows(heir, b"1")
        write_due = store.checkpoints.write_due

        def slow() -> None:
            begun.set()
            assert may_end.wait(60)
            write_due()

        monkeypatch.setattr(store.checkpoints, "write_due", slow)
        store.want_checkpoint(store.max_physical_offset)
        try:
            await until(begun.is_set, "a checkpoint is written")
            await hand_to(brokers, heir)
            await put(heir, b"2")
            await shows(heir, b"1", b"2")
        finally:
            may_end.set()


@asynccontextmanager
async def with_a_diverged_tail(
    root: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[BrokerMember], object]
) -> AsyncIterator[tuple[BrokerMember, BrokerMember]]:
    """Yield a former `async` master that is about to truncate an unreplicated message, and the new master."""
    async with broker_set(root, replication="async") as brokers:
        former = await brokers.master()
        heir, other = await brokers.slaves()
        await put(former, b"1")
        for slave in (heir, other):
            await shows(slave, b"1")
        with monkeypatch.context() as patch:  # no slave copies the next message
            patch.setattr(former.broker.store, "log_bytes", lambda start, *_, **__: (start, memoryview(b"")))
            patch.setattr(former.broker.store.described, "at", lambda _: None)
            await put(former, b"alone")
            prepare(former)
            await hand_to(brokers, heir)
        await put(heir, b"2")
        yield former, heir


async def test_member_refuses_reads_and_sends_heartbeats_in_a_truncation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    recover = MessageStore._recover

    def slow(self: MessageStore) -> Any:
        begun.set()
        assert may_end.wait(60)
        return recover(self)

    try:
        async with with_a_diverged_tail(
            tmp_path, monkeypatch, lambda _: monkeypatch.setattr(MessageStore, "_recover", slow)
        ) as (former, _):
            await until(begun.is_set, "the log is recovered")
            assert former.role is Role.FENCED
            assert "broker set: truncating" in {trouble.name for trouble in faults(former.replicas)}
            asked = former.replicas.requests.sent["Heartbeat"]
            await until(lambda: former.replicas.requests.sent["Heartbeat"] >= asked + 2, "its heartbeats go on")
            connection = await former.connect()
            refused = await ask(connection, Code.PULL_MESSAGE, **pull_ext("readers", TOPIC, 0, 0))
            assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
            connection.close()
            may_end.set()
            await shows(former, b"1", b"2")
            assert former.role in (Role.SLAVE, Role.SLAVE_IN_SYNC)
    finally:
        may_end.set()


async def test_follower_restarts_after_an_unexpected_error_in_a_truncation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_at_first(member: BrokerMember) -> None:
        store, failures = member.broker.store, iter(range(2))

        def wrong(*arguments: Any, **keywords: Any) -> Any:
            if next(failures, None) is not None:
                raise AssertionError("a defect")
            return MessageStore.truncation(store, *arguments, **keywords)

        monkeypatch.setattr(store, "truncation", wrong)

    async with with_a_diverged_tail(tmp_path, monkeypatch, fail_at_first) as (former, _):
        await shows(former, b"1", b"2")
        assert former.broker.runtime.supervisor.failures["follow-master"] == 2
        assert former.broker.runtime.supervisor.failures["broker-set"] == 0
        assert former.role in (Role.SLAVE, Role.SLAVE_IN_SYNC)


async def test_deposed_master_serves_and_saves_nothing_while_it_reloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    reload = MetadataLog.reload_parts

    def slow(self: MetadataLog) -> Any:
        begun.set()
        yield lambda: may_end.wait(60)
        yield from reload(self)

    async with of_three(tmp_path) as (brokers, former, heir, _):
        await shows(heir, b"1")
        monkeypatch.setattr(MetadataLog, "reload_parts", slow)
        try:
            await hand_to(brokers, heir)
            await until(begun.is_set, "the tables are read")
            assert former.role is Role.FENCED
            former.broker.topics.file.touch()
            with pytest.raises(BrokerError, match="no longer the master of its set"):
                await former.broker.topics.file.save()
            change_of_role = former.broker.parts.replicas.change_of_role
            assert change_of_role is not None
            await change_of_role.follow_pops()
            asked = former.replicas.requests.sent["Heartbeat"]
            await until(lambda: former.replicas.requests.sent["Heartbeat"] >= asked + 2, "its heartbeats go on")
            assert former.role is Role.FENCED
        finally:
            may_end.set()
        await put(heir, b"2")
        await shows(former, b"1", b"2")
        await until(lambda: former.role in (Role.SLAVE, Role.SLAVE_IN_SYNC), "it serves readers")
        await former.broker.topics.file.save()
