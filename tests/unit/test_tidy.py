"""The house rules that a machine can see: short files and functions, no dead module, no clock or sleep out of place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("broker", "infra", "lifecycle", "namesrv", "neve", "tiered")
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
# Run by name: `python -m`, or named in pyproject.toml.
STARTED = {"tiered.worker", "infra.minio", "infra.versitygw", "neve.cli.main", "broker.command", "namesrv.command"}
# Imported by users, and the double of a disk, by tests.
OFFERED = {"neve.client.sync", "infra.sim_disk"}
# Imported when a verb is called (`neve.cli.main`).
NAMED_IN_TEXT = re.compile(r"\"((?:neve|broker|namesrv)(?:\.\w+)+)")
MARKS = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
CLOCK = {"time.time", "datetime.now", "datetime.utcnow", "random.random", "random.choice", "random.randrange"}


@cache
def trees() -> dict[Path, ast.Module]:
    found = {}
    for folder in (*PACKAGES, "bench", "examples", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found[path.relative_to(ROOT)] = ast.parse(path.read_text("utf-8"))
    return found


def calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def test_files_and_functions_are_short() -> None:
    long = []
    for path, tree in trees().items():
        lines = len((ROOT / path).read_text("utf-8").splitlines())
        if path.parts[0] in PACKAGES and lines > FILE_LINES_MAX:
            long.append(f"{path}: {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > FUNCTION_LINES_MAX:
                    long.append(f"{path}: {node.name} has {size} lines")
    assert long == []


def test_every_module_is_used() -> None:
    modules = {
        ".".join(path.with_suffix("").parts)
        for path in trees()
        if path.parts[0] in PACKAGES and path.name != "__init__.py"
    }
    used = STARTED | OFFERED
    for path, tree in trees().items():
        if path.parts[0] not in (*PACKAGES, "examples"):
            continue
        own = ".".join(path.with_suffix("").parts)
        used |= set(NAMED_IN_TEXT.findall((ROOT / path).read_text("utf-8")))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and own != node.module:
                used |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
            elif isinstance(node, ast.Import):
                used |= {name.name for name in node.names}
    assert modules - used == set()


def test_no_work_is_left_marked() -> None:
    marked = [
        str(path) for path in trees() if path.name != Path(__file__).name and MARKS.search((ROOT / path).read_text())
    ]
    assert marked == []


def test_tests_wait_for_conditions_and_never_for_time() -> None:
    sleeps = [
        f"{path}:{call.lineno}"
        for path, tree in trees().items()
        if path.parts[0] == "tests"
        for call in calls(tree)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "sleep"
    ]
    assert sleeps == []


def test_only_infra_looks_at_the_clock_or_throws_dice() -> None:
    looks = [
        f"{path}:{call.lineno}"
        for path, tree in trees().items()
        if path.parts[0] in PACKAGES and path.parts[0] != "infra"
        for call in calls(tree)
        if ast.unparse(call.func) in CLOCK
    ]
    assert looks == []
