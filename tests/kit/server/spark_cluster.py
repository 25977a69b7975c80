"""Spark's standalone cluster from the scripts of pyspark's own package: processes of a master and workers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pyspark
from typing_extensions import override

from tests.kit.clock.waiting import wait_until
from tests.kit.server import spark_jvm
from tests.kit.server.processes import Processes, accepts, free_ports

_CLASS = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
_ROOM = "org.apache.spark.deploy"
_START_S = 120.0


class SparkCluster(Processes):
    """Workers of one core each, with separate directories and temporary files for each worker and its executors."""

    def __init__(self, directory: Path, workers: int = 2) -> None:
        super().__init__(directory)
        port, self._page = free_ports(2)
        self._address = f"127.0.0.1:{port}"
        self._count = workers
        self.workers: list[subprocess.Popen[str]] = []

    @property
    def master(self) -> str:
        return f"spark://{self._address}"

    @override
    def start(self) -> SparkCluster:
        host, _, port = self._address.rpartition(":")
        command = [_CLASS, f"{_ROOM}.master.Master", "--host", host, "--port", port, "--webui-port", str(self._page)]
        self.spawn(command, "master.log", self._environment(self.directory))
        wait_until(lambda: accepts(self._address), "the master of a Spark cluster", _START_S)
        for number in range(self._count):
            home = self.directory / f"worker-{number}"
            home.mkdir()
            command = [_CLASS, f"{_ROOM}.worker.Worker", "--host", host, "--cores", "1", "--memory", "700m"]
            command += ["--work-dir", str(home), "--webui-port", "0", self.master]
            self.workers.append(self.spawn(command, f"worker-{number}.log", self._environment(home)))
        wait_until(self._all_are_there, "the workers of a Spark cluster", _START_S)
        return self

    def kill_worker(self, number: int) -> None:
        """SIGKILL a worker and its executors with their Python processes."""
        worker = psutil.Process(self.workers[number].pid)
        for process in (worker, *worker.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _all_are_there(self) -> bool:
        dead = [worker.args for worker in self.workers if worker.poll() is not None]
        assert not dead, f"{dead} ended: {self.log('worker-0.log')[-2000:]}"
        return self.log("master.log").count("Registering worker") == self._count

    def _environment(self, home: Path) -> dict[str, str]:
        temporary = home / "tmp"
        temporary.mkdir(exist_ok=True)
        return {
            "TMPDIR": str(temporary),
            "SPARK_LOCAL_DIRS": str(temporary),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": f"{spark_jvm.COMPILER} -Djava.io.tmpdir={temporary}",
            "SPARK_NO_DAEMONIZE": "1",
            "PYSPARK_PYTHON": sys.executable,
            "PATH": os.environ["PATH"],
        }
