"""The house rules that a machine can see: no dead module, no clock or sleep out of place."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("access", "broker", "infra", "lifecycle", "namesrv", "neve", "tiered")
# Run by name: `python -m`, or named in pyproject.toml.
STARTED = {"tiered.worker.process", "infra.minio", "neve.cli.main", "broker.command", "namesrv.command"}
# Imported by users.
OFFERED = {"neve.client.sync"}
# Imported when a verb is called (`neve.cli.main`).
NAMED_IN_TEXT = re.compile(r"\"((?:neve|broker|namesrv)(?:\.\w+)+)")
MARKS = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
# Only these look at the machine's clocks, and only this one throws dice.
CLOCKS = {"infra/clock.py", "neve/clock.py"}
DICE = {"neve/entropy.py"}
TIMES = {
    *(f"time.{name}{unit}" for name in ("time", "monotonic", "perf_counter", "process_time") for unit in ("", "_ns")),
    *("time.gmtime", "time.localtime", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"),
}
THROWS = re.compile(r"(os\.urandom|uuid\.uuid[14]|secrets\.\w+|random\.(?!Random$)\w+|\w+\.SystemRandom)$")


@cache
def trees() -> dict[Path, ast.Module]:
    found = {}
    for folder in (*PACKAGES, "bench", "examples", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found[path.relative_to(ROOT)] = ast.parse(path.read_text("utf-8"))
    return found


def calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def test_every_bug_on_record_has_its_test() -> None:
    """A checker that no longer finds the old bug has rotted; one that is gone finds nothing."""
    faults = []
    for line in (ROOT / "tests" / "TRACK_RECORD.md").read_text("utf-8").splitlines():
        if not line.startswith("| ") or line.startswith("| bug "):
            continue
        cells = line.strip("| ").split(" | ")
        tests = re.findall(r"`([^`]+\.py)(?:::(\w+))?`", cells[-1])
        if len(cells) != 4 or not tests:
            faults.append(f"not bug, found by, root cause and test: {line[:100]}")
        for name, function in tests:
            path = ROOT / "tests" / name
            if not path.is_file() or (function and f"def {function}(" not in path.read_text("utf-8")):
                faults.append(f"no such test: {name}::{function}")
    assert faults == []


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


def test_the_clock_and_the_dice_are_injected() -> None:
    """Whatever is named, called or not: a default or a factory looks as well."""
    looks = []
    for path, tree in trees().items():
        if path.parts[0] not in PACKAGES:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                named = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                named = [ast.unparse(node)]
            else:
                continue
            for name in named:
                at_clock = name in TIMES and path.as_posix() not in CLOCKS
                if at_clock or (THROWS.match(name) and path.as_posix() not in DICE):
                    looks.append(f"{path}:{node.lineno} {name}")
    assert looks == []


def test_the_changelog_says_each_thing_once_under_its_kind_and_area() -> None:
    """Lists that grow at both ends are merged by keeping both sides."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    bullets = re.split(r"^- ", text, flags=re.MULTILINE)[1:]
    assert [one for one, count in Counter(one.split("\n\n")[0].strip() for one in bullets).items() if count > 1] == []
    for release in text.split("\n## ")[1:]:
        kinds = re.findall(r"^### (.+)$", release, re.MULTILINE)
        assert kinds == [kind for kind in ("Added", "Changed", "Fixed", "Removed") if kind in kinds]
        for kind in release.split("\n### ")[1:]:
            title, *areas = kind.split("\n#### ")
            assert title.strip() in kinds, "nothing stands before the first area"
            assert all("\n- " in area for area in areas)
        assert "\n- " not in release.split("\n### ")[0]
