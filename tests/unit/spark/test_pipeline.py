"""A pipeline's project, its record, how it stands, and what is said where it can't run; no JVM is started."""

from __future__ import annotations

import ast
import fcntl
import json
from pathlib import Path

import pytest

from infra.objects.open import open_store
from neve.cli.main import run as neve
from neve.spark.jars import SparkSetupError
from neve.spark.pipeline import run as running
from neve.spark.pipeline.project import SPEC, Wanted, create
from neve.spark.pipeline.record import COMPLETED, FAILED, KILLED, RUNS_KEPT, Busy, FlowDone, Record, Run
from neve.spark.pipeline.run import BadPipeline, find_spec, read_spec, run_pipeline
from neve.spark.pipeline.status import standing
from tests.doubles.archive_on_paper import ArchiveOnPaper

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

WANTED = Wanted("shop", "s3://b/p?endpoint=http://h:9000", 'or"ders', "n BIGINT", ("h:9876", "told"))


def test_a_new_pipeline_is_one_that_spark_reads(tmp_path: Path) -> None:
    home = tmp_path / "a b"
    files = create(home, WANTED)
    assert {file.name for file in files} == {
        SPEC,
        "clean.py",
        "windows.sql",
        "by_tag.sql",
        "into_topic.py",
        ".gitignore",
    }
    spec = read_spec(home / SPEC)
    assert (spec.name, spec.storage) == ("shop", (home / "storage").as_uri())
    assert spec.configuration["spark.neve.store"] == WANTED.store
    assert spec.configuration["spark.neve.topic"] == 'or"ders'
    assert (spec.configuration["spark.neve.namesrv"], spec.configuration["spark.neve.into"]) == ("h:9876", "told")
    for file in files:
        if file.suffix == ".py":
            ast.parse(file.read_text())
    assert "INTERVAL 10 MINUTES" in (home / "transformations" / "windows.sql").read_text()


def test_without_a_topic_to_go_to_there_is_no_flow_that_sends(tmp_path: Path) -> None:
    files = create(tmp_path / "new", WANTED._replace(into=None, schema=None))
    assert "into_topic.py" not in {file.name for file in files}
    assert '"text"' in (tmp_path / "new" / "transformations" / "clean.py").read_text()


def test_nothing_is_written_over_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(FileExistsError, match="is there and not empty"):
        create(tmp_path, WANTED)
    with pytest.raises(ValueError, match='DROP TABLE x" is no length of time'):
        create(tmp_path / "new", WANTED._replace(window="1 hour'; DROP TABLE x"))
    assert not (tmp_path / "new").exists()


def test_a_spec_is_found_from_below_and_its_lack_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create(tmp_path / "shop", WANTED)
    below = tmp_path / "shop" / "transformations"
    assert find_spec(below) == find_spec(tmp_path / "shop") == find_spec(tmp_path / "shop" / SPEC)
    assert neve(["pipeline", "run", str(tmp_path)]) == 3
    assert f"no {SPEC} in {tmp_path}, nor above it: `neve pipeline init DIR` makes one" in capsys.readouterr().err
    assert neve(["pipeline", "status", str(tmp_path / "none")]) == 3
    assert "there is no pipeline at" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [("name: x\n", "PIPELINE_SPEC_MISSING_REQUIRED_FIELD"), ("name: x\nstorage: y\nfoo: 1\n", "UNEXPECTED_FIELD"),
     ("{", "while parsing"), ("", "TypeError")],
)  # fmt: skip
def test_a_spec_that_spark_does_not_take_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    (tmp_path / SPEC).write_text(text)
    with pytest.raises(BadPipeline, match=told):
        read_spec(tmp_path / SPEC)
    assert neve(["pipeline", "dry-run", str(tmp_path)]) == 2
    assert str(tmp_path / SPEC) in capsys.readouterr().err


def test_no_java_and_an_old_one_are_told_before_anything_is_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    create(tmp_path / "shop", WANTED)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert neve(["pipeline", "run", str(tmp_path / "shop")]) == 1
    assert "Spark needs Java 17 or 21 and none was found: install one" in capsys.readouterr().err
    (tmp_path / "jdk" / "bin").mkdir(parents=True)
    (tmp_path / "jdk" / "bin" / "java").touch()
    (tmp_path / "jdk" / "release").write_text('JAVA_VERSION="11.0.2"\n')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    assert neve(["pipeline", "dry-run", str(tmp_path / "shop")]) == 1
    assert "java is Java 11: point JAVA_HOME at another" in capsys.readouterr().err
    assert not (tmp_path / "shop" / ".neve").exists()


