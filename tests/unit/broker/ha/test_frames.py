"""The frames of the HA port: RocketMQ's, neve's own, and invalid ones."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from broker.ha import frames
from broker.ha.frames import (
    Hello,
    MasterFrames,
    MasterHandshake,
    SlaveAck,
    SlaveFrames,
    SlaveHandshake,
    StreamRefusal,
    Transfer,
    encode_ack,
    encode_described_head,
    encode_hello,
    encode_master_handshake,
    encode_refusal,
    encode_slave_handshake,
    encode_transfer_head,
)
from neve.errors import ProtocolError

HELLO = Hello(
    cluster="c",
    broker_set="b",
    member_id=2,
    incarnation="i" * 32,
    starts=3,
    process="p" * 32,
    nonce="n" * 32,
    mapped_file_size_commit_log=1 << 30,
    message_delay_level="1s 5s 10s",
    master_epoch=7,
    eviction_frontier=4096,
)
FROM_SLAVE = [
    (encode_hello(HELLO), HELLO),
    (encode_slave_handshake(SlaveHandshake(2)), SlaveHandshake(2)),
    (encode_slave_handshake(SlaveHandshake(1 << 40, True, True)), SlaveHandshake(1 << 40, True, True)),
    (encode_ack(0), SlaveAck(0)),
    (encode_ack(1 << 40), SlaveAck(1 << 40)),
    (encode_ack(500, 300), SlaveAck(500, 300)),
]
FROM_MASTER = [
    (encode_hello(HELLO), HELLO),
    (
        encode_refusal(StreamRefusal("cluster", "staging is not production")),
        StreamRefusal("cluster", "staging is not production"),
    ),
    (encode_master_handshake(0, ()), MasterHandshake(0, -1, ())),
    (encode_master_handshake(900, [(1, 0), (4, 700)]), MasterHandshake(900, 4, ((1, 0), (4, 700)))),
    (encode_transfer_head(0, 900, 4, 700, 880), Transfer(900, 4, 700, 880, memoryview(b""))),
    (encode_transfer_head(3, 900, 4, 700, 880) + b"abc", Transfer(900, 4, 700, 880, memoryview(b"abc"))),
    (encode_transfer_head(9000, 0, 1, 0, 0) + bytes(9000), Transfer(0, 1, 0, 0, memoryview(bytes(9000)))),
    (
        encode_described_head(3, 900, 4, 700, 880, b"told") + b"abc",
        Transfer(900, 4, 700, 880, memoryview(b"abc"), memoryview(b"told")),
    ),
]


def test_rocketmq_frames_have_its_members_layout() -> None:
    assert encode_slave_handshake(SlaveHandshake(2, True, False)).hex() == "00000001000100000000000000000002"
    assert encode_ack(0x1234).hex() == "000000020000000000001234"
    assert encode_master_handshake(0x500, [(1, 0), (2, 0x367F9)]).hex() == (
        "00000001" "00000018" "0000000000000500" "00000002"
        "00000001" "0000000000000000" "00000002" "00000000000367f9"
    )  # fmt: skip
    assert encode_master_handshake(0, ()).hex() == "00000001000000000000000000000000ffffffff"
    assert encode_transfer_head(2, 0x10, 3, 0x08, 0x09).hex() == (
        "00000002" "00000002" "0000000000000010" "00000003" "0000000000000008" "0000000000000009"
    )  # fmt: skip


def test_first_four_bytes_distinguish_neve_members_from_stock_ones() -> None:
    ordinals = range(5)
    first = {struct.unpack_from(">i", data)[0] for data in (encode_hello(HELLO), encode_refusal(StreamRefusal("x")))}
    assert first.isdisjoint(ordinals)
    assert struct.unpack_from(">i", encode_ack(5, 5))[0] not in ordinals
    assert struct.unpack_from(">i", encode_described_head(1, 0, 1, 0, 0, b"x"))[0] not in ordinals
    assert encode_hello(HELLO)[:4] == b"nevH"


def detached(frame: object) -> object:
    """Return a frame whose body is a copy instead of a view of the reader's buffer."""
    if not isinstance(frame, Transfer):
        return frame
    described = None if frame.description is None else memoryview(bytes(frame.description))
    return replace(frame, body=memoryview(bytes(frame.body)), description=described)


