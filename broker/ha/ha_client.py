"""A slave's connection to its master. RocketMQ's HAClient.

I/O alone: what is said is `slave_session`'s. One task reads, stores what came with one write, syncs it where an
acknowledgement promises that, and acknowledges; then it reads on. It ends with the master that it was told to follow:
`follow` runs until it is cancelled, and connects again after each end, sooner after one that may pass by itself.

An epoch is on the disk before its first byte is stored, and that a master is followed before anything is acknowledged
to it. What can't be cut without an operator, and whatever a master refuses by name, is kept in `trouble` and tried
again, slowly.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from broker.ha import plain_session, slave_session
from broker.ha.epoch_file import EpochFile
from broker.ha.epochs import EpochCache
from broker.ha.frames import Hello, Refusal
from broker.ha.greeting import Reason, refusal
from broker.ha.plain_session import PlainSession
from broker.ha.slave_session import Local, SlaveSession
from broker.ha.stock_master import Life, StockMaster
from broker.store.errors import LogMismatch, StoreError
from infra.clock import Clock
from infra.threads import SYSTEM_THREADS, Threads
from neve.entropy import Entropy, salt, unique_name
from neve.errors import NeveError

log = logging.getLogger(__name__)

READ_BYTES = 256 << 10
CONNECT_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
REFUSED_PAUSE_S = 10.0


class ReplicaLog(Protocol):
    """A slave's log."""

    @property
    def min_physical_offset(self) -> int:
        """Where it begins."""

    @property
    def max_physical_offset(self) -> int:
        """Where it ends: behind the last whole record."""

    @property
    def flushed_offset(self) -> int:
        """So much of it is on the disk."""

    @property
    def replica_offset(self) -> int:
        """Where the next byte of the stream belongs: of an unfinished record there may be some already."""

    def append_replica(self, data: bytes | memoryview, at: int) -> None:
        """Store the master's bytes. Raises LogMismatch or another StoreError; what was stored before stays."""

    def go_on_with_master_at(self, physical_offset: int) -> None:
        """The master's next file begins there, behind a hole. Raises as `append_replica`."""


class CutRefused(Exception):
    """What lies above is perhaps acknowledged: an operator has to look."""


AskStockMaster = Callable[[], Awaitable[tuple[StockMaster, Life | None]]]
Session = SlaveSession | PlainSession
Action = slave_session.Action | plain_session.AskMaster


class SlaveEvents(Protocol):
    """What a slave's broker does besides. Called on the loop."""

    async def cut(self, to: int) -> None:
        """Keep what is above a record's start at or below `to` in `diverged/`, and cut it off. Raises CutRefused."""

    async def following(self, master_epoch: int) -> None:
        """Keep that all that is here is of this master's log: on the disk when this returns."""

    def confirmed(self, offset: int) -> None:
        """What lies below is safe, and is here."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to follow."""

    host: str
    port: int
    master_epoch: int
    is_stock: bool = False
    is_plain: bool = False  # an Apache master without a controller


