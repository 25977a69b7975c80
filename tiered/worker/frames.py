"""Messages between a broker and its tier workers, over a socketpair.

    u32 length of the message | u8 number of file descriptors (0 or 1) | message, msgpack

Large arrays are not in the message, but in a memfd whose descriptor is sent with the head.

    memfd of EncodeUpload:  physical i64[n] | size i32[n]                of all objects, each in order of its `runs`
    memfd of ReadGroup:     positions i64[n + 1] | offsets i64[n] | tags i64[n] | times i64[n] | wire
                            filled by the worker; the memfd may be larger
"""

import fcntl
import os
import socket
import struct

import msgspec

from neve.archive.format.journal import CommittedObject, PlannedObject

_HEAD = struct.Struct(">IB")


class ObjectToWrite(msgspec.Struct):
    """A name, and the runs of its rows."""

    name: PlannedObject
    runs: list[tuple[int, int, int]]  # queue, first offset, count; in order of the queues


class EncodeUpload(msgspec.Struct, tag="encode_upload"):
    """Request to the encoder: read the runs from the log files, write the objects, and upload those that are absent.

    `files` are path, first CommitLog offset and length. `work_dir` has large objects while they are made. Answer:
    Uploaded.
    """

    id: int
    store_url: str
    objects: list[ObjectToWrite]
    files: list[tuple[str, int, int]]
    metadata: dict[str, str]
    work_dir: str


class Compact(msgspec.Struct, tag="compact"):
    """Request to the encoder: write the rows of `inputs`, without those `below` and `erased`, and upload the object.

    `work_dir` has the copies of the inputs and the object while it is made. Answer: Compacted.
    """

    id: int
    store_url: str
    name: PlannedObject
    inputs: list[CommittedObject]
    below: dict[int, int]  # queue -> offset
    erased: dict[int, list[tuple[int, int]]]  # queue -> first, last
    metadata: dict[str, str]
    work_dir: str


class GiveUp(msgspec.Struct, tag="give_up"):
    """Notice to the encoder: cancel uploads of requests up to this id that have not begun. No answer."""

    through: int


class SetUploadRate(msgspec.Struct, tag="set_upload_rate"):
    """Notice of the upload rate. No answer."""

    bytes_per_second: int


class ReadGroup(msgspec.Struct, tag="read_group"):
    """Request to the reader: fetch row group `index` of an object, `length` bytes at `offset`, and rebuild its records.

    The records and their positions are written into the memfd of the request. Answer: GroupRead.
    """

    id: int
    store_url: str
    key: str
    topic: str
    size: int
    footer: int
    index: int
    offset: int
    length: int
    wire_bytes: int
    runs: list[tuple[int, int, int]]  # queue, first and last offset in the row group, by the journal
    keep: bool  # whether to add it to the disk cache; the cache is read in any case


class AskFilters(msgspec.Struct, tag="ask_filters"):
    """Request for the row groups that may have a word, by their bloom filters. Answer: MayHold."""

    id: int
    store_url: str
    key: str
    size: int
    footer: int
    groups: list[int]
    word: bytes


class AskBounds(msgspec.Struct, tag="ask_bounds"):
    """Request for the row groups that may have the record at a CommitLog offset, by statistics. Answer: MayHold."""

    id: int
    store_url: str
    key: str
    size: int
    footer: int
    groups: list[int]
    physical_offset: int


class ObjectParts(msgspec.Struct):
    """The places of an object's footer and row groups."""

    key: str
    size: int
    footer: int
    groups: list[tuple[int, int]]  # start, length


class ForgetObjects(msgspec.Struct, tag="forget"):
    """Request to the reader: remove objects from the caches. Answer: Forgotten."""

    id: int
    store_url: str
    objects: list[ObjectParts]


class RemoveStaleUploads(msgspec.Struct, tag="remove_stale_uploads"):
    """Request to the encoder: abort unfinished uploads of the broker's dead workers. Answer: StaleRemoved."""

    id: int
    store_url: str
    broker: str


class Committed(msgspec.Struct, tag="committed"):
    """The object is complete in the store, possibly by an earlier attempt: its name as COMMIT publishes it."""

    name: CommittedObject
    wire_rows: int  # rows of the object that need the column `wire`
    damaged_rows: int


class NotUploaded(msgspec.Struct, tag="not_uploaded"):
    """The reason why there is no object: the exception's class name and text, raised again in the broker."""

    kind: str
    message: str


