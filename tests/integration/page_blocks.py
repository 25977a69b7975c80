"""Commands and programs of a page, each with the output that the page shows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.kit.docs.page import DOCS, Page

PAGES = DOCS / "analyse"
#: Values that differ from run to run: days, months and sizes.
_CHANGING = re.compile(r"\d{4}-\d\d(-\d\d)?|\d+(\.\d+)? ([KMG]i)?B\b")


@dataclass
class Block:
    """A command or a program. `output` is empty if the page shows none."""

    language: str
    text: str
    output: str = ""


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page of docs/analyse in their order; a block `text` is the output of a program."""
    found: list[Block] = []
    for language, _, text in Page(f"analyse/{page}").fences():
        if language == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                found.append(Block("console", command, output))
        elif language == "text" and found and found[-1].language == "python":
            found[-1].output = text
        else:
            found.append(Block(language, text))
    return found


def normalized(output: str) -> list[str]:
    """Return the lines of an output, without empty lines, trailing spaces, and values that differ from run to run."""
    lines = (_CHANGING.sub("…", line).rstrip() for line in output.splitlines())
    return [line for line in lines if line]
