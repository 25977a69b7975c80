"""Tests that `docs/dev/tasks.md` lists exactly the tasks, jobs and threads of the servers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "dev" / "tasks.md").read_text("utf-8")
SERVERS = ("access", "broker", "controller", "infra", "lifecycle", "namesrv", "tiered")
KINDS = ("spawn", "every", "keep", "vital")
ROW_WITH_KIND = re.compile(rf"^\| `([\w-]+)` \| ({'|'.join(KINDS)}) \|", re.MULTILINE)
# Starts threads with names given by callers: `threads.start(name, work)`, `threads.in_line(name)`.
SEAM = "infra/loop/threads.py"
# Not named in the code: the name is from asyncio.
ASYNCIOS_OWN = "asyncio_"


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package in SERVERS:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text("utf-8"))


def named(call: ast.Call) -> str:
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name.lstrip("_")
    return ""


def text_of(value: ast.expr | None) -> str:
    """Return the constant prefix of a name."""
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            return text
    return ""


def argument(call: ast.Call, position: int, keyword: str) -> ast.expr | None:
    given = [item.value for item in call.keywords if item.arg == keyword]
    return given[0] if given else call.args[position] if len(call.args) > position else None


def rows() -> set[str]:
    return set(re.findall(r"^\| `([\w-]+)` \|", PAGE, re.MULTILINE)) - {ASYNCIOS_OWN, *KINDS}


def test_page_lists_exactly_the_tasks_and_threads_of_the_code() -> None:
    in_code, without_name = set(), []
    for path, tree in modules():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            kind = named(call)
            if kind in KINDS or ast.unparse(call.func).endswith(("threads.start", "threads.in_line")):
                in_code.add(text_of(argument(call, 0, "name")))
            elif kind in ("Thread", "ThreadPoolExecutor") and path != SEAM:
                keyword, position = ("name", 2) if kind == "Thread" else ("thread_name_prefix", 1)
                name = text_of(argument(call, position, keyword))
                if not name:
                    without_name.append(f"{path}:{call.lineno}")
                in_code.add(name)
    assert without_name == []
    in_code -= {"", "job-"}  # job names come from `JobScheduler.every`
    assert in_code - rows() == set(), "not on the page"
    assert rows() - in_code == set(), "not in the code"


def test_page_names_the_file_of_each_unsupervised_task() -> None:
    files = {
        path
        for path, tree in modules()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and named(call) in ("create_task", "ensure_future")
    }
    assert [path for path in sorted(files) if f"`{path}`" not in PAGE] == []


def test_page_kind_of_a_task_is_its_supervisor_method() -> None:
    told: dict[str, str] = dict(ROW_WITH_KIND.findall(PAGE))
    started: dict[str, str] = {}
    for path, tree in modules():
        if path.startswith("broker/archiving"):  # jobs: all of them are `every`
            continue
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if named(call) in KINDS and text_of(argument(call, 0, "name")):
                started[text_of(argument(call, 0, "name"))] = named(call)
    assert {name: told.get(name) for name in started} == started
