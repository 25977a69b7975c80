"""A server from a Debian package, unpacked into the cache of servers; nothing is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from infra.objects.s3_server import ServerMissing, cache_directory, find_binary

#: Each program with its package.
PROGRAMS = {"prometheus": "prometheus", "promtool": "prometheus"}


def ensure(name: str) -> Path:
    """Return the program: from PATH, from the cache, or from its package.

    Raises:
        ServerMissing: The package cannot be fetched.
    """
    return find_binary(name) or _unpacked(name)


def _unpacked(name: str) -> Path:
    package, binary = PROGRAMS[name], cache_directory() / "bin" / name
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise ServerMissing(f"there is no `{name}` on PATH, and no apt-get to fetch Debian's package {package} with")
    binary.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.write(f"fetching {name} into {binary.parent} (Debian's package {package})\n")
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(dir=binary.parent) as directory:
        fetch = ["apt-get", "-qq", "download", package]
        if _failed(fetch, directory):  # A new machine has no package lists yet, and fetching them requires root.
            _failed(["apt-get", "-qq", "update"], directory)
            if fault := _failed(fetch, directory):
                raise ServerMissing(f"there is no `{name}` on PATH, and `{' '.join(fetch)}` failed: {fault}")
        (archive,) = Path(directory).glob("*.deb")
        if fault := _failed(["dpkg-deb", "-x", str(archive), "unpacked"], directory):
            raise ServerMissing(f"{archive.name}: {fault}")
        # An interrupted copy never has the final name.
        return (Path(directory) / "unpacked" / "usr" / "bin" / name).replace(binary)


def _failed(command: list[str], directory: str) -> str:
    """Return the error output of a failed command, or "" on success."""
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    return (done.stderr[-1000:] or f"exit code {done.returncode}") if done.returncode else ""
