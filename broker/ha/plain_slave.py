"""A broker that follows an Apache master without a controller (RocketMQ's `brokerRole=SLAVE`).

    ha/followed.json     the life of the master that the log is of, JSON: `MasterLife`; written before its first byte

The name servers name the master in their answer to each registration. Its properties are queried on each connection. If
the master lost its tail, this log is truncated, too (`plain_session`). The broker remains a slave: there are no
elections.

An archive of the log is notified of the start of each new life of the master, before any byte of this log is removed or
added because of it. After that, each call of `look` updates the archivable limit (`stock_archivable_limit`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from broker.ha.asked import RequestClient
from broker.ha.frames import Hello
from broker.ha.ha_client import FollowTarget, HaClient
from broker.ha.plain_session import PlainSession
from broker.ha.slave_session import Local, SlaveState
from broker.ha.stock_archivable_limit import Observation, flush_takes_s
from broker.ha.stock_master import MasterLife, StockMaster, read_observation, read_stock_master
from broker.role import BrokerRole, Role
from broker.store.message_store import MessageStore
from infra.disk.filesystem import Disk
from infra.disk.versioned_file import VersionedFile
from infra.loop.in_steps import run_beside
from infra.loop.threads import SYSTEM_THREADS, Threads
from infra.process.startup import EXIT_CONFIG, EXIT_FAILED, StartupError
from neve.errors import NeveError
from neve.remoting.codes import RequestCode

log = logging.getLogger(__name__)

DIRECTORY, _NAME = "ha", "followed.json"


class ArchiveCallbacks(Protocol):
    """Callbacks to the archive of the log, on the event loop."""

    async def master_began_at(self, offset: int) -> None:
        """Take a new life of the master. It has lost its log above the offset, or has reassigned these offsets."""
        ...

    def master_attached(self, boot_ms: int, end_at_start: int, flush_takes_s: float | None) -> None:
        """Take the fact that the whole log is this life's, and that the bytes that follow are."""
        ...

    def master_observed(self, observation: Observation) -> None:
        """Take the state of the log of the life that is followed."""
        ...


class FollowedFile:
    """File that identifies the life of the master whose log this is."""

    def __init__(self, disk: Disk, root: Path) -> None:
        self._disk, self._directory = disk, root / DIRECTORY
        self._file = VersionedFile(
            disk, self._directory / _NAME, MasterLife, partial(StartupError, exit_code=EXIT_FAILED)
        )
        self.path = self._file.path

    @property
    def is_there(self) -> bool:
        """Return whether this directory was a slave's."""
        return self._file.exists

    def load(self) -> MasterLife | None:
        """Return the stored life, or None. Raises StartupError if the file is unreadable."""
        self._disk.make_dirs(self._directory)
        return self._file.read()

    def save(self, life: MasterLife) -> None:
        """Save the life durably."""
        self._file.write(life)

    def remove(self) -> None:
        self._file.remove()


def refuse_slaves(disk: Disk, root: Path) -> None:
    """Raise StartupError if a slave's directory is configured as a member of a set."""
    file = FollowedFile(disk, root)
    if file.is_there:
        raise StartupError(
            f"{root} is a copy of an Apache master's log: make it a master with replication=none and "
            f"brokerRole=ASYNC_MASTER first, then a member of a set",
            EXIT_CONFIG,
        )


