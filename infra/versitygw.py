"""The Versity S3 gateway over a directory, for tests: a second implementation of S3 beside MinIO.

python -m infra.versitygw --ensure        print the path of the binary, building it when there is none
python -m infra.versitygw --serve DIR     run it over DIR with a bucket `archive`; prints what a shell needs to use it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from infra import go_server
from infra.go_server import Launch, Program, S3Server


def _arguments(launch: Launch) -> list[str]:
    sidecar = launch.directory / "metadata"  # beside the objects: not every file system has extended attributes
    sidecar.mkdir(exist_ok=True)
    return ["--port", launch.address, "--quiet", "posix", "--sidecar", str(sidecar), str(launch.data)]


def _environment(launch: Launch) -> dict[str, str]:
    return {"ROOT_ACCESS_KEY": launch.access_key, "ROOT_SECRET_KEY": launch.secret_key}


# It has no page for health without a signature; that it refuses one says that it listens.
PROGRAM = Program(
    "versitygw",
    "github.com/versity/versitygw/cmd/versitygw@latest",
    _arguments,
    _environment,
    "/",
    HTTPStatus.FORBIDDEN,
)


@contextmanager
def running(directory: Path, port: int = 0, keys: tuple[str, str] | None = None) -> Iterator[S3Server]:
    """A private instance over `directory`; with its old port and keys, it is back."""
    with go_server.running(PROGRAM, directory, port, keys) as server:
        yield server


if __name__ == "__main__":
    go_server.main(PROGRAM, "infra.versitygw")
