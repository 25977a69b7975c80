"""What `neve.spark.progress` shows of a Spark that is played here: by its tracker, and by what a server tells."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from neve.spark.tasks_done import progress
from tests.waiting import wait_until


class Tracker:
    """Job 1 ran before. Job 2 has a stage of ten tasks, and one of five that it passes over."""

    def __init__(self) -> None:
        self.status, self.completed, self.runs = "RUNNING", 0, False

    def getJobIdsForGroup(self, _group: None) -> list[int]:  # noqa: N802 - Spark's name
        return [1, 2] if self.runs else [1]

    def getActiveJobsIds(self) -> list[int]:  # noqa: N802 - Spark's name
        return [2] if self.runs and self.status == "RUNNING" else []

    def getJobInfo(self, job: int) -> Any:  # noqa: N802 - Spark's name
        return SimpleNamespace(status="SUCCEEDED", stageIds=[0]) if job == 1 else self._running()

    def getStageInfo(self, stage: int) -> Any:  # noqa: N802 - Spark's name
        known, done = {0: (3, 3), 5: (10, self.completed), 6: (5, 0)}[stage]
        return SimpleNamespace(numTasks=known, numCompletedTasks=done)

    def _running(self) -> Any:
        return SimpleNamespace(status=self.status, stageIds=[5, 6])


def test_tasks_are_counted_from_its_begin_on_and_those_passed_over_are_not() -> None:
    tracker, shown = Tracker(), list[str]()
    query = SimpleNamespace(
        name=None, lastProgress={"batchId": 7, "numInputRows": 50, "processedRowsPerSecond": 1200.4}
    )
    spark: Any = SimpleNamespace(
        sparkContext=SimpleNamespace(statusTracker=lambda: tracker), streams=SimpleNamespace(active=[])
    )
    with progress(spark, "it", shown.append, every=0.001):
        tracker.runs, tracker.completed = True, 4
        wait_until(lambda: "it: 4 of 15 tasks" in shown)
        spark.streams.active.append(query)
        wait_until(lambda: "it: 4 of 15 tasks; stream batch 7, 50 rows, 1,200/s" in shown)
        spark.streams.active.clear()
        tracker.completed, tracker.status = 10, "SUCCEEDED"
    assert shown[-1] == "it: 10 tasks"


def test_a_connect_server_tells_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[Any] = []

    class Session:
        registerProgressHandler = staticmethod(handlers.append)  # noqa: N815 - Spark's name
        removeProgressHandler = staticmethod(handlers.remove)  # noqa: N815 - Spark's name

    monkeypatch.setattr(Session, "__module__", "pyspark.sql.connect.session")
    stage, shown = SimpleNamespace(num_tasks=8, num_completed_tasks=2), list[str]()
    with progress(Session(), "it", shown.append, every=0.001):
        handlers[0](stages=[stage], inflight_tasks=1, operation_id="a", done=False)
        wait_until(lambda: "it: 2 of 8 tasks" in shown)
        stage.num_completed_tasks = 6
        handlers[0](stages=[stage], inflight_tasks=0, operation_id="a", done=True)
    assert shown[-1] == "it: 6 tasks"
    assert handlers == []


@pytest.mark.parametrize("is_terminal", [True, False])
def test_on_a_terminal_a_line_is_written_again_and_a_log_gets_the_last(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    tracker = Tracker()
    spark: Any = SimpleNamespace(
        sparkContext=SimpleNamespace(statusTracker=lambda: tracker), streams=SimpleNamespace(active=[])
    )
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    with pytest.raises(KeyError), progress(spark, "it", every=60.0):
        tracker.runs, tracker.completed, tracker.status = True, 10, "SUCCEEDED"
        raise KeyError
    told = capsys.readouterr().err
    assert re.fullmatch(r"\rit: 10 tasks\x1b\[K\n" if is_terminal else r"it: 10 tasks\n", told), told
