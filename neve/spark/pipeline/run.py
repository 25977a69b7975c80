"""Carries out a pipeline by Spark's own runner: a Spark Connect server in this process, or one that is there.

Spark keeps the names of tables in a catalog. One that does not outlive the session makes the second run fail at tables
that stand on the disk, so a run on this machine has one beside the spec (Derby, which serves one process at a time).
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from neve.clock import system_now_ms
from neve.entropy import system_entropy, unique_name
from neve.extras import install_command
from neve.spark.builder import OF_SESSIONS, session
from neve.spark.jars import SparkSetupError, find_java
from neve.spark.pipeline.project import SPEC
from neve.spark.pipeline.record import COMPLETED, FAILED, FlowDone, Record, Run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STORE, TOPIC = "spark.neve.store", "spark.neve.topic"
_SPECS = (SPEC, "spark-pipeline.yaml")
_OF_FLOW = re.compile(r"Flow '?([^\s']+)'? (?:is |has )?([A-Z]+)\b")

_TOLD_MOST = 2000


class BadPipeline(Exception):
    """The spec, or a definition, is not what Spark takes."""


class RunFailed(Exception):
    """A flow failed, and would not be done by its retries."""


class Refresh(NamedTuple):
    """Of which tables; nothing chosen: all, from where they are. `anew`: those are emptied and made again."""

    some: Sequence[str] = ()
    anew: Sequence[str] = ()
    all_anew: bool = False


class Event(NamedTuple):
    """What Spark tells while it runs; `flow` and `state` where it is of a flow."""

    at_ms: int
    text: str
    flow: str | None = None
    state: str | None = None


def find_spec(where: Path) -> Path:
    """The spec: a file, or what a directory, or one above it, has. Raises FileNotFoundError."""
    if where.is_file():
        return where.absolute()
    if not where.is_dir():
        raise FileNotFoundError(f"there is no pipeline at {where}: `neve pipeline init {where}` makes one")
    home = where.absolute()
    for folder in (home, *home.parents):
        for name in _SPECS:
            if (folder / name).is_file():
                return folder / name
    raise FileNotFoundError(f"no {SPEC} in {where}, nor above it: `neve pipeline init DIR` makes one")


def read_spec(path: Path) -> Any:
    """Spark's own reading of it. Raises BadPipeline, SparkSetupError."""
    pipelines = _pipelines()
    import yaml  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        return pipelines.load_pipeline_spec(path)
    except (PySparkException, yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise BadPipeline(f"{path}: {_short(error)}") from error


def run_pipeline(
    spec_file: Path,
    *,
    dry: bool = False,
    refresh: Refresh | None = None,
    master: str | None = None,
    remote: str | None = None,
    progress: Callable[[Event], None] = lambda event: None,
) -> Run:
    """One run, until each flow has done what there was for it. `dry`: only whether it would run.

    Args:
        spec_file: as `find_spec` gives it.
        refresh: some tables only, or anew.
        master: of a Spark in this process, without `remote`.
        remote: a Spark Connect server, sc://HOST:PORT, which has its own catalog and jars.
        progress: told of each event.

    Raises:
        BadPipeline: spec or definitions are wrong.
        RunFailed: a flow failed.
        neve.spark.pipeline.record.Busy: another run goes on.
        SparkSetupError: something that Spark needs is missing here.
    """
    spec = read_spec(spec_file)
    remote = remote or _served(os.environ)
    if remote is None:
        find_java()
    record = Record(spec_file.parent)
    with record.locked():
        runs = record.runs()
        run = Run("dry-run" if dry else "run", system_now_ms())
        runs.append(run)
        record.write(runs)
        try:
            with _connected(spec, spec_file, record.home, master, remote) as spark:
                todo = refresh or Refresh()
                for event in _events(spark, spec, spec_file, dry=dry, refresh=todo, is_own=remote is None):
                    _note(run, event)
                    record.write(runs)
                    progress(event)
            _check(run)
        except BaseException as error:
            run.state, run.error = FAILED, _short(error)
            raise
        else:
            run.state = COMPLETED
        finally:
            run.ended_ms = system_now_ms()
            record.write(runs)
    return run


def _note(run: Run, event: Event) -> None:
    if event.flow is not None and event.state is not None:
        run.flows[event.flow] = FlowDone(event.state, event.at_ms, event.text if event.state == "failed" else "")


def _check(run: Run) -> None:
    failed = [(name, flow) for name, flow in run.flows.items() if flow.state == "failed"]
    if failed:
        raise RunFailed("\n".join(flow.told or f"flow {name} failed" for name, flow in failed))


def _events(
    spark: SparkSession, spec: Any, spec_file: Path, *, dry: bool, refresh: Refresh, is_own: bool
) -> Iterator[Event]:
    from pyspark.errors import PySparkException
    from pyspark.pipelines import spark_connect_pipeline as connect
    from pyspark.pipelines.spark_connect_graph_element_registry import SparkConnectGraphElementRegistry

    settings = _settings(spark, spec, spec_file, is_own=is_own)
    try:
        graph = connect.create_dataflow_graph(spark, spec.catalog, spec.database, settings)
        registry = SparkConnectGraphElementRegistry(spark, graph)
        with contextlib.redirect_stdout(sys.stderr):  # what definitions print is no data of this command
            _pipelines().register_definitions(spec_file, registry, spec, spark, graph)
    except Exception as error:
        raise BadPipeline(f"{_place(error, spec_file)}: {_short(error)}") from error
    answers = connect.start_run(
        spark, graph, full_refresh=list(refresh.anew), full_refresh_all=refresh.all_anew, refresh=list(refresh.some),
        dry=dry, storage=spec.storage,
    )  # fmt: skip
    try:
        for answer in answers:
            if "pipeline_event_result" in answer:
                told = answer["pipeline_event_result"].event
                yield _event(told.message, told.timestamp.ToMilliseconds())
    except PySparkException as error:
        raise (BadPipeline if dry or "RUN_EXECUTION_FAILURE" not in str(error) else RunFailed)(_short(error)) from error


def _settings(spark: SparkSession, spec: Any, spec_file: Path, *, is_own: bool) -> dict[str, str]:
    """Of the spec, what a session may set. The rest is for the start of a server, and one of this process was told it.

    Raises:
        BadPipeline: another server is asked for it.
    """
    from pyspark.errors import PySparkException

    found = {}
    for name, value in (OF_SESSIONS | dict(spec.configuration)).items():
        try:
            spark.conf.set(name, value)
        except PySparkException as error:
            if not is_own:
                raise BadPipeline(f"{spec_file}: {name} is for the start of a server: {_short(error)}") from error
        else:
            found[name] = value
    return found


def _event(text: str, at_ms: int) -> Event:
    of_flow = _OF_FLOW.match(text)
    if of_flow is None:
        return Event(at_ms, text)
    return Event(at_ms, text, of_flow[1], of_flow[2].lower())


@contextlib.contextmanager
def _connected(spec: Any, spec_file: Path, own: Path, master: str | None, remote: str | None) -> Iterator[SparkSession]:
    """Spark's runner speaks to a Connect server only; that which it would start itself takes port 15002 for granted."""
    from pyspark.sql.connect.session import SparkSession as Connected

    with contextlib.ExitStack() as stack:
        if remote is None:
            here = _served_here(spec, spec_file.parent, own, master)
            stack.callback(here.stop)
            module = getattr(here._jvm, "org.apache.spark.sql.connect.service.SparkConnectService$")
            remote = f"sc://localhost:{getattr(module, 'MODULE$').localPort()}"
        stack.enter_context(_environment(SPARK_CONNECT_MODE_ENABLED="1"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", FutureWarning)  # of pandas, which is not used
        builder = Connected.builder.remote(remote).config("spark.sql.connect.serverStacktrace.enabled", "false")
        spark = builder.getOrCreate()
        stack.callback(spark.stop)
        yield spark


def _served_here(spec: Any, home: Path, own: Path, master: str | None) -> Any:
    token = os.environ.setdefault("SPARK_CONNECT_AUTHENTICATE_TOKEN", unique_name(system_entropy))
    conf = {
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.connect.authenticate.token": token,
        "spark.sql.artifact.isolation.enabled": "true",
        "spark.sql.artifact.isolation.alwaysApplyClassloader": "true",
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.warehouse.dir": (home / "warehouse").as_uri(),
        "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={own / 'metastore'};create=true",
        "spark.ui.enabled": "false",
        "spark.log.level": "FATAL",  # what goes wrong comes back as an error
    }
    conf |= spec.configuration
    if master is not None:
        conf["spark.master"] = master
    in_bucket = any(place.startswith("s3a:") for place in (spec.storage, conf["spark.sql.warehouse.dir"]))
    stores = [conf[STORE]] if in_bucket and conf.get(STORE, "").startswith("s3:") else []
    with _environment(SPARK_REMOTE=None):
        here: Any = session(*stores, app_name=spec.name, master=master, conf=conf)
    here._jvm.java.lang.System.setProperty("derby.stream.error.file", str(own / "derby.log"))
    return here


@contextlib.contextmanager
def _environment(**changes: str | None) -> Iterator[None]:
    """PySpark goes by these, and by no argument."""
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _served(environment: Mapping[str, str]) -> str | None:
    remote = environment.get("SPARK_REMOTE", "")
    return remote if remote.startswith("sc:") else None


def _pipelines() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            from pyspark.pipelines import cli
    except ImportError as missing:
        raise SparkSetupError(
            f"declared pipelines need PySpark 4.2 or newer with what Spark Connect needs ({missing}): "
            f"{install_command('pipelines')}"
        ) from missing
    return cli


def _place(error: BaseException, spec_file: Path) -> str:
    """The line of a definition that an error came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(spec_file.parent)]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else str(spec_file)


def _short(error: BaseException) -> str:
    """Without the JVM's stack."""
    text = str(error).partition("JVM stacktrace:")[0].strip() or type(error).__name__
    kind = "" if type(error).__module__.startswith(("pyspark", "neve")) else f"{type(error).__name__}: "
    return f"{kind}{text}"[:_TOLD_MOST]
