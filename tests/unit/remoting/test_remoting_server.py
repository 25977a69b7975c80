from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import uvloop

from infra.net.limits import RemotingLimits
from infra.net.remoting_server import Answer, Connection, RemotingServer, open_connection
from infra.net.request_router import RequestRouter
from neve.errors import BrokerError, UnknownOutcome
from neve.remoting.command import RemotingCommand, decode_command, encode_command
from neve.remoting.frame import FrameDecoder
from tests.kit.clock.calls_per_turn import CallsPerTurn
from tests.kit.clock.waiting import until

ECHO, BOOM, REFUSE, SLOW, ASK, LATER, BAD_ANSWER, NAMED = 10, 11, 12, 14, 15, 17, 18, 19


def echo(_: Connection, command: RemotingCommand) -> RemotingCommand:
    return RemotingCommand.response(command, 0, ext=command.ext, body=command.body)


def boom(_: Connection, command: RemotingCommand) -> RemotingCommand:
    raise RuntimeError("broken on purpose")


def refuse(_: Connection, command: RemotingCommand) -> RemotingCommand:
    raise BrokerError(17, "no such topic")


async def slow(_: Connection, command: RemotingCommand) -> Answer:
    await asyncio.to_thread(len, command.body)
    if command.body == b"boom":
        raise ValueError("later")
    return RemotingCommand.response(command, 0, body=b"slow")


async def ask(connection: Connection, command: RemotingCommand) -> Answer:
    answer = await connection.invoke(RemotingCommand(307), 2)
    return RemotingCommand.response(command, 0, body=answer.body)


def later(connection: Connection, command: RemotingCommand) -> Answer:
    asyncio.get_running_loop().call_soon(connection.send, RemotingCommand.response(command, 0, body=b"later"))
    return None


def bad_answer(_: Connection, command: RemotingCommand) -> Answer:
    return RemotingCommand.response(command, 0, ext={"x": "y" * (1 << 24)})


def named(_: Connection, command: RemotingCommand) -> Answer:
    raise BrokerError(17, f"topic[{command.ext['topic']}] not exist")


def router() -> RequestRouter:
    result = RequestRouter()
    for code, handler in (
        (ECHO, echo),
        (BOOM, boom),
        (REFUSE, refuse),
        (SLOW, slow),
        (ASK, ask),
        (LATER, later),
        (BAD_ANSWER, bad_answer),
        (NAMED, named),
    ):
        result.register(code, handler)
    return result


@asynccontextmanager
async def serving(limits: RemotingLimits | None = None) -> AsyncIterator[RemotingServer]:
    server = RemotingServer(router(), host="127.0.0.1", port=0, limits=limits)
    await server.start()
    try:
        yield server
    finally:
        await server.shutdown()


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """Run the tests on the event loop of the servers, and on asyncio's own."""
    policy: asyncio.AbstractEventLoopPolicy = request.param()
    return policy


def wire(command: RemotingCommand) -> bytes:
    return b"".join(encode_command(command))


async def receive(reader: asyncio.StreamReader) -> RemotingCommand:
    (length,) = struct.unpack(">i", await reader.readexactly(4))
    return decode_command(await reader.readexactly(length))


async def test_many_frames_in_one_write_are_answered_in_order() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"".join(wire(RemotingCommand(ECHO, n, body=b"%d" % n)) for n in range(500)))
        answers = [await receive(reader) for _ in range(500)]
        assert [(answer.opaque, answer.body) for answer in answers] == [(n, b"%d" % n) for n in range(500)]
        writer.close()


async def test_thousand_requests_of_one_read_are_served_in_order_and_turns() -> None:
    router, heard = RequestRouter(), CallsPerTurn(echo)
    router.register(ECHO, lambda connection, command: heard(connection, command))  # noqa: PLW0108 - no method
    server = RemotingServer(router, host="127.0.0.1", port=0)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"".join(wire(RemotingCommand(ECHO, n)) for n in range(1_000)))
    assert [(await receive(reader)).opaque for _ in range(1_000)] == list(range(1_000))
    assert heard.most <= 64
    writer.close()
    await server.shutdown()


