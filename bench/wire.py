"""A second, minimal client of the Remoting protocol, independent of neve's codec, for benchmarks and crash tests.

frame = length i32 of what follows | 0x00 and header length u24 | header JSON | body
"""

from __future__ import annotations

import base64
import hmac
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

import msgspec

from neve.record.codec import MessageRecord, iter_records

SEND_V2 = 310
PULL = 11
MAX_OFFSET = 30
MIN_OFFSET = 31
UPDATE_TOPIC = 17
ROUTE = 105
SUCCESS = 0
PULL_NOT_FOUND = 19
PULL_RETRY_IMMEDIATELY = 20
PULL_OFFSET_MOVED = 21
#: Always ten digits: a frame's length does not depend on its opaque.
OPAQUE_FIRST = 1_000_000_000
_HEAD = struct.Struct(">ii")


class Response(msgspec.Struct):
    """The header of an answer; `Responses` adds the body."""

    opaque: int
    code: int = -1
    remark: str | None = None
    extFields: dict[str, str] = {}  # noqa: N815 - the wire's name; msgspec copies the default
    body: bytes = b""


_decode = msgspec.json.Decoder(Response).decode


class Refused(Exception):
    """The broker answered with a code other than success."""


def request(code: int, opaque: int, ext: Mapping[str, object], body: bytes = b"") -> bytes:
    """Return one complete frame."""
    header = msgspec.json.encode(
        {
            "code": code,
            "extFields": {name: str(value) for name, value in ext.items()},
            "flag": 0,
            "language": "PYTHON",
            "opaque": opaque,
            "serializeTypeCurrentRPC": "JSON",
            "version": 479,
        }
    )
    return _HEAD.pack(4 + len(header) + len(body), len(header)) + header + body


@dataclass(frozen=True, slots=True)
class Signer:
    """A user of a broker with authentication."""

    name: str
    secret: str

    def signed(self, ext: Mapping[str, object], body: bytes) -> dict[str, object]:
        """Return the fields with access key and signature: HMAC-SHA1 of the values, ordered by name, and the body."""
        fields = {name: str(value) for name, value in ext.items()} | {"AccessKey": self.name}
        content = "".join(fields[name] for name in sorted(fields)).encode() + body
        digest = hmac.digest(self.secret.encode(), content, "sha1")
        return {**fields, "Signature": base64.b64encode(digest).decode()}


def send_ext(topic: str, queue_id: int, properties: str = "", queues: int = 8) -> dict[str, object]:
    """Return the header of SEND_MESSAGE_V2, whose field names are letters."""
    names = {"a": "raw_load", "b": topic, "c": "TBW102", "d": queues, "e": queue_id, "f": 0, "g": 1_700_000_000_000}
    return {**names, "h": 0, "i": properties, "j": 0, "k": "false", "l": 16, "m": "false"}


def pull_ext(group: str, topic: str, queue_id: int, offset: int, count: int = 32) -> dict[str, object]:
    """Return the header of a pull that carries its subscription and does not wait for new messages."""
    place = {"consumerGroup": group, "topic": topic, "queueId": queue_id, "queueOffset": offset, "maxMsgNums": count}
    flags = {"sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 0}
    return {**place, **flags, "subscription": "*", "subVersion": 0, "expressionType": "TAG"}


@dataclass(slots=True)
class SendFrames:
    """Frames of equal messages to the queues in turn, built so that only the opaque is written for each."""

    topic: str
    body: bytes
    queues: int = 8
    signer: Signer | None = None
    _parts: list[tuple[bytes, bytes]] = field(init=False)

    def __post_init__(self) -> None:
        mark = str(OPAQUE_FIRST).encode()
        frames = (request(SEND_V2, OPAQUE_FIRST, self._ext(queue), self.body) for queue in range(self.queues))
        self._parts = [
            (before, after) for before, _, after in (frame.partition(b'"opaque":' + mark) for frame in frames)
        ]

    def _ext(self, queue: int) -> dict[str, object]:
        """Return the signed fields; the opaque is not covered by a signature."""
        ext = send_ext(self.topic, queue)
        return ext if self.signer is None else self.signer.signed(ext, self.body)

    def frame(self, number: int) -> bytes:
        before, after = self._parts[number % self.queues]
        return b'%b"opaque":%d%b' % (before, OPAQUE_FIRST + number, after)


class Responses:
    """Parses received bytes into answers."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Response]:
        self._buffer += data
        buffer, position, found = self._buffer, 0, []
        while len(buffer) - position >= _HEAD.size:
            length, marked = _HEAD.unpack_from(buffer, position)
            end = position + 4 + length
            if len(buffer) < end:
                break
            body_at = position + _HEAD.size + (marked & 0xFFFFFF)
            answer = _decode(bytes(buffer[position + _HEAD.size : body_at]))
            answer.body = bytes(buffer[body_at:end])
            found.append(answer)
            position = end
        del buffer[:position]
        return found


class Client:
    """One blocking connection to a broker."""

    def __init__(self, address: str, timeout: float = 30.0, signer: Signer | None = None) -> None:
        self._signer = signer
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.responses = Responses()
        self._opaque = OPAQUE_FIRST

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    def invoke(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> Response:
        """Send one request and return its answer, whatever its code."""
        self._opaque += 1
        if self._signer is not None:
            ext = self._signer.signed(ext, body)
        self.socket.sendall(request(code, self._opaque, ext, body))
        while True:
            data = self.socket.recv(1 << 20)
            if not data:
                raise ConnectionResetError("the broker closed the connection")
            for answer in self.responses.feed(data):
                if answer.opaque == self._opaque:
                    return answer

    def ask(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> Response:
        """Send a request and return its answer; raise Refused unless it succeeded."""
        answer = self.invoke(code, ext, body)
        if answer.code != SUCCESS:
            raise Refused(f"request {code}: code {answer.code}, {answer.remark}")
        return answer

    def create_topic(self, topic: str, queues: int) -> None:
        ext: dict[str, object] = {"topic": topic, "defaultTopic": "TBW102", "readQueueNums": queues}
        ext |= {
            "writeQueueNums": queues,
            "perm": 6,
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": 0,
            "order": "false",
        }
        self.ask(UPDATE_TOPIC, ext)

    def send(self, topic: str, queue_id: int, body: bytes, properties: str = "") -> int:
        """Send one message; return its offset in the queue."""
        return int(self.ask(SEND_V2, send_ext(topic, queue_id, properties), body).extFields["queueOffset"])

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return the first offset of a queue and the one after its last."""
        ext = {"topic": topic, "queueId": queue_id}
        return tuple(int(self.ask(code, ext).extFields["offset"]) for code in (MIN_OFFSET, MAX_OFFSET))  # type: ignore[return-value]

    def read(
        self, topic: str, queue_id: int, start: int, end: int, group: str = "raw_reader"
    ) -> Iterator[MessageRecord]:
        """Return the records of a queue from `start` up to `end`, as pulls return them."""
        while start < end:
            answer = self.invoke(PULL, pull_ext(group, topic, queue_id, start))
            if answer.code == PULL_RETRY_IMMEDIATELY:
                start = int(answer.extFields["nextBeginOffset"])  # After a gap, or unchanged.
                continue
            if answer.code != SUCCESS:
                raise Refused(f"pull of {topic}/{queue_id} at {start}: code {answer.code}, {answer.remark}")
            yield from iter_records(answer.body)
            start = int(answer.extFields["nextBeginOffset"])
