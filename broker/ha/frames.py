"""Frames of the HA port: RocketMQ's of controller mode, byte by byte, and neve's extensions.

A frame begins with a word that names its kind. RocketMQ's is the ordinal of a state (1 HANDSHAKE, 2 TRANSFER), neve's
are four letters. No state has such an ordinal, so that a stock peer closes the connection at the first of them, and
neve recognizes its peer by the first four bytes. All integers are big endian.

slave to master
  HELLO      "nevH" i32 | size i32 | crc32 of the body u32 | body: JSON, see `Hello`
  H1         1 i32 | from the last file i16 | asynchronous learner i16 | member id i64
  T1         2 i32 | end of the slave's log i64
  SYNCED     "nevS" i32 | end of the slave's log i64 | end of what is on its disk i64                 T1 after a HELLO
master to slave
  HELLO      the same
  REFUSAL    "nevR" i32 | size i32 | crc32 of the body u32 | body: JSON, see `StreamRefusal`
  H2         1 i32 | size i32 = 12 n | end of the master's log i64 | its last epoch i32, -1: none
             n times: epoch i32 | start i64, ascending
  T2         2 i32 | size i32 | offset i64 | epoch i32 | the epoch's start i64 | confirm offset i64
             bytes of the log from `offset` on; none: a heartbeat
  DESCRIBED  "nevD" i32 | and so on, as a T2 | size of the description i32                to a slave of format 2
             description of one append (`broker.store.described`), then its bytes

    slave                         master
    HELLO (between neves only)  ->
                                <-  HELLO, or REFUSAL and the end
    HELLO, with a proof (where the set has a secret)
    H1                          ->
                                <-  H2
    T1: first offset wanted     ->
                                <-  T2
    T1: end of its log          ->              ...

A slave sends a T1 after each write and every 5 s; between neves a SYNCED with the durable end, and every second. A
master sends a T2 when the log has grown and every 5 s. Both sides close the connection after 20 s of silence. The first
T1 is the request: 0 means the start of the log, or of its newest file if H1 asked for that. RocketMQ's master puts the
*next* epoch into the T2 that ends an epoch; its start is then the end of that T2.

A claimed length is checked as soon as it is received. No buffer of a merely claimed size is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from struct import Struct
from typing import Annotated, TypeVar
from zlib import crc32

import msgspec

from neve.errors import ProtocolError

FORMAT = 2  # version of the frames between neve's members; members may be one version apart
DESCRIBES_FROM = 2  # a slave of this format accepts DESCRIBED

#: Field of a master's answer to 906, neve's alone: it accepts a HELLO, of this format.
HELLO_FORMAT = "helloFormat"

HANDSHAKE, TRANSFER = 1, 2  # RocketMQ's HAConnectionState
HELLO = int.from_bytes(b"nevH")
REFUSAL = int.from_bytes(b"nevR")
SYNCED = int.from_bytes(b"nevS")
DESCRIBED = int.from_bytes(b"nevD")
assert max(HANDSHAKE, TRANSFER) < 5 < min(HELLO, REFUSAL, SYNCED, DESCRIBED), "RocketMQ has five states"

BODY_MAX = (4 << 20) - 36  # RocketMQ's slave reads a T2 into a buffer of 4 MiB
EPOCHS_MAX = 1000  # the capacity of the buffer of RocketMQ's master
_JSON_MAX = 64 << 10
_TEXT_MAX = 16 << 10

_WORD = Struct(">i")
_SIZES = Struct(">ii")
_LETTERS = Struct(">iiI")
_H1 = Struct(">ihhq")
_T1 = Struct(">iq")
_SYNCED = Struct(">iqq")
_H2 = Struct(">iiqi")
_EPOCH = Struct(">iq")
_T2 = Struct(">iiqiqq")
_DESCRIBED = Struct(">iiqiqqi")
assert (_H1.size, _T1.size, _H2.size, _EPOCH.size, _T2.size) == (16, 12, 20, 12, 36)

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
_Token = Annotated[str, msgspec.Meta(max_length=64)]
_Text = Annotated[str, msgspec.Meta(max_length=_TEXT_MAX)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Hello(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Identity of a neve member, and settings that have to match before bytes are sent. Unknown fields are ignored."""

    format: int = FORMAT
    cluster: _Name
    broker_set: _Name
    member_id: _Id
    incarnation: _Token
    starts: _Id  # number of starts of this data directory
    process: _Token  # random for each start: two copies of a directory have equal counts
    nonce: _Token  # of this connection
    answers: _Token = ""  # the nonce of the master's HELLO that this one answers; empty in the slave's first
    mapped_file_size_commit_log: _Offset
    message_delay_level: _Text
    master_epoch: int  # epoch of the master that it follows, or as which it leads
    log_uuid: _Token = ""  # set by the master: name of the log in the archive, equal on all members
    proof: _Token = ""  # proof that it knows the secret of its set, if there is one: see `proof`
    # set by the master: the log may be evicted below it, so that a new member begins there
    eviction_frontier: _Offset = 0


