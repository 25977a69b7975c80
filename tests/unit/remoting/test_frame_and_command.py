from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neve.errors import ProtocolError
from neve.remoting import command
from neve.remoting.codes import BINARY_CODE_ALIASES, RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand, decode_command, encode_command
from neve.remoting.frame import MAX_FRAME, FrameDecoder

TEXT = st.text(max_size=20)


def wire(command: RemotingCommand) -> bytes:
    return b"".join(encode_command(command))


def plain(command: RemotingCommand) -> tuple[object, ...]:
    return (
        command.code,
        command.opaque,
        command.flag,
        command.version,
        command.language,
        command.remark,
        command.ext,
        command.body,
        command.serialize_type,
    )


def frames(decoder: FrameDecoder) -> list[bytes]:
    result = []
    while (frame := decoder.next_frame()) is not None:
        result.append(bytes(frame))
    return result


def json_frame(header: object, body: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack(">I", len(raw)) + raw + body


def base(**more: object) -> dict[str, object]:
    return {"code": 10, "flag": 0, "language": "JAVA", "opaque": 7, "version": 479, **more}


@given(
    st.integers(-(2**31), 2**31 - 1),
    st.dictionaries(TEXT, TEXT, max_size=8),
    st.binary(max_size=50),
    st.none() | st.text(min_size=1, max_size=10),
)
def test_json_command_round_trips(opaque: int, ext: dict[str, str], body: bytes, remark: str | None) -> None:
    command = RemotingCommand(310, opaque, ext=ext, body=body, remark=remark)
    assert plain(decode_command(wire(command)[4:])) == plain(command)


@given(st.integers(-(2**15), 2**15 - 1), st.dictionaries(TEXT, TEXT, max_size=8), st.binary(max_size=50))
def test_binary_command_round_trips(code: int, ext: dict[str, str], body: bytes) -> None:
    command = RemotingCommand(code, 5, 1, ext=ext, body=body, serialize_type=1)
    assert plain(decode_command(wire(command)[4:])) == plain(command)


@given(st.lists(st.binary(max_size=60), max_size=6), st.integers(1, 40))
def test_frames_are_independent_of_read_boundaries(bodies: list[bytes], step: int) -> None:
    stream = b"".join(wire(RemotingCommand(10, n, body=body)) for n, body in enumerate(bodies))
    whole = FrameDecoder()
    whole.receive_data(stream)
    expected = frames(whole)
    assert [decode_command(frame).body for frame in expected] == bodies
    pieces = FrameDecoder()
    got: list[bytes] = []
    for start in range(0, len(stream), step):
        pieces.receive_data(stream[start : start + step])
        got += frames(pieces)
    assert got == expected
    assert not pieces.pending


def test_byte_by_byte_and_trailing_bytes() -> None:
    stream = wire(RemotingCommand(34, 1, body=b"body")) + b"\x00\x00"
    decoder = FrameDecoder()
    got: list[bytes] = []
    for value in stream:
        decoder.receive_data(bytes([value]))
        got += frames(decoder)
    assert len(got) == 1
    assert decoder.pending


@pytest.mark.parametrize("length", [-1, -(2**31), 0, 3, MAX_FRAME + 1, 2**31 - 1])
def test_hostile_frame_lengths_are_refused(length: int) -> None:
    decoder = FrameDecoder()
    decoder.receive_data(struct.pack(">i", length))
    with pytest.raises(ProtocolError):
        decoder.next_frame()


@pytest.mark.parametrize("header_length", [97, 0xFFFFFF])
def test_header_longer_than_its_frame_is_refused_early(header_length: int) -> None:
    decoder = FrameDecoder()
    size = 100 if header_length == 97 else 1 << 20
    decoder.receive_data(struct.pack(">ii", size, header_length))
    with pytest.raises(ProtocolError):
        decoder.next_frame()


@pytest.mark.parametrize(
    "header",
    [
        base(extFields={str(n): "x" for n in range(257)}),
        base(extFields={"a": 1}),
        base(extFields={"a": None}),
        base(extFields={"a": {"b": "c"}}),
        base(extFields=[1]),
        base(code="10"),
        base(code=2**31),
        base(opaque=-(2**31) - 1),
        base(flag=True),
        base(remark=3),
        base(language=3),
        base(extFields={"topic": "\ud800"}),
        base(remark="\udfff"),
        {"flag": 0},
        b"[]",
        b"",
        b"{",
        b"\xff\xfe",
        b'{"code":10,"code":11,"flag":0,"language":"JAVA","opaque":7,"version":479}',
        b'{"code":10,"flag":0,"language":"JAVA","opaque":7,"version":479,"extFields":{"a":"1","a":"2"}}',
        b'{"code":10,"flag":0,"language":"JAVA","opaque":7,"extFields":{"a":"1","a" :"2"}}',
        b'{"code":10,"x":' + b"[" * 60_000 + b"]}",
        b'{"x":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001,
    ],
)
def test_hostile_json_headers_are_refused(header: object) -> None:
    with pytest.raises(ProtocolError):
        decode_command(json_frame(header))


def test_json_headers_with_missing_and_unknown_fields_are_accepted() -> None:
    sparse = decode_command(json_frame({"code": 105}))
    assert (sparse.code, sparse.opaque, sparse.flag, sparse.version, sparse.ext) == (105, 0, 0, 0, {})
    odd = decode_command(json_frame(base(remark=None, extFields=None, Signature="x", serializeTypeCurrentRPC="JSON")))
    assert odd.remark is None
    assert odd.ext == {}
    values = {"addr": "1.2.3.4:10911", "quote": '":"'}
    assert decode_command(json_frame(base(extFields=values))).ext == values


def test_inner_fields_cannot_be_set_by_the_peer() -> None:
    forged = {"#body": "AAAA", "#type": 1, "#parts": [1]}
    command = decode_command(json_frame(base(**forged), b"real"))
    assert (command.body, command.serialize_type, command.parts) == (b"real", 0, None)


def binary_frame(remark_length: int, ext_length: int, tail: bytes = b"") -> bytes:
    header = struct.pack(">hbhiiii", 34, 0, 479, 1, 0, remark_length, ext_length) + tail
    return struct.pack(">I", 1 << 24 | len(header)) + header


@pytest.mark.parametrize(
    "frame",
    [
        binary_frame(-1, 0),
        binary_frame(0, -1),
        binary_frame(0, 1),
        binary_frame(5, 0),
        binary_frame(0, 0, b"x"),
        binary_frame(0, 6, struct.pack(">hi", -1, 0)),
        binary_frame(0, 6, struct.pack(">hi", 0, -1)),
        binary_frame(0, 6, struct.pack(">hi", 0, 1)),
        binary_frame(0, 3, b"\0\0\0"),
        binary_frame(0, 12, struct.pack(">hihi", 0, 0, 0, 0)),
        binary_frame(0, 7, struct.pack(">hci", 1, b"\xff", 0)),
        binary_frame(0, 0)[:-4],
        b"\x01\x00\x00\x02\x00\x00",
        b"\x02\x00\x00\x00",
        b"\x00\x00",
    ],
)
def test_hostile_binary_headers_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_command(frame)


def test_too_many_binary_fields() -> None:
    command = RemotingCommand(34, ext={str(n): "x" for n in range(257)}, serialize_type=1)
    with pytest.raises(ProtocolError):
        decode_command(wire(command)[4:])


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error_or_a_command(data: bytes) -> None:
    try:
        decode_command(data)
    except ProtocolError:
        return


def test_pop_codes_survive_sixteen_bits() -> None:
    expected = [3442, 3443, 3444, 3445, 3446, 3447, 3448, 3543]
    assert sorted(BINARY_CODE_ALIASES) == expected
    for code in (RequestCode.POP_MESSAGE, RequestCode.ACK_MESSAGE, RequestCode.BATCH_ACK_MESSAGE):
        assert decode_command(wire(RemotingCommand(code, serialize_type=1))[4:]).code == code
    answer = RemotingCommand(3442, flag=1, serialize_type=1)
    assert decode_command(wire(answer)[4:]).code == 3442


def test_response_echoes_opaque_and_serialization_and_sends_parts() -> None:
    request = RemotingCommand(11, 99, serialize_type=1)
    answer = RemotingCommand.response(request, ResponseCode.SUCCESS, ext={"a": "b"}, parts=[memoryview(b"xy"), b"z"])
    decoded = decode_command(wire(answer)[4:])
    assert (decoded.opaque, decoded.is_response, decoded.serialize_type, decoded.body) == (99, True, 1, b"xyz")
    assert decoded.version == 479


def test_header_above_the_limit_is_not_sent() -> None:
    with pytest.raises(ProtocolError):
        encode_command(RemotingCommand(10, ext={"i": "x" * (1 << 24)}))


def test_long_property_text_round_trips_in_headers() -> None:
    properties = "".join(f'p{number}\x01雪\\"{{}}[],\x02' for number in range(20_000))
    for serialize_type in (0, 1):
        sent = RemotingCommand(310, ext={"b": "t", "i": properties}, body=b"x", serialize_type=serialize_type)
        decoder = FrameDecoder()
        decoder.receive_data(wire(sent))
        frame = decoder.next_frame()
        assert frame is not None
        decoded = decode_command(frame)
        assert (decoded.ext, decoded.body) == (sent.ext, b"x")


@pytest.mark.parametrize(
    "value",
    [
        {"extFields": {str(number): "" for number in range(20_000)}},
        {"unknown": [[] for _ in range(40_000)], "language": ""},
        {"extFields": {"a": "b"}, "unknown": {str(number): number for number in range(20_000)}, "flag": None},
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_header_with_too_many_values_is_refused_before_decoding(
    value: dict[str, object], indent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(command, "json", never)
    monkeypatch.setattr(command, "_incoming", never)
    header = json.dumps({"code": 310, **value}, indent=indent).encode()
    with pytest.raises(ProtocolError, match="too many values"):
        decode_command(struct.pack(">I", len(header)) + header)


def test_language_must_be_a_word() -> None:
    for fields in (base(language="x" * 65), base(language="x" * 65, unknown=1)):
        header = json.dumps(fields).encode()
        with pytest.raises(ProtocolError):
            decode_command(struct.pack(">I", len(header)) + header)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (bytes.fromhex("1603010200010001fc0303"), "a TLS handshake on a plain-text connection"),
        (bytes.fromhex("15030300020246"), "a TLS alert: the server accepts TLS connections only"),
        (b"GET /metrics HTTP/1.1\r\n", "an HTTP request"),
        (bytes.fromhex("7fffffff00000000"), "frame length 2147483647 is outside 4.."),
        (bytes.fromhex("ffffffff00000000"), "frame length -1 is outside 4.."),
    ],
)
def test_decoder_names_another_protocol(data: bytes, text: str) -> None:
    decoder = FrameDecoder()
    decoder.receive_data(data)
    with pytest.raises(ProtocolError, match=text):
        decoder.next_frame()
