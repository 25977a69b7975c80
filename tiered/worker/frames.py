"""What a broker and its tier workers say to each other, over a socketpair.

    u32 length of the message | u8 number of file descriptors (0 or 1) | message, msgpack

Big arrays never travel in the message: they lie in a memfd whose descriptor rides along with the head.

    memfd of EncodeUpload:  physical i64[n] | size i32[n]                of all objects, each in order of its `runs`
    memfd of ReadGroup:     positions i64[n + 1] | offsets i64[n] | tags i64[n] | times i64[n] | wire
                            which the worker fills; it may be larger than that
"""

import fcntl
import os
import socket
import struct

import msgspec

from neve.archive.format.journal import CommittedObject, PlannedObject

_HEAD = struct.Struct(">IB")


class ObjectToWrite(msgspec.Struct):
    """A name, and where its rows are to be found."""

    name: PlannedObject
    runs: list[tuple[int, int, int]]  # queue, first offset, count; in order of the queues


class EncodeUpload(msgspec.Struct, tag="encode_upload"):
    """To the encoder: read the runs out of the log files, write the objects, upload each if it is absent.

    `files` are path, first CommitLog offset and length; `work_dir` holds a large object while it is made. Answer:
    Uploaded.
    """

    id: int
    store_url: str
    objects: list[ObjectToWrite]
    files: list[tuple[str, int, int]]
    metadata: dict[str, str]
    work_dir: str


class Compact(msgspec.Struct, tag="compact"):
    """To the encoder: read `inputs`, write their rows but those `below` and `erased` as the object `name`, upload it.

    `work_dir` holds copies of them and the object while it is made. Answer: Compacted.
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
    """To the encoder: what was asked for up to this request, and is not on its way, is not uploaded. No answer."""

    through: int


class SetUploadRate(msgspec.Struct, tag="set_upload_rate"):
    """No answer follows."""

    bytes_per_second: int


class ReadGroup(msgspec.Struct, tag="read_group"):
    """To the reader: fetch row group `index` of an object, `length` bytes at `offset`, and rebuild its records.

    They and their positions go into the memfd that rides along. Answer: GroupRead.
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
    runs: list[tuple[int, int, int]]  # queue, first and last offset that the journal says are in the row group
    keep: bool  # in the disk cache; what is there already answers in any case


class AskFilters(msgspec.Struct, tag="ask_filters"):
    """Which of these row groups may hold a word, by their bloom filters."""

    id: int
    store_url: str
    key: str
    size: int
    footer: int
    groups: list[int]
    word: bytes


class AskBounds(msgspec.Struct, tag="ask_bounds"):
    """Which of these row groups may hold the record from a place in the log, by their statistics."""

    id: int
    store_url: str
    key: str
    size: int
    footer: int
    groups: list[int]
    physical_offset: int


class StoredObject(msgspec.Struct):
    """Where in an object its footer and its row groups lie."""

    key: str
    size: int
    footer: int
    groups: list[tuple[int, int]]  # start, length


class Forget(msgspec.Struct, tag="forget"):
    """To the reader: these objects leave its caches. Answer: Forgotten."""

    id: int
    store_url: str
    objects: list[StoredObject]


class RemoveStaleUploads(msgspec.Struct, tag="remove_stale_uploads"):
    """To the encoder: abort uploads that this broker's dead workers left. Answer: StaleRemoved."""

    id: int
    store_url: str
    broker: str


class Committed(msgspec.Struct, tag="committed"):
    """The object is in the store whole, or was there already with the same content: its name as COMMIT publishes it."""

    name: CommittedObject
    wire_rows: int  # of `name.rows`: those that are kept whole
    damaged_rows: int


class NotUploaded(msgspec.Struct, tag="not_uploaded"):
    """Why there is no object: the exception's class name and text, raised again on the broker's side."""

    kind: str
    message: str


class Uploaded(msgspec.Struct, tag="uploaded"):
    """What became of each object of an EncodeUpload, in its order."""

    id: int
    outcomes: list[Committed | NotUploaded]
    waited: float  # seconds that the rate held their parts back, summed


