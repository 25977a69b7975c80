"""A transcript: command lines as a user types them, their output and exit codes, with variable parts replaced by names.

Transcripts are golden files; `NEVE_GOLDEN=write` writes them again.

    $ neve topic create orders
    ! created orders with 8 queues           stderr
    [3]                                      the exit code, if it is not 0
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from neve.cli import main
from tests.kit.clock.waiting import wait_until

_GOLDEN = Path(__file__).with_name("golden")
_WRITE = "NEVE_GOLDEN"

#: Variable parts and their replacements; the first that matches is used.
_CHANGING: Sequence[tuple[str, str]] = (
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)?", "TIME"),
    (r"\b\d{4}-\d\d-\d\d\b", "DATE"),
    (r"\b1[6-9]\d{11}\b", "MS"),
    (r"\b[0-9A-F]{32}\b", "ID"),
    (r"127\.0\.0\.1:\d+", "ADDRESS"),
    (r"127\.0\.0\.1@[\w#.-]+", "CLIENT"),
    (r"neve-bench-[0-9a-f]{8}", "neve-bench-NAME"),
    (r"\b\d+\.\d+ (KiB|MiB|GiB)", "SIZE"),
    (r"\b\d+ B/s", "SIZE/s"),
    (r"\b\d+\.\d+%?", "N"),
    (r"\b(\d+m)?\d+s\b", "SPAN"),
)


class CommandLine(NamedTuple):
    """A command line. `{name}` is replaced by the value that an earlier step's `keep` found."""

    line: str
    stdin: str = ""
    #: A name, and a pattern for the output whose first group is kept under it.
    keep: tuple[str, str] | None = None
    #: The command is repeated until its output contains this text.
    until: str = ""
    #: Replace all numbers, because measurements differ each time.
    measured: bool = False
    #: Leave out the output; only the execution matters.
    silent: bool = False
    #: Run only with this kind of server.
    only: str = ""


class Shell:
    """Runs steps in this process, with its own standard input."""

    def __init__(self, capfd: pytest.CaptureFixture[str], names: dict[str, str]) -> None:
        """Create a shell; `names` are values, such as a directory, that the transcript shows by name."""
        self._capfd, self._names = capfd, names
        self._lines: list[str] = []

    def type(self, step: CommandLine) -> None:
        code, out, err = self._run(step)
        if step.until:
            seen = [(code, out, err)]

            def is_there() -> bool:
                if re.search(step.until, seen[-1][1]):
                    return True
                seen.append(self._run(step))
                return False

            wait_until(is_there, f"{step.until!r} of {step.line}")
            code, out, err = seen[-1]
        if step.keep is not None:
            name, pattern = step.keep
            found = re.search(pattern, out)
            assert found is not None, (step.line, out, err)
            self._names[name] = found[1]
        self._lines.append(f"$ {step.line}" + (" <<END" if step.stdin else ""))
        if step.stdin:
            self._lines += [*step.stdin.splitlines(), "END"]
        if step.silent:
            assert code == 0, (step.line, out, err)
        else:
            self._lines += [*self._shown(out, step), *(f"! {line}" for line in self._shown(err, step))]
        self._lines += [f"[{code}]"] * (code != 0)
        self._lines.append("")

    def _run(self, step: CommandLine) -> tuple[int, str, str]:
        line = re.sub(r"\{(\w+)\}", lambda name: self._names[name[1]], step.line)
        _, *words = shlex.split(line)
        kept = os.dup(0)
        with tempfile.TemporaryFile() as typed:
            typed.write(step.stdin.encode())
            typed.seek(0)
            os.dup2(typed.fileno(), 0)
            try:
                code = main.run(words)
            finally:
                os.dup2(kept, 0)
                os.close(kept)
        out, err = self._capfd.readouterr()
        return code, out, err

    def _shown(self, text: str, step: CommandLine) -> list[str]:
        for name, value in sorted(self._names.items(), key=lambda item: -len(item[1])):
            text = text.replace(value, f"{{{name}}}")
        for pattern, name in _CHANGING:
            text = re.sub(pattern, name, text)
        if step.measured:
            text = re.sub(r"\b\d+\b", "N", text)
            # A broker that has just started has no rates yet.
            text = re.sub(r"(?m)^((?:put|get)_tps)\b.*$", r"\1  N", re.sub(r"(?m)(\s+N)+\s*$", "  N", text))
        # The width of a column depends on the replaced values.
        return [re.sub(r" {2,}", "  ", line).rstrip() for line in text.splitlines()]

    def compare(self, name: str) -> None:
        """Compare with the golden file, unless it is to be written."""
        text = "\n".join(self._lines)
        golden = _GOLDEN / f"{name}.txt"
        if os.environ.get(_WRITE) == "write":
            golden.write_text(text, "utf-8")
            return
        wanted = golden.read_text("utf-8")
        changed = list(difflib.unified_diff(wanted.splitlines(), text.splitlines(), golden.name, "now", lineterm=""))
        assert not changed, "\n".join([*changed, f"as it shall be: {_WRITE}=write writes it"])
