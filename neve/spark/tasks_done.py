"""How far Spark is, while a query runs: one line on a terminal, or below a notebook's cell, that is written again."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from neve.spark.builder import is_remote

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVERY_S = 0.5


_LAST_LOOKS, _LAST_LOOK_S = 20, 0.05  # Spark tells of a job's end a moment after its query has its answer


class Done(NamedTuple):
    """Tasks of the stages that are known by now; more may follow. `streams`: a line for each query that runs."""

    tasks: int
    of_tasks: int
    streams: tuple[str, ...] = ()
    is_over: bool = False  # nothing runs now

    def text(self) -> str:
        """For who looks on."""
        tasks = f"{self.tasks} tasks" if self.is_over else f"{self.tasks} of {self.of_tasks} tasks"
        return "; ".join((tasks, *self.streams))


@contextmanager
def progress(
    spark: SparkSession, what: str = "Spark", show: Callable[[str], None] | None = None, every: float = EVERY_S
) -> Iterator[None]:
    """Shows how far the queries are that run inside of the `with`, and how many tasks they took.

    `show` is told each line instead. On neither a terminal nor in a notebook only the last line is printed.
    """
    line = _Line(what, show)
    watch = _Connected(spark) if is_remote(spark) else _Classic(spark)
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(every):
            line.tell(watch.look())

    looker = threading.Thread(target=look, name="neve-spark-progress", daemon=True)
    looker.start()
    try:
        yield
    finally:
        stop.set()
        looker.join()
        done, pause = watch.look(), threading.Event()
        for _ in range(_LAST_LOOKS):
            if done.is_over:
                break
            pause.wait(_LAST_LOOK_S)
            done = watch.look()
        line.tell(done)
        watch.close()
        line.end()


class _Classic:
    """Asks the driver. What has run before does not count."""

    def __init__(self, spark: Any) -> None:
        self._spark, self._tracker = spark, spark.sparkContext.statusTracker()
        self._stages: dict[int, tuple[int, int]] = {}
        self._before = self._jobs()

    def look(self) -> Done:
        runs = False
        for job in sorted(self._jobs() - self._before):
            info = self._tracker.getJobInfo(job)
            if info is None:
                continue
            runs |= info.status == "RUNNING"
            for number in info.stageIds:
                stage = self._tracker.getStageInfo(number)
                if stage is not None and stage.numTasks:
                    # stages that a job passes over have tasks as well
                    known = stage.numTasks if info.status == "RUNNING" else stage.numCompletedTasks
                    self._stages[number] = (stage.numCompletedTasks, known)
        done, known = _sums(self._stages)
        return Done(done, known, tuple(map(_stream, self._spark.streams.active)), not runs)

    def close(self) -> None:
        """Nothing is held."""

    def _jobs(self) -> set[int]:
        return {*self._tracker.getJobIdsForGroup(None), *self._tracker.getActiveJobsIds()}


class _Connected:
    """Is told by the server, query by query."""

    def __init__(self, spark: Any) -> None:
        self._spark = spark
        self._operations: dict[str, tuple[int, int]] = {}
        self._running: set[str] = set()
        spark.registerProgressHandler(self._note)

    def look(self) -> Done:
        done, known = _sums(self._operations)
        return Done(done, known, is_over=not self._running)

    def close(self) -> None:
        self._spark.removeProgressHandler(self._note)

    def _note(self, stages: Any, inflight_tasks: int, operation_id: str | None, done: bool, **_more: Any) -> None:
        told, query = list(stages or ()), operation_id or ""
        if told:
            completed = sum(one.num_completed_tasks for one in told)
            self._operations[query] = completed, completed if done else sum(one.num_tasks for one in told)
        (self._running.discard if done else self._running.add)(query)


def _sums(counts: dict[int, tuple[int, int]] | dict[str, tuple[int, int]]) -> tuple[int, int]:
    found = list(counts.values())
    return sum(done for done, _ in found), sum(known for _, known in found)


class _Line:
    """Where somebody looks: a notebook, a terminal, or nobody."""

    def __init__(self, what: str, show: Callable[[str], None] | None) -> None:
        self._what, self._told = what, ""
        self._display = None if show is not None else _display()
        self._show = show or self._print
        self._is_open = False

    def tell(self, done: Done) -> None:
        text = f"{self._what}: {done.text()}"
        if text != self._told:
            self._told = text
            self._show(text)

    def end(self) -> None:
        if self._is_open or (self._show == self._print and self._display is None and not sys.stderr.isatty()):
            print("" if self._is_open else self._told, file=sys.stderr)  # noqa: T201 - who looks on is told
            self._is_open = False

    def _print(self, text: str) -> None:
        if self._display is not None:
            self._display.update({"text/plain": text}, raw=True)
        elif sys.stderr.isatty():
            print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)  # noqa: T201
            self._is_open = True


def _display() -> Any:
    """A place below the cell that runs; None outside of a notebook."""
    shell = sys.modules.get("IPython")
    running = None if shell is None else shell.get_ipython()
    if running is None or not hasattr(running, "kernel"):
        return None
    from IPython.display import display

    return display({"text/plain": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]


def _stream(query: Any) -> str:
    told = query.lastProgress
    name = query.name or "stream"
    if told is None:
        return f"{name} begins"
    return (
        f"{name} batch {told['batchId']}, {told['numInputRows']} rows, {told.get('processedRowsPerSecond') or 0:,.0f}/s"
    )
