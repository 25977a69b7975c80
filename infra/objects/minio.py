"""MinIO for evaluation and tests: `minio` from PATH, or built by a checkout.

python -m infra.objects.minio --serve DIR     serve DIR with a bucket `archive`; print the shell variables to use it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from infra.objects import s3_server
from infra.objects.s3_server import Launch, Program, S3Server, create_bucket

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


# The readiness page answers 200 before the buckets are loaded; only after that are anonymous requests refused.
PROGRAM = Program("minio", _arguments, _environment, "/", HTTPStatus.FORBIDDEN)


@contextmanager
def running(directory: Path, port: int = 0, keys: tuple[str, str] | None = None) -> Iterator[S3Server]:
    """Run an instance with its data in `directory`. With its former `port` and `keys`, an instance resumes."""
    with s3_server.running(PROGRAM, directory, port, keys) as server:
        yield server


if __name__ == "__main__":
    s3_server.main(PROGRAM, "infra.objects.minio")
