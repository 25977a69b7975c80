"""A client's end of a connection: requests are sent as bytes, answers are received as commands, without delay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

from neve.remoting.codes import RequestCode
from neve.remoting.command import RemotingCommand, decode_command, encode_command
from neve.remoting.frame import FrameDecoder
from tests.simulation.messaging.loop import SimLoop

Answered = Callable[[RemotingCommand], None]


class SimulatedClient:
    """One connection. `asked` gets the broker's own requests."""

    def __init__(self, loop: SimLoop, port: int, asked: Answered) -> None:
        self._loop, self._asked = loop, asked
        self._decoder = FrameDecoder()
        self._waiting: dict[int, Answered] = {}
        self._opaque = 0
        self.is_closed = False
        self._protocol: asyncio.Protocol
        loop.call_soon(self._connect, port)

    def _connect(self, port: int) -> None:
        self._protocol = self._loop.ports[port]()
        self._protocol.connection_made(cast("asyncio.Transport", self))

    def ask(self, code: RequestCode, answered: Answered, body: bytes = b"", **ext: object) -> None:
        self._opaque += 1
        request = RemotingCommand(code, opaque=self._opaque, ext={k: str(v) for k, v in ext.items()}, body=body)
        self._waiting[self._opaque] = answered
        self._loop.call_soon(self._deliver, b"".join(encode_command(request)))

    def _deliver(self, data: bytes) -> None:
        if not self.is_closed:
            self._protocol.data_received(data)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # ---- the broker's transport

    def write(self, data: bytes) -> None:
        if self.is_closed:
            return
        self._decoder.receive_data(bytes(data))
        while (bounds := self._decoder.next_bounds()) is not None:
            command = decode_command(self._decoder.buffer, *bounds)
            if not command.flag & 1:
                self._asked(command)
            elif (answered := self._waiting.pop(command.opaque, None)) is not None:
                answered(command)

    def writelines(self, parts: Sequence[bytes]) -> None:
        self.write(b"".join(parts))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("10.0.0.1", 4000) if name == "peername" else default

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._loop.call_soon(self._protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: the buffer never fills."""

    def pause_reading(self) -> None:
        """Do nothing: sent bytes have been read already."""

    def resume_reading(self) -> None:
        """Do nothing: reading never paused."""
