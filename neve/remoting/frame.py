"""Cutting a byte stream into frames.

0        4                      4 + length
+--------+----------------------+
| length | mark, header, body   |   big endian; `length` counts what follows it
+--------+----------------------+
  i32      mark: u8 serialize type, u24 header length
"""

from __future__ import annotations

from struct import Struct

from neve.errors import ProtocolError

MAX_FRAME = 16 * 1024 * 1024
LENGTH_SIZE = 4
MARK_SIZE = 4
MAX_HEADER = (1 << 24) - 1  # what the mark can say; a frame ends it before
# What a received piece of an unfinished frame costs beside its bytes.
_CHUNK_COST = 64
# `unpack_from` makes no slice: half the time of `int.from_bytes` for each frame.
_length_at = Struct(">i").unpack_from
_mark_at = Struct(">I").unpack_from
# The first bytes of a TLS record: its type, and the major version.
_TLS_HANDSHAKE, _TLS_ALERT = 0x1603, 0x1503
_HTTP = (b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI")


class FrameDecoder:
    """Collects what a connection receives and hands out whole frames.

    Lengths are refused as soon as their bytes are there, and no buffer of a merely claimed size is ever made.
    """

    __slots__ = ("_chunked", "_chunks", "_limit", "_missing", "_position", "buffer", "taken")

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self.buffer = b""
        self._position = 0
        self._chunks: list[bytes] = []  # parts of an unfinished frame, joined once when it is complete
        self._chunked = 0
        self._missing = 0
        self.taken = 0  # frames so far

    @property
    def pending(self) -> bool:
        """Whether bytes were received that belong to no finished frame."""
        return self._missing > 0 or len(self.buffer) > self._position

    @property
    def held(self) -> int:
        """Bytes of memory that an unfinished frame takes."""
        return len(self.buffer) + self._chunked if self.pending else 0

    def receive_data(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        if self._missing > len(data):
            self._chunks.append(data)
            self._chunked += len(data) + _CHUNK_COST
            self._missing -= len(data)
            return
        rest = self.buffer[self._position :]
        if rest or self._chunks:
            data = b"".join((rest, *self._chunks, data))
            self._chunks.clear()
            self._chunked = 0
        self._missing = 0
        self._position = 0
        self.buffer = data

    def next_frame(self) -> memoryview | None:
        """The next whole frame without its length, or None until more bytes arrive."""
        bounds = self.next_bounds()
        return None if bounds is None else memoryview(self.buffer)[bounds[0] : bounds[1]]

    def next_bounds(self) -> tuple[int, int] | None:
        """Start and end of the next whole frame in `buffer`; the frame counts as taken."""
        if self._missing:
            return None
        start = self._position + LENGTH_SIZE
        available = len(self.buffer) - start
        if available < 0:
            if self._position and self._position == len(self.buffer):
                self.buffer, self._position = b"", 0  # an idle connection holds no memory
            return None
        (length,) = _length_at(self.buffer, self._position)
        if length < MARK_SIZE or length > self._limit:
            raise ProtocolError(_not_a_frame(length) or f"frame length {length} is outside 4..{self._limit}")
        if available < length:
            if available >= MARK_SIZE:
                check_mark(self.buffer, start, length)
            self._missing = length - available
            return None
        self._position = end = start + length
        self.taken += 1
        return start, end

    def put_back(self, buffer: bytes, start: int, count: int = 1) -> None:
        """Give the frames that were taken last out of `buffer` again, the first of which begins here."""
        self.buffer, self._position, self._missing = buffer, start - LENGTH_SIZE, 0
        self.taken -= count


def check_mark(buffer: memoryview | bytes, position: int, frame_length: int) -> tuple[int, int]:
    """Serialize type and header length out of the mark word at a position, if the frame can hold the header."""
    (mark,) = _mark_at(buffer, position)
    length = mark & 0xFFFFFF
    if length > frame_length - MARK_SIZE:
        raise ProtocolError(f"header length {length} in a frame of {frame_length}")
    return mark >> 24, length


def _not_a_frame(length: int) -> str | None:
    """Name the protocol whose first four bytes were read as a length; None: unknown."""
    if length >> 16 == _TLS_HANDSHAKE:
        return "a TLS handshake on a plain-text connection: the server has no tlsCertPath, or tlsServerMode=disabled"
    if length >> 16 == _TLS_ALERT:
        return "a TLS alert: the server accepts TLS connections only"
    if length >= 0 and length.to_bytes(4, "big") in _HTTP:
        return "an HTTP request: this port speaks RocketMQ's Remoting protocol"
    return None