class StreamRefusal(msgspec.Struct, frozen=True, rename="camel"):
    """Reason why a master sends no log: a name for a metric, and a sentence for operators."""

    reason: _Name
    text: _Text = ""


class SlaveHandshake(msgspec.Struct, frozen=True):
    """H1: the slave's handshake."""

    member_id: int
    from_last_file: bool = False
    is_learner: bool = False


class SlaveAck(msgspec.Struct, frozen=True):
    """T1 or SYNCED: end of the slave's log. `synced` is the durable end; -1: not reported."""

    end: int
    synced: int = -1


class MasterHandshake(msgspec.Struct, frozen=True):
    """H2: the master's handshake. `epochs` are (epoch, start), ascending."""

    end: int
    last_epoch: int
    epochs: tuple[tuple[int, int], ...]


class Transfer(msgspec.Struct, frozen=True):
    """T2 or DESCRIBED. `body` is a view of received bytes, valid until the next call of the reader."""

    offset: int
    epoch: int
    epoch_start: int
    confirm: int
    body: memoryview
    description: memoryview | None = None


SlaveFrame = Hello | SlaveHandshake | SlaveAck
MasterFrame = Hello | StreamRefusal | MasterHandshake | Transfer

# -- writing


def encode_hello(hello: Hello) -> bytes:
    """Return a HELLO, of either side."""
    return _encode_letters(HELLO, msgspec.json.encode(hello))


def encode_refusal(refusal: StreamRefusal) -> bytes:
    """Return a REFUSAL."""
    return _encode_letters(REFUSAL, msgspec.json.encode(refusal))


def _encode_letters(word: int, body: bytes) -> bytes:
    assert len(body) <= _JSON_MAX
    return _LETTERS.pack(word, len(body), crc32(body)) + body


def encode_slave_handshake(frame: SlaveHandshake) -> bytes:
    """Return an H1."""
    return _H1.pack(HANDSHAKE, frame.from_last_file, frame.is_learner, frame.member_id)


def encode_ack(end: int, synced: int = -1) -> bytes:
    """Return a T1, or a SYNCED for a neve master if `synced` is given."""
    assert max(synced, 0) <= end
    return _T1.pack(TRANSFER, end) if synced < 0 else _SYNCED.pack(SYNCED, end, synced)


def encode_master_handshake(end: int, epochs: Iterable[tuple[int, int]]) -> bytes:
    """Return an H2, with the newest epochs if there are more than it has room for."""
    newest = list(epochs)[-EPOCHS_MAX:]
    last = newest[-1][0] if newest else -1
    head = _H2.pack(HANDSHAKE, len(newest) * _EPOCH.size, end, last)
    return head + b"".join(_EPOCH.pack(epoch, start) for epoch, start in newest)


def encode_transfer_head(size: int, offset: int, epoch: int, epoch_start: int, confirm: int) -> bytes:
    """Return the head of a T2. The master writes the body directly from its log."""
    assert 0 <= size <= BODY_MAX and offset >= 0
    return _T2.pack(TRANSFER, size, offset, epoch, epoch_start, confirm)


def encode_described_head(  # noqa: PLR0917 - as `encode_transfer_head`
    size: int, offset: int, epoch: int, epoch_start: int, confirm: int, description: bytes
) -> bytes:
    """Return the head of a DESCRIBED with the description. The body of `size` bytes follows."""
    whole = len(description) + size
    assert 0 < size < whole <= BODY_MAX and offset >= 0
    return _DESCRIBED.pack(DESCRIBED, whole, offset, epoch, epoch_start, confirm, len(description)) + description


