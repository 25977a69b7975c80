"""The links between members, controller, name server and clients: a TCP proxy whose directions are cut one by one.

    connecting peer ──▶ a face (its own address on loopback) ──▶ the server behind it

Controller and name server have one face for each peer, so a face identifies its peer. A member has one face, whose
address it announces to all; the peer of a connection is identified by the process that owns the other end.

A cut direction accepts no further bytes. Bytes that it has accepted, or that wait in the kernel, arrive after the
healing: late, as over a network that lost the packets and retransmits them. Or the healing breaks these connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

_CHUNK = 64 << 10
_BACKLOG = 128
_ESTABLISHED = "01"
_CONNECT_S = 5.0

Direction = tuple[str, str]  # (source, target)
Owners = Callable[[], Iterable[tuple[str, int]]]


class Links:
    """All links. `owners` returns the names of the peers that connect to members, with the ids of their processes."""

    def __init__(self, owners: Owners, chance: random.Random) -> None:
        self._owners, self._chance = owners, chance
        self._cut: set[Direction] = set()
        self._healed: dict[Direction, asyncio.Event] = defaultdict(asyncio.Event)
        self._servers: list[asyncio.Server] = []
        self._connections: set[_Connection] = set()
        self._carrying: set[asyncio.Task[None]] = set()
        self.unknown = 0  # Connections whose owner is unknown.

    async def face(self, host: str, port: int, server: tuple[str, int], to: str, source: str = "") -> int:
        """Listen in front of a server for `source`, or for any peer; return the port, which 0 leaves to the system."""

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            name: str | None = source
            if not source:
                name = await asyncio.to_thread(owner, writer.get_extra_info("peername"), self._owners())
            if not name:
                self.unknown += name is not None
                writer.transport.abort()
                return
            connection = _Connection(self, name, to, reader, writer)
            self._connections.add(connection)
            try:
                await connection.run(server)
            finally:
                self._connections.discard(connection)

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(carry(reader, writer))
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)

        listening = await asyncio.start_server(accept, host, port, limit=_CHUNK, backlog=_BACKLOG)
        self._servers.append(listening)
        return int(listening.sockets[0].getsockname()[1])

    def cut(self, directions: Iterable[Direction]) -> None:
        """Cut these directions."""
        for direction in directions:
            self._cut.add(direction)
            self._healed[direction].clear()

    def heal(self, directions: Iterable[Direction] | None = None, *, breaks: bool = False) -> None:
        """Heal all or these links. `breaks`: break their connections instead of delivering the held bytes."""
        healed = set(self._cut if directions is None else directions)
        if breaks:
            self.break_off(healed)
        self._cut -= healed
        for direction in healed:
            self._healed[direction].set()

    def break_off(self, directions: Iterable[Direction]) -> None:
        """Reset the connections between these peers; they may reconnect."""
        wanted = set(directions)
        for connection in list(self._connections):
            if not wanted.isdisjoint((connection.towards, connection.back)):
                connection.abort()

    def is_cut(self, direction: Direction) -> bool:
        return direction in self._cut

    async def opened(self, direction: Direction) -> None:
        """Wait until the link is not cut."""
        while direction in self._cut:
            await self._healed[direction].wait()

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._carrying:
            task.cancel()
        ended = await asyncio.gather(*self._carrying, return_exceptions=True)
        for server in self._servers:
            await server.wait_closed()
        faults = [one for one in ended if isinstance(one, Exception)]
        if faults:
            raise ExceptionGroup("links failed", faults)


class _Connection:
    """A connection with its two directions."""

    def __init__(
        self, links: Links, source: str, to: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._links = links
        self.towards, self.back = (source, to), (to, source)
        self._reader, self._writer = reader, writer
        self._server: asyncio.StreamWriter | None = None
        self._task = asyncio.current_task()

    async def run(self, server: tuple[str, int]) -> None:
        try:
            await self._links.opened(self.towards)  # The first packet does not arrive earlier.
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(*server, limit=_CHUNK)
        except (OSError, TimeoutError):
            self._writer.transport.abort()
            return
        self._server = writer
        for one in (self._writer, writer):
            one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pumps = [
            asyncio.ensure_future(self._pump(self.towards, self._reader, writer)),
            asyncio.ensure_future(self._pump(self.back, reader, self._writer)),
        ]
        try:
            await asyncio.gather(*pumps)
        finally:
            for pump in pumps:
                pump.cancel()
            self._writer.transport.abort()
            writer.transport.abort()

    async def _pump(self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward until the sender closes, then close the receiver's side, which ends the other direction."""
        with contextlib.suppress(OSError):
            while True:
                await self._links.opened(direction)
                data = await reader.read(_CHUNK)
                await self._links.opened(direction)
                if not data:
                    break
                writer.write(data)
                await writer.drain()
        writer.close()

    def abort(self) -> None:
        """Reset both ends at once."""
        self._writer.transport.abort()
        if self._server is not None:
            self._server.transport.abort()
        if self._task is not None:
            self._task.cancel()


def owner(peer: tuple[str, int], owners: Iterable[tuple[str, int]]) -> str | None:
    """Return the name of the process that has the other end of a connection from this machine.

    Return "" if it is none of them, None if that end is closed.
    """
    inode = _inode(peer)
    if not inode:
        return None
    return next((name for name, pid in owners if _has_socket(pid, inode)), "")


def _inode(peer: tuple[str, int]) -> str:
    host, port = peer
    local = "".join(f"{part:02X}" for part in reversed(socket.inet_aton(host))) + f":{port:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1] == local and fields[3] == _ESTABLISHED:
            return fields[9]
    return ""


def _has_socket(pid: int, inode: str) -> bool:
    wanted = f"socket:[{inode}]"
    try:
        return any(_target(entry) == wanted for entry in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def _target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except OSError:
        return ""
