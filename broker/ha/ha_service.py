"""The HA port: a master's connections from its slaves. RocketMQ's HAService.

This module does I/O only; `master_session` has the protocol, and `confirm` decides which bytes are confirmed. While
this member is not a master, new connections are closed at once, as RocketMQ's slaves do. All code runs on the event
loop of the broker.

New bytes of the log are sent once per iteration of the event loop, however many appends there were. A slave that does
not read delays only itself: no bytes are taken from the log for it until it has read what was written. Bytes far below
the end may have to be read from the disk, which a thread does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol, cast

from msgspec.structs import replace

from broker.ha import master_session
from broker.ha.alarm import Alarm
from broker.ha.confirm import Confirm
from broker.ha.epochs import EpochCache
from broker.ha.frames import Hello
from broker.ha.greeting import Reason
from broker.ha.master_session import CONFIRM_EVERY_S, LogSource, MasterSession, StreamRules
from infra.clock import Clock
from infra.loop.threads import SYSTEM_THREADS, Threads
from infra.net.tls import ServerTls, SniffingServer
from infra.net.tls import listen as tls_listen
from infra.process.startup import addresses
from neve.entropy import Entropy, unique_name

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64  # a set has a handful of members; other connections are not from members
_WRITE_HIGH_WATER = 1 << 20
_HANDSHAKE_S = 10.0


CallSoon = Callable[[Callable[[], object]], object]


def _not_leading(call: Callable[[], object]) -> None:
    raise AssertionError("only a master sends its log")


class HaEvents(Protocol):
    """Callbacks of a master's broker about its slaves. Called on the event loop; they must not block."""

    def confirmed(self, offset: int) -> None:
        """Record that the log is confirmed up to `offset`."""

    def slave_connected(self, member_id: int, hello: Hello | None) -> None:
        """Record that a member follows. A stock member has no HELLO."""

    def slave_reported(self, member_id: int) -> None:
        """Record progress of a member outside the SyncStateSet, which may be able to join now."""


class Leadership:
    """Everything that this member needs to lead for one leadership term."""

    def __init__(
        self,
        own: Hello,
        epochs: EpochCache,
        confirm: Confirm,
        events: HaEvents,
        *,
        rules: StreamRules,
        is_member: Callable[[int], bool],
        now: Callable[[Hello], Hello] | None = None,
    ) -> None:
        """Create the state of a term.

        `own` is the HELLO without nonces. `now` updates the fields that differ from connection to connection.
        """
        assert own.master_epoch == confirm.master_epoch and own.member_id == confirm.own_id
        self.own, self.epochs, self.confirm, self.events = own, epochs, confirm, events
        self.rules, self.is_member, self._now = rules, is_member, now

    @property
    def hello(self) -> Hello:
        """Return the HELLO for a slave that connects now."""
        return self.own if self._now is None else self._now(self.own)