def test_a_pyspark_without_pipelines_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    create(tmp_path / "shop", WANTED)
    monkeypatch.setitem(__import__("sys").modules, "pyspark.pipelines", None)
    with pytest.raises(SparkSetupError, match=r"need PySpark 4\.2 or newer .*pip install .*\[pipelines\]"):
        read_spec(tmp_path / "shop" / SPEC)


def test_one_run_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create(tmp_path, WANTED)
    record = Record(tmp_path)
    with record.locked():
        assert record.is_running()
        with pytest.raises(Busy):
            run_pipeline(tmp_path / SPEC, remote="sc://127.0.0.1:1")
        assert neve(["pipeline", "run", str(tmp_path), "--remote", "sc://127.0.0.1:1"]) == 5
    assert "another run of this pipeline goes on" in capsys.readouterr().err
    assert not record.is_running()


def test_who_looks_whether_a_run_goes_on_keeps_none_from_beginning(tmp_path: Path) -> None:
    record = Record(tmp_path)
    with record.locked():
        pass
    with (record.home / "lock").open("rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        with pytest.raises(Busy):  # as long as he looks
            record.locked().__enter__()
    with record.locked():
        assert record.is_running()


def test_a_run_that_is_gone_was_killed_and_the_last_ones_are_kept(tmp_path: Path) -> None:
    record = Record(tmp_path)
    runs = [Run("run", n, COMPLETED, n) for n in range(RUNS_KEPT + 5)]
    with record.locked():
        record.write([*runs, Run("run", 99)])
        assert record.runs()[-1].state == "running"
    assert [run.began_ms for run in record.runs()] == [*range(6, RUNS_KEPT + 5), 99]
    assert record.runs()[-1].state == KILLED
    (record.home / "runs.json").write_text("[{")
    with pytest.raises(ValueError, match="no record of runs"):
        record.runs()


def test_what_each_flow_did_last_and_how_far_behind_it_is(tmp_path: Path) -> None:
    store = f"dir:{tmp_path / 'archive'}"
    archive = ArchiveOnPaper(open_store(store), "a", "orders")
    archive.write(0, 0, 0, 10, hour=0)
    archive.write(100, 0, 10, 10, hour=1)
    home = tmp_path / "pipe line"
    record = Record(home)
    with record.locked():
        done = {"c.d.clean": FlowDone("completed", 5), "c.d.by": FlowDone("completed", 6)}
        later = {"c.d.clean": FlowDone("failed", 9, "why")}
        record.write([Run("run", 1, COMPLETED, flows=done), Run("run", 7, FAILED, flows=later), Run("dry-run", 8)])
    checkpoint = home / "storage" / "_checkpoints" / "c" / "d" / "clean" / "clean"
    for number in (0, 10, 9):  # the tenth full refresh, and older ones
        for what in ("offsets", "commits"):
            (checkpoint / str(number) / what).mkdir(parents=True)
    here = checkpoint / "10"
    position = {"version": 1, "brokers": {"a": {"through": 2, "left": {"orders": {"0": [[7, 9]]}}}}}
    (here / "offsets" / "3").write_text(f'v1\n{{"batchTimestampMs":4}}\n{json.dumps(position)}')
    (here / "offsets" / "4").write_text("v1\n")
    (here / "commits" / "3").write_text("v1\n")
    (here / "commits" / ".3.crc").touch()
    told = standing(home, (home / "storage").as_uri(), (store, "orders"))
    assert [run.began_ms for run in told.runs] == [1, 7]
    by, clean = told.flows
    assert (by.name, by.state, by.batches, by.position) == ("c.d.by", "completed", None, None)
    assert (clean.state, clean.told, clean.at_ms, clean.batches, clean.batch_ms) == ("failed", "why", 9, 4, 4)
    assert (clean.is_amid, clean.position, clean.behind) == (True, "a: entry 2", 3 + 10)
    elsewhere = standing(home, "s3a://bucket/storage", (store, "orders"))
    assert [flow.position for flow in elsewhere.flows] == [None, None]


def test_what_spark_tells_is_of_a_flow_or_of_the_run() -> None:
    event = running._event("Flow spark_catalog.default.by_tag has FAILED.\n[X] why", 3)
    assert (event.flow, event.state, event.at_ms) == ("spark_catalog.default.by_tag", "failed", 3)
    event = running._event("Flow 'a' is RUNNING.", 3)
    assert (event.flow, event.state) == ("a", "running")
    event = running._event("Flow 'c.d.windows' SKIPPED due to upstream failure(s).", 3)
    assert (event.flow, event.state) == ("c.d.windows", "skipped")
    assert running._event("Run is COMPLETED.", 4) == running.Event(4, "Run is COMPLETED.")
