"""Tests of the record codec: it preserves every byte and rejects malformed records."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import lz4.frame
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from neve.record.bodies import decode_batch, encode_batch, inflate
from neve.record.codec import MalformedRecord, decode_record, encode_record, iter_bodies, iter_records, reencode_record
from neve.record.ids import UniqueIdGenerator, offset_msg_id, parse_offset_msg_id
from neve.record.layout import (
    BORN_HOST_V6,
    COMPRESSED,
    COMPRESSION_LZ4,
    COMPRESSION_ZLIB,
    COMPRESSION_ZSTD,
    STORE_HOST_V6,
)
from neve.record.properties import bytes_to_properties, last_value, properties_to_bytes, tags_code

HOSTS = [("10.1.2.3", 10911), ("2001:db8::1", 443), ("::ffff:1.2.3.4", 1)]


def encode(**changes: object) -> bytes:
    fields: dict[str, object] = {
        "topic": b"orders",
        "body": b"hello",
        "properties": b"KEYS\x01a\x02",
        "queue_id": 3,
        "flag": 7,
        "queue_offset": 42,
        "physical_offset": 4096,
        "sys_flag": 0,
        "born_timestamp": 1,
        "born_host": HOSTS[0],
        "store_timestamp": 2,
        "store_host": HOSTS[0],
    }
    return encode_record(**(fields | changes))  # type: ignore[arg-type]


@given(
    body=st.binary(max_size=200),
    topic=st.text(st.characters(codec="ascii", min_codepoint=48), min_size=1, max_size=255),
    properties=st.binary(max_size=100),
    born=st.sampled_from(HOSTS),
    store=st.sampled_from(HOSTS),
    born_timestamp=st.integers(-(2**63), 2**63 - 1),
)
def test_records_survive_encoding_and_decoding(body, topic, properties, born, store, born_timestamp) -> None:  # type: ignore[no-untyped-def]
    raw = encode(
        body=body,
        topic=topic.encode(),
        properties=properties,
        born_host=born,
        store_host=store,
        born_timestamp=born_timestamp,
    )
    record = decode_record(raw)
    assert (record.size, record.body, record.topic) == (len(raw), body, topic)
    assert (record.properties_raw, record.born_timestamp) == (properties, born_timestamp)
    assert record.body_crc == zlib.crc32(body) & 0x7FFFFFFF


def test_field_positions_equal_the_layout() -> None:
    raw = encode()
    assert int.from_bytes(raw[28:36], "big") == 4096
    assert int.from_bytes(raw[56:64], "big") == 2
    assert raw[88:93] == b"hello"


def test_truncated_records_and_wrong_lengths_are_refused() -> None:
    raw = encode()
    for cut in range(len(raw)):
        with pytest.raises(MalformedRecord):
            decode_record(raw[:cut])
    for position in (84, 93, 100):
        for value in (0x7F, 0xFF):
            lying = bytearray(raw)
            lying[position] = value
            with pytest.raises(MalformedRecord):
                decode_record(lying)


@pytest.mark.parametrize("hosts", [BORN_HOST_V6, STORE_HOST_V6, BORN_HOST_V6 | STORE_HOST_V6])
def test_flipped_host_bits_of_a_short_record_are_refused(hosts: int) -> None:
    """With these bits, the fixed fields extend beyond the record."""
    for length in range(24):
        raw = bytearray(encode(body=b"", topic=b"t", properties=b"\xff" * length))
        raw[36:40] = hosts.to_bytes(4, "big")
        with pytest.raises(MalformedRecord):
            decode_record(raw)


def test_consecutive_records_are_iterated() -> None:
    assert [r.body for r in iter_records(encode(body=b"a") + encode(body=b"") + encode(body=b"c"))] == [
        b"a",
        b"",
        b"c",
    ]


def test_iter_bodies_yields_the_bodies_of_records() -> None:
    hosts = [("127.0.0.1", 1), ("::1", 2)]
    parts = [
        encode(
            body=bytes([number]) * number, queue_offset=number, store_timestamp=number, born_host=born, store_host=store
        )
        for number, (born, store) in enumerate(((a, b) for a in hosts for b in hosts), 1)
    ]
    whole = b"".join(parts)
    assert list(iter_bodies(whole)) == [
        (one.queue_offset, one.sys_flag, one.store_timestamp, one.body) for one in iter_records(whole)
    ]
    for end in range(1, len(parts[0])):
        with pytest.raises(MalformedRecord):
            list(iter_bodies(whole[:end]))
    for at, lie in ((0, len(whole) + 1), (0, 5), (84, -1), (84, 10_000)):
        with pytest.raises(MalformedRecord):
            list(iter_bodies(whole[:at] + lie.to_bytes(4, "big", signed=True) + whole[at + 4 :]))


@pytest.mark.parametrize(
    ("tags", "code"), [(None, 0), ("", 0), ("TagA", 2598919), ("polygenelubricants", -(2**31)), ("é😀", 1996812)]
)
def test_tags_code_equals_the_java_hash(tags: str | None, code: int) -> None:
    assert tags_code(tags) == code


def test_properties_are_parsed_like_rocketmq() -> None:
    assert bytes_to_properties(b"a\x01b\x02c\x01\x02\x01d\x02e\x02f\x01g") == {"a": "b", "f": "g"}
    assert properties_to_bytes({"a": "b", "c": "", "d": "é"}) == "a\x01b\x02d\x01é\x02".encode()


def test_decompression_bomb_is_refused() -> None:
    bomb = zlib.compress(b"\0" * (1 << 20))
    assert inflate(bomb, COMPRESSED) == b"\0" * (1 << 20)
    with pytest.raises(ValueError, match="longer than"):
        inflate(bomb, COMPRESSED, limit=1000)


@pytest.mark.parametrize("codec", [COMPRESSION_ZLIB, COMPRESSION_LZ4, COMPRESSION_ZSTD])
def test_damaged_compressed_body_is_a_value_error(codec: int) -> None:
    whole = b"neve " * 1000
    compress = {
        COMPRESSION_ZLIB: zlib.compress,
        COMPRESSION_LZ4: lz4.frame.compress,
        COMPRESSION_ZSTD: zstandard.compress,
    }
    assert inflate(compress[codec](whole), COMPRESSED | codec) == whole
    with pytest.raises(ValueError, match="not match the compression in its sysFlag"):
        inflate(b"neither of them", COMPRESSED | codec)


def zstd_without_length(whole: bytes) -> bytes:
    """Compress as a stream like the Java client: the frame does not contain the length."""
    stream = zstandard.ZstdCompressor().compressobj()
    return stream.compress(whole) + stream.flush()


@pytest.mark.parametrize("whole", [b"", b"x", b"neve " * 1000, bytes(range(256)) * 4000])
@pytest.mark.parametrize(
    ("codec", "compress"),
    [
        (COMPRESSION_ZLIB, zlib.compress),
        (COMPRESSION_LZ4, lz4.frame.compress),
        (COMPRESSION_ZSTD, zstandard.compress),
        (COMPRESSION_ZSTD, zstd_without_length),
    ],
)
def test_truncated_compressed_body_is_refused(codec: int, compress: Callable[[bytes], bytes], whole: bytes) -> None:
    packed = compress(whole)
    assert inflate(packed, COMPRESSED | codec, len(whole)) == whole
    for length in {0, 1, len(packed) // 2, len(packed) - 1}:
        with pytest.raises(ValueError, match="not match the compression in its sysFlag"):
            inflate(packed[:length], COMPRESSED | codec)


def test_batch_round_trips_and_a_truncated_one_is_refused() -> None:
    blob = encode_batch([(b"a", 1, b"k\x01v\x02"), (b"", 0, b"")])
    assert decode_batch(blob) == [(1, b"a", b"k\x01v\x02"), (0, b"", b"")]
    for cut in range(1, len(blob)):
        if cut != len(encode_batch([(b"a", 1, b"k\x01v\x02")])):
            with pytest.raises(MalformedRecord):
                decode_batch(blob[:cut])


def test_offset_id_encodes_host_and_physical_offset() -> None:
    assert offset_msg_id(("127.0.0.1", 10911), 1024) == "7F00000100002A9F0000000000000400"
    assert parse_offset_msg_id("7F00000100002A9F0000000000000400") == ("127.0.0.1", 10911, 1024)


def test_unique_ids_have_rocketmqs_length_and_do_not_repeat() -> None:
    ids = UniqueIdGenerator("10.0.0.1", 77, 12345, 0)
    made = {ids.next(1) for _ in range(1000)}
    assert len(made) == 1000
    assert {len(one) for one in made} == {32}


def test_unique_id_contains_its_creation_time() -> None:
    ids = UniqueIdGenerator("10.0.0.1", 77, 12345, 1_000)
    told = [int(ids.next(now)[-12:-4], 16) for now in (1_000, 1_000, 1_007, 1_007, 1_003, 1_000)]
    assert told == [0, 0, 7, 7, 3, 0]


def test_copy_with_too_long_properties_keeps_the_original_ones() -> None:
    own = properties_to_bytes({"k": "v" * 32_700})
    record = decode_record(encode(properties=own))
    grown = {**record.properties, "more": "x" * 70}
    copy = decode_record(reencode_record(record, topic="u", properties=grown))
    assert (copy.topic, copy.properties_raw, copy.queue_id) == ("u", own, 3)
    shorter = decode_record(reencode_record(record, topic="u", properties={"a": "b"}, queue_id=9))
    assert (shorter.properties, shorter.queue_id) == ({"a": "b"}, 9)


_PIECES = st.sampled_from(
    [b"TAGS", b"KEYS", b"XTAGS", b"\x01", b"\x02", b"v", b"\xc3\xbc", b"\xe2", b"TAGS\x01", b"\x02TAGS\x01"]
)


@given(st.lists(_PIECES, max_size=12).map(b"".join))
def test_last_value_equals_the_parsed_properties(raw: bytes) -> None:
    for name in ("TAGS", "KEYS", "UNIQ_KEY"):
        assert last_value(raw, f"{name}\x01".encode()) == bytes_to_properties(raw).get(name, "")
