"""The job of docs/analyse/spark-deploy.md under `spark-submit`, on a standalone cluster of two workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.objects.open import open_store
from neve.spark.jars import pyspark_jars
from tests.integration.page_blocks import blocks
from tests.integration.spark_archive import commit
from tests.kit.archive.archive_on_paper import ArchiveOnPaper
from tests.kit.server import spark_jvm
from tests.kit.server.spark_cluster import SparkCluster

pytestmark = [pytest.mark.servers, pytest.mark.timeout(600)]

CONF = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
    "spark.executor.extraJavaOptions": spark_jvm.COMPILER,
}
SUBMIT_S = 280.0


def test_verify_runs_as_an_application_of_spark_submit(tmp_path: Path) -> None:
    url = f"dir:{tmp_path / 'archive'}"
    archive = ArchiveOnPaper(open_store(url), "a", "orders")
    for number in range(3):
        commit(archive, number, 10 * number, 10 * number + 9)
    (tmp_path / "cluster").mkdir()
    commands = [block.text for block in blocks("spark-deploy.md") if block.language == "console"]
    options = " ".join(f"--conf '{name}={value}'" for name, value in CONF.items())
    with SparkCluster(tmp_path / "cluster") as cluster:
        script = "\n".join(commands).replace("spark://HOST:7077", f"{cluster.master} {options}")
        home = pyspark_jars().parent
        path = f"{home / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-ec", script.replace("dir:/srv/archive", url)],
            cwd=tmp_path, capture_output=True, text=True, timeout=SUBMIT_S, check=False,
            env={**os.environ, "PATH": path, "SPARK_HOME": str(home)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        assert cluster.log("master.log").count("Registering app") > 0
    checked = json.loads(done.stdout.strip().splitlines()[-1])
    assert (checked["ok"], checked["objects"], checked["rows"]) == (True, 3, 30)