# -- reading

_Frame = TypeVar("_Frame")
# Returns the size of the frame at a position; 0: more bytes are needed to know it. Raises ProtocolError.
_Measure = Callable[[bytes, int, int], int]
_Decode = Callable[[memoryview], _Frame]


class ReceivedBytes:
    """Buffer that splits received bytes into frames. The pieces of an incomplete frame are joined once, when it is
    complete.
    """

    __slots__ = ("_buffer", "_chunks", "_measure", "_missing", "_position")

    def __init__(self, measure: _Measure) -> None:
        self._measure = measure
        self._buffer, self._position = b"", 0
        self._chunks: list[bytes] = []
        self._missing = 0

    @property
    def held(self) -> int:
        """Return the number of bytes that belong to an incomplete frame."""
        return len(self._buffer) - self._position + sum(map(len, self._chunks))

    @property
    def is_empty(self) -> bool:
        """Return whether the buffer is empty."""
        return not self._chunks and self._position == len(self._buffer)

    def receive(self, data: bytes) -> None:
        if self._missing > len(data):
            self._chunks.append(data)
            self._missing -= len(data)
            return
        rest = self._buffer[self._position :]
        if rest or self._chunks:
            data = b"".join((rest, *self._chunks, data))
            self._chunks.clear()
        self._buffer, self._position, self._missing = data, 0, 0

    def next(self) -> memoryview | None:
        if self._missing:
            return None
        available = len(self._buffer) - self._position
        if available < _WORD.size:
            return None
        size = self._measure(self._buffer, self._position, available)
        if not size:
            return None
        if size > available:
            self._missing = size - available
            return None
        self._position += size
        return memoryview(self._buffer)[self._position - size : self._position]


class SlaveFrames:
    """Parser of a slave's frames. After a ProtocolError the connection has to be closed."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = ReceivedBytes(_measure_of_slave)

    @property
    def held(self) -> int:
        """Return the number of bytes of an incomplete frame."""
        return self._bytes.held

    def only_report(self, data: bytes) -> SlaveAck | None:
        """Return the SYNCED if the data is exactly one, which is the usual case. None: call `receive_data`."""
        if len(data) != _SYNCED.size or not self._bytes.is_empty:
            return None
        word, end, synced = _SYNCED.unpack(data)
        return SlaveAck(end, synced) if word == SYNCED and 0 <= synced <= end else None

    def receive_data(self, data: bytes) -> Iterator[SlaveFrame]:
        """Yield the frames that are complete now, one at a time. Frames before a fault are valid."""
        self._bytes.receive(data)
        while (frame := self._bytes.next()) is not None:
            yield _SLAVES[_WORD.unpack_from(frame)[0]][1](frame)


class MasterFrames:
    """Parser of a master's frames. After a ProtocolError the connection has to be closed."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = ReceivedBytes(_measure_of_master)

    @property
    def held(self) -> int:
        """Return the number of bytes of an incomplete frame."""
        return self._bytes.held

    def receive_data(self, data: bytes) -> Iterator[MasterFrame]:
        """Yield the frames that are complete now, one at a time. Frames before a fault are valid."""
        self._bytes.receive(data)
        while (frame := self._bytes.next()) is not None:
            yield _MASTERS[_WORD.unpack_from(frame)[0]][1](frame)


def _measure_of_slave(buffer: bytes, position: int, available: int) -> int:
    word = _WORD.unpack_from(buffer, position)[0]
    if word not in _SLAVES:
        raise ProtocolError(f"unknown frame of a slave: {buffer[position : position + 4]!r}")
    return _SLAVES[word][0](buffer, position, available)


def _measure_of_master(buffer: bytes, position: int, available: int) -> int:
    word = _WORD.unpack_from(buffer, position)[0]
    if word not in _MASTERS:
        raise ProtocolError(f"unknown frame of a master: {buffer[position : position + 4]!r}")
    return _MASTERS[word][0](buffer, position, available)


def _fixed(size: int) -> _Measure:
    return lambda buffer, position, available: size


