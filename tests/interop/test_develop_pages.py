"""docs/develop/java.md and docs/develop/go.md: their commands run as printed, with the programs on the pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import jvm
from tests.kit.clock.waiting import wait_until
from tests.kit.docs.page import Page
from tests.kit.server.go_build import find_go
from tests.kit.server.neve import NeveServer

pytestmark = pytest.mark.servers
COMMAND_S = 300
COMMIT_S = 60  # A push consumer commits every 5 s.


@pytest.fixture(scope="module")
def namesrv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with NeveServer(tmp_path_factory.mktemp("neve")) as server:
        yield server.namesrv


class Reader:
    """Executes the commands of a page in a directory of their own."""

    def __init__(self, page: str, directory: Path, namesrv: str) -> None:
        self._page = Page(f"develop/{page}")
        self.directory = directory
        found = f"{Path(sys.executable).parent}:{Path(find_go('go')).parent}:{os.environ['PATH']}"
        # The logs of Java clients are below user.home.
        java = f"-Duser.home={directory} -XX:TieredStopAtLevel=1"
        self._env = {**os.environ, "PATH": found, "NAMESRV_ADDR": namesrv, "JDK_JAVA_OPTIONS": java}

    def blocks(self, language: str) -> list[str]:
        return self._page.blocks(language=language)

    def commands(self) -> list[list[str]]:
        """Return the lines of each block of commands after the one that starts the server."""
        start, *others = [block.splitlines() for block in self.blocks("")]
        assert start[0].startswith("neve up --data ")
        return others

    def runs(self, command: str) -> str:
        done = subprocess.run(
            command, shell=True, cwd=self.directory, env=self._env, capture_output=True, text=True,
            timeout=COMMAND_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + (done.stderr if command.startswith("neve") else "")

    def starts(self, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            f"exec {command}", shell=True, cwd=self.directory, env=self._env, stdout=subprocess.PIPE, text=True
        )


def shape(output: str) -> list[str]:
    """Return the lines without queues and offsets, which differ from run to run, in any order."""
    return sorted(re.sub(r"\b(queue|offset) \d+", r"\1", line) for line in output.splitlines())


def test_java_quick_start_prints_the_outputs_on_its_page(namesrv: str, tmp_path: Path) -> None:
    reader = Reader("java.md", tmp_path, namesrv)
    (pom,) = reader.blocks("xml")
    (tmp_path / "pom.xml").write_text(pom)
    for program in reader.blocks("java"):
        (name,) = re.findall(r"^public class (\w+)", program, re.MULTILINE)
        (tmp_path / f"{name}.java").write_text(program)
    (fetch,), (compile_producer, produce), (compile_consumer, consume), (lag,) = reader.commands()
    sent, received, no_lag = reader.blocks("text")
    jvm.jars()  # The dependencies of the client are a part of these, so that Maven has them.
    reader.runs(fetch)
    reader.runs(compile_producer)
    assert shape(reader.runs(produce)) == shape(sent)
    reader.runs(compile_consumer)
    consumer = reader.starts(consume)
    try:
        assert consumer.stdout is not None
        assert shape("".join(next(consumer.stdout) for _ in received.splitlines())) == shape(received)
        wait_until(lambda: no_lag.splitlines()[0] in reader.runs(lag), "the commit", COMMIT_S)
    finally:
        consumer.terminate()
        consumer.communicate(timeout=COMMAND_S)


def test_go_quick_start_prints_the_output_on_its_page(namesrv: str, tmp_path: Path) -> None:
    reader = Reader("go.md", tmp_path, namesrv)
    (program,) = reader.blocks("go")
    (tmp_path / "main.go").write_text(program)
    (init, get, run), (lag,) = reader.commands()
    (output,) = reader.blocks("text")
    reader.runs(init)
    reader.runs(get)
    assert shape(reader.runs(run)) == shape(output)
    wait_until(lambda: "quickstart_go_consumers: no lag" in reader.runs(lag), "the commit", COMMIT_S)
