"""Remoting over asyncio: a connection parses all received frames, dispatches them, and writes all answers at once.

A handler gets `(connection, command)` and returns the answer, an awaitable of it, or None if it answers later through
`connection.send` or never. Commands that it sends during a batch are written with the batch.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, cast

from infra.net.error_answers import error_answer, not_supported, too_much_in_work
from infra.net.limits import Admission, BodiesInWork, RemotingLimits, UnfinishedFrames
from infra.net.tls import Certificate, ServerTls, SniffingServer
from infra.net.tls import listen as tls_listen
from infra.process.startup import addresses
from neve.errors import BrokerError, ProtocolError, UnknownOutcome
from neve.remoting.codes import ResponseCode
from neve.remoting.command import Buffer, RemotingCommand, decode_command, encode_command
from neve.remoting.frame import FrameDecoder

log = logging.getLogger(__name__)

# An answer of more than _MANY_BUFFERS buffers is written in pieces of about _AT_ONCE bytes, each after the last one was
# sent: copying ten MB into the kernel in one call would block the event loop.
_MANY_BUFFERS = 256
_AT_ONCE = 1 << 20
_FLUSH_REST_S = 0.005
# Requests of one connection per iteration of the event loop; one read may contain a thousand.
_REQUESTS_AT_ONCE = 64

Answer = RemotingCommand | None
Handler = Callable[["Connection", RemotingCommand], Answer | Awaitable[Answer]]
# Serves the frames that it supports, up to the first other one. It repeats the checks of the handler (permissions).
Express = Callable[["Connection", FrameDecoder], None]


class Connection:
    """One connection, of a server or a client. It has the interface of an asyncio protocol."""

    def __init__(
        self,
        handler: Handler,
        limits: RemotingLimits,
        *,
        reads: frozenset[int] = frozenset(),
        express: Express | None = None,
        opened: Callable[[Connection], None] | None = None,
        closed: Callable[[Connection], None] | None = None,
        unfinished: UnfinishedFrames | None = None,
        in_work: BodiesInWork | None = None,
    ) -> None:
        """`reads`: codes without side effects, whose requests are cancelled when the client disconnects."""
        self._handler = handler
        self._express, self._reads = express, reads
        self._unfinished, self._in_work = unfinished, in_work
        self._is_unfinished = False
        self._limits = limits
        self._opened = opened
        self._closed_callback = closed
        self._decoder = FrameDecoder(limits.max_frame)
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._out: list[Buffer] = []
        self._corked = False
        self._flush_scheduled = False
        self._in_pieces = False  # `_out` holds the rest of a large answer
        self._flush_timer: asyncio.TimerHandle | None = None  # checks if the last piece was sent
        self._has_more_frames = False  # the decoder holds received frames for the next iteration
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading: set[asyncio.Task[None]] = set()
        self._resumed: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, asyncio.Future[RemotingCommand]] = {}
        self._next_opaque = 0
        self._pauses = 0
        self._gate_in_flight = False
        self._on_close: list[Callable[[Connection], None]] = []
        self.remote: tuple[str, int] = ("", 0)
        self.local: tuple[str, int] = ("", 0)
        self.last_active = self._loop.time()
        self.partial_since: float | None = None
        self.is_closed = False
        self.state: dict[str, Any] = {}  # data of the handler

    # ---- the asyncio protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called once by the event loop."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._limits.write_high_water)
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple) and len(peer) >= 2:
            self.remote = (str(peer[0]), int(peer[1]))
        own = transport.get_extra_info("sockname")
        if isinstance(own, tuple) and len(own) >= 2:
            self.local = (str(own[0]), int(own[1]))
        if self._opened is not None:
            self._opened(self)

    def data_received(self, data: bytes) -> None:
        """Parse and dispatch all complete frames, then write all answers at once."""
        if self.is_closed:
            return
        decoder = self._decoder
        self.last_active = self._loop.time()
        taken = decoder.taken
        fault: ProtocolError | None = None
        self._corked = True
        try:
            decoder.receive_data(data)
            self._serve_frames(decoder)
        except ProtocolError as error:
            fault = error
        finally:
            self._corked = False
            self.flush()
        pending = decoder.pending
        if not pending:
            self.partial_since = None
        elif decoder.taken > taken or self.partial_since is None:
            self.partial_since = self.last_active
        if (
            (pending or self._is_unfinished)
            and self._unfinished is not None
            and not self._has_more_frames
            and not self.is_closed
        ):
            self._is_unfinished = pending
            self._unfinished.note(self, decoder.held)
        if fault is not None:
            log.warning("closing %s:%d: %s", *self.remote, fault)
            self.close()

    def rest(self) -> None:
        """Serve the remaining received frames in the next iteration of the event loop.

        Reading is paused until then: otherwise more data would arrive and be buffered.
        """
        if not self._has_more_frames:
            self._has_more_frames = True
            self._pause()
            self._loop.call_soon(self._process_rest)

    def _process_rest(self) -> None:
        if self._has_more_frames:
            self._has_more_frames = False
            self.data_received(b"")
            self._resume()

    def eof_received(self) -> None:
        """The peer has closed its end; the transport closes itself."""
        while self._has_more_frames:
            self._process_rest()

    def pause_writing(self) -> None:
        """The peer reads too slowly: stop reading its requests."""
        self._pause()

    def resume_writing(self) -> None:
        """The peer has read enough: read its requests again."""
        self._resume()

    def connection_lost(self, error: Exception | None) -> None:
        """Called once by the event loop; runs the close callbacks."""
        while self._has_more_frames:  # received requests take effect, though their client is gone
            self._process_rest()
        self.is_closed = True
        self._out.clear()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(UnknownOutcome("the connection closed before the answer"))
        self._waiting.clear()
        if self._unfinished is not None:
            self._unfinished.note(self, 0)
        for task in (*self._reading, *self._resumed):  # requests with side effects run to the end
            task.cancel()
        callbacks, self._on_close = self._on_close, []
        if self._closed_callback is not None:
            callbacks.append(self._closed_callback)
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # an error of one owner must not keep the others from cleaning up
                log.exception("close callback failed: %s:%d", *self.remote)

    # ---- for handlers

    def send(self, command: RemotingCommand) -> None:
        """Queue a command; all commands of one iteration of the event loop are written at once."""
        self._out += encode_command(command)
        self._schedule_flush()

    def send_raw(self, data: Buffer) -> None:
        """Queue encoded frames."""
        self._out.append(data)
        if not self._corked:
            self._schedule_flush()

    def flush(self, *, at_once: bool = False) -> None:
        """Write the queued data; a large amount in pieces, unless `at_once`."""
        self._flush_scheduled = False
        out = self._out
        if not out:
            return
        self._out = []
        if self._transport is None or self.is_closed or self._transport.is_closing():
            return
        if self._in_pieces or len(out) > _MANY_BUFFERS:
            if not at_once and self._has_piece_to_leave(self._transport, out):
                return
            out = self._first_piece(out)
        self.last_active = self._loop.time()
        self._transport.writelines(out)
        if self._pauses and self._transport.get_write_buffer_size() > self._limits.max_unwritten:
            self._drop(self._transport)

    def _drop(self, transport: asyncio.Transport) -> None:
        log.warning("connection closed: %s:%d does not read its answers", *self.remote)
        transport.abort()

    def _has_piece_to_leave(self, transport: asyncio.Transport, out: list[Buffer]) -> bool:
        """Return whether the last piece is still being sent: `out` is queued, and reading is paused."""
        unwritten = transport.get_write_buffer_size()
        if unwritten < _AT_ONCE:
            return False
        if unwritten + sum(map(len, out)) > self._limits.max_unwritten:
            self._drop(transport)
            return True
        self._out = out
        self._in_pieces = self._flush_scheduled = True
        if self._flush_timer is None:
            self._pause()
            self._flush_timer = self._loop.call_later(_FLUSH_REST_S, self._flush_rest)
        return True

    def _flush_rest(self) -> None:
        self._flush_timer = None
        self.flush()
        self._resume()

    def _first_piece(self, out: list[Buffer]) -> list[Buffer]:
        size = 0
        for number, data in enumerate(out, 1):
            size += len(data)
            if size > _AT_ONCE and number < len(out):
                self._out = out[number:]
                self._in_pieces = self._flush_scheduled = True
                self._loop.call_soon(self.flush)
                return out[:number]
        self._in_pieces = False
        return out

    async def invoke(self, command: RemotingCommand, timeout: float) -> RemotingCommand:  # noqa: ASYNC109
        """Send a request and return its answer; sets the opaque. Raises TimeoutError after `timeout` seconds."""
        if self.is_closed:
            raise ConnectionError("the connection is closed")
        if len(self._waiting) >= self._limits.max_requests_out:
            raise BrokerError(ResponseCode.SYSTEM_BUSY, "too many requests to this peer are in flight")
        opaque = self._take_opaque()
        command.opaque = opaque
        future: asyncio.Future[RemotingCommand] = self._loop.create_future()
        self._waiting[opaque] = future
        try:
            self.send(command)
            async with asyncio.timeout(timeout):
                return await future
        finally:
            self._waiting.pop(opaque, None)

    def send_oneway(self, command: RemotingCommand) -> None:
        """Send a request without an answer."""
        command.opaque = self._take_opaque()
        command.flag |= 2
        self.send(command)

    def on_close(self, callback: Callable[[Connection], None]) -> None:
        """Call `callback` once when the connection ends; immediately if it has ended."""
        if self.is_closed:
            callback(self)
        else:
            self._on_close.append(callback)

    def close(self) -> None:
        """Close after the queued data has been written."""
        while self._out:
            self.flush(at_once=True)
        if self._transport is not None:
            self._transport.close()

    @property
    def is_encrypted(self) -> bool:
        """Whether the connection uses TLS."""
        return self._transport is not None and self._transport.get_extra_info("sslcontext") is not None

    @property
    def in_flight(self) -> frozenset[asyncio.Task[None]]:
        """The tasks of asynchronous requests in progress."""
        return frozenset(self._tasks)

    def abort(self) -> None:
        """Close the connection without writing queued data."""
        if self._transport is not None:
            self._transport.abort()

    def give_up(self) -> None:
        """Close the connection now, and free the buffer of its unfinished frame."""
        self._unfinished = None
        self._decoder = FrameDecoder(self._limits.max_frame)
        self._has_more_frames = False
        self.is_closed = True
        self.abort()

    # ---- inside

    def _serve_frames(self, decoder: FrameDecoder) -> None:
        express = self._express
        for _ in range(_REQUESTS_AT_ONCE):
            if express is not None:
                express(self, decoder)
                if self._has_more_frames:
                    return
            bounds = decoder.next_bounds()
            if bounds is None:
                return
            command = decode_command(decoder.buffer, *bounds)
            if not self._take_response(command):
                self.dispatch(command)
        self.rest()

    def dispatch(self, command: RemotingCommand) -> None:
        """Call the handler of one request and send its answer."""
        try:
            answer = self._handler(self, command)
        except Exception as error:  # noqa: BLE001 - the dispatcher: the error becomes the answer
            answer = error_answer(command, error)
        if answer is None:
            return
        if isinstance(answer, RemotingCommand):
            self._answer(command, answer)
        else:
            self._take_in_work(command, answer)

    def _take_in_work(self, command: RemotingCommand, answer: Awaitable[Answer]) -> None:
        if self._in_work is not None and not self._in_work.take(command):
            if isinstance(answer, Coroutine):
                answer.close()  # it was never started
            self._answer(command, too_much_in_work(command))
            return
        task = self._loop.create_task(self._finish(command, answer))
        self._tasks.add(task)
        if self._in_work is not None:
            task.add_done_callback(partial(self._in_work.done, len(command.body)))
        if command.code in self._reads:
            self._reading.add(task)
        task.add_done_callback(self._task_done)
        if len(self._tasks) >= self._limits.max_in_flight and not self._gate_in_flight:
            self._gate_in_flight = True
            self._pause()

    def resume(
        self, command: RemotingCommand, work: Callable[[], Answer | Awaitable[Answer]], *, in_work: bool = False
    ) -> None:
        """Continue a request that waited; the outcome of `work`, an error as well, is its answer.

        There may be thousands of waiting requests, so it does not count as in progress; it ends with the connection.
        With `in_work` it is treated as a new request: for a request that waited only for a moment.
        """
        try:
            answer = work()
        except Exception as error:  # noqa: BLE001 - the dispatcher
            answer = error_answer(command, error)
        if isinstance(answer, RemotingCommand):
            self._answer(command, answer)
        elif answer is None:
            return
        elif in_work:
            self._take_in_work(command, answer)
        else:
            task = self._loop.create_task(self._finish(command, answer))
            self._resumed.add(task)
            task.add_done_callback(self._resumed.discard)

    def _answer(self, command: RemotingCommand, answer: RemotingCommand) -> None:
        if command.flag & 2:
            return
        try:
            self._out += encode_command(answer)
        except Exception as error:  # noqa: BLE001 - the client has to get an answer
            self._out += encode_command(error_answer(command, error))
        if not self._corked:
            self._schedule_flush()

    async def _finish(self, command: RemotingCommand, work: Awaitable[Answer]) -> None:
        try:
            answer = await work
        except Exception as error:  # noqa: BLE001 - the dispatcher
            answer = error_answer(command, error)
        if answer is not None and not self.is_closed:
            self._answer(command, answer)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._reading.discard(task)
        if self._gate_in_flight and len(self._tasks) < self._limits.max_in_flight:
            self._gate_in_flight = False
            self._resume()

    def _take_response(self, command: RemotingCommand) -> bool:
        if not command.flag & 1:
            return False
        future = self._waiting.pop(command.opaque, None)
        if future is not None and not future.done():
            future.set_result(command)
        return True

    def _take_opaque(self) -> int:
        self._next_opaque = (self._next_opaque + 1) & 0x7FFFFFFF
        return self._next_opaque

    def _schedule_flush(self) -> None:
        if not self._corked and not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)

    def _pause(self) -> None:
        self._pauses += 1
        if self._pauses == 1 and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _resume(self) -> None:
        self._pauses -= 1
        if self._pauses == 0 and self._transport is not None and not self._transport.is_closing():
            if self.partial_since is not None:
                self.partial_since = self._loop.time()  # this end had paused reading
            self._transport.resume_reading()

    def overdue(self, now: float) -> str | None:
        """Return why the connection should be closed; None if it should not."""
        if self._pauses:
            return None if now - self.last_active < self._limits.idle_seconds else "nothing written for too long"
        if self.partial_since is not None and now - self.partial_since > self._limits.frame_seconds:
            return "a frame was not completed in time"
        if now - self.last_active > self._limits.idle_seconds:
            return "idle"
        return None


class RemotingServer:
    """Listens on one or more ports, with one handler."""

    def __init__(
        self,
        handler: Handler,
        *,
        reads: frozenset[int] = frozenset(),
        express: Express | None = None,
        host: str = "0.0.0.0",
        port: int = 0,
        limits: RemotingLimits | None = None,
        closed: Callable[[Connection], None] | None = None,
        tls: ServerTls | None = None,
        room: Callable[[], int] | None = None,
    ) -> None:
        self._closed = closed
        self._tls = tls
        self._handler, self._reads, self._express = handler, reads, express
        self._host = host
        self._port = port
        self._limits = limits or RemotingLimits()
        self.admission = Admission(self._limits.max_connections, room, with_tls=tls is not None)
        self._servers: list[asyncio.Server | SniffingServer] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._left: set[asyncio.Task[None]] = set()  # requests that run to the end without their client
        self.unfinished = UnfinishedFrames(self._limits.max_unfinished)
        self.in_work = BodiesInWork(self._limits.max_unfinished)
        self.connections: set[Connection] = set()

    @property
    def port(self) -> int:
        """The port of the first listening socket."""
        return int(self._servers[0].sockets[0].getsockname()[1]) if self._servers else self._port

    @property
    def certificate(self) -> Certificate | None:
        """The certificate that clients see; None: plain text only."""
        return None if self._tls is None else self._tls.certificate

    async def start(self) -> None:
        """Open the configured port."""
        await self.listen(self._port)
        self._sweep()

    async def listen(self, port: int) -> None:
        """Open another port at each address."""
        for host in addresses(self._host):
            server = await self._listen_at(host, port)
            self._servers.append(server)
            port = port or int(server.sockets[0].getsockname()[1])

    async def _listen_at(self, host: str, port: int) -> asyncio.Server | SniffingServer:
        if self._tls is None:
            return await asyncio.get_running_loop().create_server(self._new, host, port, backlog=self._limits.backlog)
        most, seconds = self.admission.undecided, self._limits.frame_seconds
        return await tls_listen(self._new, self._tls, host, port, max_waiting=most, handshake_s=seconds)

    def stop_accepting(self) -> None:
        """Close the listening sockets, but no connection."""
        for server in self._servers:
            server.close()

    async def shutdown(self, grace_s: float = 1.0) -> None:
        """Stop listening, wait `grace_s` for requests in progress, write queued data and close all connections."""
        self.stop_accepting()
        under_way = [*self._left, *(task for connection in self.connections for task in connection.in_flight)]
        if under_way:
            await asyncio.wait(under_way, timeout=grace_s)
        if self._sweeper is not None:
            self._sweeper.cancel()
        open_connections = [connection for connection in self.connections if not connection.is_closed]
        done = asyncio.Event()
        left = len(open_connections)

        def one_less(_: Connection) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                done.set()

        for connection in open_connections:
            connection.on_close(one_less)
            connection.close()
        if open_connections:
            try:
                async with asyncio.timeout(2):
                    await done.wait()
            except TimeoutError:
                for connection in tuple(self.connections):
                    connection.abort()

    def _new(self) -> asyncio.Protocol:
        connection = Connection(
            self._handler,
            self._limits,
            reads=self._reads,
            express=self._express,
            opened=self._opened,
            closed=self._forget,
            unfinished=self.unfinished,
            in_work=self.in_work,
        )
        return cast("asyncio.Protocol", connection)

    def _opened(self, connection: Connection) -> None:
        if not self.admission.admits(connection.remote, len(self.connections)):
            connection.abort()
            return
        self.connections.add(connection)

    def _forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        for task in connection.in_flight:
            self._left.add(task)
            task.add_done_callback(self._left.discard)
        if self._closed is not None:
            self._closed(connection)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in tuple(self.connections):
            reason = connection.overdue(now)
            if reason is not None:
                log.info("closing %s:%d: %s", *connection.remote, reason)
                connection.abort()
        self._sweeper = loop.call_later(min(self._limits.frame_seconds, self._limits.idle_seconds) / 4, self._sweep)


async def open_connection(
    host: str,
    port: int,
    *,
    handler: Handler | None = None,
    limits: RemotingLimits | None = None,
    tls: ssl.SSLContext | None = None,
) -> Connection:
    """Connect to a server; `handler` serves its requests (default: none)."""

    def refuse(_: Connection, command: RemotingCommand) -> Answer | Awaitable[Answer]:
        return not_supported(command)

    def make() -> asyncio.Protocol:
        return cast("asyncio.Protocol", Connection(handler or refuse, limits or RemotingLimits()))

    _, protocol = await asyncio.get_running_loop().create_connection(make, host, port, ssl=tls)
    return cast("Connection", protocol)
