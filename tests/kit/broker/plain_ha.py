"""A master that speaks RocketMQ's replication without epochs."""

from __future__ import annotations

import asyncio
from struct import Struct

from msgspec.structs import replace

from broker.ha.stock_master import MasterLife, StockMaster
from broker.store.message_store import MessageStore
from neve.errors import NeveError
from tests.kit.clock.waiting import until

LIFE = MasterLife("c", "b", 1_700_000_000_000, 500)
SETTINGS = {
    "brokerClusterName": "c",
    "brokerName": "b",
    "brokerId": "0",
    "brokerRole": "ASYNC_MASTER",
    "mappedFileSizeCommitLog": str(1 << 20),
    "messageDelayLevel": "1s 5s",
    "enableDLegerCommitLog": "false",
}


_REPORT, _HEAD = Struct(">q"), Struct(">qi")
_BATCH = 1000  # small, so that records arrive in pieces


class PlainMaster:
    """RocketMQ's DefaultHAConnection over a neve log: no checks, no epochs, and 0 asks for the newest file."""

    def __init__(self, store: MessageStore, file_size: int) -> None:
        self.store, self.file_size = store, file_size
        self.boot_ms, self.end_at_start = 1, store.max_physical_offset
        self.acks: list[int] = []
        self.asked = 0
        self.is_dumb = False
        self._connections = 0
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop, and close all connections."""
        assert self._server is not None
        self._server.close()
        self.boot_ms = -1
        await until(lambda: not self._connections)

    async def restart(self, store: MessageStore) -> None:
        """Start the next incarnation at the same port, with the remaining part of the log."""
        boot_ms = self.boot_ms
        await self.stop()
        self.store, self.boot_ms, self.end_at_start = store, boot_ms + 1, store.max_physical_offset
        await self.start()

    def says(self) -> StockMaster:
        self.asked += 1
        if self.is_dumb:
            raise NeveError(None, "busy")
        store = self.store
        return StockMaster(
            life=replace(LIFE, boot_ms=self.boot_ms, end_at_start=self.end_at_start),
            begin=store.min_physical_offset,
            end=store.max_physical_offset,
            ha_address="",
            settings=SETTINGS | {"mappedFileSizeCommitLog": str(self.file_size)},
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        acks = asyncio.create_task(self._hear(reader))
        try:
            await until(lambda: bool(self.acks) or acks.done())
            if not self.acks:
                return  # disconnected before it sent its offset
            life, at, end = self.boot_ms, self.acks[-1], self.store.max_physical_offset
            at = at or end - end % self.file_size

            def is_over() -> bool:
                return acks.done() or life != self.boot_ms

            while not is_over():
                at, data = self.store.log_bytes(at, 1 << 62, _BATCH, padding=True)
                writer.write(_HEAD.pack(at, len(data)) + data)
                at += len(data)
                await writer.drain()
                if not data:
                    await until(lambda at=at: is_over() or self.store.max_physical_offset > at)  # type: ignore[misc]
        except OSError:
            pass  # the slave has gone
        finally:
            acks.cancel()
            writer.close()
            self._connections -= 1
            self.acks.clear()

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        while len(report := await reader.read(_REPORT.size)) == _REPORT.size:
            self.acks += _REPORT.unpack(report)
