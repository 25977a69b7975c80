"""The short programs of `examples/` that need no Spark run against one broker and print what its README shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.kit.server.neve import NEVE

Up = Callable[..., AbstractContextManager[Any]]
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"
README = (FOLDER / "README.md").read_text()
#: The topics differ, so that the programs can run at the same time. DuckDB reads the orders of the producer.
TOGETHER = ("consumer", "transaction", "request_reply", "ordered", "delayed", "batch", "duckdb_query")
SPARK = ("spark_read", "spark_stream")
LONG = ("day", "failover", "pipeline")
LONGEST = 30
RUN_S = 120.0


def shown(name: str) -> list[str]:
    """Return the output that the README shows for a program."""
    (found,) = re.findall(rf"^\$ python examples/{name}\.py\n(.*?)(?=^\$ |^```)", README, re.MULTILINE | re.DOTALL)
    return str(found).splitlines()


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory, neve_up: Up) -> Iterator[dict[str, list[str]]]:
    """Run all programs; return the lines that each has printed."""
    home = tmp_path_factory.mktemp("examples")
    store = f"dir:{home / 'archive'}"
    with neve_up(home, "--store", store) as server, ExitStack() as stack:
        environment = {**os.environ, "NAMESRV_ADDR": server.namesrv, "NEVE_ADMIN": server.admin}

        def start(*command: str) -> subprocess.Popen[str]:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            return stack.enter_context(subprocess.Popen(command, env=environment, text=True, **pipes))  # type: ignore[call-overload]

        def end(process: subprocess.Popen[str]) -> list[str]:
            out, err = process.communicate(timeout=RUN_S)
            assert process.returncode == 0, err
            return out.splitlines()

        def program(name: str) -> subprocess.Popen[str]:
            code = (FOLDER / f"{name}.py").read_text().replace("127.0.0.1:9876", server.namesrv)
            return start(sys.executable, "-c", code.replace("dir:/tmp/neve-archive", store))

        topics = sorted({topic for path in FOLDER.glob("*.py") for topic in created(path.read_text())})
        for process in [start(NEVE, "topic", "create", topic, "--queues", "4") for topic in topics]:
            end(process)
        found = {"producer": end(program("producer"))}
        end(start(NEVE, "archive", "offload", "--roll"))
        running = {name: program(name) for name in TOGETHER}
        yield found | {name: end(process) for name, process in running.items()}


def created(program: str) -> list[str]:
    """Return the topics that the first lines of a program tell its reader to create."""
    return re.findall(r"neve topic create (\w+) --queues 4", program)


@pytest.mark.parametrize("name", ["producer", *TOGETHER])
def test_example_prints_the_lines_of_the_readme(printed: dict[str, list[str]], name: str) -> None:
    lines, expected = printed[name], shown(name)
    if name in ("consumer", "ordered"):  # Queues are read in any order.
        lines, expected = sorted(lines), sorted(expected)
    assert lines == expected


def test_ordered_example_keeps_the_steps_of_an_order(printed: dict[str, list[str]]) -> None:
    for order in (1, 2):
        steps = [line.rpartition(" ")[2] for line in printed["ordered"] if f"order {order} " in line]
        assert steps == ["created", "paid", "shipped"]


def test_examples_are_short_and_listed() -> None:
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert names == {"producer", *TOGETHER, *SPARK, *LONG}
    for name in names:
        assert f"{name}.py" in README
    for name in names - set(LONG):
        assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= LONGEST, name
    for path in (FOLDER / "notebooks").glob("*.ipynb"):
        assert path.name in README