class HaClient:
    """See the module."""

    def __init__(
        self,
        replica: ReplicaLog,
        epochs: EpochCache,
        epoch_file: EpochFile,
        events: SlaveEvents,
        *,
        own: Hello,
        clock: Clock,
        entropy: Entropy,
        confirm: Callable[[], int],
        followed_epoch: Callable[[], int],
        sync: Callable[[], Awaitable[None]] | None = None,
        begins_at_frontier: bool = False,
        is_learner: Callable[[], bool] = lambda: False,
        ask_stock_master: AskStockMaster | None = None,
        secret: bytes = b"",
        tls: ssl.SSLContext | None = None,
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        """`own` is the HELLO but for its nonce and the epoch; `confirm` and `followed_epoch` are what is kept of them.

        `sync` brings the log to the disk: given where an acknowledgement promises that. `ask_stock_master` is for a
        master without a controller: what it says of itself, and which life of it was followed last. Raises NeveError,
        OSError, TimeoutError.
        """
        self._log, self._epochs, self._epoch_file, self._events = replica, epochs, epoch_file, events
        self._own, self._clock, self._entropy, self._threads = own, clock, entropy, threads
        self._confirm, self._followed_epoch, self._sync = confirm, followed_epoch, sync
        self._begins_at_frontier, self._tls, self._secret = begins_at_frontier, tls, secret
        self._is_learner = is_learner
        self._writer: asyncio.StreamWriter | None = None
        self._ask_stock_master = ask_stock_master
        self.session: Session | None = None
        self.connections = 0
        self.ended: Counter[str] = Counter()  # connections, by why: a refusal's name, or "lost"
        # What will be the same with the next connection; None while a master is followed.
        self.trouble: Refusal | None = None

    async def follow(self, target: Target) -> None:
        """Never ends but by its cancellation."""
        pause = FIRST_PAUSE_S
        while True:
            fault, was_attached = await self._follow_once(target)
            self.trouble = fault
            self.ended[fault.reason if fault is not None else "lost"] += 1
            if was_attached:
                pause = FIRST_PAUSE_S
            jitter = 0.5 + (salt(self._entropy) % 1024) / 1024
            await asyncio.sleep((REFUSED_PAUSE_S if fault is not None else pause) * jitter)
            pause = min(pause * 2, LONGEST_PAUSE_S)

    async def _follow_once(self, target: Target) -> tuple[Refusal | None, bool]:
        """One connection: why it ended, if that will be the same with the next one; whether the log came over it."""
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    target.host, target.port, ssl=self._tls, limit=READ_BYTES
                )
        except (OSError, TimeoutError) as error:
            log.info("the master at %s:%d can't be reached: %s", target.host, target.port, error)
            return None, False
        self.connections += 1
        session = self.session = self._new_session(target)
        self._writer = writer
        try:
            return await self._run(session, reader, writer)
        finally:
            self.session = self._writer = None
            writer.transport.abort()

    def reconnect(self) -> None:
        """What this member says of itself when it connects is another."""
        if self._writer is not None:
            self._writer.transport.abort()

    def _new_session(self, target: Target) -> Session:
        replica, own = self._log, self._own
        local = Local(
            replica.min_physical_offset,
            replica.max_physical_offset,
            self._epochs.entries(),
            self._confirm(),
            self._followed_epoch(),
        )
        if target.is_plain:
            return PlainSession(local, own)
        hello = replace(own, nonce=unique_name(self._entropy), answers="", master_epoch=target.master_epoch)
        return SlaveSession(
            local,
            member_id=own.member_id,
            master_epoch=target.master_epoch,
            hello=None if target.is_stock else hello,
            begins_at_frontier=self._begins_at_frontier,
            is_learner=self._is_learner(),
            secret=self._secret,
        )

    async def _run(
        self, session: Session, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Refusal | None, bool]:
        driver = _Driver(self, session, writer)
        clock = self._clock
        try:
            await driver.do(session.start(clock.monotonic()))
            while not driver.is_ended:
                data: bytes | None = None
                try:
                    async with asyncio.timeout(max(session.wake_at - clock.monotonic(), 0.0)):
                        data = await reader.read(READ_BYTES)
                except TimeoutError:
                    await driver.do(session.tick(clock.monotonic(), self._log.flushed_offset))
                    continue
                if not data:
                    log.info("the master has closed the connection")
                    break
                await driver.do(session.receive_data(data, clock.monotonic()))
                await driver.do(session.tick(clock.monotonic(), self._log.flushed_offset))
                await writer.drain()
                await asyncio.sleep(0)  # a read that has bytes at hand gives nobody else the loop
        except (OSError, NeveError) as error:  # or the disk could not take what has to be on it first
            log.warning("the connection to the master ends: %s", error)
        return driver.fault, driver.was_attached

    def store(self, append: slave_session.Append) -> None:
        """The master's bytes, into the log."""
        replica, at = self._log, append.at
        if at != replica.replica_offset and at > replica.max_physical_offset > 0:
            replica.go_on_with_master_at(at)
        replica.append_replica(append.data, at)

    async def stored(self, session: Session) -> Sequence[Action]:
        """Acknowledge what is there, once it is as safe as an acknowledgement says."""
        replica = self._log
        end = replica.max_physical_offset
        if self._sync is not None:
            await self._sync()
        return session.stored(end, replica.flushed_offset, self._clock.monotonic())

    async def take_epochs(self, entries: tuple[tuple[int, int], ...]) -> None:
        """Written down before their first byte."""
        wanted = EpochCache((*self._epochs.entries(), *entries))
        await self._save_epochs(wanted)
        for epoch, start in entries:
            self._epochs.assign(epoch, start)

    async def _save_epochs(self, wanted: EpochCache) -> None:
        """Before anything here goes by them: what could not be saved is saved by the next connection.

        To its end, whoever cancels: the next role saves epochs as well, and these must not come after its.
        """
        saving = asyncio.ensure_future(self._threads.run(self._epoch_file.save, wanted.entries()))
        try:
            await asyncio.shield(saving)
        except asyncio.CancelledError:
            await saving
            raise

    async def cut(self, session: Session, to: int) -> Sequence[Action]:
        """The log parts from the master's: first the bytes, then the epochs that have none left."""
        if to < self._log.max_physical_offset:
            await self._events.cut(to)
        end = self._log.max_physical_offset
        assert end <= to
        wanted = EpochCache(self._epochs.entries())
        if wanted.truncate(end):
            await self._save_epochs(wanted)
            self._epochs.truncate(end)
        return session.parted(end, self._epochs.entries())

    async def ask_stock_master(self, session: Session) -> Sequence[Action]:
        """Over another connection, while this one stands."""
        assert isinstance(session, PlainSession)
        assert self._ask_stock_master is not None
        master, followed = await self._ask_stock_master()
        return session.told(master, followed, self._clock.monotonic())

    async def attached(self, session: Session, master_epoch: int) -> Sequence[Action]:
        """All that is here is the master's, and what is acknowledged first is here."""
        await self._events.following(master_epoch)
        if self._sync is not None:
            await self._sync()
        self.trouble = None
        if isinstance(session, SlaveSession) and session.begins_at:
            self._log.go_on_with_master_at(session.begins_at)
        return session.attached(self._log.flushed_offset, self._clock.monotonic())

    def confirmed(self, offset: int) -> None:
        """What lies below is safe."""
        self._events.confirmed(offset)