class HaService:
    """Server of the HA port."""

    def __init__(
        self,
        source: LogSource,
        clock: Clock,
        entropy: Entropy,
        *,
        host: str = "0.0.0.0",
        port: int = 0,
        tls: ServerTls | None = None,
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        self.source, self.clock, self.entropy, self.threads = source, clock, entropy, threads
        self._host, self._port, self._tls = host, port, tls
        self._servers: list[asyncio.Server | SniffingServer] = []
        self._links: dict[_Link, None] = {}  # the oldest first
        self._by_member: dict[int, _Link] = {}
        self._sending = False
        self._call_soon: CallSoon = _not_leading  # cached, because `get_running_loop` is a system call each time
        self.leadership: Leadership | None = None
        self.refused: Counter[str] = Counter()  # counted by reason

    # -- start and stop

    @property
    def port(self) -> int:
        """Return the port that is listened on."""
        return int(self._servers[0].sockets[0].getsockname()[1]) if self._servers else self._port

    async def start(self) -> None:
        """Listen at each address."""
        port = self._port
        for host in addresses(self._host):
            server = await self._listen_at(host, port)
            self._servers.append(server)
            port = port or int(server.sockets[0].getsockname()[1])

    async def _listen_at(self, host: str, port: int) -> asyncio.Server | SniffingServer:
        if self._tls is None:
            return await asyncio.get_running_loop().create_server(self._new, host, port)
        return await tls_listen(self._new, self._tls, host, port, max_waiting=MAX_CONNECTIONS, handshake_s=_HANDSHAKE_S)

    def _new(self) -> asyncio.Protocol:
        return cast("asyncio.Protocol", _Link(self))

    async def shutdown(self) -> None:
        """Stop listening, and close all connections."""
        for server in self._servers:
            server.close()
        self.stop_leading()
        for link in tuple(self._links):
            link.abort()

    # -- roles

    def lead(self, leadership: Leadership) -> None:
        """Accept slaves, as the master of a new term."""
        self.stop_leading()
        self.leadership = leadership
        self._call_soon = asyncio.get_running_loop().call_soon

    def stop_leading(self) -> None:
        """Close all connections. Nothing that they send counts from here on."""
        self.leadership = None
        self.source.described.want(False)
        for link in tuple(self._links):
            link.dismiss()

    # -- growth and confirm

    def appended(self) -> None:
        """Take the growth of the log. The new bytes are sent later in this iteration of the event loop."""
        leadership = self.leadership
        if leadership is None:
            return
        before = leadership.confirm.value
        leadership.confirm.appended(self.source.max_physical_offset)
        self._publish_confirm(leadership, before)
        if self._by_member and not self._sending:
            self._sending = True
            self._call_soon(self._send)

    def _send(self) -> None:
        self._sending = False
        for link in tuple(self._by_member.values()):
            link.advance()

    def confirm_changed(self, before: int) -> None:
        """Publish a change that the caller made to `Confirm`, such as another SyncStateSet, or progress of time."""
        if self.leadership is not None:
            self._publish_confirm(self.leadership, before)

    def _publish_confirm(self, leadership: Leadership, before: int) -> None:
        if leadership.confirm.value > before and self.leadership is leadership:
            leadership.events.confirmed(leadership.confirm.value)
            for link in self._by_member.values():
                link.confirm_moved()

    # -- connections

    @property
    def slaves(self) -> dict[int, MasterSession]:
        """Return the sessions that stream, by member id."""
        return {member: link.session for member, link in self._by_member.items() if link.session is not None}

    def opened(self, link: _Link) -> bool:
        """Register a new connection. Return False if it has to be closed: no room, or this member is no master."""
        if self.leadership is None:
            self.refused[Reason.NOT_MASTER.value] += 1
            return False
        if len(self._links) >= MAX_CONNECTIONS and not self._make_room():
            return False
        self._links[link] = None
        return True

    def _make_room(self) -> bool:
        """Close the oldest connection that does not stream yet, so that idle ones can't keep members out.

        Return whether there was one.
        """
        self.refused["too-many"] += 1
        idle = next((link for link in self._links if link.session is not None and not link.session.is_streaming), None)
        if idle is None:
            return False
        idle.abort()
        self._links.pop(idle)
        return True

    def slave_connected(self, link: _Link, leadership: Leadership, slave: master_session.SlaveConnected) -> None:
        """Take a member that requests the log. Its older connection is closed."""
        older = self._by_member.pop(slave.member_id, None)
        if older is not None:
            log.info("member %d reconnects", slave.member_id)
            older.abort()
        self._by_member[slave.member_id] = link
        self._describe()
        now = self.clock.monotonic()
        leadership.confirm.connected(slave.member_id, link, now, is_learner=slave.is_learner)
        leadership.events.slave_connected(slave.member_id, slave.hello)

    def _describe(self) -> None:
        """Keep the descriptions of appends in memory while a slave accepts them."""
        self.source.described.want(any(session.takes_descriptions for session in self.slaves.values()))

    def reported(self, link: _Link, leadership: Leadership, member: int, reported: master_session.Reported) -> bool:
        """Take a report of a member. Return False if it is impossible."""
        confirm, now = leadership.confirm, self.clock.monotonic()
        before = confirm.value
        # a slave's report may be processed before the notification of the append
        confirm.appended(self.source.max_physical_offset)
        if not confirm.reported(member, link, reported.end, now, synced=reported.synced):
            return False
        self._publish_confirm(leadership, before)
        if not confirm.in_sync(member):
            leadership.events.slave_reported(member)
        return True

    def closed(self, link: _Link, leadership: Leadership | None, member: int) -> None:
        """Take the end of a connection."""
        self._links.pop(link, None)
        if self._by_member.get(member) is link:
            del self._by_member[member]
            self._describe()
        if leadership is not None and member:
            before = leadership.confirm.value
            leadership.confirm.disconnected(member, link, self.clock.monotonic())
            self._publish_confirm(leadership, before)


class _Link:
    """A connection from a slave. It has the methods of an asyncio protocol."""

    def __init__(self, service: HaService) -> None:
        self._service, self._loop = service, asyncio.get_running_loop()
        self._leadership: Leadership | None = None
        self._transport: asyncio.Transport | None = None
        self._alarm = Alarm(self._loop, self._tick)
        self._later: asyncio.TimerHandle | None = None  # sends the next batch
        self._fetcher: asyncio.Task[None] | None = None
        self._paused = False
        self._peer = "?"
        self.session: MasterSession | None = None

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        service = self._service
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_WATER)
        self._peer = str(transport.get_extra_info("peername"))
        leadership = service.leadership
        if not service.opened(self) or leadership is None:
            log.info("closing %s: this member is no master, or there is no room", self._peer)
            self._transport.abort()
            return
        self._leadership = leadership
        now = service.clock.monotonic()
        own = _with_nonce(leadership.hello, service.entropy)
        self.session = MasterSession(
            service.source,
            leadership.epochs,
            own,
            leadership.rules,
            is_member=leadership.is_member,
            confirm=lambda: leadership.confirm.value,
            now=now,
        )
        self._alarm.ring_in(self.session.wake_at - now)

    def data_received(self, data: bytes) -> None:
        if self.session is not None:
            self._do(self.session.receive_data(data, self._service.clock.monotonic()))
            self.advance()

    def eof_received(self) -> None:
        """Return None, so that the transport closes itself."""

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self.advance()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop()
        session, self.session = self.session, None
        if session is not None:
            self._service.closed(self, self._leadership, session.member_id)

    # -- called by the service

    def confirm_moved(self) -> None:
        """Schedule a heartbeat that carries the confirm offset, in case no bytes do."""
        self._alarm.ring_in(CONFIRM_EVERY_S)

    def _tick(self) -> None:
        session = self.session
        if session is None or session.is_ended:
            return
        now = self._service.clock.monotonic()
        # a heartbeat carries the next offset, and must not overtake bytes that are being read
        if self._fetcher is None:
            self._do(session.tick(now))
        self._alarm.ring_in(max(session.wake_at - now, CONFIRM_EVERY_S))

    def advance(self) -> None:
        """Send one batch of the log. The rest follows after the other connections had theirs."""
        session = self.session
        if session is None or self._paused or self._fetcher is not None or not session.has_more:
            return
        loop, now = self._loop, self._service.clock.monotonic()
        delay = session.may_send_at(now) - now
        if delay > 0:
            if self._later is None:
                self._later = loop.call_later(delay, self._advance_later)
            return
        is_old = session.is_far_behind
        actions = session.advance(now)
        if not actions:
            return
        if is_old:
            self._fetcher = loop.create_task(self._fetch(actions), name="ha-fetch")
            return
        self._do(actions)
        if session.has_more and self._later is None:
            self._later = loop.call_later(0, self._advance_later)

    def _advance_later(self) -> None:
        self._later = None
        self.advance()

    async def _fetch(self, actions: list[master_session.Action]) -> None:
        """Send a batch whose bytes may have to be read from the disk."""
        fetched = [await self._fetched(action) for action in actions]
        self._fetcher = None
        if self.session is not None and not self.session.is_ended:
            self._do(fetched)
            self.advance()

    async def _fetched(self, action: master_session.Action) -> master_session.Action:
        if not isinstance(action, master_session.Send):
            return action
        return master_session.Send((await self._service.threads.run(b"".join, action.data),))

    def dismiss(self) -> None:
        """Refuse the slave, because this member is no longer the master."""
        if self.session is not None:
            self._do(self.session.dismiss())

    def abort(self) -> None:
        """Close now."""
        self._stop()
        if self._transport is not None:
            self._transport.abort()

    def _stop(self) -> None:
        self._alarm.stop()
        for handle in (self._later, self._fetcher):
            if handle is not None:
                handle.cancel()
        self._later = self._fetcher = None

    # -- inside

    def _do(self, actions: list[master_session.Action]) -> None:
        transport, leadership, service = self._transport, self._leadership, self._service
        assert transport is not None and leadership is not None
        for action in actions:
            match action:
                case master_session.Send(data=data):
                    if not transport.is_closing():
                        transport.writelines(data)
                case master_session.SlaveConnected():
                    service.slave_connected(self, leadership, action)
                    if self.session is not None:
                        self._alarm.ring_in(self.session.wake_at - service.clock.monotonic())
                case master_session.Reported():
                    self._report(action)
                case master_session.End(why=why, refusal=refusal):
                    if refusal is not None:
                        service.refused[refusal.reason] += 1
                    log.warning("closing the slave at %s: %s", self._peer, why)
                    self._stop()
                    transport.close()

    def _report(self, reported: master_session.Reported) -> None:
        session, leadership = self.session, self._leadership
        if session is None or leadership is None or self._service.leadership is not leadership:
            return
        if not self._service.reported(self, leadership, session.member_id, reported):
            log.error("member %d reports an impossible end of its log: %d", session.member_id, reported.end)
            self.abort()


def _with_nonce(own: Hello, entropy: Entropy) -> Hello:
    return replace(own, nonce=unique_name(entropy))
