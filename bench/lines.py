"""Lines through the command line: `neve produce` from a file, `neve consume` to a file, compared byte for byte.

    python -m bench.lines [--lines 1000000] [--namesrv host:port]

Without `--namesrv` it runs its own `neve up`. Each command is timed as a whole, including its start.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import NEVE, NeveServer

#: All bytes except the two that end lines.
_ANY = bytes(byte for byte in range(256) if byte not in b"\r\n")
_LIMIT_S = 900


class Took(NamedTuple):
    """The duration of one command, in seconds."""

    command: str
    seconds: float


def write_lines(file: Path, count: int) -> None:
    """Write numbered lines of 66 bytes on average, with arbitrary bytes."""
    with file.open("wb") as out:
        for number in range(count):
            at = number * 7 % len(_ANY)
            out.write(b"%08d %s\n" % (number, (_ANY + _ANY)[at : at + 16 + number % 81]))


def round_trip(namesrv: str, directory: Path, count: int, *, queues: int = 4) -> Iterator[Took]:
    """Yield each command with its duration.

    Raises:
        AssertionError: The output differs from the input.
    """
    lines, topic = directory / "lines", f"lines{uuid.uuid4().hex[:8]}"
    write_lines(lines, count)
    _create(namesrv, topic, queues)
    wanted = sorted(lines.read_bytes().split(b"\n"))
    yield _run(namesrv, "produce", topic, stdin=lines, stdout=directory / "receipts")
    receipts = (directory / "receipts").read_bytes()
    assert receipts.count(b'"status": "SEND_OK"') == receipts.count(b"\n") == count
    for how in ([], ["--group", f"g{topic}", "--count", str(count)]):
        out = directory / "out"
        yield _run(namesrv, "consume", topic, *how, stdout=out)
        assert sorted(out.read_bytes().split(b"\n")) == wanted, f"consume {how} gives other lines"
    # With one queue the output is the file itself.
    _create(namesrv, f"{topic}-one", 1)
    yield _run(namesrv, "produce", f"{topic}-one", "--order-key", "k", "--quiet", stdin=lines)
    yield _run(namesrv, "consume", f"{topic}-one", stdout=directory / "out")
    assert (directory / "out").read_bytes() == lines.read_bytes(), "not the same file"


def _create(namesrv: str, topic: str, queues: int) -> None:
    """Create a topic; return once the name server routes clients to it."""
    _run(namesrv, "topic", "create", topic, "--queues", str(queues))
    describe = [NEVE, "topic", "show", topic, "-n", namesrv]
    wait_until(
        lambda: subprocess.run(describe, capture_output=True, check=False).returncode == 0, f"the route of {topic}"
    )


def _run(namesrv: str, *arguments: str, stdin: Path | None = None, stdout: Path | None = None) -> Took:
    began = time.perf_counter()
    with open(stdin or "/dev/null", "rb") as source, open(stdout or "/dev/null", "wb") as target:  # noqa: PTH123
        done = subprocess.run(
            [NEVE, *arguments, "-n", namesrv],
            stdin=source,
            stdout=target,
            stderr=subprocess.PIPE,
            timeout=_LIMIT_S,
            check=False,
        )
    assert done.returncode == 0, f"{arguments}: {done.stderr.decode(errors='replace')}"
    return Took(" ".join(arguments), time.perf_counter() - began)


@contextmanager
def _cluster(namesrv: str | None, directory: Path) -> Iterator[str]:
    if namesrv is not None:
        yield namesrv
        return
    with NeveServer(directory) as neve:
        yield neve.namesrv


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--namesrv")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, _cluster(arguments.namesrv, Path(name)) as namesrv:
        for took in round_trip(namesrv, Path(name), arguments.lines):
            print(f"{took.seconds:6.1f} s  {arguments.lines / took.seconds:9,.0f}/s  neve {took.command}", flush=True)
    print(f"{arguments.lines:,} lines: the same bytes each time")


if __name__ == "__main__":
    main()
