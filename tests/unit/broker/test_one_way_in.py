"""Nothing gets into the log but through the intake: whoever waits for what is appended has one place to stand."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.unit.test_tidy import ROOT

APPENDS = frozenset({"append", "put", "queue_for", "new_queue"})


def appends(tree: ast.AST) -> Iterator[ast.Attribute]:
    """What a module takes of the message store that appends, whatever it does with it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in APPENDS:
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            if name.strip("_") == "store":
                yield node


def test_one_module_of_the_broker_calls_the_stores_append() -> None:
    callers = {
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "broker").rglob("*.py"))
        if any(appends(ast.parse(path.read_text("utf-8")))) and not path.is_relative_to(ROOT / "broker" / "store")
    }
    assert callers == {"broker/intake/log_writer.py"}
