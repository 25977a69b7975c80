"""Only the intake appends to the log, so that all waiting for an append is in one module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]

APPENDS = frozenset({"append", "put", "queue_for", "new_queue"})


def appends(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the uses of the message store's append methods in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in APPENDS:
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            if name.strip("_") == "store":
                yield node


def test_only_the_intake_calls_the_stores_append() -> None:
    callers = {
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "broker").rglob("*.py"))
        if any(appends(ast.parse(path.read_text("utf-8")))) and not path.is_relative_to(ROOT / "broker" / "store")
    }
    assert callers == {"broker/intake/log_writer.py"}
