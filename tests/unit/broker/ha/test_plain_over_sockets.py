"""A neve log under a master that speaks RocketMQ's plain HA stream, over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from broker.ha.ha_client import FollowTarget, HaClient
from broker.ha.plain_session import PlainSession
from broker.ha.slave_session import Local
from broker.ha.stock_master import MasterLife, StockMaster
from infra.clock import SystemClock
from neve.entropy import system_entropy
from tests.kit.broker.ha_member import A, B, HaMember, assert_same, run
from tests.kit.broker.ha_session import hello
from tests.kit.broker.plain_ha import PlainMaster
from tests.kit.clock.waiting import until

FILE_SIZE = 16384  # of the stores in this module


class PlainFollower:
    """A slave, and the incarnation of its master that it followed last."""

    def __init__(self, member: HaMember, master: PlainMaster) -> None:
        self.member, self.master = member, master
        self.life: MasterLife | None = None
        self.client = self._client()

    def _client(self) -> HaClient:
        member = self.member
        return HaClient(
            member.store,
            member.stored_epochs,
            self,
            self._new_session,
            clock=SystemClock(),
            entropy=system_entropy,
            ask_stock_master=self._ask,
        )

    def _new_session(self, target: FollowTarget) -> PlainSession:
        store = self.member.store
        local = Local(store.min_physical_offset, store.max_physical_offset, (), confirm=0, followed_epoch=0)
        return PlainSession(
            local, hello(B, mapped_file_size_commit_log=self.master.file_size), store.reader.last_record
        )

    async def _ask(self) -> tuple[StockMaster, MasterLife | None]:
        self._told = self.master.says()
        return self._told, self.life

    async def truncate(self, to: int) -> None:
        store = self.member.store
        store.truncate(store.reader.record_start(to), epoch=0, floor=store.reader.record_start(to))

    async def following(self, master_epoch: int) -> None:
        self.life = self._told.life

    def confirmed(self, offset: int) -> None:
        assert offset <= self.member.store.max_physical_offset
        self.member.confirmed_to = offset

    @asynccontextmanager
    async def follows(self) -> AsyncIterator[None]:
        target = FollowTarget(host="127.0.0.1", port=self.master.port, master_epoch=0)
        task = asyncio.create_task(self.client.follow(target))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def caught_up(self) -> None:
        ours, theirs = self.member.store, self.master.store
        await until(lambda: ours.max_physical_offset == theirs.max_physical_offset > 0)
        await until(lambda: bool(self.master.acks) and self.master.acks[-1] == ours.max_physical_offset)
        assert_same(ours, theirs)


async def master_with(count: int, size: int = 100) -> tuple[HaMember, PlainMaster]:
    member = HaMember(A)
    member.store.lead()
    member.put(count, size)
    master = PlainMaster(member.store, FILE_SIZE)
    await master.start()
    return member, master


def test_slave_gets_and_acknowledges_the_whole_log_and_the_live_tail() -> None:
    async def main() -> None:
        member, master = await master_with(300)
        slave = PlainFollower(HaMember(B), master)
        async with slave.follows():
            await slave.caught_up()
            assert slave.member.store.max_physical_offset > FILE_SIZE, "over a file's end, from the lowest on"
            for _ in range(10):
                member.put(3)
                await slave.caught_up()
        assert slave.member.confirmed_to == slave.member.store.max_physical_offset
        await master.stop()

    run(main())


def test_killed_slave_resumes_at_its_log_end() -> None:
    async def main() -> None:
        member, master = await master_with(100)
        slave = PlainFollower(HaMember(B), master)
        async with slave.follows():
            await slave.caught_up()
        member.put(100)
        again = PlainFollower(slave.member.restarted(), master)
        again.life = slave.life
        async with again.follows():
            await again.caught_up()
        assert again.client.session is None
        await master.stop()

    run(main())


def test_slave_keeps_and_truncates_a_tail_that_its_master_lost() -> None:
    async def main() -> None:
        member, master = await master_with(100)
        member.store.after_flush(member.store.visibility.flush())
        kept = member.store.max_physical_offset
        slave = PlainFollower(HaMember(B), master)
        async with slave.follows():
            await slave.caught_up()
            member.put(20)
            await slave.caught_up()
            lost = member.store.log_bytes(kept, 1 << 62, 1 << 20, padding=True)[1]
            cut = HaMember(A, member.disk.power_cut())
            cut.store.lead()
            assert cut.store.max_physical_offset == kept
            await master.restart(cut.store)
            cut.put(40)
            await slave.caught_up()
        assert list(slave.member.diverged().values()) == [lost]
        assert slave.life is not None
        assert slave.life.end_at_start == kept
        await master.stop()

    run(main())


def test_master_restarted_twice_after_losing_its_tail_is_not_followed() -> None:
    """No record exists of the incarnation in between, and its writes have the same sizes."""

    async def main() -> None:
        member, master = await master_with(100)
        member.store.after_flush(member.store.visibility.flush())
        cut = HaMember(A, member.disk.power_cut())
        member.put(20)
        slave = PlainFollower(HaMember(B), master)
        async with slave.follows():
            await slave.caught_up()
        cut.store.lead()
        cut.put(3)  # as before; the next ones differ
        cut.put(40)
        await master.restart(cut.store)
        end, again = slave.member.store.max_physical_offset, PlainFollower(slave.member.restarted(), master)
        again.life = slave.life
        assert master.end_at_start > end
        async with again.follows():
            await until(lambda: again.client.trouble is not None)
        assert again.client.trouble is not None
        assert again.client.trouble.reason == "log-mismatch"
        assert again.member.store.max_physical_offset == end
        await master.stop()

    run(main())


def test_unidentified_master_gets_no_request_and_is_asked_again() -> None:
    async def main() -> None:
        _, master = await master_with(10)
        master.is_dumb = True
        slave = PlainFollower(HaMember(B), master)
        async with slave.follows():
            await until(lambda: master.asked >= 2)
            assert (master.acks, slave.member.store.max_physical_offset, slave.client.trouble) == ([], 0, None)
            master.is_dumb = False
            await slave.caught_up()
        await master.stop()

    run(main())


def test_log_of_unknown_origin_is_not_continued_and_is_reported() -> None:
    async def main() -> None:
        member, master = await master_with(10)
        slave = PlainFollower(HaMember(B), master)
        async with slave.follows():
            await slave.caught_up()
        member.put(10)
        again = PlainFollower(slave.member.restarted(), master)
        end = again.member.store.max_physical_offset
        async with again.follows():
            await until(lambda: again.client.trouble is not None)
        assert again.client.trouble is not None
        assert again.client.trouble.reason == "log-without-epochs"
        assert again.member.store.max_physical_offset == end
        await master.stop()

    run(main())