class Uploaded(msgspec.Struct, tag="uploaded"):
    """The outcome of each object of an EncodeUpload, in its order."""

    id: int
    outcomes: list[Committed | NotUploaded]
    waited: float  # seconds for which the rate delayed the uploads, summed


class Compacted(msgspec.Struct, tag="compacted"):
    """The merged object is complete in the store: its name as REPLACE publishes it."""

    id: int
    name: CommittedObject
    waited: float  # seconds for which the rate delayed the upload


class GiveUpCompaction(msgspec.Struct, tag="give_up_compaction"):
    """Notice that the broker stops: compactions in progress and later ones fail. No answer."""


class GroupRead(msgspec.Struct, tag="group_read"):
    """The row group is in the memfd of the request."""

    id: int
    rows: int
    wire_bytes: int
    fetched: int  # bytes from the store
    cached: int  # bytes from the disk cache


class MayHold(msgspec.Struct, tag="may_hold"):
    """The row groups that may have a match, and the bytes that were read for the answer."""

    id: int
    groups: list[int]
    fetched: int
    cached: int


class Forgotten(msgspec.Struct, tag="forgotten"):
    """The objects are no longer in the caches."""

    id: int


class StaleRemoved(msgspec.Struct, tag="stale_removed"):
    """The number of aborted uploads."""

    id: int
    count: int


class Failed(msgspec.Struct, tag="failed"):
    """A failed request: the exception's class name and text, raised again in the broker."""

    id: int
    kind: str  # the exception's class name
    message: str


Request = EncodeUpload | Compact | ReadGroup | AskFilters | AskBounds | ForgetObjects | RemoveStaleUploads
Message = Request | SetUploadRate | GiveUp | GiveUpCompaction
Answered = Uploaded | Compacted | GroupRead | MayHold | Forgotten | StaleRemoved
Reply = Answered | Failed

_encoder = msgspec.msgpack.Encoder()
decode_message: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
decode_reply: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class PeerDisconnected(ConnectionError):
    """The peer closed the connection, or died in the middle of a message."""


def send(sock: socket.socket, message: Message | Reply, descriptor: int | None = None) -> None:
    """Send a message. Only one thread at a time: the caller locks."""
    payload = _encoder.encode(message)
    descriptors = [] if descriptor is None else [descriptor]
    head = _HEAD.pack(len(payload), len(descriptors))
    if descriptors:
        socket.send_fds(sock, [head], descriptors)
    else:
        sock.sendall(head)
    sock.sendall(payload)


def receive(sock: socket.socket) -> tuple[bytes, int | None]:
    """Return the next message and its descriptor, which the caller closes. Raises PeerDisconnected."""
    head, descriptors, _, _ = socket.recv_fds(sock, _HEAD.size, 1)
    descriptor = descriptors[0] if descriptors else None
    try:
        head += _exactly(sock, _HEAD.size - len(head)) if head else b""
        if not head:
            raise PeerDisconnected("the peer closed the connection")
        length, _ = _HEAD.unpack(head)
        return _exactly(sock, length), descriptor
    except PeerDisconnected:
        if descriptor is not None:
            os.close(descriptor)
        raise


def receive_reply(sock: socket.socket) -> bytes:
    """Return the next message of a worker. Raises PeerDisconnected.

    Workers send no descriptors; the kernel closes any.
    """
    length, _ = _HEAD.unpack(_exactly(sock, _HEAD.size))
    return _exactly(sock, length)


def _exactly(sock: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        part = sock.recv(min(length - len(received), 1 << 20))
        if not part:
            raise PeerDisconnected("the peer ended in the middle of a message")
        received += part
    return bytes(received)


def size_of_group(rows: int, wire_bytes: int) -> int:
    """Return the size of the memfd of ReadGroup in bytes."""
    return 8 * (4 * rows + 1) + wire_bytes


def fill(descriptor: int, parts: list[memoryview]) -> None:
    """Write these parts one after another into a memfd of sufficient size. Raises OSError if it is too small."""
    rest, position = [part.cast("B") for part in parts if part.nbytes], 0
    while rest:
        written = os.pwritev(descriptor, rest, position)
        position += written
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][written:]


def shared(parts: list[memoryview]) -> int:
    """Return a sealed memfd with these parts one after another, which no process can change or shrink."""
    descriptor = os.memfd_create("neve-tier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for part in parts:
            rest = part.cast("B")
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