class Nowhere(asyncio.Transport):
    """A transport that discards writes."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def writelines(self, list_of_data: Iterable[Any]) -> None: ...


@pytest.mark.parametrize("ending", ["end of file", "reset"])
async def test_requests_received_before_a_disconnect_are_served(ending: str) -> None:
    """A client sends one-way requests and disconnects."""

    heard: list[int] = []
    connection = Connection(lambda _, command: heard.append(command.opaque), RemotingLimits())
    connection.connection_made(cast("asyncio.BaseTransport", Nowhere({"peername": ("10.0.0.7", 1)})))
    connection.data_received(b"".join(wire(RemotingCommand(ECHO, n, flag=2)) for n in range(300)))
    assert heard == list(range(64))
    connection.eof_received() if ending == "end of file" else connection.connection_lost(ConnectionResetError())
    assert heard == list(range(300))


async def test_frame_is_assembled_byte_by_byte() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for value in wire(RemotingCommand(ECHO, 3, serialize_type=1, ext={"k": "v"})):
            writer.write(bytes([value]))
            await writer.drain()
        answer = await receive(reader)
        assert (answer.opaque, answer.ext, answer.serialize_type) == (3, {"k": "v"}, 1)
        writer.close()


@pytest.mark.parametrize(
    ("code", "sent", "expected", "remark"),
    [
        (9999, b"", 3, "not supported"),
        (BOOM, b"", 1, "broken on purpose"),
        (REFUSE, b"", 17, "no such topic"),
        (SLOW, b"", 0, ""),
        (SLOW, b"boom", 1, "later"),
        (LATER, b"", 0, ""),
        (BAD_ANSWER, b"", 1, "header"),
    ],
)
async def test_each_request_is_answered_and_the_connection_stays_open(
    code: int, sent: bytes, expected: int, remark: str
) -> None:
    async with serving() as server:
        connection = await open_connection("127.0.0.1", server.port)
        answer = await connection.invoke(RemotingCommand(code, body=sent), 5)
        assert answer.code == expected
        assert remark in (answer.remark or "")
        assert (await connection.invoke(RemotingCommand(ECHO, body=b"alive"), 5)).body == b"alive"
        connection.close()


@pytest.mark.parametrize("code", [ECHO, BOOM, REFUSE, SLOW, 9999])
async def test_one_way_is_never_answered(code: int) -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(wire(RemotingCommand(code, 1, flag=2)) + wire(RemotingCommand(SLOW, 2)))
        assert (await receive(reader)).opaque == 2
        writer.close()
        assert await reader.read() == b""


async def test_server_sends_requests_to_its_client() -> None:
    def client_side(_: Connection, command: RemotingCommand) -> Answer:
        return RemotingCommand.response(command, 0, body=b"from the client")

    async with serving() as server:
        connection = await open_connection("127.0.0.1", server.port, handler=client_side)
        answer = await connection.invoke(RemotingCommand(ASK), 5)
        assert answer.body == b"from the client"
        connection.close()


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\n\r\n", struct.pack(">ii", 4, 0), b"\xff" * 8]
)
async def test_invalid_data_closes_connection_after_valid_frames_are_answered(data: bytes) -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(wire(RemotingCommand(ECHO, 8)) + data)
        assert (await receive(reader)).opaque == 8
        assert await reader.read() == b""
        writer.close()


async def test_connections_with_unfinished_frames_are_closed() -> None:
    async with serving(RemotingLimits(frame_seconds=0.05)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(wire(RemotingCommand(ECHO, 8)) + b"\x00")
        assert (await receive(reader)).opaque == 8
        with pytest.raises(ConnectionError):
            await _read_to_reset(reader)
        writer.close()


async def _read_to_reset(reader: asyncio.StreamReader) -> None:
    if await reader.read() == b"":
        raise ConnectionResetError


async def test_idle_connections_are_closed() -> None:
    async with serving(RemotingLimits(idle_seconds=0.05)) as server:
        connection = await open_connection("127.0.0.1", server.port)
        gone = asyncio.Event()
        connection.on_close(lambda _: gone.set())
        await gone.wait()
        assert connection.is_closed
        connection.on_close(lambda _: gone.clear())
        assert not gone.is_set()


async def test_lost_connection_fails_waiting_requests() -> None:
    async with serving() as server:
        asked = asyncio.Event()

        def never_answer(_: Connection, command: RemotingCommand) -> Answer:
            asked.set()
            return None

        connection = await open_connection("127.0.0.1", server.port, handler=never_answer)
        waiting = asyncio.create_task(connection.invoke(RemotingCommand(ASK), 5))
        await asked.wait()
        for peer in tuple(server.connections):
            peer.abort()
        with pytest.raises(UnknownOutcome):
            await waiting
        with pytest.raises(ConnectionError):
            await connection.invoke(RemotingCommand(ECHO), 5)


async def test_connections_above_the_limit_are_refused() -> None:
    async with serving(RemotingLimits(max_connections=1)) as server:
        first = await open_connection("127.0.0.1", server.port)
        await first.invoke(RemotingCommand(ECHO), 5)
        second = await open_connection("127.0.0.1", server.port)
        gone = asyncio.Event()
        second.on_close(lambda _: gone.set())
        await gone.wait()
        assert (await first.invoke(RemotingCommand(ECHO), 5)).code == 0
        first.close()


async def test_in_flight_limit_pauses_and_resumes() -> None:
    async with serving(RemotingLimits(max_in_flight=2)) as server:
        connection = await open_connection("127.0.0.1", server.port)
        answers = await asyncio.gather(*(connection.invoke(RemotingCommand(SLOW), 5) for _ in range(200)))
        assert {answer.body for answer in answers} == {b"slow"}
        connection.close()


async def test_slow_reader_receives_all_answers() -> None:
    async with serving(RemotingLimits(write_high_water=64 * 1024)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        payload = b"x" * 200_000
        sending = asyncio.create_task(_send_many(writer, payload, 60))
        answers = [await receive(reader) for _ in range(60)]
        await sending
        assert all(answer.body == payload for answer in answers)
        writer.close()


async def test_peer_that_never_reads_is_disconnected() -> None:
    async with serving(RemotingLimits(write_high_water=64 * 1024, max_unwritten=1 << 20)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
        writer.write(wire(RemotingCommand(ECHO, 1)))
        await receive(reader)
        (connection,) = server.connections
        gone = asyncio.Event()
        connection.on_close(lambda _: gone.set())
        while not connection.is_closed:
            for _ in range(16):
                connection.send(RemotingCommand(40, flag=2, body=b"x" * 1_000_000))
            connection.flush()
            await asyncio.to_thread(len, b"")
        await gone.wait()
        writer.transport.abort()


async def _send_many(writer: asyncio.StreamWriter, payload: bytes, count: int) -> None:
    for n in range(count):
        writer.write(wire(RemotingCommand(ECHO, n, body=payload)))
        await writer.drain()


@pytest.mark.parametrize("at_once", [True, False])
async def test_resumed_request_is_answered_if_it_fails(at_once: bool) -> None:
    def held(connection: Connection, command: RemotingCommand) -> Answer:
        async def fail() -> Answer:
            raise OSError("Input/output error")

        def work() -> Answer | Awaitable[Answer]:
            if at_once:
                raise OSError("Input/output error")
            return fail()

        asyncio.get_running_loop().call_soon(connection.resume, command, work)
        return None

    server = RemotingServer(held, host="127.0.0.1", port=0)
    await server.start()
    connection = await open_connection("127.0.0.1", server.port)
    answer = await connection.invoke(RemotingCommand(ECHO), 10)
    assert (answer.code, answer.remark) == (1, "OSError: Input/output error")
    connection.close()
    await server.shutdown()


async def _hang_up_in(server: RemotingServer, code: int, stage: Stage) -> None:
    connection = await open_connection("127.0.0.1", server.port)
    connection.send_oneway(RemotingCommand(code))
    await stage.entered.wait()
    connection.abort()
    await until(lambda: not server.connections)


class Stage:
    """A handler that waits for `resume` in its middle."""

    def __init__(self) -> None:
        self.entered, self.resume = asyncio.Event(), asyncio.Event()
        self.ends: list[str] = []

    async def __call__(self, _: Connection, command: RemotingCommand) -> Answer:
        self.entered.set()
        try:
            await self.resume.wait()
        except asyncio.CancelledError:
            self.ends.append("cancelled")
            raise
        self.ends.append("done")
        return RemotingCommand.response(command, 0)


async def test_changing_request_completes_after_a_disconnect() -> None:
    routes, change, read = router(), Stage(), Stage()
    routes.register(900, change)
    routes.register(901, read, reads=True)
    server = RemotingServer(routes, reads=routes.reads, host="127.0.0.1", port=0)
    await server.start()
    await _hang_up_in(server, 900, change)
    await _hang_up_in(server, 901, read)
    await until(lambda: read.ends == ["cancelled"])
    assert change.ends == []
    stop = asyncio.create_task(server.shutdown(grace_s=30))
    await asyncio.to_thread(len, b"")
    assert not stop.done(), "a stop waits for it"
    change.resume.set()
    await stop
    assert change.ends == ["done"]


async def test_unfinished_frames_share_a_memory_limit() -> None:
    async with serving(RemotingLimits(max_unfinished=1 << 20)) as server:
        good = await open_connection("127.0.0.1", server.port)
        held = [await _unfinished(server, 100_000) for _ in range(30)]
        assert server.unfinished.bytes <= 1 << 20
        assert server.unfinished.dropped + len(server.unfinished) == 30
        assert server.unfinished.dropped >= 20
        assert (await good.invoke(RemotingCommand(ECHO, body=b"x" * 500_000), 5)).code == 0, "it is younger than they"
        reader, writer = held[-1]
        writer.write(b"x" * 9)
        assert (await receive(reader)).code == 0
        for _, writer in held:
            writer.transport.abort()
        await until(lambda: (server.unfinished.bytes, len(server.unfinished)) == (0, 0))


async def _unfinished(server: RemotingServer, size: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a frame without its last nine bytes, and wait until the server has received it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    before = server.unfinished.bytes + server.unfinished.dropped
    writer.write(wire(RemotingCommand(ECHO, body=b"x" * size))[:-9])
    await until(lambda: server.unfinished.bytes + server.unfinished.dropped != before)
    return reader, writer


async def test_bodies_of_requests_in_progress_share_a_memory_limit() -> None:
    routes, stage = router(), Stage()
    routes.register(900, stage)
    server = RemotingServer(routes, host="127.0.0.1", limits=RemotingLimits(max_unfinished=1_000_000))
    await server.start()
    connections = [await open_connection("127.0.0.1", server.port) for _ in range(3)]
    asked: list[asyncio.Task[RemotingCommand]] = []
    for number in range(6):  # sequentially, because unfinished frames have a limit of their own
        request = RemotingCommand(900, body=b"x" * 300_000)
        asked.append(asyncio.create_task(connections[number % 3].invoke(request, 30)))
        await until(lambda: asked[-1].done() or server.in_work.bytes == 300_000 * len(asked))
    assert [task.done() for task in asked] == [False, False, False, True, True, True]
    assert {task.result().code for task in asked if task.done()} == {2}
    assert server.in_work.bytes == 900_000
    small = asyncio.create_task(connections[0].invoke(RemotingCommand(900), 30))
    stage.resume.set()
    assert (await small).code == 0, "what brings no body takes no room"
    assert sorted(answer.code for answer in await asyncio.gather(*asked)) == [0, 0, 0, 2, 2, 2]
    assert stage.ends == ["done"] * 4
    assert server.in_work.bytes == 0
    await server.shutdown()


def test_buffered_pieces_count_with_their_overhead() -> None:
    decoder = FrameDecoder()
    frame = wire(RemotingCommand(ECHO, body=b"x" * 10_000))
    for value in frame[:5000]:
        decoder.receive_data(bytes([value]))
        decoder.next_bounds()
    assert decoder.held > 50 * 4000
    decoder.receive_data(frame[5000:])
    assert decoder.next_bounds() is not None
    assert not decoder.pending
    assert decoder.held == 0


async def test_long_name_in_a_remark_is_shortened() -> None:
    async with serving() as server:
        connection = await open_connection("127.0.0.1", server.port)
        answer = await connection.invoke(RemotingCommand(NAMED, ext={"topic": "x" * 1_000_000}), 5)
        assert answer.code == 17
        assert 1000 < len(answer.remark or "") < 10_000
        connection.close()


class RecordingTransport(asyncio.Transport):
    """A transport that records the data and the size of each write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.data = b""
        self.unwritten = 0
        self.reading = True
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unwritten

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.aborted = True

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        whole = b"".join(list_of_data)
        self.calls.append(len(whole))
        self.data += whole

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        self.data += b"closed"