def readers() -> list[tuple[Callable[[], SlaveFrames | MasterFrames], list[tuple[bytes, object]]]]:
    return [
        (SlaveFrames, [(data, frame) for data, frame in FROM_SLAVE]),
        (MasterFrames, [(data, frame) for data, frame in FROM_MASTER]),
    ]


@settings(deadline=None)
@given(st.data())
def test_frames_are_parsed_whole_from_any_division_of_the_bytes(data: st.DataObject) -> None:
    make, known = data.draw(st.sampled_from(readers()))
    chosen = data.draw(st.lists(st.sampled_from(known), max_size=6))
    stream = b"".join(one for one, _ in chosen)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader, got = make(), list[object]()
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += [detached(frame) for frame in reader.receive_data(stream[begin:end])]
    assert got == [frame for _, frame in chosen]
    assert reader.held == 0


@pytest.mark.parametrize(("make", "known"), readers())
def test_frames_are_parsed_whole_byte_by_byte(
    make: Callable[[], SlaveFrames | MasterFrames], known: list[tuple[bytes, object]]
) -> None:
    reader = make()
    for data, frame in known:
        got = [detached(one) for byte in data for one in reader.receive_data(bytes([byte]))]
        assert got == [frame]


def test_frames_before_a_malformed_one_are_returned() -> None:
    reader = SlaveFrames().receive_data(encode_ack(7) + b"garbage!")
    assert next(reader) == SlaveAck(7)
    with pytest.raises(ProtocolError):
        next(reader)


@pytest.mark.parametrize(
    "stranger", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00", b"\0\0\0\0", b"\0\0\0\3", b"\xff" * 8]
)
@pytest.mark.parametrize("make", [SlaveFrames, MasterFrames])
def test_unknown_frame_is_refused_at_its_first_four_bytes(
    make: type[SlaveFrames | MasterFrames], stranger: bytes
) -> None:
    with pytest.raises(ProtocolError):
        list(make().receive_data(stranger[:4]))


def test_frames_of_the_other_side_are_refused() -> None:
    with pytest.raises(ProtocolError):
        list(SlaveFrames().receive_data(encode_refusal(StreamRefusal("x"))))
    with pytest.raises(ProtocolError):
        list(MasterFrames().receive_data(encode_ack(5, 5)))


@pytest.mark.parametrize("size", [-1, frames.BODY_MAX + 1, 0x7FFFFFFF])
def test_oversized_frame_is_refused_at_its_header(size: int) -> None:
    with pytest.raises(ProtocolError):
        list(MasterFrames().receive_data(struct.pack(">ii", frames.TRANSFER, size)))


@pytest.mark.parametrize("size", [12 * 1001, 13])
def test_handshake_with_too_many_or_partial_epochs_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError):
        list(MasterFrames().receive_data(struct.pack(">ii", frames.HANDSHAKE, size)))


def test_oversized_hello_is_refused_at_its_header() -> None:
    with pytest.raises(ProtocolError):
        list(SlaveFrames().receive_data(struct.pack(">ii", frames.HELLO, (64 << 10) + 1)))


def test_unfinished_frame_buffers_only_its_own_bytes() -> None:
    reader = MasterFrames()
    list(reader.receive_data(encode_transfer_head(frames.BODY_MAX, 0, 1, 0, 0) + b"x" * 100))
    assert reader.held == 136
    reader = MasterFrames()
    list(reader.receive_data(b"".join(data for data, _ in FROM_MASTER) + b"\0\0"))
    assert reader.held == 2


def test_handshake_holds_the_newest_thousand_epochs() -> None:
    data = encode_master_handshake(5000, [(epoch, epoch) for epoch in range(1500)])
    (frame,) = MasterFrames().receive_data(data)
    assert isinstance(frame, MasterHandshake)
    assert (len(frame.epochs), frame.epochs[0], frame.last_epoch) == (1000, (500, 500), 1499)


