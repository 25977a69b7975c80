"""A slave's connection to its master. RocketMQ's HAClient.

This module does I/O only; `slave_session` has the protocol. Bytes that arrive together are stored with one write and
acknowledged with one, in the same callback of the event loop. A task does slow actions: a sync that an acknowledgement
promises, saving an epoch, a truncation. Bytes that arrive meanwhile are held.

`follow` runs until it is cancelled, and follows one master only. It reconnects after each end of the connection, sooner
if the cause may be temporary.

An epoch is on the disk before its first byte is stored. The followed epoch is on the disk before anything is
acknowledged to its master. A truncation that needs an operator and a refusal by the master are kept in `trouble` and
retried slowly.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, cast

import msgspec
from msgspec.structs import replace
from typing_extensions import override

from broker.ha import plain_session, slave_session
from broker.ha.epoch_file import StoredEpochs
from broker.ha.epochs import EpochCache
from broker.ha.frames import Hello, StreamRefusal
from broker.ha.greeting import Reason, refusal
from broker.ha.plain_session import PlainSession
from broker.ha.slave_session import Local, SlaveSession
from broker.ha.stock_master import MasterLife, StockMaster
from broker.store.errors import LogMismatch, StoreError
from broker.store.message_store import MessageStore
from infra.clock import Clock
from neve.entropy import Entropy, salt
from neve.errors import NeveError

log = logging.getLogger(__name__)

READ_BYTES = 256 << 10
CONNECT_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
REFUSED_PAUSE_S = 10.0


class DivergenceRefused(Exception):
    """The bytes above the truncation point may be acknowledged: an operator has to decide."""


AskStockMaster = Callable[[], Awaitable[tuple[StockMaster, MasterLife | None]]]
Session = SlaveSession | PlainSession
Action = slave_session.Action | plain_session.AskMaster


class SlaveEvents(Protocol):
    """Callbacks of a replication connection to the slave's broker. Called on the event loop."""

    async def truncate(self, to: int) -> None:
        """Save the bytes above a record's start at or below `to` in `diverged/`, and truncate the log there.

        Raise DivergenceRefused.
        """

    async def following(self, master_epoch: int) -> None:
        """Record that all bytes of the log are this master's: durable when this returns."""

    def confirmed(self, offset: int) -> None:
        """Record that the log is confirmed up to `offset`, and that these bytes are stored here."""


class FollowTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A master to follow."""

    host: str
    port: int
    master_epoch: int
    is_stock: bool = False


def member_session(
    target: FollowTarget,
    store: MessageStore,
    epochs: EpochCache,
    own: Hello,
    *,
    confirm: int,
    followed_epoch: int,
    begins_at_frontier: bool = False,
    is_learner: bool = False,
    secret: bytes = b"",
) -> SlaveSession:
    """Return the protocol of a new connection to a master that a controller elected.

    `own` is the HELLO with a new nonce, and without the epoch of the master.
    """
    local = Local(store.min_physical_offset, store.max_physical_offset, epochs.entries(), confirm, followed_epoch)
    return SlaveSession(
        local,
        member_id=own.member_id,
        master_epoch=target.master_epoch,
        hello=None if target.is_stock else replace(own, answers="", master_epoch=target.master_epoch),
        begins_at_frontier=begins_at_frontier,
        is_learner=is_learner,
        secret=secret,
        last_record=store.reader.last_record,
    )


class HaClient:
    """Replication client of a slave."""

    def __init__(
        self,
        store: MessageStore,
        epochs: StoredEpochs,
        events: SlaveEvents,
        new_session: Callable[[FollowTarget], Session],
        *,
        clock: Clock,
        entropy: Entropy,
        sync: Callable[[], Awaitable[None]] | None = None,
        ask_stock_master: AskStockMaster | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Create a client.

        `new_session` returns the protocol of a new connection. `sync` makes the log durable, and is given if an
        acknowledgement promises that.

        `ask_stock_master` is for a master without a controller. It returns the master's properties, and the life of it
        that was followed last. It raises NeveError, OSError or TimeoutError.
        """
        self._store, self._epochs, self._events, self._new_session = store, epochs, events, new_session
        self._replica, self._visibility = store.replica, store.visibility
        self._clock, self._entropy, self._sync, self._tls = clock, entropy, sync, tls
        self._stream: _Stream | None = None
        self._ask_stock_master = ask_stock_master
        self.session: Session | None = None
        self.connections = 0
        self.ended: Counter[str] = Counter()  # connections by cause of their end: the name of a refusal, or "lost"
        # The last fault that a reconnection would not cure; None while a master is followed.
        self.trouble: StreamRefusal | None = None

    async def follow(self, target: FollowTarget) -> None:
        """Follow a master until cancelled."""
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

    async def _follow_once(self, target: FollowTarget) -> tuple[StreamRefusal | None, bool]:
        """Follow the master over one connection.

        Return the fault, if the next connection would have it too, and whether any bytes of the log may have arrived.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, stream = await loop.create_connection(
                    lambda: _Stream(self._clock),
                    target.host,
                    target.port,
                    ssl=None if target.is_stock else self._tls,
                )
        except (OSError, TimeoutError) as error:
            log.info("the master at %s:%d can't be reached: %s", target.host, target.port, error)
            return None, False
        self.connections += 1
        session = self.session = self._new_session(target)
        self._stream = stream
        try:
            return await self._run(session, stream)
        finally:
            self.session = self._stream = None
            stream.abort()

    def reconnect(self) -> None:
        """Close the connection, because the handshake of the next one has other contents."""
        if self._stream is not None:
            self._stream.abort()

    @property
    def held(self) -> int:
        """Return the number of received bytes that wait for a slow action."""
        return 0 if self._stream is None else self._stream.held

    async def _run(self, session: Session, stream: _Stream) -> tuple[StreamRefusal | None, bool]:
        driver = _Driver(self, session, stream)
        try:
            await driver.do(session.start(self._clock.monotonic()))
            await stream.run(driver)
        except (OSError, NeveError) as error:  # a StoreError of the disk ends the connection as well
            log.warning("connection to the master closed: %s", error)
        return driver.fault, driver.was_attached

    def store(self, append: slave_session.Append) -> None:
        """Append the master's bytes to the log."""
        replica, at = self._replica, append.at
        if at != replica.next_offset and at > self._store.max_physical_offset > 0:
            replica.continue_at(at)
        replica.append(append.data, at, append.description)

    @property
    def flushed_offset(self) -> int:
        """Return the end of the durable part of the log."""
        return self._visibility.flushed

    @property
    def syncs(self) -> bool:
        """Return whether acknowledged bytes have to be durable."""
        return self._sync is not None

    async def sync(self) -> int:
        """Make stored bytes as durable as an acknowledgement promises.

        Return the end of the log at the time of the call.
        """
        end = self._store.max_physical_offset
        if self._sync is not None:
            await self._sync()
        return end

    def stored(self, session: Session, end: int = -1) -> Sequence[Action]:
        """Acknowledge stored bytes; `end`: only up to there, which a sync has covered."""
        end = self._store.max_physical_offset if end < 0 else end
        return session.stored(end, self._visibility.flushed, self._clock.monotonic())

    async def take_epochs(self, entries: tuple[tuple[int, int], ...]) -> None:
        """Save new epochs before their first byte."""
        await self._epochs.assign(entries)

    async def truncate(self, session: Session, to: int) -> Sequence[Action]:
        """Truncate the log where it diverges from the master's: first the bytes, then the epochs without bytes."""
        if to < self._store.max_physical_offset:
            await self._events.truncate(to)
        end = self._store.max_physical_offset
        assert end <= to
        await self._epochs.truncate(end)
        return session.parted(end, self._epochs.cache.entries())

    async def ask_stock_master(self, session: Session) -> Sequence[Action]:
        """Query the master's properties over another connection, while this one stays open."""
        assert isinstance(session, PlainSession)
        assert self._ask_stock_master is not None
        master, followed = await self._ask_stock_master()
        return session.master_read(master, followed, self._clock.monotonic())

    async def attached(self, session: Session, master_epoch: int) -> Sequence[Action]:
        """Record that the whole log is this master's, and make the first acknowledged bytes durable."""
        await self._events.following(master_epoch)
        if self._sync is not None:
            await self._sync()
        self.trouble = None
        if isinstance(session, SlaveSession) and session.begins_at:
            self._replica.continue_at(session.begins_at)
        return session.attached(self._visibility.flushed, self._clock.monotonic())

    def confirmed(self, offset: int) -> None:
        """Record that the log is confirmed up to `offset`."""
        self._events.confirmed(offset)


class _Acknowledge(msgspec.Struct, frozen=True):
    """Acknowledgement of stored bytes after they are durable."""


_ACKNOWLEDGE = _Acknowledge()
Work = Action | _Acknowledge


