"""Split a byte stream into frames.

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
MAX_HEADER = (1 << 24) - 1  # the limit of the mark; MAX_FRAME is lower
# Memory overhead of a received piece of an incomplete frame.
_CHUNK_COST = 64
# `unpack_from` makes no slice, so it takes half the time of `int.from_bytes`.
_length_at = Struct(">i").unpack_from
_mark_at = Struct(">I").unpack_from
# The first bytes of a TLS record: its type and the major version.
_TLS_HANDSHAKE, _TLS_ALERT = 0x1603, 0x1503
_HTTP = (b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI")


class FrameDecoder:
    """Collects the received bytes of a connection and returns complete frames.

    An invalid length is refused as soon as its bytes arrive. No buffer is allocated for an announced size.
    """

    __slots__ = ("_chunked", "_chunks", "_limit", "_missing", "_position", "buffer", "taken")

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self.buffer = b""
        self._position = 0
        self._chunks: list[bytes] = []  # parts of an incomplete frame, joined once it is complete
        self._chunked = 0
        self._missing = 0
        self.taken = 0  # frames returned so far

    @property
    def pending(self) -> bool:
        """Whether an incomplete frame was received."""
        return self._missing > 0 or len(self.buffer) > self._position

    @property
    def held(self) -> int:
        """The memory of an incomplete frame in bytes."""
        return len(self.buffer) + self._chunked if self.pending else 0

    def receive_data(self, data: bytes) -> None:
        """Add the next bytes of the stream."""
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
        """Return the next complete frame without its length; None until more bytes arrive. Raises ProtocolError."""
        bounds = self.next_bounds()
        return None if bounds is None else memoryview(self.buffer)[bounds[0] : bounds[1]]

    def next_bounds(self) -> tuple[int, int] | None:
        """Return start and end of the next complete frame in `buffer`, and consume it. Raises ProtocolError."""
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
        """Return the last `count` frames to the decoder; the first of them begins at `start` in `buffer`."""
        self.buffer, self._position, self._missing = buffer, start - LENGTH_SIZE, 0
        self.taken -= count


def check_mark(buffer: memoryview | bytes, position: int, frame_length: int) -> tuple[int, int]:
    """Return serialize type and header length of the mark at a position.

    Raises:
        ProtocolError: the header exceeds the frame.
    """
    (mark,) = _mark_at(buffer, position)
    length = mark & 0xFFFFFF
    if length > frame_length - MARK_SIZE:
        raise ProtocolError(f"header length {length} in a frame of {frame_length}")
    return mark >> 24, length


def _not_a_frame(length: int) -> str | None:
    """Describe the protocol whose first four bytes were decoded as a length; None if it is unknown."""
    if length >> 16 == _TLS_HANDSHAKE:
        return "a TLS handshake on a plain-text connection: the server has no tlsCertPath, or tlsServerMode=disabled"
    if length >> 16 == _TLS_ALERT:
        return "a TLS alert: the server accepts TLS connections only"
    if length >= 0 and length.to_bytes(4, "big") in _HTTP:
        return "an HTTP request: this port speaks RocketMQ's Remoting protocol"
    return None