class PlainSlave:
    """Slave of a master without a controller. Runs on the event loop."""

    def __init__(
        self,
        own: Hello,
        *,
        store: MessageStore,
        file: FollowedFile,
        new_client: Callable[[PlainSlave], HaClient],
        api: RequestClient,
        following: Callable[[str, int], None],
        advanced: Callable[[], None],
        archive: Callable[[], ArchiveCallbacks],
        forget_poll: Callable[[], None],
        role: BrokerRole,
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        """Create a slave.

        `own` has the settings that have to match the master's. `following` is called with address and start time of the
        master once the whole log is its. `advanced` is called after each growth of the log.

        `forget_poll` durably drops the stored positions of the master, before a truncation.
        """
        self._store, self._role, self._api, self._threads = store, role, api, threads
        self._following, self._advanced, self._archive = following, advanced, archive
        self._forget_poll = forget_poll
        self._file, self._own = file, own
        self._file_size = own.mapped_file_size_commit_log
        self._followed: MasterLife | None = None
        self._last_read_master: StockMaster | None = None
        self._master_begins_at = 0
        self._is_cutting = False
        self._address = self._ha_address = ""
        self._changed = asyncio.Event()
        role.become(Role.FENCED)
        self.client = new_client(self)

    # -- start

    def load(self) -> None:
        """Load the followed life. Called before the log is opened."""
        self._followed = self._file.load()

    def begin(self) -> None:
        """Serve readers. Called after recovery of the log. Raise StartupError if it is unknown whose log it is."""
        if self._followed is None and self._store.max_physical_offset > 0:
            raise StartupError(
                "brokerRole=SLAVE needs an empty storePathRootDir: this log is not a copy of a master's", EXIT_CONFIG
            )
        self._role.become(Role.SLAVE)

    # -- the master

    def master_is(self, address: str, ha_address: str) -> None:
        """Take the master's addresses from a name server. Repeated calls with the same addresses do nothing."""
        if (address, ha_address) != (self._address, self._ha_address):
            log.info("the master is %s, its HA port %s", address, ha_address)
            self._address, self._ha_address = address, ha_address
            self._changed.set()

    async def run(self) -> None:
        """Follow the master, and after a change the new one. Never returns."""
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
                following.result()  # raises, because it never returns
        finally:
            changed.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await changed

    def _target(self) -> FollowTarget | None:
        host, _, port = self._ha_address.rpartition(":")
        if not host or not port.isdigit():
            return None
        return FollowTarget(host=host.strip("[]"), port=int(port), master_epoch=0)

    @property
    def master_address(self) -> str:
        """Return the master's address for clients; empty: no name server has named one."""
        return self._address

    @property
    def is_attached(self) -> bool:
        """Return whether the whole log is the master's, and the connection is streaming."""
        session = self.client.session
        return session is not None and session.state is SlaveState.FOLLOWING

    @property
    def master_begins_at(self) -> int:
        """Return the start of the master's log at the last query; 0: unknown."""
        return self._master_begins_at

    def master_may_lack(self, topic: str, queue_id: int, offset: int) -> bool:
        """Return whether the master may have dropped a message that is stored here, from its log or its archive.

        This includes its first file, which it drops next. A reader that is redirected there would get "offset illegal"
        from the master, and skip messages.
        """
        if not self._master_begins_at or offset >= self._store.queues.max_offset(topic, queue_id):
            return False
        entry = self._store.reader.entry(topic, queue_id, offset)
        return entry is None or entry[0] < self._master_begins_at + self._file_size

    def tick(self) -> None:
        """Update the role. Called each second: while a master is connected, readers are redirected to it."""
        if not self._is_cutting:
            self._role.become(Role.SLAVE, has_master=self.is_attached)

    def new_session(self, target: FollowTarget) -> PlainSession:
        """Return the protocol of a new connection."""
        store = self._store
        local = Local(store.min_physical_offset, store.max_physical_offset, (), confirm=0, followed_epoch=0)
        return PlainSession(local, self._own, store.reader.last_record)

    async def ask_master(self) -> tuple[StockMaster, MasterLife | None]:
        """Query the master's properties. Return them, and the life of it that was followed last."""
        ask, address = self._api.ask, self._address
        properties = await ask(address, RequestCode.GET_BROKER_CONFIG, {})
        runtime = await ask(address, RequestCode.GET_BROKER_RUNTIME_INFO, {})
        ha_info = await ask(address, RequestCode.EXCHANGE_BROKER_HA_INFO, {})
        text = bytes(properties.body).decode("utf-8", "replace")
        self._last_read_master = read_stock_master(text, bytes(runtime.body), ha_info.ext)
        return self._last_read_master, self._followed

    async def look(self) -> None:
        """Query the state of the master's log. If the query fails, the last state stays in force."""
        life, address = self._followed, self._address
        if life is None or not self.is_attached:
            return
        try:
            before = await self._api.ask(address, RequestCode.GET_BROKER_RUNTIME_INFO, {})
            status = await self._api.ask(address, RequestCode.GET_BROKER_HA_STATUS, {})
            after = await self._api.ask(address, RequestCode.GET_BROKER_RUNTIME_INFO, {})
            observation = read_observation(bytes(before.body), bytes(status.body), bytes(after.body), life.boot_ms)
        except (OSError, TimeoutError, NeveError) as error:
            log.info("the master at %s does not report its flushed offset: %s", address, error)
            return
        if observation is not None and self.is_attached and self._followed is life:
            self._master_begins_at = observation.begin
            self._archive().master_observed(observation)

    # -- callbacks of the replication client (SlaveEvents)

    async def truncate(self, to: int) -> None:
        """Truncate the log above `to`, which the master has lost."""
        store = self._store
        start = store.reader.record_start(to)
        await self._archive().master_began_at(start)
        self._forget_poll()  # messages that it counts as delivered may be above
        self._is_cutting = True
        # other callbacks run before the log is consistent again: none may serve a reader
        self._role.become(Role.FENCED)
        try:
            kept = await run_beside(store.truncation(start, epoch=0, floor=start), self._threads.run)
        finally:
            self._is_cutting = False
            self.tick()
        log.warning("the master lost its log above %d: the copied part is in %s", to, kept)

    async def following(self, master_epoch: int) -> None:
        """Save the life of the master durably before its first byte is stored."""
        assert self._last_read_master is not None
        master, archive = self._last_read_master, self._archive()
        life = master.life
        if life != self._followed:
            if self._followed is not None:
                await archive.master_began_at(life.end_at_start)
            await self._threads.run(self._file.save, life)
            self._followed = life
        self._master_begins_at = master.begin
        archive.master_attached(life.boot_ms, life.end_at_start, flush_takes_s(master.settings))
        self._following(self._address, life.boot_ms)

    def confirmed(self, offset: int) -> None:
        """Publish growth of the log. Whether other brokers have these bytes is unknown."""
        self._advanced()
