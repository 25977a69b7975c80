"""Tests of the conversion between lines and messages, without guesses, loss or changes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from pathlib import Path

import click
import pytest

from neve.cli import produce
from neve.cli.line_parts import LineParts, delimiter_bytes
from neve.cli.line_ranges import ranges
from neve.cli.message_formats import as_body, by_format
from neve.cli.message_lines import BadLine, Outgoing, from_line
from neve.cli.options import INSTANT, OFFSETS
from neve.cli.spans import RequestedSpan
from neve.cli.stdin_lines import LineTooLong, stdin_lines
from neve.cli.stdout_bytes import NotPrinted, StdoutBytes
from neve.client import Message, MessageQueue
from neve.clock import system_now_ms
from neve.units import duration_text

MESSAGE = Message(
    topic="orders",
    body=b"\x00body\xff",
    tags="new",
    keys=("42", "é"),
    properties={"colour": "red", "KEYS": "42 é", "UNIQ_KEY": "AB"},
    queue=MessageQueue("orders", "broker-a", 3),
    queue_offset=17,
    msg_id="AB",
    store_timestamp=1_767_225_600_001,
    born_timestamp=1_767_225_600_000,
)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("%s", b"\x00body\xff"),
        (r"%q:%o\t%s\n", b"3:17\t\x00body\xff\n"),
        ("%k|%K|%g|%i", "42 é|5|new|AB".encode()),
        ("%h", b"colour=red"),
        ("%H", "colour=red,KEYS=42 é,UNIQ_KEY=AB".encode()),
        ("%t %p %b %S", b"orders 3 broker-a 6"),
        ("%T %B", b"1767225600001 1767225600000"),
        ("%D", b"2026-01-01T00:00:00.001Z"),
        (r"%R%s\x00 100%%", b"\0\0\0\x06\x00body\xff\x00 100%"),
    ],
)
def test_format_prints_its_fields(text: str, printed: bytes) -> None:
    assert by_format(text)(MESSAGE) == printed


@pytest.mark.parametrize("text", ["%x", "%", r"\q%s"])
def test_format_with_an_unknown_letter_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        by_format(text)


def test_body_output_ends_with_the_delimiter() -> None:
    assert as_body(delimiter_bytes(r"\0"))(MESSAGE) == b"\x00body\xff\0"
    with pytest.raises(click.BadParameter):
        delimiter_bytes("")


def test_line_key_and_properties_extend_the_common_ones() -> None:
    common = Outgoing(b"", "new", ("all",), {"from": "here"})
    parts = LineParts(b":", b"|")
    found = parts.message(b"42 43:colour=red,size=a=b|body:|\xff", common)
    assert found == Outgoing(
        b"body:|\xff", "new", ("all", "42", "43"), {"from": "here", "colour": "red", "size": "a=b"}
    )
    assert parts.message(b":|body", common) == common._replace(body=b"body")
    assert LineParts(b"::").message(b"a:b::c", common).keys == ("all", "a:b")


@pytest.mark.parametrize("line", [b"no key", b"key:no properties", b"\xff:|x", b"k:colour|x"])
def test_line_without_its_parts_is_refused(line: bytes) -> None:
    with pytest.raises(BadLine):
        LineParts(b":", b"|").message(line, Outgoing(b""))


@pytest.mark.parametrize(
    "field", ['"tags": "X"', '"keys": ["X"]', '"properties": {"a": "X"}', '"properties": {"X": "a"}']
)
def test_lone_surrogate_in_a_json_line_is_refused(field: str) -> None:
    with pytest.raises(BadLine):
        from_line(b'{"body": "x", %s}' % field.replace("X", r"\ud800").encode())


def lines_of(text: bytes, delimiter: bytes, piece: int, limit: int = 1 << 20) -> list[tuple[int, bytes]]:
    """Return the lines of a text that a pipe delivers in pieces of `piece` bytes."""

    async def read() -> list[tuple[int, bytes]]:
        ours, theirs = os.pipe()
        found: list[tuple[int, bytes]] = []
        reading = stdin_lines(delimiter=delimiter, limit=limit, descriptor=ours)
        try:
            for at in range(0, len(text), piece):
                os.write(theirs, text[at : at + piece])
            os.close(theirs)
            async for together in reading:
                found += together
        finally:
            os.close(ours)
        return found

    return asyncio.run(read())


@pytest.mark.parametrize("delimiter", [b"\n", b"\0", b"--"])
@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_lines_are_independent_of_read_boundaries(delimiter: bytes, piece: int) -> None:
    lines = [b"one", b"", b"two - three\x01", b"-", b"last\xff"]
    text = delimiter.join(lines)
    wanted = text.split(delimiter)
    assert [line for _, line in lines_of(text, delimiter, piece)] == wanted
    assert lines_of(text + delimiter, delimiter, piece) == list(enumerate(wanted, 1))


def test_carriage_return_is_stripped_only_from_text_lines() -> None:
    assert lines_of(b"a\r\nb\r", b"\n", 100) == [(1, b"a"), (2, b"b")]
    assert lines_of(b"a\r\r\n", b"\n", 100) == [(1, b"a\r")]
    assert lines_of(b"a\r\0b\r", b"\0", 100) == [(1, b"a\r"), (2, b"b\r")]


def test_endless_line_is_refused() -> None:
    with pytest.raises(LineTooLong) as caught:
        lines_of(b"one\n" + b"x" * 5000, b"\n", 100, limit=1000)
    assert caught.value.number == 2


def test_offset_ranges_are_abbreviated() -> None:
    assert ranges([]) == ""
    assert ranges([5, 1, 2, 3, 9, 8]) == "1-3, 5, 8-9"
    assert ranges(range(1, 40, 2), at_most=2) == "1, 3 and 18 more"


@pytest.mark.parametrize(
    ("text", "found"),
    [("5", (5, None)), ("5:", (5, None)), (":5", (None, 5)), ("5:9", (5, 9)), ("0:0", (0, 0))],
)
def test_offsets_are_a_start_or_a_half_open_range(text: str, found: tuple[int | None, int | None]) -> None:
    assert OFFSETS.convert(text, None, None) == found


@pytest.mark.parametrize("text", ["", ":", "-1", "9:5", "a", "1:b"])
def test_offsets_refuse_other_text(text: str) -> None:
    with pytest.raises(click.BadParameter):
        OFFSETS.convert(text, None, None)


def test_store_times_bound_a_half_open_range() -> None:
    wanted = RequestedSpan(from_ms=10, to_ms=20)
    assert [ms for ms in (9, 10, 19, 20) if wanted.has(ms)] == [10, 19]
    assert RequestedSpan().has(0)


@pytest.mark.parametrize("span", [60, 5400, 7200, 86_400])
def test_negative_duration_is_a_time_before_now(span: int) -> None:
    before = system_now_ms()
    found = INSTANT.convert(f"-{duration_text(span * 1000)}", None, None)
    assert before - span * 1000 <= found <= system_now_ms() - span * 1000
    with pytest.raises(click.BadParameter, match=re.escape("-90")):
        INSTANT.convert("yesterday", None, None)


def test_output_to_a_full_pipe_does_not_block_the_loop() -> None:
    """With a full pipe, other tasks run, and all output arrives."""
    data = bytes(range(256)) * 4096

    async def inside() -> bytes:
        ours, theirs = os.pipe()
        out = StdoutBytes(theirs)
        out.add(data)
        printing = asyncio.create_task(out.flush())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not printing.done()
        os.set_blocking(ours, False)
        parts: list[bytes] = []
        while sum(map(len, parts)) < len(data):
            with contextlib.suppress(BlockingIOError):
                parts.append(os.read(ours, 65536))
            await asyncio.sleep(0)
        await printing
        os.close(ours)
        os.close(theirs)
        return b"".join(parts)

    assert asyncio.run(inside()) == data


async def test_closed_output_pipe_is_detected_without_a_write() -> None:
    ours, theirs = os.pipe()
    out = StdoutBytes(theirs)
    try:
        with pytest.raises(BrokenPipeError):
            async with asyncio.timeout(30), out.watched():
                os.close(ours)
                await asyncio.Event().wait()
    finally:
        os.close(theirs)


async def test_output_to_a_full_disk_is_an_error() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    out = StdoutBytes(full)
    out.add(b"receipt")
    try:
        with pytest.raises(NotPrinted, match="No space left"):
            await out.flush()
    finally:
        os.close(full)


def test_oversized_body_file_is_not_read_completely(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(produce, "_FILE_BYTES", 1000)
    file = tmp_path / "file"
    file.write_bytes(b"x" * 1000)
    assert produce._file(os.fsencode(file), Outgoing(b"", "new")) == Outgoing(b"x" * 1000, "new")
    with pytest.raises(BadLine, match="longer than 1000 bytes"):
        produce._file(b"/dev/zero", Outgoing(b""))
