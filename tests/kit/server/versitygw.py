"""The Versity S3 gateway on a directory: a second implementation of S3 besides MinIO."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from infra.objects import s3_server
from infra.objects.s3_server import Launch, Program, S3Server


def _arguments(launch: Launch) -> list[str]:
    # Beside the objects, because not every file system has extended attributes.
    sidecar = launch.directory / "metadata"
    sidecar.mkdir(exist_ok=True)
    return ["--port", launch.address, "--quiet", "posix", "--sidecar", str(sidecar), str(launch.data)]


def _environment(launch: Launch) -> dict[str, str]:
    return {"ROOT_ACCESS_KEY": launch.access_key, "ROOT_SECRET_KEY": launch.secret_key}


# It has no health page without a signature; a refusal shows that it listens.
PROGRAM = Program("versitygw", _arguments, _environment, "/", HTTPStatus.FORBIDDEN)


@contextmanager
def running(directory: Path, port: int = 0, keys: tuple[str, str] | None = None) -> Iterator[S3Server]:
    """Run a private instance on `directory`; with the same port and keys it replaces a former one."""
    with s3_server.running(PROGRAM, directory, port, keys) as server:
        yield server
