"""A broker that follows an Apache master without a controller (RocketMQ's `brokerRole=SLAVE`).

    ha/followed.json     the life of the master that the log is of, JSON: `Life`; written before its first byte

The name servers say who the master is, with each registration. What it is, is asked of it on each connection, and where
it lost its tail, so does this log (`plain_session`). It is never anything but a slave: nobody elects here.

An archive of it is told what is heard of the master: that a new life of it began, and where, before a byte of this log
goes or comes by that; then how safe its log is, as often as `look` is called (`stock_reach`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from broker.ha.asked import Asked
from broker.ha.epoch_file import EpochFile
from broker.ha.epochs import EpochCache
from broker.ha.frames import Hello
from broker.ha.ha_client import HaClient, Target
from broker.ha.slave_session import SlaveState
from broker.ha.stock_master import Life, StockMaster, read_look, read_stock_master
from broker.ha.stock_reach import Look, flush_takes_s
from broker.role import BrokerRole, Role
from broker.store.message_store import MessageStore
from infra.clock import Clock
from infra.disk.filesystem import Disk
from infra.disk.versioned_file import VersionedFile
from infra.loop.in_steps import run_beside
from infra.loop.threads import SYSTEM_THREADS, Threads
from infra.process.startup import EXIT_CONFIG, EXIT_FAILED, StartupError
from neve.entropy import Entropy
from neve.errors import NeveError
from neve.remoting.codes import RequestCode

log = logging.getLogger(__name__)

DIRECTORY, _NAME = "ha", "followed.json"


class Archive(Protocol):
    """What an archive of the log is told. On the loop."""

    async def master_began_at(self, offset: int) -> None:
        """A new life of the master: what its log had above the offset it has no more, or has given again."""
        ...

    def master_attached(self, boot_ms: int, end_at_start: int, flush_takes_s: float | None) -> None:
        """All of the log is this life's, and what comes now is."""
        ...

    def master_looked_at(self, look: Look) -> None:
        """Of the life that is followed."""
        ...


class FollowedFile:
    """Which life of which master the log is of."""

    def __init__(self, disk: Disk, root: Path) -> None:
        self._disk, self._directory = disk, root / DIRECTORY
        self._file = VersionedFile(disk, self._directory / _NAME, Life, partial(StartupError, exit_code=EXIT_FAILED))
        self.path = self._file.path

    @property
    def is_there(self) -> bool:
        """Whether this directory was a slave's."""
        return self._file.exists

    def load(self) -> Life | None:
        """Return the stored life, or None. Raises StartupError if the file is unreadable."""
        self._disk.make_dirs(self._directory)
        return self._file.read()

    def save(self, life: Life) -> None:
        """On the disk when it returns."""
        self._file.write(life)

    def remove(self) -> None:
        self._file.remove()


def refuse_slaves(disk: Disk, root: Path) -> None:
    """StartupError for a slave's directory that is to be a set's member."""
    file = FollowedFile(disk, root)
    if file.is_there:
        raise StartupError(
            f"{root} is the copy of an Apache master's log: it becomes a master with replication=none and "
            f"brokerRole=ASYNC_MASTER first, and a member of a set after that",
            EXIT_CONFIG,
        )