class _Driver:
    """Carries out what a session says, one after the other."""

    def __init__(self, client: HaClient, session: Session, writer: asyncio.StreamWriter) -> None:
        self._client, self._session, self._writer = client, session, writer
        self.fault: Refusal | None = None
        self.was_attached = self.is_ended = False

    async def do(self, actions: Sequence[Action]) -> None:
        """Each is whole before the next."""
        client, session = self._client, self._session
        try:
            has_stored = False
            for action in actions:
                match action:
                    case slave_session.Append():
                        client.store(action)
                        has_stored = True
                    case slave_session.TakeEpochs(entries=entries):
                        await client.take_epochs(entries)
                    case plain_session.AskMaster():
                        await self.do(await client.ask_stock_master(session))
                    case slave_session.Cut(to=to):
                        await self.do(await client.cut(session, to))
                    case slave_session.Attached(master_epoch=epoch):
                        await self.do(await client.attached(session, epoch))
                        self.was_attached = True
                    case _:
                        self._at_once(action)
            if has_stored:
                for action in await client.stored(session):
                    self._at_once(action)
        except LogMismatch as error:
            self._end(str(error), refusal(Reason.MISMATCH, str(error)))
        except CutRefused as error:
            self._end(str(error), refusal(Reason.CUT, str(error)))
        except StoreError as error:  # the disk is full, say: that may pass
            self._end(f"the log takes no more: {error}", None)

    def _at_once(self, action: Action) -> None:
        match action:
            case slave_session.Send(data=data):
                self._writer.write(data)
            case slave_session.Confirmed(offset=offset):
                self._client.confirmed(offset)
            case slave_session.End(why=why, refusal=fault):
                self._end(why, fault)
            case _:
                raise AssertionError(f"{action} takes its time")

    def _end(self, why: str, fault: Refusal | None) -> None:
        log.warning("follows its master no more: %s", why)
        self.fault, self.is_ended = fault, True
