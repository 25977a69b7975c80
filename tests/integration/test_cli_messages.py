"""`neve produce` and `neve consume`: nothing is changed, ignored or lost without a word."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from typing import Any

import pytest

from neve.cli import main
from neve.client import Message, connect
from neve.client.validators import RESERVED_PROPERTIES
from tests.servers.neve import NEVE

DEADLINE_S = 60
USAGE, NOT_FOUND, FEWER = 2, 3, 7
BODIES = [b"text", "Grüße ⛄ 😀".encode(), bytes(range(256)), b"\xff", b'{"a": 1}', b"two\nlines\r\n", b"\x00"]


def neve(namesrv: str, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "NAMESRV_ADDR": namesrv}
    return subprocess.run(
        [NEVE, *arguments], input=stdin, capture_output=True, env=environment, timeout=DEADLINE_S, check=False
    )


def rows(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def stored(namesrv: str, topic: str) -> list[Message]:
    async with connect(namesrv) as client:
        return [message async for message in client.reader(topic)]


def own(message: Message) -> tuple[Any, ...]:
    """What the application gave."""
    properties = {name: value for name, value in message.properties.items() if name not in RESERVED_PROPERTIES}
    return message.body, message.tags, message.properties.get("KEYS"), properties, message.flag


@pytest.mark.parametrize("form", ["auto", "base64", "both"])
def test_what_consume_prints_as_json_produce_sends_again_byte_for_byte(namesrv: str, form: str) -> None:
    first, second = f"trip-{form}", f"trip-back-{form}"

    async def send() -> None:
        async with connect(namesrv) as client:
            await client.create_topic(first, 1)
            await client.create_topic(second, 1)
            for number, body in enumerate(BODIES):
                properties = {"größe": "5 €", "quote": '"\\ '} if number % 2 else {}
                tags = "new" if number % 3 else None
                await client.send(first, body, tags=tags, keys=["42", "a  b"], properties=properties, flag=number - 1)

    asyncio.run(send())
    printed = neve(namesrv, "consume", first, "-o", "json", "--body", form)
    assert printed.returncode == 0, printed.stderr
    assert [b"body_base64" in line for line in printed.stdout.splitlines()] == [
        form != "auto" or not _is_text(body) for body in BODIES
    ]
    again = neve(namesrv, "produce", second, "--json", "--queue", "0", "--order-key", "x", stdin=printed.stdout)
    assert again.returncode == USAGE
    again = neve(namesrv, "produce", second, "--json", "--order-key", "x", stdin=printed.stdout)
    assert again.returncode == 0, again.stderr
    before, after = (asyncio.run(stored(namesrv, topic)) for topic in (first, second))
    assert [own(message) for message in after] == [own(message) for message in before]
    assert [message.body for message in after] == BODIES


def _is_text(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_a_line_that_is_no_message_is_named(namesrv: str) -> None:
    for line, why in (
        (b"no json", b"no JSON"),
        (b"[1]", b"no JSON object"),
        (b'{"body": 5}', b"no text `body`"),
        (b'{"body_base64": "!"}', b"body_base64"),
        (b'{"body": "x", "delay": 5}', b"nobody knows delay"),
        (b'{"body": "x", "properties": {"DELAY": "3"}}', b"property DELAY is used by the system"),
        (b'{"body": "x", "keys": "42"}', b"`keys` is a list"),
        (b'{"body": "x", "flag": true}', b"`flag`"),
    ):
        done = neve(namesrv, "produce", "badlines", "--json", stdin=b'{"body": "fine"}\n\n' + line + b"\n")
        assert done.returncode == 1
        assert b"line 3: " in done.stderr
        assert why in done.stderr
        assert [row["line"] for row in rows(done.stdout)] == [1]


def test_a_line_that_is_too_long_is_named_and_what_was_stored_has_its_receipt(namesrv: str) -> None:
    long = b"x" * (5 << 20)
    done = neve(namesrv, "produce", "toolong", stdin=b"one\n" + long + b"\nthree\nfour")
    assert done.returncode == 1
    assert b"line 2: " in done.stderr
    receipts = rows(done.stdout)
    assert f"{len(receipts)} messages are stored".encode() in done.stderr
    assert len(asyncio.run(stored(namesrv, "toolong"))) == len(receipts)
    assert {row["line"] for row in receipts} <= {1, 3, 4}
    in_order = neve(namesrv, "produce", "toolong-in-order", "--order-key", "k", stdin=b"one\n" + long + b"\nthree\n")
    assert b"nothing after line 2 was sent" in in_order.stderr
    assert [row["line"] for row in rows(in_order.stdout)] == [1]
    assert [message.body for message in asyncio.run(stored(namesrv, "toolong-in-order"))] == [b"one"]


def test_one_interrupt_ends_a_produce_that_waits_for_its_terminal(namesrv: str) -> None:
    ours, theirs = pty.openpty()
    # Below a shell's `&` an interrupt is ignored, and so it would be by all that is started from here.
    heeds = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", heeds, NEVE, "produce", "typed"],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "NAMESRV_ADDR": namesrv},
    )
    os.close(theirs)
    try:
        os.write(ours, b"hello\n")
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["line"] == 1
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        os.close(ours)
    assert process.returncode == 130
    assert b"1 messages are stored" in said
    assert b"Traceback" not in said
    assert b"Fatal" not in said


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["consume", "t", "--group", "g", "--queue", "1"], "--queue is for reading without a group"),
        (["consume", "t", "--idle", "5"], "--idle goes with --group"),
        (["consume", "t", "--pop"], "--pop needs a --group"),
        (["consume", "t", "--share"], "--share needs a --group"),
        (["consume", "t", "--group", "g", "--pop", "--broadcast"], "--broadcast and --pop exclude each other"),
        (["consume", "t", "--body", "base64"], "--body goes with -o json"),
        (["produce", "t", "body", "--json"], "leave BODY out"),
        (["produce", "t", "--json", "--tags", "x"], "each line has its own tags"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == USAGE
    assert why in " ".join(capsys.readouterr().err.split())


def test_a_queue_that_is_not_there_is_not_found(namesrv: str) -> None:
    assert neve(namesrv, "produce", "queues", "--queue", "0", "hello").returncode == 0
    assert neve(namesrv, "consume", "queues", "--queue", "0").stdout == b"hello\n"
    assert neve(namesrv, "consume", "queues", "--queue", "1").stdout == b""
    assert neve(namesrv, "consume", "queues", "--queue", "99").returncode == NOT_FOUND


def test_from_last_without_a_group_is_what_comes_from_now_on(namesrv: str) -> None:
    assert neve(namesrv, "produce", "tail", "old").returncode == 0
    process = subprocess.Popen(
        [NEVE, "consume", "tail", "--from", "last", "--count", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "NAMESRV_ADDR": namesrv},
    )
    try:
        assert process.stderr is not None
        assert b"from now on" in process.stderr.readline()
        assert neve(namesrv, "produce", "tail", stdin=b"new\nnewer\n").returncode == 0
        printed, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert sorted(printed.split()) == [b"new", b"newer"]
    assert process.returncode == 0
    none = neve(namesrv, "consume", "tail", "--from", "last", "--count", "1", "--idle", "0.1")
    assert (none.returncode, none.stdout) == (FEWER, b"")


def test_a_group_that_has_offsets_is_told_that_it_goes_on_there(namesrv: str) -> None:
    assert neve(namesrv, "produce", "goeson", stdin=b"1\n2\n").returncode == 0
    first = neve(namesrv, "consume", "goeson", "--group", "again", "--from", "first", "--count", "2")
    assert sorted(first.stdout.split()) == [b"1", b"2"]
    assert b"it goes on there" not in first.stderr
    second = neve(namesrv, "consume", "goeson", "--group", "again", "--from", "first", "--idle", "0.5")
    assert second.stdout == b""
    assert b"it goes on there" in second.stderr


def test_lines_keep_what_is_in_them(namesrv: str) -> None:
    text = "".join(f"line {number} \u2028 {'x' * (number * 37 % 9000)}\n" for number in range(300)).encode()
    done = neve(namesrv, "produce", "many", "--order-key", "k", stdin=text + b"\r\n\nlast without an end")
    assert done.returncode == 0, done.stderr
    assert [message.body for message in asyncio.run(stored(namesrv, "many"))] == [
        *text.rstrip(b"\n").split(b"\n"), b"last without an end"
    ]  # fmt: skip
    assert rows(done.stdout)[-1]["line"] == 303