class Compacted(msgspec.Struct, tag="compacted"):
    """The object is in the store whole: its name as REPLACE publishes it."""

    id: int
    name: CommittedObject
    waited: float  # as in Committed


class GiveUpCompaction(msgspec.Struct, tag="give_up_compaction"):
    """The broker stops: what is under way fails, and what comes. No answer follows."""


class GroupRead(msgspec.Struct, tag="group_read"):
    """The row group lies in the memfd that came with the request."""

    id: int
    rows: int
    wire_bytes: int
    fetched: int  # bytes that came from the store
    cached: int  # bytes that came from the disk cache


class MayHold(msgspec.Struct, tag="may_hold"):
    """Those of the row groups asked about that may hold what is looked for, and the bytes that it took to tell."""

    id: int
    groups: list[int]
    fetched: int
    cached: int


class Forgotten(msgspec.Struct, tag="forgotten"):
    """Nothing of them is in the cache."""

    id: int


class StaleRemoved(msgspec.Struct, tag="stale_removed"):
    """How many uploads were aborted."""

    id: int
    count: int


class Failed(msgspec.Struct, tag="failed"):
    """A request that failed: the exception's class name and text, raised again on the broker's side."""

    id: int
    kind: str  # the exception's class name
    message: str


Request = EncodeUpload | Compact | ReadGroup | AskFilters | AskBounds | Forget | RemoveStaleUploads
Message = Request | SetUploadRate | GiveUp | GiveUpCompaction
Answered = Uploaded | Compacted | GroupRead | MayHold | Forgotten | StaleRemoved
Reply = Answered | Failed

_encoder = msgspec.msgpack.Encoder()
decode_message: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
decode_reply: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class PeerGone(ConnectionError):
    """The other end closed, or died in the middle of a message."""


def send(sock: socket.socket, message: Message | Reply, descriptor: int | None = None) -> None:
    """One sender at a time: the caller locks."""
    payload = _encoder.encode(message)
    descriptors = [] if descriptor is None else [descriptor]
    head = _HEAD.pack(len(payload), len(descriptors))
    if descriptors:
        socket.send_fds(sock, [head], descriptors)
    else:
        sock.sendall(head)
    sock.sendall(payload)


def receive(sock: socket.socket) -> tuple[bytes, int | None]:
    """The next message and the descriptor beside it, which the caller closes. Raises PeerGone."""
    head, descriptors, _, _ = socket.recv_fds(sock, _HEAD.size, 1)
    descriptor = descriptors[0] if descriptors else None
    try:
        head += _exactly(sock, _HEAD.size - len(head)) if head else b""
        if not head:
            raise PeerGone("the peer closed the connection")
        length, _ = _HEAD.unpack(head)
        return _exactly(sock, length), descriptor
    except PeerGone:
        if descriptor is not None:
            os.close(descriptor)
        raise


def receive_reply(sock: socket.socket) -> bytes:
    """The next message of a worker, which sends no descriptor: the kernel closes one that is there. Raises PeerGone."""
    length, _ = _HEAD.unpack(_exactly(sock, _HEAD.size))
    return _exactly(sock, length)


def _exactly(sock: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        part = sock.recv(min(length - len(received), 1 << 20))
        if not part:
            raise PeerGone("the peer ended in the middle of a message")
        received += part
    return bytes(received)


def size_of_group(rows: int, wire_bytes: int) -> int:
    """What the memfd of ReadGroup has to hold."""
    return 8 * (4 * rows + 1) + wire_bytes


def fill(descriptor: int, parts: list[memoryview]) -> None:
    """Lay these parts one after another into a memfd that is as large. Raises OSError where it is not."""
    rest, position = [part.cast("B") for part in parts if part.nbytes], 0
    while rest:
        written = os.pwritev(descriptor, rest, position)
        position += written
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][written:]


def shared(parts: list[memoryview]) -> int:
    """A sealed memfd with these parts one after another: nobody can change or shrink it under a reader."""
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
