"""MinIO for development and tests.

python -m infra.minio --ensure        print the path of the binary, building it when there is none
python -m infra.minio --serve DIR     run it over DIR with a bucket `archive`; prints what a shell needs to use it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from infra import go_server
from infra.go_server import Launch, Program, S3Server, create_bucket

__all__ = ["Minio", "create_bucket", "running"]

Minio = S3Server


def _arguments(launch: Launch) -> list[str]:
    return ["server", "--quiet", "--address", launch.address, "--console-address", "127.0.0.1:0", str(launch.data)]


def _environment(launch: Launch) -> dict[str, str]:
    return {
        "MINIO_ROOT_USER": launch.access_key,
        "MINIO_ROOT_PASSWORD": launch.secret_key,
        "MINIO_BROWSER": "off",
        "MINIO_UPDATE": "off",
        "MINIO_CONFIG_DIR": str(launch.directory / "config"),
    }


PROGRAM = Program(
    "minio", "github.com/minio/minio@latest", _arguments, _environment, "/minio/health/ready", HTTPStatus.OK
)


@contextmanager
def running(directory: Path, port: int = 0, keys: tuple[str, str] | None = None) -> Iterator[S3Server]:
    """A private instance over `directory`; with its old port and keys, it is back."""
    with go_server.running(PROGRAM, directory, port, keys) as server:
        yield server


if __name__ == "__main__":
    go_server.main(PROGRAM, "infra.minio")