def _with_body(head: Struct, most: int, whole: int = 1) -> _Measure:
    def measure(buffer: bytes, position: int, available: int) -> int:
        if available < _SIZES.size:
            return 0
        size = _SIZES.unpack_from(buffer, position)[1]
        if not 0 <= size <= most or size % whole:
            raise ProtocolError(f"a body of {size} bytes exceeds the limit of {most}")
        return head.size + int(size)

    return measure


def _decode_hello(frame: memoryview) -> Hello:
    return _decode_letters(frame, Hello)


def _decode_refusal(frame: memoryview) -> StreamRefusal:
    return _decode_letters(frame, StreamRefusal)


_Body = TypeVar("_Body", Hello, StreamRefusal)


def _decode_letters(frame: memoryview, kind: type[_Body]) -> _Body:
    _, _, crc = _LETTERS.unpack_from(frame)
    body = frame[_LETTERS.size :]
    if crc32(body) != crc:
        raise ProtocolError(f"a damaged {kind.__name__}")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a {kind.__name__} that can't be read: {error}") from error


def _decode_slave_handshake(frame: memoryview) -> SlaveHandshake:
    _, from_last_file, is_learner, member_id = _H1.unpack(frame)
    return SlaveHandshake(member_id, from_last_file == 1, is_learner == 1)


def _decode_ack(frame: memoryview) -> SlaveAck:
    end = _T1.unpack(frame)[1]
    if end < 0:
        raise ProtocolError(f"the end of a slave's log is invalid: {end}")
    return SlaveAck(end)


def _decode_synced(frame: memoryview) -> SlaveAck:
    _, end, synced = _SYNCED.unpack(frame)
    if not 0 <= synced <= end:
        raise ProtocolError(f"the end of a slave's log is invalid: {end}, {synced} of it synced")
    return SlaveAck(end, synced)


def _decode_master_handshake(frame: memoryview) -> MasterHandshake:
    _, _, end, last_epoch = _H2.unpack_from(frame)
    epochs = tuple(_EPOCH.iter_unpack(frame[_H2.size :]))
    ascend = all(low[0] < high[0] and low[1] <= high[1] for low, high in pairwise(epochs))
    if end < 0 or not ascend or any(epoch < 0 or start < 0 for epoch, start in epochs):
        raise ProtocolError(f"the epochs of the master are invalid: {epochs[-3:]}, end {end}")
    return MasterHandshake(end, last_epoch, epochs)


def _decode_transfer(frame: memoryview) -> Transfer:
    _, size, offset, epoch, epoch_start, confirm = _T2.unpack_from(frame)
    if size and offset < 0:
        raise ProtocolError(f"invalid transfer: {size} bytes at {offset}")
    return Transfer(offset, epoch, epoch_start, confirm, frame[_T2.size :])


def _decode_described(frame: memoryview) -> Transfer:
    _, size, offset, epoch, epoch_start, confirm, described = _DESCRIBED.unpack_from(frame)
    if offset < 0 or not 0 < described < size:
        raise ProtocolError(f"invalid transfer: {size} bytes at {offset}, {described} of them a description")
    body_at = _DESCRIBED.size + described
    return Transfer(offset, epoch, epoch_start, confirm, frame[body_at:], frame[_DESCRIBED.size : body_at])


_SLAVES: dict[int, tuple[_Measure, _Decode[SlaveFrame]]] = {
    HELLO: (_with_body(_LETTERS, _JSON_MAX), _decode_hello),
    HANDSHAKE: (_fixed(_H1.size), _decode_slave_handshake),
    TRANSFER: (_fixed(_T1.size), _decode_ack),
    SYNCED: (_fixed(_SYNCED.size), _decode_synced),
}
_MASTERS: dict[int, tuple[_Measure, _Decode[MasterFrame]]] = {
    HELLO: (_with_body(_LETTERS, _JSON_MAX), _decode_hello),
    REFUSAL: (_with_body(_LETTERS, _JSON_MAX), _decode_refusal),
    HANDSHAKE: (_with_body(_H2, EPOCHS_MAX * _EPOCH.size, _EPOCH.size), _decode_master_handshake),
    TRANSFER: (_with_body(_T2, BODY_MAX), _decode_transfer),
    DESCRIBED: (_with_body(_DESCRIBED, BODY_MAX), _decode_described),
}