@pytest.mark.parametrize("epochs", [[(2, 0), (1, 5)], [(1, 5), (2, 0)], [(1, 0), (1, 5)], [(1, -5)], [(-2, 5)]])
def test_handshake_with_unordered_epochs_is_refused(epochs: list[tuple[int, int]]) -> None:
    with pytest.raises(ProtocolError):
        list(MasterFrames().receive_data(encode_master_handshake(100, epochs)))


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">iq", frames.TRANSFER, -1),
        struct.pack(">iqq", frames.SYNCED, 5, 6),
        struct.pack(">iqq", frames.SYNCED, 5, -1),
    ],
)
def test_acknowledgement_with_impossible_offsets_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(SlaveFrames().receive_data(data))


def test_transfer_at_a_negative_offset_is_refused() -> None:
    with pytest.raises(ProtocolError):
        list(MasterFrames().receive_data(struct.pack(">iiqiqq", frames.TRANSFER, 1, -1, 1, 0, 0) + b"x"))


@pytest.mark.parametrize("at", range(len(encode_hello(HELLO))))
def test_hello_with_a_flipped_bit_is_refused_or_incomplete(at: int) -> None:
    data = bytearray(encode_hello(HELLO))
    data[at] ^= 1
    reader = SlaveFrames()
    try:
        assert list(reader.receive_data(bytes(data))) == []
    except ProtocolError:
        return
    assert reader.held == len(data)


@pytest.mark.parametrize(
    "change",
    [
        {"cluster": ""},
        {"cluster": "x" * 256},
        {"memberId": -1},
        {"messageDelayLevel": "x" * 20000},
        {"nonce": "x" * 65},
    ],
)
def test_hello_with_impossible_fields_is_refused(change: dict[str, object]) -> None:
    body = msgspec.json.encode(msgspec.to_builtins(HELLO) | change)
    with pytest.raises(ProtocolError):
        list(SlaveFrames().receive_data(frames._encode_letters(frames.HELLO, body)))


def test_hello_of_a_later_format_is_read_without_its_unknown_fields() -> None:
    body = msgspec.json.encode(msgspec.to_builtins(HELLO) | {"format": 3, "news": [1, 2]})
    (hello,) = SlaveFrames().receive_data(frames._encode_letters(frames.HELLO, body))
    assert isinstance(hello, Hello)
    assert hello.format == 3


def test_single_report_is_parsed_like_by_the_general_reader() -> None:
    report = encode_ack(70, 30)
    assert SlaveFrames().only_report(report) == SlaveAck(70, 30) == next(SlaveFrames().receive_data(report))
    reader = SlaveFrames()
    for _ in range(3):
        assert reader.only_report(report) == SlaveAck(70, 30)
        assert list(reader.receive_data(report)) == [SlaveAck(70, 30)]


@pytest.mark.parametrize(
    "data",
    [
        encode_ack(70),
        encode_ack(70) + encode_ack(71)[:8],
        encode_ack(70, 30) * 2,
        struct.pack(">iqq", frames.SYNCED, 30, 70),
        struct.pack(">iqq", frames.SYNCED, 30, -1),
        struct.pack(">iqq", 7, 70, 30),
    ],
)
def test_fast_path_ignores_anything_but_a_single_report(data: bytes) -> None:
    assert SlaveFrames().only_report(data) is None


@pytest.mark.parametrize("cut", [1, 4, 12, 19])
def test_rest_of_a_split_frame_is_not_parsed_as_a_report(cut: int) -> None:
    """The rest has the length of a report."""
    report, reader = encode_ack(70, 30), SlaveFrames()
    assert list(reader.receive_data(report[:cut])) == []
    rest = report[cut:] + report[:cut]
    assert reader.only_report(rest) is None
    assert list(reader.receive_data(rest)) == [SlaveAck(70, 30)]


@pytest.mark.parametrize(("size", "described"), [(5, 0), (5, -1), (5, 5), (5, 9), (0, 1)])
def test_description_that_is_empty_or_leaves_no_bytes_is_refused(size: int, described: int) -> None:
    head = struct.pack(">iiqiqqi", frames.DESCRIBED, size, 0, 1, 0, 0, described)
    with pytest.raises(ProtocolError, match="of them a description"):
        list(MasterFrames().receive_data(head + bytes(size)))