class PlainSlave:
    """See the module. On the loop."""

    def __init__(
        self,
        own: Hello,
        *,
        store: MessageStore,
        disk: Disk,
        root: Path,
        api: Asked,
        following: Callable[[str, int], None],
        advanced: Callable[[], None],
        archive: Callable[[], Archive],
        forget_poll: Callable[[], None],
        role: BrokerRole,
        clock: Clock,
        entropy: Entropy,
        sync_log: Callable[[], Awaitable[None]] | None,
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        """`own` is what has to be equal at the master.

        `following` is told with address and start of the master whose log all of this is, `advanced` when there is more
        of it; `forget_poll`: what the master has delivered is not known any more, before a cut, on the disk;
        `sync_log`: where an acknowledgement promises the disk.
        """
        self._store, self._role, self._api, self._threads = store, role, api, threads
        self._following, self._advanced, self._archive = following, advanced, archive
        self._forget_poll = forget_poll
        self._file = FollowedFile(disk, root)
        self._file_size = own.mapped_file_size_commit_log
        self._followed: Life | None = None
        self._told: StockMaster | None = None
        self._master_begins_at = 0
        self._is_cutting = False
        self._address = self._ha_address = ""
        self._changed = asyncio.Event()
        role.become(Role.FENCED)
        self.client = HaClient(
            store,
            EpochCache(),
            EpochFile(disk, root / DIRECTORY),
            self,
            own=own,
            clock=clock,
            entropy=entropy,
            confirm=lambda: 0,
            followed_epoch=lambda: 0,
            sync=sync_log,
            ask_stock_master=self._ask_master,
            threads=threads,
        )

    # ---- a start

    def load(self) -> None:
        """Before the log is opened."""
        self._followed = self._file.load()

    def begin(self) -> None:
        """Behind the log's recovery: what is here may be read. StartupError where nobody knows whose it is."""
        if self._followed is None and self._store.max_physical_offset > 0:
            raise StartupError(
                "brokerRole=SLAVE begins with an empty storePathRootDir: this log is no master's copy", EXIT_CONFIG
            )
        self._role.become(Role.SLAVE)

    # ---- whom it follows

    def master_is(self, address: str, ha_address: str) -> None:
        """A name server says so; it may say it again and again."""
        if (address, ha_address) != (self._address, self._ha_address):
            log.info("the master is %s, its HA port %s", address, ha_address)
            self._address, self._ha_address = address, ha_address
            self._changed.set()

    async def run(self) -> None:
        """Never ends: follows the master, and another one from when there is one."""
        while True:
            self._changed.clear()
            target = self._target()
            following = None if target is None else asyncio.create_task(self.client.follow(target))
            try:
                await self._changed.wait() if following is None else await self._until_changed(following)
            finally:
                if following is not None:
                    following.cancel()
                    await asyncio.wait([following])

    async def _until_changed(self, following: asyncio.Task[None]) -> None:
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({following, changed}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()  # raises: it never ends by itself
        finally:
            changed.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await changed

    def _target(self) -> Target | None:
        host, _, port = self._ha_address.rpartition(":")
        if not host or not port.isdigit():
            return None
        return Target(host=host.strip("[]"), port=int(port), master_epoch=0, is_plain=True)

    @property
    def master_address(self) -> str:
        """Where clients reach the master; empty: no name server has named one."""
        return self._address

    @property
    def is_attached(self) -> bool:
        """All that is here is the master's, and more comes."""
        session = self.client.session
        return session is not None and session.state is SlaveState.FOLLOWING

    @property
    def master_begins_at(self) -> int:
        """Where the master's log does, as it said last; 0: it has not."""
        return self._master_begins_at

    def master_may_lack(self, topic: str, queue_id: int, offset: int) -> bool:
        """Whether the master may have dropped what is here, in its log or its archive; soon, where it lies in its first
        file. A reader that it sends on would hear from the master that its offset is wrong, and go on above."""
        if not self._master_begins_at or offset >= self._store.max_offset(topic, queue_id):
            return False
        entry = self._store.entry(topic, queue_id, offset)
        return entry is None or entry[0] < self._master_begins_at + self._file_size

    def tick(self) -> None:
        """Each second: readers are sent to the master while there is one."""
        if not self._is_cutting:
            self._role.become(Role.SLAVE, has_master=self.is_attached)

    async def _ask_master(self) -> tuple[StockMaster, Life | None]:
        ask, address = self._api.ask, self._address
        properties = await ask(address, RequestCode.GET_BROKER_CONFIG, {})
        runtime = await ask(address, RequestCode.GET_BROKER_RUNTIME_INFO, {})
        ha_info = await ask(address, RequestCode.EXCHANGE_BROKER_HA_INFO, {})
        text = bytes(properties.body).decode("utf-8", "replace")
        self._told = read_stock_master(text, bytes(runtime.body), ha_info.ext)
        return self._told, self._followed

    async def look(self) -> None:
        """Ask how safe the master's log is. What it does not say stays as it was."""
        life, address = self._followed, self._address
        if life is None or not self.is_attached:
            return
        try:
            before = await self._api.ask(address, RequestCode.GET_BROKER_RUNTIME_INFO, {})
            status = await self._api.ask(address, RequestCode.GET_BROKER_HA_STATUS, {})
            after = await self._api.ask(address, RequestCode.GET_BROKER_RUNTIME_INFO, {})
            look = read_look(bytes(before.body), bytes(status.body), bytes(after.body), life.boot_ms)
        except (OSError, TimeoutError, NeveError) as error:
            log.info("the master at %s does not say how safe its log is: %s", address, error)
            return
        if look is not None and self.is_attached and self._followed is life:
            self._master_begins_at = look.begin
            self._archive().master_looked_at(look)

    # ---- what following does besides (SlaveEvents)

    async def cut(self, to: int) -> None:
        """The master lost what is above."""
        store = self._store
        start = store.record_start(to)
        await self._archive().master_began_at(start)
        self._forget_poll()  # what it calls delivered may be above
        self._is_cutting = True
        self._role.become(Role.FENCED)  # the loop has other turns before the log is whole again: none serves a reader
        try:
            kept = await run_beside(store.truncation(start, epoch=0, floor=start), self._threads.run)
        finally:
            self._is_cutting = False
            self.tick()
        log.warning("the master lost its log above %d: what was copied of it is in %s", to, kept)

    async def following(self, master_epoch: int) -> None:
        """Its life is on the disk before its first byte."""
        assert self._told is not None
        told, archive = self._told, self._archive()
        life = told.life
        if life != self._followed:
            if self._followed is not None:
                await archive.master_began_at(life.end_at_start)
            await self._threads.run(self._file.save, life)
            self._followed = life
        self._master_begins_at = told.begin
        archive.master_attached(life.boot_ms, life.end_at_start, flush_takes_s(told.settings))
        self._following(self._address, life.boot_ms)

    def confirmed(self, offset: int) -> None:
        """So much of the log is here; nobody says how much of it is anywhere else."""
        self._advanced()
