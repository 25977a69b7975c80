"""`neve spark verify` as an application of `spark-submit`, on a standalone cluster of two workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.objects.open import open_store
from neve.spark.jars import pyspark_jars
from tests.integration.spark_archive import commit
from tests.kit.archive.archive_on_paper import ArchiveOnPaper
from tests.kit.server import spark_jvm
from tests.kit.server.spark_cluster import SparkCluster

pytestmark = [pytest.mark.servers, pytest.mark.timeout(600)]

Submit = Callable[..., Any]
JOB = "from neve.cli.main import main\nmain()\n"  # As in docs/analysts.md.
CONF = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
    "spark.executor.extraJavaOptions": spark_jvm.COMPILER,
}
SUBMIT_S = 280.0


@pytest.fixture(scope="module")
def submit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submit]:
    """Return `submit(*words)`, which returns the JSON that a command prints last."""
    home = pyspark_jars().parent
    job = tmp_path_factory.mktemp("job") / "neve_job.py"
    job.write_text(JOB)
    with SparkCluster(tmp_path_factory.mktemp("cluster")) as cluster:

        def run(*words: str) -> Any:
            command = [str(home / "bin" / "spark-submit"), "--master", cluster.master]
            command += [word for name, value in CONF.items() for word in ("--conf", f"{name}={value}")]
            environment = {**os.environ, "SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable}
            done = subprocess.run(
                [*command, str(job), *words, "--json"],
                capture_output=True, text=True, env=environment, timeout=SUBMIT_S, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-4000:]
            assert cluster.log("master.log").count("Registering app") > 0
            return json.loads(done.stdout.strip().splitlines()[-1])

        yield run


def test_verify_runs_as_an_application_of_spark_submit(submit: Submit, tmp_path: Path) -> None:
    url = f"dir:{tmp_path / 'archive'}"
    archive = ArchiveOnPaper(open_store(url), "a", "orders")
    for number in range(3):
        commit(archive, number, 10 * number, 10 * number + 9)
    checked = submit("spark", "verify", "--store", url)
    assert (checked["ok"], checked["objects"], checked["rows"]) == (True, 3, 30)
