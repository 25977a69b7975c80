"""The codec of commands: requests, one-way requests and responses.

JSON header (serialize type 0): {"code","extFields","flag","language","opaque","remark"?,"version"}; ext: strings only

Binary header (serialize type 1), big endian:

    i16 code | i8 language | i16 version | i32 opaque | i32 flag | i32 n, remark | i32 m, ext block of m bytes
    ext block: { i16 n, key | i32 n, value }*, ending exactly at m
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import msgspec

from neve.errors import ProtocolError
from neve.remoting.codes import BINARY_CODE_ALIASES, LANGUAGE_CODES, LANGUAGES, VERSION
from neve.remoting.frame import MARK_SIZE, MAX_HEADER, check_mark

SERIALIZE_JSON = 0
SERIALIZE_BINARY = 1
FLAG_RESPONSE = 1
FLAG_ONEWAY = 2
MAX_FIELDS = 256
MAX_LANGUAGE = 64  # stored with the client
# A header may be as long as its frame, but only because of long strings: a header of this size, without the content of
# its strings, has few enough values to be decoded.
MAX_HEADER_STRUCTURE = 64 * 1024
LANGUAGE = "PYTHON"

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Buffer = bytes | memoryview

# Parts up to this average size are joined, because each buffer of a write costs more than copying them.
_JOINED_PART = 2048
_BINARY_FIXED = struct.Struct(">hbhii")
_PREFIX = struct.Struct(">ii")
_I16 = struct.Struct(">h")
_I32 = struct.Struct(">i")


class RemotingCommand(
    msgspec.Struct, rename={"ext": "extFields", "body": "#body", "serialize_type": "#type", "parts": "#parts"}
):
    """A request or response with its header fields and its body.

    A decoded body is always bytes. If `parts` is set, its buffers are sent instead of `body`, without joining them.
    """

    code: Int32
    opaque: Int32 = 0
    flag: Int32 = 0
    version: Int32 = VERSION
    language: str = LANGUAGE
    remark: str | None = None
    ext: dict[str, str] = {}
    body: bytes = b""
    serialize_type: int = SERIALIZE_JSON
    parts: list[Any] | None = None

    @property
    def is_response(self) -> bool:
        """Whether this is a response: only bit 0 of the flag counts, because both ends send requests."""
        return self.flag & FLAG_RESPONSE != 0

    @property
    def is_oneway(self) -> bool:
        """Whether this is a one-way request, which gets no response, not even an error."""
        return self.flag & FLAG_ONEWAY != 0

    @property
    def size(self) -> int:
        """The characters of the header and bytes of the body: its memory while it is queued."""
        texts = sum(map(len, self.ext)) + sum(map(len, self.ext.values()))
        return len(self.body) + len(self.remark or "") + texts

    @staticmethod
    def response(  # noqa: PLR0917
        request: RemotingCommand,
        code: int,
        remark: str | None = None,
        ext: Mapping[str, str] | None = None,
        body: bytes = b"",
        parts: Sequence[Buffer] | None = None,
    ) -> RemotingCommand:
        """Make a response to `request` in its serialization."""
        return RemotingCommand(
            code,
            request.opaque,
            FLAG_RESPONSE,
            VERSION,
            LANGUAGE,
            remark,
            cast("dict[str, str]", ext) if ext is not None else {},
            body,
            request.serialize_type,
            cast("list[Any] | None", parts),
        )


class _Incoming(RemotingCommand):
    """The target of the JSON decoder; invalid defaults show which fields the peer left out."""

    flag: Int32 = -1
    version: Int32 = -1
    language: str = ""
    serialize_name: str | None = msgspec.field(default=None, name="serializeTypeCurrentRPC")


class _Outgoing(msgspec.Struct, omit_defaults=True, rename={"ext": "extFields"}):
    """The JSON header to encode."""

    code: int
    flag: int
    language: str
    opaque: int
    version: int
    ext: dict[str, str] = {}
    remark: str | None = None
    serializeTypeCurrentRPC: str = ""  # noqa: N815


_incoming = msgspec.json.Decoder(_Incoming)
_outgoing = msgspec.json.Encoder()


def decode_command(frame: Buffer, start: int = 0, end: int | None = None) -> RemotingCommand:
    """Decode a frame without its length, or the one in [start, end) of a buffer.

    Raises:
        ProtocolError: the frame is invalid; the connection cannot continue.
    """
    end = len(frame) if end is None else end
    if end - start < MARK_SIZE:
        raise ProtocolError("a frame without a mark word")
    serialize_type, header_length = check_mark(frame, start, end - start)
    body_start = start + MARK_SIZE + header_length
    header = bytes(frame[start + MARK_SIZE : body_start])
    if serialize_type == SERIALIZE_JSON:
        command = _decode_json(header)
    elif serialize_type == SERIALIZE_BINARY:
        command = _decode_binary(header)
    else:
        raise ProtocolError(f"serialize type {serialize_type}")
    command.body = bytes(frame[body_start:end])
    command.serialize_type = serialize_type
    return command


_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


def _decode_json(header: bytes) -> RemotingCommand:
    if len(header) > MAX_HEADER_STRUCTURE and len(_TEXT.sub(b"--------", header)) > MAX_HEADER_STRUCTURE:
        raise ProtocolError("a header of too many values")
    try:
        command = _incoming.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _decode_json_carefully(header)
    fields = len(command.ext)
    if fields > MAX_FIELDS or len(command.language) > MAX_LANGUAGE:
        raise ProtocolError(f"{fields} header fields, or a language of {len(command.language)} characters")
    # Each key has at least one colon, so if there are as many colons as distinct keys, no key is repeated.
    known = fields + 5 + (fields > 0) + (command.remark is not None) + (command.serialize_name is not None)
    if header.count(b":") != known or command.flag < 0 or command.version < 0 or not command.language:
        return _decode_json_carefully(header)
    command.body = b""
    command.parts = None
    return command


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ProtocolError("a key is repeated in the header")
    return result


def _decode_json_carefully(header: bytes) -> RemotingCommand:
    """Decode a header with colons in values, missing or unknown fields, or hostile content."""
    try:
        fields = json.loads(header, object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the header is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ProtocolError("the header is no JSON object")
    ext = fields.get("extFields") or {}
    if not isinstance(ext, dict) or len(ext) > MAX_FIELDS or not all(isinstance(value, str) for value in ext.values()):
        raise ProtocolError("extFields is no map of at most 256 strings")
    numbers = [fields.get("code"), fields.get("opaque", 0), fields.get("flag", 0), fields.get("version", 0)]
    if not all(type(number) is int and -(2**31) <= number < 2**31 for number in numbers):
        raise ProtocolError("code, opaque, flag or version is no 32-bit number")
    language, remark = fields.get("language") or "", fields.get("remark")
    if not isinstance(language, str) or len(language) > MAX_LANGUAGE or not isinstance(remark, str | None):
        raise ProtocolError("language or remark is no string")
    try:
        json.dumps([language, remark, ext], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ProtocolError("half a surrogate pair in the header") from error
    code, opaque, flag, version = numbers
    return RemotingCommand(code, opaque, flag, version, language, remark, ext)


def _decode_binary(header: bytes) -> RemotingCommand:
    if len(header) < _BINARY_FIXED.size:
        raise ProtocolError("the binary header ends early")
    code, language, version, opaque, flag = _BINARY_FIXED.unpack_from(header)
    if not flag & FLAG_RESPONSE:
        code = BINARY_CODE_ALIASES.get(code, code)
    remark, position = _take(header, _BINARY_FIXED.size, _I32)
    block, position = _take(header, position, _I32)
    if position != len(header):
        raise ProtocolError("bytes after the binary header")
    ext: dict[str, str] = {}
    try:
        position = 0
        while position < len(block):
            key, position = _take(block, position, _I16)
            value, position = _take(block, position, _I32)
            name = key.decode()
            if name in ext or len(ext) == MAX_FIELDS:
                raise ProtocolError("a key is repeated in the header, or there are too many")
            ext[name] = value.decode()
        text = remark.decode() or None
    except UnicodeDecodeError as error:
        raise ProtocolError("the binary header is not UTF-8") from error
    name = LANGUAGES[language] if 0 <= language < len(LANGUAGES) else "OTHER"
    return RemotingCommand(code, opaque, flag, version, name, text, ext)


def _take(data: bytes, position: int, size: struct.Struct) -> tuple[bytes, int]:
    start = position + size.size
    if start > len(data):
        raise ProtocolError("the binary header ends early")
    (length,) = size.unpack_from(data, position)
    end = start + length
    if length < 0 or end > len(data):
        raise ProtocolError(f"length {length} in the binary header")
    return data[start:end], end


def encode_command(command: RemotingCommand) -> list[Buffer]:
    """Return the buffers of a complete frame. Raises ProtocolError if the header is too long."""
    if command.serialize_type == SERIALIZE_BINARY:
        header = _encode_binary(command)
    else:
        header = _outgoing.encode(
            _Outgoing(
                command.code,
                command.flag,
                command.language,
                command.opaque,
                command.version,
                command.ext,
                command.remark,
                "JSON",
            )
        )
    size = len(header)
    if size > MAX_HEADER:
        raise ProtocolError(f"a header of {size} bytes")
    mark = command.serialize_type << 24 | size
    parts = command.parts
    if parts is not None:
        total = sum(map(len, parts))
        head = _PREFIX.pack(MARK_SIZE + size + total, mark) + header
        if total <= _JOINED_PART * len(parts):
            return [b"".join((head, *parts))]
        return [head, *parts]
    body = command.body
    return (
        [_PREFIX.pack(MARK_SIZE + size + len(body), mark) + header, body]
        if body
        else [_PREFIX.pack(MARK_SIZE + size, mark) + header]
    )


def _encode_binary(command: RemotingCommand) -> bytes:
    code = command.code & 0xFFFF
    code = code - 0x10000 if code > 0x7FFF else code
    language = LANGUAGE_CODES.get(command.language, LANGUAGE_CODES["OTHER"])
    remark = (command.remark or "").encode()
    ext: list[bytes] = []
    for key, value in command.ext.items():
        name, text = key.encode(), value.encode()
        ext += (_I16.pack(len(name)), name, _I32.pack(len(text)), text)
    block = b"".join(ext)
    fixed = _BINARY_FIXED.pack(code, language, command.version, command.opaque, command.flag)
    return b"".join((fixed, _I32.pack(len(remark)), remark, _I32.pack(len(block)), block))
