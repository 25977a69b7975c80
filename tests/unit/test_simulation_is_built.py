"""Checks that the simulation passes test doubles as arguments and patches no name of neve."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOUSE = ("access", "broker", "controller", "infra", "lifecycle", "namesrv", "neve", "tiered")
#: Beginnings of the names of tests that break neve on purpose, to check that the simulation detects the fault.
BREAKS = (
    "test_simulation_finds_",
    "test_violation_names_the_seed_and_the_last_steps",
    "test_summary_resumes_where_it_stopped",
)
MODULES = sorted((ROOT / "tests" / "simulation").rglob("*.py"))


def _from_the_house(tree: ast.Module) -> set[str]:
    """Return the names that a module imports from neve."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _of_house(node.module or ""):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names if _of_house(alias.name)}
    return names


def _of_house(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] in HOUSE


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _faults(source: str) -> list[str]:
    """Return the places of a module that patch a name of neve."""
    tree = ast.parse(source)
    house, faults = _from_the_house(tree), list[str]()
    breaking = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith(BREAKS)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in breaking:
            continue
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            faults += [ast.unparse(t) for t in targets if isinstance(t, ast.Attribute) and _root(t) in house]
        elif isinstance(node, ast.ImportFrom | ast.Import):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            faults += [module for module in modules if module.startswith("unittest.mock")]
        elif isinstance(node, ast.Name) and node.id == "monkeypatch":
            faults.append("monkeypatch")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            faults.append(ast.unparse(node))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and _is_private(node.attr):
            faults += [ast.unparse(node)] if node.value.id in house else []  # or an unbound private method
    return faults


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_simulation_patches_no_name_of_neve(path: Path) -> None:
    assert _faults(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "module.threading = 1",
        "module.Class.method = 1",
        "module.SIZE += 1",
        "setattr(module, 'x', 1)",
        "Controller._load(1)",
        "from unittest.mock import patch",
        "def f(monkeypatch): monkeypatch.setattr(module, 'x', 1)",
    ],
)
def test_patch_of_a_name_is_detected(line: str) -> None:
    assert _faults(f"from broker import module\nfrom broker.broker_controller import Controller\n{line}\n")


def test_that_breaks_neve_on_purpose_is_permitted() -> None:
    source = (
        "from broker import module\ndef test_simulation_finds_it(monkeypatch): monkeypatch.setattr(module, 'x', 1)\n"
    )
    assert _faults(source) == []