class _Driver:
    """Executor of the actions of a session, one after the other."""

    def __init__(self, client: HaClient, session: Session, stream: _Stream) -> None:
        self.client, self.session, self._stream = client, session, stream
        self.fault: StreamRefusal | None = None
        self.was_attached = self.is_ended = self._has_stored = False

    def begin(self, actions: Sequence[Action]) -> Sequence[Work]:
        """Do the fast actions. Return the rest, starting with the first slow one."""
        client = self.client
        try:
            for number, action in enumerate(actions):
                if isinstance(action, slave_session.Append):
                    client.store(action)
                    self._has_stored = True
                elif not self._at_once(action):
                    return actions[number:]
            if not self._has_stored:
                return ()
            if client.syncs:
                return (_ACKNOWLEDGE,)
            self._has_stored = False
            for action in client.stored(self.session):
                self._at_once(action)
        except StoreError as error:
            self._fail(error)
        return ()

    async def do(self, actions: Sequence[Work]) -> None:
        """Do all actions. Each is complete before the next begins."""
        try:
            while actions and not self.is_ended:
                first = actions[0]
                if isinstance(first, _Acknowledge):
                    self._has_stored = False
                    actions = self.client.stored(self.session, await self.client.sync())
                elif (more := await self._take_time(first)) is None:
                    actions = self.begin(cast("Sequence[Action]", actions))
                else:
                    await self.do(more)
                    self.was_attached |= isinstance(first, slave_session.Attached)
                    actions = actions[1:]
                    if not actions and self._has_stored:
                        actions = self.begin(())
        except (DivergenceRefused, StoreError) as error:
            self._fail(error)

    async def _take_time(self, action: Action) -> Sequence[Action] | None:
        """Do a slow action and return the actions that follow from it; None: the action is a fast one."""
        client, session = self.client, self.session
        match action:
            case slave_session.TakeEpochs(entries=entries):
                await client.take_epochs(entries)
                return ()
            case plain_session.AskMaster():
                return await client.ask_stock_master(session)
            case slave_session.Truncate(to=to):
                return await client.truncate(session, to)
            case slave_session.Attached(master_epoch=epoch):
                return await client.attached(session, epoch)
        return None

    def _at_once(self, action: Action) -> bool:
        """Do a fast action. Return False, without doing anything, for a slow one."""
        match action:
            case slave_session.Send(data=data):
                self._stream.write(data)
            case slave_session.Confirmed(offset=offset):
                self.client.confirmed(offset)
            case slave_session.End(why=why, refusal=fault):
                self._end(why, fault)
            case _:
                return False
        return True

    def _fail(self, error: DivergenceRefused | StoreError) -> None:
        if isinstance(error, LogMismatch):
            self._end(str(error), refusal(Reason.MISMATCH, str(error)))
        elif isinstance(error, DivergenceRefused):
            self._end(str(error), refusal(Reason.CUT, str(error)))
        else:  # a full disk, for example: that may pass
            self._end(f"the log accepts no record: {error}", None)

    def _end(self, why: str, fault: StreamRefusal | None) -> None:
        log.warning("replication from the master stopped: %s", why)
        self.fault, self.is_ended = fault, True


class _Stream(asyncio.Protocol):
    """Byte stream of a connection. Bytes go to the driver at once, or are held while it does a slow action."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._driver: _Driver | None = None  # None: it does a slow action, or has not started
        self._work: Sequence[Work] = ()
        self._held: list[bytes] = []
        self._wanted = asyncio.Event()  # set to wake up the task
        self._timer: asyncio.TimerHandle | None = None
        self._failure: Exception | None = None
        self._is_lost = False

    # -- asyncio's side

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class does not inherit

    @override
    def data_received(self, data: bytes) -> None:
        driver = self._driver
        if driver is None:
            self._hold(data)
            return
        self._begin(driver, data)
        if len(data) >= READ_BYTES // 2:  # more may be available, and other callbacks need the loop
            self._rest()

    @override
    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._wanted.set()

    # -- the driver's side

    def write(self, data: bytes) -> None:
        """Send these bytes without delay."""
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(data)

    @property
    def held(self) -> int:
        return sum(map(len, self._held))

    def abort(self) -> None:
        """Close now, and receive nothing after that."""
        self._driver = None
        if self._timer is not None:
            self._timer.cancel()
        assert self._transport is not None
        self._transport.abort()

    async def run(self, driver: _Driver) -> None:
        """Run until the connection ends, or the driver. Raise the exception that ends either."""
        while not driver.is_ended:
            if self._held:
                data = b"".join(self._held)
                self._held.clear()
                await driver.do(driver.begin(driver.session.receive_data(data, self._clock.monotonic())))
                await asyncio.sleep(0)  # yield to the event loop: available bytes don't
                continue
            if self._is_lost:
                log.info("the connection to the master is closed")
                return
            self._driver = driver  # from here on bytes are processed as they arrive
            self._resume()
            self._wake_in(driver.session.wake_at - self._clock.monotonic())
            await self._wanted.wait()
            self._wanted.clear()
            self._driver = None
            if self._failure is not None:
                raise self._failure
            work, self._work = self._work, ()
            await driver.do(work)

    # -- inside

    def _begin(self, driver: _Driver, data: bytes | None) -> None:
        """Pass bytes, or the time, to the session, and do the fast actions that result."""
        now, session = self._clock.monotonic(), driver.session
        try:
            actions = (
                session.tick(now, driver.client.flushed_offset) if data is None else session.receive_data(data, now)
            )
            self._work = driver.begin(actions)
        except Exception as error:  # noqa: BLE001 - raised by `run`, as if the task had done it
            self._failure = error
        if self._work or self._failure is not None or driver.is_ended:
            self._driver = None
            self._wanted.set()

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        if self.held >= READ_BYTES and self._transport is not None:
            self._transport.pause_reading()

    def _rest(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._resume)

    def _resume(self) -> None:
        transport = self._transport
        if transport is not None and self._driver is not None and not transport.is_closing():
            transport.resume_reading()

    def _wake_in(self, delay: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(delay, 0.0), self._tick)

    def _tick(self) -> None:
        driver, self._timer = self._driver, None
        if driver is None:
            return  # the task is running, and checks the time when it is done
        now = self._clock.monotonic()
        if now >= driver.session.wake_at:
            self._begin(driver, None)
        if self._driver is not None:
            self._wake_in(driver.session.wake_at - self._clock.monotonic())
