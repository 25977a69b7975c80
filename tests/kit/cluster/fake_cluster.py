"""A fake name server and brokers in the event loop of the test, with answers from a function."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from neve.remoting.body import dumps
from neve.remoting.command import RemotingCommand, decode_command, encode_command
from neve.remoting.frame import FrameDecoder

Said = tuple[int, dict[str, str], bytes]  # code, fields, body
Answer = Said | None  # None: no answer
Handler = Callable[[RemotingCommand], Answer]
_HEARTBEATS = (34, 35)
DEADLINE_S = 10


class FakeServer:
    """Answers requests by `handler`, and records them."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.requests: list[RemotingCommand] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.address = ""
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self.writers:
            writer.close()

    def codes(self) -> list[int]:
        return [request.code for request in self.requests]

    def push(self, command: RemotingCommand) -> None:
        for writer in self.writers:
            writer.write(b"".join(encode_command(command)))

    def reply(self, request: RemotingCommand, code: int, ext: dict[str, str], body: bytes = b"") -> None:
        self.push(RemotingCommand.response(request, code, "because", ext, body))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        decoder = FrameDecoder()
        while data := await reader.read(65536):
            decoder.receive_data(data)
            while (frame := decoder.next_frame()) is not None:
                request = decode_command(frame)
                self.requests.append(request)
                if request.is_response or request.is_oneway:
                    continue
                answer = self.handler(request)
                if answer is not None:
                    code, ext, body = answer
                    response = RemotingCommand.response(request, code, "because", ext, body)
                    writer.write(b"".join(encode_command(response)))


def send_ok(request: RemotingCommand) -> Said:
    """Store every message at offset 7, and accept every heartbeat."""
    return 0, {"msgId": "ID", "queueId": request.ext.get("e", "0"), "queueOffset": "7"}, b""


def refuse(code: int) -> Handler:
    """Return a handler that accepts heartbeats and refuses everything else with `code`."""
    return lambda request: (0 if request.code in _HEARTBEATS else code, {}, b"")


def silent(request: RemotingCommand) -> Answer:
    """Accept heartbeats, and answer nothing else."""
    return (0, {}, b"") if request.code in _HEARTBEATS else None


def sends(server: FakeServer) -> list[RemotingCommand]:
    """Return the send and batch requests that the server has received."""
    return [request for request in server.requests if request.code in (310, 320)]


class FakeCluster:
    """A name server that reports one queue of every topic on each broker."""

    def __init__(self, *handlers: Handler) -> None:
        self.brokers = [FakeServer(handler) for handler in handlers or (send_ok,)]
        self.namesrv = FakeServer(self._route)
        self.unknown_topics: set[str] = set()

    def _route(self, request: RemotingCommand) -> Answer:
        if request.ext.get("topic") in self.unknown_topics:
            return 17, {}, b""
        names = [f"b{number}" for number in range(len(self.brokers))]
        route = {
            "brokerDatas": [
                {"brokerName": name, "cluster": "c", "brokerAddrs": {"0": broker.address}}
                for name, broker in zip(names, self.brokers, strict=True)
            ],
            "queueDatas": [{"brokerName": n, "perm": 6, "readQueueNums": 1, "writeQueueNums": 1} for n in names],
        }
        return 0, {}, dumps(route)


@asynccontextmanager
async def running(*handlers: Handler) -> AsyncIterator[FakeCluster]:
    """Run one broker per handler, or one that stores everything."""
    cluster = FakeCluster(*handlers)
    servers = [cluster.namesrv, *cluster.brokers]
    for server in servers:
        await server.start()
    try:
        yield cluster
    finally:
        for server in servers:
            await server.stop()


def run(work: Callable[[], Awaitable[None]]) -> None:
    """Run a test in a new event loop with a time limit."""

    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await work()

    asyncio.run(limited())
