"""The pages of docs/analyse about Spark, and the examples that use Spark: each prints what it shows, in one JVM."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

import neve.archive
from infra.objects.open import open_store
from neve.cli.main import run
from tests.integration.page_blocks import PAGES, Block, blocks, normalized
from tests.kit.archive.archive_on_paper import ArchiveOnPaper
from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import NEVE
from tests.kit.wire.schema_bodies import ORDER, descriptors

pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Up = Callable[..., AbstractContextManager[Any]]
EXAMPLES = PAGES.parents[1] / "examples"
QUICKSTART = "spark-quickstart.md"
#: spark-read.md is the last one: it sends a message that the archive must not have.
OTHERS = ("spark-streaming.md", "spark-write.md", "decode.md", "jobs.md", "spark-read.md")
COMMAND_S = 120


@dataclass
class Reader:
    """Follows pages with a broker, an archive and a directory of this test."""

    server: Any
    home: Path

    def placed(self, text: str) -> str:
        for shown, here in (
            ("/tmp/neve-archive", str(self.home / "archive")), ("/tmp/verify.note", str(self.home / "verify.note")),
            ("/srv/tables", str(self.home / "tables")), ("/tmp/neve-orders", str(self.home / "table")),
            ("127.0.0.1:9876", self.server.namesrv),
        ):  # fmt: skip
            text = text.replace(shown, here)
        return text

    def follow(self, page: str) -> None:
        """Run the commands and programs of a page; assert that each prints what the page shows."""
        names: dict[str, Any] = {"__name__": page}
        for block in blocks(page):
            assert block.language in ("console", "python"), block
            if block.text.startswith(("neve up", "rm -r /tmp/neve")):
                continue
            printed = self.command(block) if block.language == "console" else self.program(block.text, names)
            assert normalized(printed) == normalized(block.output), block.text

    def program(self, text: str, names: dict[str, Any]) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(self.placed(text), "<program>", "exec"), names)
        return out.getvalue()

    def command(self, block: Block) -> str:
        text = self.placed(block.text)
        if text.startswith("neve spark"):  # In this process, whose JVM it uses.
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
                assert run(shlex.split(text)[1:]) == 0
            return out.getvalue()
        done = subprocess.run(
            ["bash", "-c", text],
            cwd=self.home, capture_output=True, text=True, timeout=COMMAND_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{text}: {done.stderr[-2000:]}"
        lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
        return "\n".join(line for line in lines if not line.startswith("asking "))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, neve_up: Up) -> Iterator[Reader]:
    """Return a reader after the quick start."""
    home = tmp_path_factory.mktemp("pages")
    (home / "order.avsc").write_text(json.dumps(ORDER))
    (home / "shop.desc").write_bytes(descriptors())
    with (
        neve_up(home / "up", "--store", f"dir:{home / 'archive'}") as server,
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(home),
    ):
        environment = {"NAMESRV_ADDR": server.namesrv, "NEVE_ADMIN": server.admin, "MASTER": "local[2]"}
        environment["PATH"] = f"{Path(NEVE).parent}:{os.environ['PATH']}"
        for name, value in environment.items():
            patch.setenv(name, value)
        reader = Reader(server, home)
        reader.follow(QUICKSTART)
        yield reader
        if (spark := SparkSession.getActiveSession()) is not None:
            spark.stop()


@pytest.mark.parametrize("page", OTHERS)
def test_page_prints_the_outputs_that_it_shows(reader: Reader, page: str) -> None:
    reader.follow(page)


def test_spark_examples_print_the_lines_of_the_readme(reader: Reader) -> None:
    """The topic has another name, because the quick start uses `orders` as well."""

    def example(name: str) -> str:
        return (EXAMPLES / f"{name}.py").read_text().replace('"orders",', '"sales",')

    def archived() -> int:
        return neve.archive.dataset(store, "sales").count_rows() if "sales" in neve.archive.open(store).topics() else 0

    store = f"dir:{reader.home / 'archive'}"
    reader.command(Block("console", "neve topic create sales --queues 4"))
    subprocess.run([sys.executable, "-c", reader.placed(example("producer"))], check=True, timeout=COMMAND_S)
    reader.command(Block("console", "neve archive offload --roll"))
    wait_until(lambda: archived() == 5, "the archive has the orders of the example")
    printed = [reader.placed(f"$ python examples/{name}.py\n") + reader.program(example(name), {}) for name in SPARK]
    shown = reader.placed((EXAMPLES / "README.md").read_text())
    assert "".join(printed) in shown


SPARK = ("spark_read", "spark_stream")


def rows(folder: Path) -> list[dict[str, Any]]:
    table = ds.dataset(folder, format="parquet", partitioning="hive", exclude_invalid_files=True).to_table()
    found: list[dict[str, Any]] = table.to_pylist()
    return found


def test_decoded_table_has_each_row_once_over_runs(reader: Reader, tmp_path: Path) -> None:
    program = next(block for block in blocks("spark-streaming.md") if block.language == "python").text
    for shown, here in (
        ("dir:/tmp/neve-archive", f"dir:{tmp_path / 'archive'}"), ("/srv/tables", str(tmp_path / "tables")),
        ("id INT, amount DOUBLE", "n INT, q INT"),
    ):  # fmt: skip
        assert shown in program
        program = program.replace(shown, here)

    def body(row: dict[str, Any]) -> dict[str, Any]:
        return row if row["queue_offset"] % 5 else row | {"body": b"not JSON", "body_codec": "none", "sys_flag": 0}

    archive = ArchiveOnPaper(open_store(f"dir:{tmp_path / 'archive'}"), "a", "orders")
    for first in (0, 10):
        archive.write(10 * first, 0, first, 10, hour=first, change=body)
        reader.program(program, {})
        good, dead = rows(tmp_path / "tables" / "orders"), rows(tmp_path / "tables" / "orders_dead")
        offsets = range(first + 10)
        assert sorted(row["n"] for row in good) == [offset for offset in offsets if offset % 5]
        assert sorted((row["queue_offset"], row["body"]) for row in dead) == [
            (offset, b"not JSON") for offset in offsets if offset % 5 == 0
        ]


def test_each_page_is_followed_by_a_test() -> None:
    elsewhere = {"duckdb-polars.md", "delta.md", "spark-deploy.md", "pipelines.md"}
    assert {path.name for path in PAGES.glob("*.md")} == {QUICKSTART, *OTHERS, *elsewhere}
