"""Seeded damage to real frames.

The frames are what a hostile or broken peer could send, including how it splits them. Equal seeds give equal frames on
every machine.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from neve.remoting.codes import RequestCode
from neve.remoting.command import RemotingCommand, decode_command, encode_command
from tests.fuzz.corpus import Direction, Recorded

CODES = [int(code) for code in RequestCode] + [0, -1, 999, 32767, 2**31 - 1]
NUMBERS = (
    0,
    1,
    -1,
    2,
    127,
    255,
    256,
    65535,
    65536,
    2**31 - 1,
    -(2**31),
    2**31,
    2**32,
    2**63 - 1,
    -(2**63),
    2**63,
    10**40,
)
TEXTS = (
    "", " ", "null", "true", "NaN", "1e9", "0x10", "\x00", "ä" * 40, "😀", "\u0001\u0002", "%s%n", "../../etc",
    "a" * 300, "{}", "[]", "[" * 400, '{"a":' * 200, "*", "a||b", "a IS NOT NULL OR (", "'", '"', "-0", "+1", "١٢",
    "1 2 3 4 5 6 7 8",
    "0 0 0 0 0 0 broker-a 0 0", "%RETRY%x", "RMQ_SYS_x", "SCHEDULE_TOPIC_XXXX", "TBW102",
)  # fmt: skip
WORDS32 = [struct.pack(">i", number) for number in NUMBERS if -(2**31) <= number < 2**31]


@dataclass(frozen=True, slots=True)
class Seed:
    """A recorded frame, taken apart once."""

    frame: bytes
    command: RemotingCommand

    @staticmethod
    def of(recorded: Recorded) -> Seed:
        return Seed(recorded.frame, decode_command(recorded.frame))


def seeds_of(corpus: Sequence[Recorded], *directions: Direction) -> list[Seed]:
    """Return the frames of these directions that this codec decodes."""
    return [Seed.of(item) for item in corpus if not directions or item.direction in directions]


class Mutator:
    """Generates test cases from a seed and a corpus."""

    def __init__(self, seed: str, seeds: Sequence[Seed], spared: frozenset[int] = frozenset()) -> None:
        self._random = Random(seed)
        self._seeds = [seed for seed in seeds if seed.command.code not in spared or seed.command.is_response]
        self._codes = [code for code in CODES if code not in spared]
        self._spared = spared
        self._damages: tuple[Callable[[Seed], bytes], ...] = (
            self._bits, self._truncated, self._length_lie, self._header_lie, self._word, self._spliced, self._chunk,
            self._other_type, self._fields, self._fields, self._fields, self._field_twice, self._body, self._body,
            self._envelope, self._other_body, self._json_type,
        )  # fmt: skip

    def frame(self) -> bytes:
        """Return one mutated frame with its length, which may be wrong."""
        choose = self._random
        return choose.choice(self._damages)(choose.choice(self._seeds))

    def cut(self, stream: bytes) -> list[bytes]:
        """Return the stream whole, or in pieces as a network may deliver them."""
        choose = self._random
        if choose.random() < 0.7 or len(stream) < 2:
            return [stream]
        if choose.random() < 0.1:
            return [stream[at : at + 1] for at in range(min(len(stream), 64))] + [stream[64:]]
        places = sorted(choose.randrange(1, len(stream)) for _ in range(choose.randrange(1, 5)))
        return [stream[start:end] for start, end in zip([0, *places], [*places, len(stream)], strict=True)]

    # ---- damage to the bytes

    def _bits(self, seed: Seed) -> bytes:
        data = bytearray(framed(seed.frame))
        for _ in range(1 << self._random.randrange(4)):
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(data)

    def _truncated(self, seed: Seed) -> bytes:
        """Truncate the frame with a matching length, so that its content ends early."""
        return framed(seed.frame[: self._random.randrange(len(seed.frame))])

    def _length_lie(self, seed: Seed) -> bytes:
        lie = len(seed.frame) + self._random.choice((-9, -1, 1, 2, 100)) if self._random.random() < 0.5 else None
        return (struct.pack(">i", lie) if lie is not None else self._random.choice(WORDS32)) + seed.frame

    def _header_lie(self, seed: Seed) -> bytes:
        (mark,) = struct.unpack_from(">I", seed.frame)
        length = (mark & 0xFFFFFF) + self._random.choice((-200, -8, -2, -1, 1, 2, 8, 200))
        return framed(struct.pack(">I", mark & 0xFF000000 | length & 0xFFFFFF) + seed.frame[4:])

    def _word(self, seed: Seed) -> bytes:
        """Replace four bytes with a number at a boundary."""
        data = bytearray(seed.frame)
        at = self._random.randrange(max(1, len(data) - 4))
        data[at : at + 4] = self._random.choice(WORDS32)
        return framed(bytes(data))

    def _spliced(self, seed: Seed) -> bytes:
        other = self._random.choice(self._seeds).frame
        at, of = self._random.randrange(len(seed.frame)), self._random.randrange(len(other))
        return framed(seed.frame[:at] + other[of:])

    def _chunk(self, seed: Seed) -> bytes:
        """Remove or duplicate a range of bytes."""
        start = self._random.randrange(len(seed.frame))
        end = min(len(seed.frame), start + self._random.randrange(1, 40))
        stretch = seed.frame[start:end] * self._random.choice((0, 0, 2, 3))
        return framed(seed.frame[:start] + stretch + seed.frame[end:])

    def _other_type(self, seed: Seed) -> bytes:
        return framed(bytes([self._random.choice((0, 1, 2, 255))]) + seed.frame[1:])

    # ---- damage to the meaning of the bytes

    def _fields(self, seed: Seed) -> bytes:
        """Remove or change one or two header fields, or replace them with those of another request."""
        command = seed.command
        ext = dict(command.ext)
        for _ in range(self._random.randrange(1, 3)):
            name = self._random.choice(list(ext)) if ext else "topic"
            way = self._random.random()
            if way < 0.2:
                ext.pop(name, None)
            elif way < 0.55:
                ext[name] = str(self._random.choice(NUMBERS))
            elif way < 0.85:
                ext[name] = self._random.choice(TEXTS)
            else:
                ext |= self._random.choice(self._seeds).command.ext
        return self._encoded(command, ext=ext)

    def _field_twice(self, seed: Seed) -> bytes:
        """Duplicate a key, which both dialects can encode and no correct peer does."""
        (mark,) = struct.unpack_from(">I", seed.frame)
        end = 4 + (mark & 0xFFFFFF)
        header = seed.frame[4:end]
        at = header.find(b'"', self._random.randrange(max(1, len(header))))
        again = header[:at] + b'"topic":"twice","topic":"again",' + header[at:] if at > 0 else header + header
        return framed(struct.pack(">I", mark & 0xFF000000 | len(again)) + again + seed.frame[end:])

    def _body(self, seed: Seed) -> bytes:
        """Combine a valid header with a damaged body."""
        data = bytearray(seed.command.body or b"{}")
        way = self._random.randrange(5)
        at = self._random.randrange(len(data))
        if way == 0:
            del data[at:]
        elif way == 1:
            data[at : at + 4] = self._random.choice(WORDS32)
        elif way == 2:
            data[at] ^= 1 << self._random.randrange(8)
        elif way == 3:
            data[at:at] = self._random.choice(TEXTS).encode()
        else:
            data[at:at] = str(self._random.choice(NUMBERS)).encode()
        return self._encoded(seed.command, body=bytes(data))

    def _envelope(self, seed: Seed) -> bytes:
        """Change the code, flag or opaque."""
        way, number = self._random.randrange(3), self._random.choice(NUMBERS[:11])
        code = self._random.choice(self._codes)
        command = seed.command
        if way == 0:
            return self._encoded(command, code=code)
        return self._encoded(command, flag=number) if way == 1 else self._encoded(command, opaque=number)

    def _other_body(self, seed: Seed) -> bytes:
        return self._encoded(seed.command, body=self._random.choice(self._seeds).command.body)

    def _json_type(self, seed: Seed) -> bytes:
        """Give a value in the JSON header another type."""
        command = seed.command
        sound = self._encoded(command, serialize_type=0)[4:]
        end = 4 + int.from_bytes(sound[1:4])
        header = sound[4:end]
        at = header.find(b":", self._random.randrange(len(header)))
        value = self._random.choice(
            (b"null", b"[]", b"{}", b"1e400", b'"x"', b"true", b"-1", b"9" * 30, b"[" * 500, b"")
        )
        stop = min(
            (place for place in (header.find(b",", at), header.find(b"}", at)) if place > 0), default=len(header)
        )
        changed = header[: at + 1] + value + header[stop:]
        return framed(struct.pack(">I", len(changed)) + changed + sound[end:])

    def _encoded(
        self,
        command: RemotingCommand,
        *,
        code: int | None = None,
        flag: int | None = None,
        opaque: int | None = None,
        ext: dict[str, str] | None = None,
        body: bytes | None = None,
        serialize_type: int | None = None,
    ) -> bytes:
        changed = RemotingCommand(
            command.code if code is None else code,
            command.opaque if opaque is None else opaque,
            command.flag if flag is None else flag,
            command.version,
            command.language,
            command.remark,
            command.ext if ext is None else ext,
            command.body if body is None else body,
            command.serialize_type if serialize_type is None else serialize_type,
        )
        return b"".join(encode_command(changed))


def framed(frame: bytes) -> bytes:
    return struct.pack(">i", len(frame)) + frame
