"""Each message of `docs/operate/troubleshooting.md` is a text of the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operate" / "troubleshooting.md").read_text("utf-8")
TABLES = PAGE.split("## Symptoms of an outage")[0]
PRODUCT = ("access", "broker", "controller", "infra", "lifecycle", "namesrv", "neve", "pyspark_neve", "tiered")
_MESSAGE_ROW = re.compile(r"^\| (`` .+? ``|`[^`]+`) \|(?: [^|]+ \|){2,3}$", re.MULTILINE)


def messages() -> list[str]:
    return [cell.strip("`").strip() for cell in _MESSAGE_ROW.findall(TABLES)]


def literal(node: ast.Constant | ast.JoinedStr) -> str:
    """Return the text of a literal, with a NUL for each expression of an f-string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)


@cache
def literals() -> tuple[str, ...]:
    """Return all string literals of the product, without docstrings."""
    found: list[str] = []
    for path in (path for package in PRODUCT for path in (ROOT / package).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        found += (
            literal(node)
            for node in nodes
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in docstrings
        )
    return tuple(found)


def pattern(message: str) -> re.Pattern[str]:
    """Return a pattern of the literal parts in order; `…` is an expression of an f-string or a %s."""
    return re.compile(r"(?:\0|%[sd])".join(re.escape(part) for part in message.split("…")))


def test_every_row_of_the_tables_has_a_message() -> None:
    rows = [line for line in TABLES.splitlines() if line.startswith("| ")]
    headings = [line for line in rows if line.startswith("| message |")]
    assert len(messages()) == len(rows) - len(headings)
    assert len(messages()) > 60


@pytest.mark.parametrize("message", messages())
def test_message_is_a_text_of_the_code(message: str) -> None:
    longest = max(message.split("…"), key=len)
    assert len(longest) > 5, "a message without a literal part of its own"
    assert any(longest in text and pattern(message).search(text) for text in literals())
