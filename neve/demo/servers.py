"""The processes of the demo: `neve up`, MinIO, and single commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from neve.cli.failures import FAILED, Failure
from neve.demo.flights import Different
from neve.server_packages import make_importable

_NEVE = [sys.executable, "-c", "from neve.cli.main import main; main()"]
_STOP_S = 30.0


@dataclass(frozen=True)
class Servers:
    """The addresses of a running `neve up`, the URL of its store, and the directory of its data and logs."""

    namesrv: str
    broker: str
    admin: str
    store: str
    directory: Path


def neve(*arguments: str) -> str:
    """Run one command of the command line and return its data.

    Raises:
        Different: the command failed.
    """
    done = subprocess.run([*_NEVE, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Different(f"`neve {shlex.join(arguments)}` ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


@contextmanager
def running(root: Path, store: str, *settings: str) -> Iterator[Servers]:
    """Run `neve up` on free ports, with its data and log in `root`."""
    command = [*_NEVE, "up", "--data", str(root / "data"), "--store", store, "--namesrv-port", "0", "--port", "0"]
    command += [word for setting in ("adminPort=0", *settings) for word in ("--set", setting)]
    with _process(command, root / "server.log") as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline() or _ended("neve up", root / "server.log"))
        yield Servers(ready["namesrv"], ready["broker"], ready["admin"], store, root)


def store_url(root: Path, kind: str, stack: ExitStack) -> str:
    """Return the URL of a new store in `root`; a MinIO runs until the stack is closed."""
    if kind == "dir":
        return f"dir:{root / 'archive'}"
    make_importable()
    command = [sys.executable, "-m", "infra.objects.minio", "--serve", str(root / "minio")]
    process = stack.enter_context(_process(command, root / "minio.log"))
    assert process.stdout is not None
    # Credentials for the broker, boto3 and Spark, then the URL.
    for line in process.stdout:
        name, _, value = shlex.split(line)[1].partition("=")
        if name == "NEVE_STORE":
            return value
        os.environ[name] = value
    return _ended("MinIO", root / "minio.log")


def cold_reads(admin: str) -> int:
    """Return the number of pulls that the broker answered from the archive, by its own metric."""
    with urllib.request.urlopen(f"http://{admin}/metrics", timeout=10) as response:
        text = response.read().decode()
    found = re.search(r"^neve_cold_reads_total (\S+)$", text, re.MULTILINE)
    if found is None:
        raise Different("the broker has no metric neve_cold_reads_total")
    return int(float(found[1]))


@contextmanager
def _process(command: list[str], log_path: Path) -> Iterator[subprocess.Popen[str]]:
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=log_path.parent)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ended(name: str, log_path: Path) -> NoReturn:
    raise Failure(FAILED, f"{name} did not start: {log_path.read_text()[-4000:].strip()}")
