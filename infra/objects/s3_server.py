"""Local S3 servers for evaluation and tests: find the binary, run an instance.

An instance listens on a free port of 127.0.0.1 with random credentials.
"""

from __future__ import annotations

import argparse
import http.client
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from neve.entropy import system_entropy

START_SECONDS = 60.0


class ServerMissing(RuntimeError):
    """The binary is missing, or the server did not start."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The parameters of an instance."""

    directory: Path
    data: Path
    address: str
    access_key: str
    secret_key: str


@dataclass(frozen=True, slots=True)
class Program:
    """A kind of server: its binary, its arguments, and the page that shows that it is ready."""

    binary: str
    arguments: Callable[[Launch], list[str]]
    environment: Callable[[Launch], dict[str, str]]
    ready_path: str
    ready_status: int


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running instance."""

    endpoint: str
    access_key: str
    secret_key: str
    pid: int

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}

    def url(self, bucket: str, prefix: str = "") -> str:
        return f"s3://{bucket}/{prefix}?endpoint={self.endpoint}&region=us-east-1"


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "neve"


def find(program: Program) -> Path | None:
    """Return the binary from PATH or from the cache."""
    return find_binary(program.binary)


def find_binary(name: str) -> Path | None:
    """Return a program from PATH or from the cache."""
    found = shutil.which(name)
    if found:
        return Path(found)
    cached = cache_directory() / "bin" / name
    return cached if cached.exists() else None


@contextmanager
def running(
    program: Program, directory: Path, port: int = 0, keys: tuple[str, str] | None = None
) -> Iterator[S3Server]:
    """Run an instance with its data and log in `directory`. With its former `port` and `keys`, an instance resumes."""
    binary = find(program)
    if binary is None:
        raise ServerMissing(f"`{program.binary}` is not on PATH; in a checkout `make servers` builds it")
    port = port or _free_port()
    data = directory / "data"
    data.mkdir(parents=True, exist_ok=True)
    access_key, secret_key = keys or (f"neve{system_entropy(6).hex()}", system_entropy(20).hex())
    launch = Launch(directory, data, f"127.0.0.1:{port}", access_key, secret_key)
    log_path = directory / f"{program.binary}.log"
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [str(binary), *program.arguments(launch)],
            env=environment | program.environment(launch),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        _wait_live(program, process, port, log_path)
        yield S3Server(f"http://{launch.address}", access_key, secret_key, process.pid)
    finally:
        _stop(process)


def _wait_live(program: Program, process: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
    pause = threading.Event()
    for _ in range(int(START_SECONDS / 0.05)):
        if process.poll() is not None:
            raise ServerMissing(f"{program.binary} ended with {process.returncode}:\n{log_path.read_text()[-2000:]}")
        if _is_live(program, port):
            return
        pause.wait(0.05)
    raise ServerMissing(
        f"{program.binary} did not answer within {START_SECONDS:.0f} s:\n{log_path.read_text()[-2000:]}"
    )


def _is_live(program: Program, port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", program.ready_path)
        return connection.getresponse().status == program.ready_status
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def create_bucket(server: S3Server, bucket: str) -> None:
    """Create a bucket if it does not exist; the archive itself never creates one."""
    import boto3  # noqa: PLC0415 - development only

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
    )
    if bucket not in {found["Name"] for found in client.list_buckets()["Buckets"]}:
        client.create_bucket(Bucket=bucket)


def main(program: Program, module: str) -> None:
    """The command `python -m MODULE --serve DIR`: run an instance until a signal."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=f"run {program.binary} for evaluation")
    parser.add_argument(
        "--serve", type=Path, metavar="DIR", required=True, help="serve DIR until a signal; print shell variables"
    )
    parser.add_argument("--port", type=int, default=0, help="default: a free port")
    parser.add_argument("--bucket", default="archive", help="created if it does not exist (default: archive)")
    chosen = parser.parse_args()
    try:
        _serve(program, chosen.serve, chosen.port, chosen.bucket)
    except ServerMissing as error:
        sys.exit(f"error: {error}")


def _serve(program: Program, directory: Path, port: int, bucket: str) -> None:
    """Run an instance with the credentials of the environment, which a restart keeps, or with new ones."""
    given = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    keys = (given[0], given[1]) if given[0] and given[1] else None
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with running(program, directory, port, keys) as server:
        create_bucket(server, bucket)
        exports = server.environment | {"NEVE_STORE": server.url(bucket, "neve")}
        sys.stdout.write("".join(f"export {name}={shlex.quote(value)}\n" for name, value in exports.items()))
        sys.stdout.flush()
        stopped.wait()
