"""`neve produce` and `neve consume` neither change, ignore nor lose messages silently."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bench.lines import round_trip
from neve.cli import main
from neve.client import Message, connect
from neve.client.validators import RESERVED_PROPERTIES
from tests.kit.server.neve import NEVE

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
    """Return the properties that the application set."""
    properties = {name: value for name, value in message.properties.items() if name not in RESERVED_PROPERTIES}
    return message.body, message.tags, message.properties.get("KEYS"), properties, message.flag


@pytest.mark.parametrize("form", ["auto", "base64", "both"])
def test_produce_resends_json_output_of_consume_byte_for_byte(namesrv: str, form: str) -> None:
    first, second = f"trip-{form}", f"trip-back-{form}"

    async def send() -> None:
        async with connect(namesrv) as client:
            await client.admin.create_topic(first, 1)
            await client.admin.create_topic(second, 1)
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


def test_produce_names_the_line_that_is_not_a_message(namesrv: str) -> None:
    for line, why in (
        (b"no json", b"it is not JSON"),
        (b"[1]", b"it is not a JSON object"),
        (b'{"body": 5}', b"neither a text `body`"),
        (b'{"body_base64": "!"}', b"body_base64"),
        (b'{"body": "x", "delay": 5}', b"unknown fields: delay"),
        (b'{"body": "x", "properties": {"DELAY": "3"}}', b"property DELAY is used by the system"),
        (b'{"body": "x", "keys": "42"}', b"`keys` must be a list"),
        (b'{"body": "x", "flag": true}', b"`flag`"),
    ):
        done = neve(namesrv, "produce", "badlines", "--json", stdin=b'{"body": "fine"}\n\n' + line + b"\n")
        assert done.returncode == 1
        assert b"line 3: " in done.stderr
        assert why in done.stderr
        assert [row["line"] for row in rows(done.stdout)] == [1]


def test_produce_names_a_too_long_line_and_prints_receipts_of_stored_ones(namesrv: str) -> None:
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


def test_one_interrupt_ends_produce_that_reads_from_a_terminal(namesrv: str) -> None:
    ours, theirs = pty.openpty()
    # The shell ignores interrupts for processes started with `&`, and child processes inherit that.
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
        (["consume", "t", "--group", "g", "--queue", "1"], "--queue excludes --group"),
        (["consume", "t", "--group", "g", "--last", "1"], "--last excludes --group"),
        (["consume", "t", "--group", "g", "--offsets", "1"], "--offsets excludes --group"),
        (["consume", "t", "--group", "g", "--to", "-1h"], "--to excludes --group"),
        (["consume", "t", "--last", "1", "--offsets", "1"], "--offsets and --last exclude each other"),
        (["consume", "t", "--from", "-1h", "--last", "1"], "--from and --last exclude each other"),
        (["consume", "t", "--to", "-1h", "--follow"], "--to excludes --follow"),
        (["consume", "t", "--to", "earliest"], "is not a time"),
        (["consume", "t", "--offsets", "1:2", "--follow"], "excludes --follow, which has no end"),
        (["consume", "t", "-o", "json", "--format", "%s"], "a form of its own"),
        (["consume", "t", "--format", "%s", "--delimiter", "x"], "leave --delimiter out"),
        (["consume", "t", "--idle", "5"], "--idle needs --group"),
        (["consume", "t", "--pop"], "--pop needs --group"),
        (["consume", "t", "--share"], "--share needs --group"),
        (["consume", "t", "--group", "g", "--pop", "--broadcast"], "--broadcast and --pop exclude each other"),
        (["consume", "t", "--body", "base64"], "--body needs -o json"),
        (["produce", "t", "body", "--json"], "leave BODY out"),
        (["produce", "t", "body", "--file", __file__], "leave BODY and --json out"),
        (["produce", "t", "--json", "-K", ":"], "from each line"),
        (["produce", "t", "body", "-K", ":"], "apply to lines of stdin only"),
        (["produce", "t", "-D", ""], "the delimiter is empty"),
        (["produce", "t", "--json", "--tags", "x"], "from each line"),
    ],
)
def test_unsupported_option_combination_is_rejected(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == USAGE
    assert why in " ".join(capsys.readouterr().err.split())


def test_consume_of_a_missing_queue_exits_with_not_found(namesrv: str) -> None:
    assert neve(namesrv, "produce", "queues", "--queue", "0", "hello").returncode == 0
    assert neve(namesrv, "consume", "queues", "--queue", "0").stdout == b"hello\n"
    assert neve(namesrv, "consume", "queues", "--queue", "1").stdout == b""
    assert neve(namesrv, "consume", "queues", "--queue", "99").returncode == NOT_FOUND


def test_consume_from_last_without_group_returns_new_messages_only(namesrv: str) -> None:
    assert neve(namesrv, "produce", "tail", "old").returncode == 0
    process = subprocess.Popen(
        [NEVE, "consume", "tail", "--from", "latest", "--count", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "NAMESRV_ADDR": namesrv},
    )
    try:
        assert process.stderr is not None
        assert b"waiting for new messages" in process.stderr.readline()
        assert neve(namesrv, "produce", "tail", stdin=b"new\nnewer\n").returncode == 0
        printed, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert sorted(printed.split()) == [b"new", b"newer"]
    assert process.returncode == 0
    none = neve(namesrv, "consume", "tail", "--from", "latest", "--count", "1", "--idle", "0.1")
    assert (none.returncode, none.stdout) == (FEWER, b"")


def test_consume_reports_committed_offsets_of_the_group(namesrv: str) -> None:
    assert neve(namesrv, "produce", "goeson", stdin=b"1\n2\n").returncode == 0
    first = neve(namesrv, "consume", "goeson", "--group", "again", "--from", "earliest", "--count", "2")
    assert sorted(first.stdout.split()) == [b"1", b"2"]
    assert b"it continues there" not in first.stderr
    second = neve(namesrv, "consume", "goeson", "--group", "again", "--from", "earliest", "--idle", "0.5")
    assert second.stdout == b""
    assert b"it continues there" in second.stderr


def test_lines_keep_their_content(namesrv: str) -> None:
    text = "".join(f"line {number} \u2028 {'x' * (number * 37 % 9000)}\n" for number in range(300)).encode()
    done = neve(namesrv, "produce", "many", "--order-key", "k", stdin=text + b"\r\n\nlast without an end")
    assert done.returncode == 0, done.stderr
    assert [message.body for message in asyncio.run(stored(namesrv, "many"))] == [
        *text.rstrip(b"\n").split(b"\n"), b"last without an end"
    ]  # fmt: skip
    assert rows(done.stdout)[-1]["line"] == 303


def test_lines_have_their_keys_and_properties(namesrv: str) -> None:
    text = b"42:colour=red,size=5|first\n43 44:|sec:ond|\n"
    done = neve(namesrv, "produce", "parted", "-K", ":", "-H", "|", "-k", "all", "--order-key", "x", stdin=text)
    assert done.returncode == 0, done.stderr
    first, second = asyncio.run(stored(namesrv, "parted"))
    assert own(first) == (b"first", None, "all 42", {"colour": "red", "size": "5"}, 0)
    assert own(second) == (b"sec:ond|", None, "all 43 44", {}, 0)
    printed = neve(namesrv, "consume", "parted", "--format", r"%k;%h;%s\0")
    assert printed.stdout == b"all 42;colour=red,size=5;first\0all 43 44;;sec:ond|\0"
    bad = neve(namesrv, "produce", "parted", "-K", ":", stdin=b"1:one\ntwo\n3:three\n")
    assert (bad.returncode, [row["line"] for row in rows(bad.stdout)]) == (1, [1])
    assert b"line 2: its key must end with ':'" in bad.stderr
    assert b"1 messages are stored" in bad.stderr


def test_file_of_any_content_is_sent_as_one_message(namesrv: str, tmp_path: Path) -> None:
    files = []
    for number, body in enumerate([*BODIES, b"x" * 3_000_000]):
        files.append(tmp_path / f"file {number}")
        files[-1].write_bytes(body)
    options = [word for file in files for word in ("--file", str(file))]
    done = neve(namesrv, "produce", "files", *options, "--order-key", "k")
    assert done.returncode == 0, done.stderr
    assert [row["file"] for row in rows(done.stdout)] == list(map(str, files))
    assert [message.body for message in asyncio.run(stored(namesrv, "files"))] == [file.read_bytes() for file in files]
    assert neve(namesrv, "produce", "files", "--file", "-", stdin=b"a\nb\n").returncode == 0
    assert neve(namesrv, "consume", "files", "--last", "1", "-D", "").stdout == b"a\nb\n"
    empty = tmp_path / "empty"
    empty.touch()
    failed = neve(namesrv, "produce", "files", "--file", str(empty))
    assert failed.returncode == 1
    assert f"file {empty}: the message body is empty".encode() in failed.stderr


def test_quiet_prints_no_receipts_but_errors_report_stored_messages(namesrv: str) -> None:
    done = neve(namesrv, "produce", "quiet", "--quiet", "--progress", stdin=b"1\n2\n")
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr.startswith(b"sent 2 messages to quiet in ")
    bad = neve(namesrv, "produce", "quiet", "--quiet", "--json", stdin=b'{"body": "3"}\nno\n')
    assert (bad.returncode, bad.stdout) == (1, b"")
    assert b"line 2: " in bad.stderr
    assert b"1 messages are stored; nothing after line 2 was sent" in bad.stderr


def test_lines_end_with_the_given_delimiter(namesrv: str) -> None:
    assert neve(namesrv, "produce", "ended", "-D", r"\0", "--order-key", "k", stdin=b"a\nb\0c\r\0").returncode == 0
    assert [message.body for message in asyncio.run(stored(namesrv, "ended"))] == [b"a\nb", b"c\r"]
    assert neve(namesrv, "consume", "ended", "-D", r"\0").stdout == b"a\nb\0c\r\0"


def test_lines_are_sent_in_batches_to_all_queues(namesrv: str) -> None:
    asyncio.run(_create(namesrv, "spread", 4))
    done = neve(namesrv, "produce", "spread", stdin=b"".join(b"%d\n" % number for number in range(2000)))
    receipts = rows(done.stdout)
    assert sorted(row["line"] for row in receipts) == list(range(1, 2001))
    at = {(row["queue"], row["offset"]): row for row in receipts}
    assert len(at) == 2000
    assert {queue for queue, _ in at} == {0, 1, 2, 3}
    for message in asyncio.run(stored(namesrv, "spread")):
        assert message.queue is not None
        receipt = at[message.queue.queue_id, message.queue_offset]
        assert (receipt["msg_id"], receipt["line"] - 1) == (message.msg_id, int(message.body))


async def _create(namesrv: str, topic: str, queues: int) -> None:
    async with connect(namesrv) as client:
        await client.admin.create_topic(topic, queues)


def test_consume_reads_a_range_by_offset_time_and_from_the_end(namesrv: str) -> None:
    asyncio.run(_create(namesrv, "parts", 2))
    for queue, texts in (("0", b"a\nb\nc\n"), ("1", b"d\ne\n")):
        assert neve(namesrv, "produce", "parts", "--queue", queue, "--tags", "x", stdin=texts).returncode == 0

    def read(*options: str) -> bytes:
        done = neve(namesrv, "consume", "parts", *options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert read("--offsets", "1:2") == b"b\ne\n"
    assert read("--offset", "2") == b"c\n"
    assert read("--last", "3") == b"c\nd\ne\n"
    assert read("--last", "2", "--queue", "0", "--tags", "x || y") == b"b\nc\n"
    assert read("--last", "2", "--tags", "y") == b""
    assert read("--last", "99").count(b"\n") == 5
    assert read("--from", "-1h", "--to", "-0.001s").count(b"\n") == 5
    assert read("--from", "-30d", "--to", "-1h") == b""
    stored_at = [int(ms) for ms in read("--format", r"%T\n").split()]
    middle = datetime.fromtimestamp(stored_at[3] / 1000, UTC).isoformat()
    assert read("--from", middle, "--queue", "1") == b"d\ne\n"
    assert read("--to", middle, "--queue", "1") == b""


def test_follow_prints_new_messages_until_interrupted(namesrv: str) -> None:
    assert neve(namesrv, "produce", "followed", stdin=b"old\n").returncode == 0
    heeds = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", heeds, NEVE, "consume", "followed", "--follow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "NAMESRV_ADDR": namesrv},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"old\n"
        assert neve(namesrv, "produce", "followed", stdin=b"new\n").returncode == 0
        assert process.stdout.readline() == b"new\n"
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert (process.returncode, printed) == (130, b"")
    assert b"2 messages\n" in said
    assert b"Traceback" not in said


@pytest.mark.parametrize("how", [[], ["--follow"], ["--group", "piped", "--idle", "60"]])
def test_consume_ends_silently_when_its_output_pipe_closes(namesrv: str, how: list[str]) -> None:
    topic = f"piped{len(how)}"
    assert neve(namesrv, "produce", topic, "-q", stdin=b"x" * 1000 + b"\n" + b"line\n" * 30_000).returncode == 0
    process = subprocess.Popen(
        [NEVE, "consume", topic, *how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "NAMESRV_ADDR": namesrv},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=DEADLINE_S) == 1
        assert process.stderr is not None
        said = process.stderr.read()
    finally:
        process.kill()
    assert b"error" not in said
    assert b"Traceback" not in said
    if how[:1] == ["--group"]:
        rest = neve(namesrv, "consume", topic, *how[:2], "--idle", "1")
        assert rest.stdout.count(b"\n") > 0, "what nobody read was acknowledged"


def test_many_lines_are_consumed_byte_for_byte(namesrv: str, tmp_path: Path) -> None:
    """`make lines` runs this test with a million lines."""
    assert len(list(round_trip(namesrv, tmp_path, 20_000))) == 5


def test_unwritable_receipts_are_reported(namesrv: str) -> None:
    environment = {**os.environ, "NAMESRV_ADDR": namesrv}
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [NEVE, "produce", "unprinted"], input=b"one\ntwo\n", stdout=full, stderr=subprocess.PIPE, env=environment,
            timeout=DEADLINE_S, check=False,
        )  # fmt: skip
    assert ended.returncode == 1
    assert b"2 messages are stored" in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith(b"error: receipts are missing: stdout cannot be written")
