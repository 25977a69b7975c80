"""Read the commands of a page of documentation, and run them in a shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[3] / "docs"
_S = 120.0
_FENCE = re.compile(
    r'^(?P<indent> *)```(?P<language>\w*)(?: title="(?P<title>[^"]*)")?\n(?P<text>.*?)^(?P=indent)```$',
    re.MULTILINE | re.DOTALL,
)


class Fence(NamedTuple):
    """A code block, without its indentation."""

    language: str
    title: str
    text: str


class Step(NamedTuple):
    """A command of a `console` block and the lines that it prints."""

    command: str
    printed: list[str]


class Page:
    """A page below docs/, by its path."""

    def __init__(self, path: str) -> None:
        self.text = (DOCS / path).read_text("utf-8")

    def section(self, heading: str) -> str:
        """Return the text below a heading of level 2 or 3, up to the next one of that level or above."""
        found = re.search(rf"^(##+) {re.escape(heading)}\n(.*?)(?=^##? |^\1 |\Z)", self.text, re.MULTILINE | re.DOTALL)
        assert found is not None, heading
        return found[2]

    def fences(self, heading: str | None = None) -> list[Fence]:
        """Return the code blocks of a section, or of the page, in their order."""
        text = self.text if heading is None else self.section(heading)
        return [
            Fence(one["language"], one["title"] or "", textwrap.dedent(one["text"])) for one in _FENCE.finditer(text)
        ]

    def blocks(self, heading: str | None = None, language: str = "") -> list[str]:
        """Return the code blocks of a language."""
        return [one.text for one in self.fences(heading) if one.language == language]

    def commands(self, heading: str) -> list[str]:
        """Return the lines of the blocks without a language, without comments."""
        lines = [line for block in self.blocks(heading) for line in block.splitlines()]
        return [line.partition("   ")[0].strip() for line in lines]

    def steps(self, heading: str | None = None) -> list[Step]:
        """Return the commands of the `console` blocks."""
        found: list[Step] = []
        for block in self.blocks(heading, "console"):
            for line in block.splitlines():
                if line.startswith("$ "):
                    found.append(Step(line[2:], []))
                else:
                    found[-1].printed.append(line)
        return found


def replaced(text: str, words: Mapping[str, str]) -> str:
    """Return a text with each word replaced, in the order of the mapping."""
    for word, other in words.items():
        text = text.replace(word, other)
    return text


def shell(
    command: str, directory: Path, env: Mapping[str, str], *, tools: Sequence[Path] = (), stdin: str = "", code: int = 0
) -> list[str]:
    """Run a command with neve's own commands, and those in `tools`, on PATH. Return its lines on stdout and stderr."""
    path = ":".join([*map(str, tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", command], cwd=directory, capture_output=True, text=True, timeout=_S, check=False, input=stdin,
        env={**os.environ, "PATH": path, **env},
    )  # fmt: skip
    assert done.returncode == code, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]
