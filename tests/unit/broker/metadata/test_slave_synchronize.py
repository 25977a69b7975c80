"""A slave fetches its master's tables and installs none that its own log does not confirm or a former master sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from access.guard import Guard, SignatureGuard, Unguarded
from access.model import SUPER, User
from access.store import AuthTables
from broker.metadata.images import MAX_IMAGE, MetadataImage, OffsetsImage, decode_offsets_image, deflated, inflated
from broker.metadata.metadata_log import ImageNeeded
from broker.metadata.slave_synchronize import IS_IMAGE, MASTER_EPOCH, Master, SlaveSynchronize
from broker.requests.slave_polls import SlavePollsProcessor
from broker.tables.changes import CHANGES, UnreadableChange
from infra.clock import ManualClock
from infra.disk.filesystem import DiskFull
from infra.loop.in_steps import Steps, at_once
from infra.net.remoting_server import Connection
from neve.errors import BrokerError, NeveError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand
from neve.remoting.names import METADATA_LOG
from neve.remoting.signature import signed
from tests.unit.broker.metadata.members import TablesMember

A, B = Master("a:1", 1), Master("b:1", 2)


class Api:
    """Connects to the leading members and records the requests. `hold` delays answers."""

    def __init__(self) -> None:
        self.polls: dict[str, SlavePollsProcessor] = {}
        self.asked: list[Code] = []
        self.failing: dict[Code, Exception] = {}
        self.hold: asyncio.Event | None = None
        self.closed = 0

    async def ask(self, address: str, code: Code, ext: dict[str, str]) -> RemotingCommand:
        self.asked.append(code)
        if code in self.failing:
            raise self.failing[code]
        polls, request = self.polls[address], RemotingCommand(code, ext=ext)
        serve = polls.all_topics if code is Code.GET_ALL_TOPIC_CONFIG else polls.all_offsets
        answer = await serve(cast("Connection", None), request)
        if self.hold is not None:
            await self.hold.wait()
        return answer

    def close(self) -> None:
        self.closed += 1


class Slave:
    """A following member. The test sets how much of its log is confirmed."""

    def __init__(self, member: TablesMember, api: Api) -> None:
        self.member, self.api, self.confirmed = member, api, 0
        self.unreadable: list[str] = []
        self.sync = SlaveSynchronize(
            member.metadata, api, confirmed=lambda: self.confirmed, on_unreadable=self.unreadable.append
        )

    def receive(self, master: TablesMember) -> None:
        """Copy the whole log and confirm it."""
        for record in master.records()[len(self.member.records()) :]:
            self.member.receive(record)
        self.confirmed = self.member.store.max_physical_offset

    @property
    def table(self) -> dict[str, dict[int, int]]:
        return self.member.offsets.table()


def polls_of(
    member: TablesMember, leads_in: Callable[[], int | None], guard: Guard | None = None
) -> SlavePollsProcessor:
    stock = cast("Any", None)
    return SlavePollsProcessor(member.metadata, stock, stock, guard or Unguarded(), leads_in=leads_in)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


@pytest.fixture
def master(tmp_path: Path, clock: ManualClock) -> TablesMember:
    """A master with a topic of nine messages and a group that has consumed them."""
    made = TablesMember(tmp_path / "a", clock)
    made.topics.create_plain("t", 1)
    for _ in range(9):
        made.put("t")
    made.offsets.commit("g", "t", 0, 9)
    return made


@pytest.fixture
def api(master: TablesMember) -> Api:
    api = Api()
    api.polls[A.address] = polls_of(master, lambda: A.epoch)
    return api


@pytest.fixture
def slave(tmp_path: Path, clock: ManualClock, api: Api) -> Slave:
    return Slave(TablesMember(tmp_path / "b", clock), api)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(bounded())


# -- images beyond the own log


def test_offsets_wait_until_the_own_log_is_confirmed_as_far(master: TablesMember, slave: Slave) -> None:
    async def scenario() -> None:
        slave.sync.follow(A)
        await slave.sync.poll()
        assert slave.table == {}
        slave.receive(master)
        slave.confirmed -= 1
        slave.sync.advance()
        assert slave.table == {}, "not before the last byte"
        slave.confirmed += 1
        slave.sync.advance()
        assert slave.table == {"t@g": {0: 9}}
        assert slave.sync.installed == 2

    run(scenario)


def test_group_that_was_reset_or_deleted_is_so_on_the_slave(master: TablesMember, slave: Slave) -> None:
    async def scenario() -> None:
        master.offsets.commit("gone", "t", 0, 3)
        slave.receive(master)
        slave.sync.follow(A)
        await slave.sync.poll()
        assert slave.table == {"t@g": {0: 9}, "t@gone": {0: 3}}
        master.offsets.commit("g", "t", 0, 2)
        master.offsets.delete_group("gone")
        await slave.sync.poll()
        assert slave.table == {"t@g": {0: 2}}

    run(scenario)


def test_reset_included_in_an_image_is_not_applied_on_top_of_it(master: TablesMember, slave: Slave) -> None:
    """The image arrives before the log: the slave follows the log first and installs the image afterwards."""

    async def scenario() -> None:
        slave.sync.follow(A)
        await slave.sync.poll()
        slave.receive(master)
        slave.sync.advance()
        master.offsets.reset("g", "t", 0, 1)
        assert master.offsets.take_reset("g", "t", 0) == 1
        master.offsets.commit("g", "t", 0, 7)
        await slave.sync.poll()
        slave.receive(master)
        slave.sync.advance()
        assert slave.table == {"t@g": {0: 7}}
        assert slave.member.offsets.resets() == {}

    run(scenario)


# -- images of a former master


def test_answer_that_arrives_after_a_change_of_master_is_discarded(
    master: TablesMember, slave: Slave, api: Api, tmp_path: Path, clock: ManualClock
) -> None:
    async def scenario() -> None:
        slave.receive(master)
        other = TablesMember(tmp_path / "c", clock)
        for record in master.records():
            other.receive(record)
        other.metadata.lead()
        other.offsets.commit("g", "t", 0, 4)
        api.polls[B.address] = polls_of(other, lambda: B.epoch)
        api.hold = asyncio.Event()
        slave.sync.follow(A)
        polling = asyncio.create_task(slave.sync.poll())
        while not api.asked:
            await asyncio.sleep(0)
        slave.sync.follow(B)
        api.hold.set()
        await polling
        assert slave.table == {}
        await slave.sync.poll()
        assert slave.table == {"t@g": {0: 4}}

    run(scenario)


def test_pending_image_of_a_former_master_is_never_installed(master: TablesMember, slave: Slave) -> None:
    async def scenario() -> None:
        slave.sync.follow(A)
        await slave.sync.poll()
        slave.sync.forget()
        slave.receive(master)
        slave.sync.advance()
        slave.sync.follow(B)
        slave.sync.advance()
        assert slave.table == {}

    run(scenario)


def test_new_master_installs_no_image_and_limits_offsets_to_its_log_end(master: TablesMember, slave: Slave) -> None:
    """The group had consumed two of three messages that no other member has.

    They are gone, and their offsets are reused.
    """

    async def scenario() -> None:
        slave.receive(master)
        slave.sync.follow(A)
        await slave.sync.poll()
        for _ in range(3):
            master.put("t")
        master.offsets.commit("g", "t", 0, 11)
        await slave.sync.poll()
        slave.sync.forget()
        assert slave.member.metadata.lead() == []
        slave.confirmed = 1 << 40
        slave.sync.advance()
        await slave.sync.poll()
        assert slave.table == {"t@g": {0: 9}}

    run(scenario)


@pytest.mark.parametrize("epoch", [None, 0, 2])
def test_master_of_another_epoch_answers_no_poll(
    master: TablesMember, slave: Slave, api: Api, epoch: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        slave.receive(master)
        api.polls[A.address] = polls_of(master, lambda: epoch)
        slave.sync.follow(A)
        for _ in range(3):
            await slave.sync.poll()
        assert (slave.table, slave.sync.installed) == ({}, 0)
        assert slave.sync.trouble is not None
        assert "does not have the tables of epoch 1" in slave.sync.trouble
        assert len(caplog.records) == 1, "once"

    run(scenario)


def test_master_deposed_while_it_gathers_an_answer_does_not_send_it(master: TablesMember) -> None:
    async def scenario() -> None:
        epochs = iter([1, 2])
        polls = polls_of(master, lambda: next(epochs))
        with pytest.raises(BrokerError, match="master in epoch 2"):
            await polls.all_offsets(
                cast("Connection", None), RemotingCommand(Code.GET_ALL_CONSUMER_OFFSET, ext={MASTER_EPOCH: "1"})
            )

    run(scenario)


# -- tables


def test_tables_are_fetched_once_per_connection_and_then_follow_the_log(
    master: TablesMember, slave: Slave, api: Api
) -> None:
    async def scenario() -> None:
        slave.receive(master)
        slave.sync.follow(A)
        for _ in range(3):
            await slave.sync.poll()
        assert api.asked.count(Code.GET_ALL_TOPIC_CONFIG) == 1
        master.topics.create_plain("later", 4)
        slave.receive(master)
        slave.sync.advance()
        assert "later" in slave.member.topics.topics
        slave.sync.follow(A)
        await slave.sync.poll()
        assert api.asked.count(Code.GET_ALL_TOPIC_CONFIG) == 2
        assert slave.member.tables() == master.tables()

    run(scenario)


def test_log_that_lacks_changes_waits_for_the_tables_and_fetches_them(
    master: TablesMember, slave: Slave, api: Api
) -> None:
    async def scenario() -> None:
        slave.member.store.queue_changes.create_queue_at(METADATA_LOG, CHANGES, 1)
        master.topics.create_plain("late", 1)
        slave.sync.follow(A)
        await slave.sync.poll()
        for record in master.records():
            if record.topic != METADATA_LOG or record.queue_offset >= 1:
                slave.member.receive(record)
        api.asked.clear()
        slave.sync.advance()
        assert slave.table == {}, "no position in a topic that is not known"
        await slave.sync.poll()
        assert api.asked.count(Code.GET_ALL_TOPIC_CONFIG) == 1
        slave.confirmed = 1 << 40
        slave.sync.advance()
        assert slave.member.topics.topics.keys() == {"t", "late"}
        assert slave.table == {"t@g": {0: 9}}

    run(scenario)


def test_tables_older_than_the_log_needs_are_fetched_again(
    master: TablesMember, slave: Slave, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        slave.member.store.queue_changes.create_queue_at(METADATA_LOG, CHANGES, 1)
        for record in master.records():
            if record.topic != METADATA_LOG or record.queue_offset >= 1:
                slave.member.receive(record)
        slave.confirmed = 1 << 40
        slave.sync.follow(A)
        slave.sync.advance()
        install = slave.member.metadata.install
        arrived: list[MetadataImage] = []

        def too_old(image: MetadataImage) -> None:
            arrived.append(image)
            if len(arrived) < 3:
                raise ImageNeeded("there is more that it lacks")
            install(image)

        monkeypatch.setattr(slave.member.metadata, "install", too_old)
        for polls in range(1, 4):
            await slave.sync.poll()
            assert len(arrived) == polls
        assert slave.table == {"t@g": {0: 9}}

    run(scenario)


def test_offsets_before_the_tables_of_a_late_log_are_dropped(master: TablesMember, slave: Slave, api: Api) -> None:
    """A log that begins above all changes is confirmed, but the tables that the offsets belong to are not here."""

    async def scenario() -> None:
        slave.confirmed = 1 << 40
        slave.sync.follow(A)
        api.failing[Code.GET_ALL_TOPIC_CONFIG] = ConnectionError("gone")
        await slave.sync.poll()
        assert (slave.table, slave.sync.installed) == ({}, 0)
        api.failing.clear()
        await slave.sync.poll()
        assert (slave.table, slave.sync.images) == ({"t@g": {0: 9}}, 1)

    run(scenario)


@pytest.mark.parametrize("error", [ConnectionError("gone"), TimeoutError(), NeveError(None, "busy")])
def test_failed_fetch_of_tables_is_repeated_and_does_not_delay_offsets(
    master: TablesMember, slave: Slave, api: Api, error: Exception
) -> None:
    async def scenario() -> None:
        slave.receive(master)
        slave.sync.follow(A)
        api.failing[Code.GET_ALL_TOPIC_CONFIG] = error
        await slave.sync.poll()
        assert slave.table == {"t@g": {0: 9}}
        assert (slave.sync.failures, slave.sync.installed) == (1, 1)
        api.failing.clear()
        await slave.sync.poll()
        assert api.asked.count(Code.GET_ALL_TOPIC_CONFIG) == 2
        assert slave.sync.trouble is None
        assert slave.sync.installed == 3

    run(scenario)


def test_tables_that_the_disk_refused_are_fetched_again(
    master: TablesMember, slave: Slave, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        slave.receive(master)
        slave.sync.follow(A)

        def full(path: Path, data: bytes) -> None:
            raise DiskFull(28, "no space left on device")

        with monkeypatch.context() as broken:
            broken.setattr(slave.member.disk, "write_atomic", full)
            await slave.sync.poll()
        assert slave.sync.trouble is not None
        assert slave.unreadable == []
        await slave.sync.poll()
        assert slave.sync.trouble is None
        assert slave.table == {"t@g": {0: 9}}
        assert api.asked.count(Code.GET_ALL_TOPIC_CONFIG) == 2

    run(scenario)


def test_slave_that_cannot_follow_a_change_stops_following(master: TablesMember, slave: Slave, api: Api) -> None:
    async def scenario() -> None:
        slave.receive(master)
        slave.sync.follow(A)
        await slave.sync.poll()
        body = b'{"v":9,"kind":"from another year"}'
        master.put_change(body)
        slave.receive(master)
        slave.sync.advance()
        (why,) = slave.unreadable
        assert "written by a newer neve" in why
        api.asked.clear()
        await slave.sync.poll()
        slave.sync.advance()
        assert (api.asked, len(slave.unreadable)) == ([], 1)

    run(scenario)


def test_master_that_answers_unlike_neve_is_reported(slave: Slave, api: Api) -> None:
    async def scenario() -> None:
        async def ask(address: str, code: Code, ext: dict[str, str]) -> RemotingCommand:
            return RemotingCommand(0, body=b'{"offsetTable":{}}')

        api.ask = ask  # type: ignore[method-assign]
        slave.sync.follow(A)
        await slave.sync.poll()
        assert slave.sync.trouble == "a:1 does not return its tables in neve's format"

    run(scenario)


# -- the task


def test_new_master_is_polled_at_once(master: TablesMember, slave: Slave) -> None:
    async def scenario() -> None:
        slave.receive(master)
        task = asyncio.create_task(slave.sync.run())
        slave.sync.follow(A)
        while not slave.table:
            await asyncio.sleep(0)
        task.cancel()

    run(scenario)


# -- secrets


def test_tables_with_secrets_are_sent_only_to_a_super_user_over_tls(master: TablesMember) -> None:
    def users(tables: AuthTables) -> None:
        tables.users |= {"boss": User("s", SUPER), "worker": User("w")}

    master.change_users(users)
    guard = SignatureGuard(master.users, {}, authorize=False, cluster="c", retry_owners=lambda _: ())
    polls = polls_of(master, lambda: 1, guard)

    async def ask(name: str, secret: str, *, encrypted: bool) -> RemotingCommand:
        ext = signed(name, secret, {MASTER_EPOCH: "1"}, b"")
        connection = SimpleNamespace(is_encrypted=encrypted, remote=("127.0.0.1", 1))
        return await polls.all_topics(
            cast("Connection", connection), RemotingCommand(Code.GET_ALL_TOPIC_CONFIG, ext=ext)
        )

    async def scenario() -> None:
        answer = await ask("boss", "s", encrypted=True)
        assert answer.ext[IS_IMAGE] == "1"
        assert b'"worker"' in inflated(bytes(answer.body))
        with pytest.raises(BrokerError, match="over TLS only"):
            await ask("boss", "s", encrypted=False)
        with pytest.raises(BrokerError, match="not a super user"):
            await ask("worker", "w", encrypted=True)
        with pytest.raises(BrokerError, match="signature"):
            await ask("boss", "guessed", encrypted=True)

    run(scenario)


# -- on the wire


def test_image_is_decoded_as_encoded_and_damaged_ones_are_refused(master: TablesMember) -> None:
    image = at_once(master.metadata.offsets_image())
    data = deflated(image)
    assert decode_offsets_image(inflated(data)) == image
    for damaged in (b"", data[:-1], data + b"x", b"{}"):
        with pytest.raises(UnreadableChange, match="damaged"):
            inflated(damaged)
    assert 100 * len(data) < MAX_IMAGE


def test_wide_table_is_gathered_in_turns_below_its_log_end(master: TablesMember) -> None:
    for number in range(600):
        master.offsets.commit(f"g{number}", "t", 0, 9)
    turns = 0

    def gathering() -> Steps[OffsetsImage]:
        """Append a message and commit its offset between two steps."""
        nonlocal turns
        steps = master.metadata.offsets_image()
        while True:
            try:
                yield next(steps)
            except StopIteration as end:
                return cast("OffsetsImage", end.value)
            turns += 1
            master.put("t")
            master.offsets.commit("g599", "t", 0, 9 + turns)

    image = at_once(gathering())
    assert turns >= 2
    assert image.offsets["t@g599"] == {0: 9 + turns}
    assert image.log_end == master.store.max_physical_offset