@pytest.mark.parametrize("closed", [False, True])
async def test_wide_answer_is_sent_in_pieces_in_order(closed: bool) -> None:
    transport = RecordingTransport()
    connection = Connection(lambda _, command: None, RemotingLimits())
    connection.connection_made(transport)
    parts = [bytes((number & 0xFF,)) * 20_000 for number in range(500)]
    for part in parts:
        connection.send_raw(part)
    await until(lambda: bool(transport.calls))
    connection.send_raw(b"after")
    if closed:
        connection.close()
    await until(lambda: len(transport.data) >= 10_000_000 + len(b"after"))
    assert transport.data == b"".join((*parts, b"after", b"closed" if closed else b""))
    assert max(transport.calls) <= (1 << 20) + 20_000
    before = len(transport.calls)
    connection.send_raw(b"x" * 5_000_000)
    connection.close()
    assert transport.calls[before:] == [5_000_000], "few buffers are one write"


async def test_wide_answer_waits_for_each_piece_and_pauses_reading() -> None:
    transport = RecordingTransport()
    connection = Connection(lambda _, command: None, RemotingLimits())
    connection.connection_made(transport)
    transport.unwritten = 1 << 20
    parts = [bytes((number & 0xFF,)) * 20_000 for number in range(500)]
    for part in parts:
        connection.send_raw(part)
    await until(lambda: not transport.reading)
    for _ in range(3):
        connection.flush()
    assert transport.calls == []
    transport.unwritten = 0
    await until(lambda: len(transport.data) == 10_000_000)
    assert transport.data == b"".join(parts)
    await until(lambda: transport.reading)
    transport.unwritten = 60 << 20
    for part in parts:
        connection.send_raw(part)
    await until(lambda: transport.aborted)
