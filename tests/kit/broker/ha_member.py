"""A member of a broker set that replicates over sockets."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop
from msgspec.structs import replace

from broker.ha.confirm import Confirm, ConfirmRules, ReplicationMode, SyncStateSet
from broker.ha.epoch_file import EpochFile, StoredEpochs
from broker.ha.frames import (
    Hello,
)
from broker.ha.ha_client import DivergenceRefused, FollowTarget, HaClient, member_session
from broker.ha.ha_service import HaService, Leadership
from broker.ha.master_session import StreamRules
from broker.ha.slave_session import SlaveSession
from broker.store.errors import TruncationRefused
from broker.store.message_store import MessageStore
from infra.clock import ManualClock, SystemClock
from infra.net.tls import ServerTls
from neve.entropy import system_entropy, unique_name
from tests.kit.broker.ha_session import hello
from tests.kit.store.replicas import log_of, open_store
from tests.kit.store.sim_disk import SimDisk
from tests.kit.store.small_store import put_one

A, B, C = 1, 2, 3
SECONDS = 30
HOME = Path("/store/ha")


def run(main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(SECONDS):
            await main

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the broker's loop
        runner.run(bounded())


class HaMember:
    """A broker's log and epochs, with the master's or the slave's end of the stream."""

    def __init__(self, member_id: int, disk: SimDisk | None = None, **changes: Any) -> None:
        self.id, self.disk = member_id, disk or SimDisk(seed=member_id)
        self.clock = ManualClock()
        self.store = open_store(self.disk, self.clock, following=True, **changes)
        self.disk.make_dirs(HOME)
        self.epoch_file = EpochFile(self.disk, HOME)
        self.stored_epochs = StoredEpochs(self.epoch_file)
        self.stored_epochs.load()
        self.epochs = self.stored_epochs.cache
        self.epochs.drop_above(self.store.max_physical_offset)
        self.confirmed_to = self.followed = 0
        self.arrived: list[Hello | None] = []
        self.service: HaService | None = None
        self.confirm: Confirm | None = None

    # -- as master

    async def lead(
        self, epoch: int, *members: int, rules: StreamRules | None = None, tls: ServerTls | None = None
    ) -> HaService:
        """Start as the master in `sync-available`, with the given members in the SyncStateSet."""
        if self.store.end.is_following:
            self.store.lead()
        end = self.store.max_physical_offset
        if self.epochs.assign(epoch, end):
            self.epoch_file.save(self.epochs.entries())
        self.confirm = Confirm(
            ConfirmRules(ReplicationMode.SYNC_AVAILABLE),
            self.id,
            epoch,
            SyncStateSet(epoch, frozenset({self.id, *members})),
            epoch_start=end,
            own_end=end,
            confirm=min(self.confirmed_to, end),
            now=SystemClock().monotonic(),
        )
        service = self.service = HaService(self.store, SystemClock(), system_entropy, host="127.0.0.1", tls=tls)
        service.lead(
            Leadership(
                hello(self.id, master_epoch=epoch),
                self.epochs,
                self.confirm,
                self,
                rules=rules or StreamRules(),
                is_member={A, B, C}.__contains__,
            )
        )
        await service.start()
        return service

    @property
    def ha(self) -> HaService:
        assert self.service is not None
        return self.service

    async def stop(self) -> None:
        """Close the port and keep the log."""
        await self.ha.shutdown()
        self.service = None

    def put(self, count: int, size: int = 100) -> None:
        dice = random.Random(self.store.max_physical_offset)
        for _ in range(count):
            put_one(self.store, f"t{dice.randrange(3)}", dice.randrange(2), dice.randbytes(size))
            if self.service is not None:
                self.service.appended()

    def tick(self) -> bool:
        """Run a member's periodic work."""
        assert self.confirm is not None
        before = self.confirm.value
        self.confirm.wish(SystemClock().monotonic())
        self.ha.confirm_changed(before)
        return True

    def confirmed(self, offset: int) -> None:
        assert offset >= self.confirmed_to
        self.confirmed_to = offset

    def slave_connected(self, member_id: int, hello: Hello | None) -> None:
        self.arrived.append(hello)

    def slave_reported(self, member_id: int) -> None:
        """Ignore the report: no slave joins the set here."""

    # -- as slave

    def client(
        self,
        own: Hello | None = None,
        sync: Callable[[], Awaitable[None]] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> HaClient:
        def new_session(target: FollowTarget) -> SlaveSession:
            return member_session(
                target,
                self.store,
                self.epochs,
                replace(own or hello(self.id), nonce=unique_name(system_entropy)),
                confirm=self.confirmed_to,
                followed_epoch=self.followed,
            )

        return HaClient(
            self.store,
            self.stored_epochs,
            self,
            new_session,
            clock=SystemClock(),
            entropy=system_entropy,
            sync=sync,
            tls=tls,
        )

    @asynccontextmanager
    async def follows(self, master: HaMember, epoch: int, client: HaClient | None = None) -> AsyncIterator[HaClient]:
        assert master.service is not None
        made = client or self.client()
        task = asyncio.create_task(
            made.follow(FollowTarget(host="127.0.0.1", port=master.service.port, master_epoch=epoch))
        )
        try:
            yield made
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled(), task.exception()

    async def truncate(self, to: int) -> None:
        store, epoch = self.store, self.epochs.last_epoch
        try:
            store.truncate(
                store.reader.record_start(to), epoch=epoch, floor=store.reader.record_start(self.confirmed_to)
            )
        except TruncationRefused as error:
            raise DivergenceRefused(str(error)) from error

    def diverged(self) -> dict[str, bytes]:
        directory = Path("/store/diverged")
        names = self.disk.list_dir(directory) if self.disk.exists(directory) else []
        return {name: self.disk.read(directory / name) for name in names}

    async def following(self, master_epoch: int) -> None:
        self.followed = master_epoch

    def has_all_of(self, master: HaMember) -> bool:
        return self.store.max_physical_offset == master.store.max_physical_offset

    def restarted(self) -> HaMember:
        """Return the member after the end of its process."""
        self.store.abandon()
        self.disk.kill()
        again = HaMember(self.id, self.disk)
        again.confirmed_to, again.followed = self.confirmed_to, self.followed
        return again


def assert_same(slave: MessageStore, master: MessageStore) -> None:
    assert list(log_of(slave)) == list(log_of(master))
    for topic, ids in master.queues.names().items():
        for queue in ids:
            assert slave.queues.max_offset(topic, queue) == master.queues.max_offset(topic, queue)
