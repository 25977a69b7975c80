"""The checks before a server opens its port; each failure is one line of text and an exit code."""

import errno
import importlib.util
import resource
import socket
import sys
from contextlib import suppress
from pathlib import Path

from neve.entropy import salt, system_entropy
from neve.extras import install_command
from neve.server_packages import DIRECTORY

EXIT_CONFIG = 2
EXIT_IN_USE = 3
EXIT_DISK = 4
EXIT_ARCHIVE = 5
EXIT_FAILED = 6

# Linux assigns ports from 32768 to outgoing connections.
_NOT_EPHEMERAL = range(20_000, 32_768)
_TRIES = 100

PACKAGES = ("neve", "infra", "access", "namesrv", "controller", "tiered", "lifecycle", "broker")

#: The dependencies of `neve[server]`. Workers load some of them hours after the start, so an incomplete upgrade has to
#: be detected here.
REQUIRED = ("aiohttp", "apscheduler", "click", "msgspec", "boto3", "numpy", "pyarrow", "xxhash", "obstore",
            "prometheus_client", "uvloop", "zlib_ng")  # fmt: skip


class StartupError(Exception):
    """The server cannot start; the text is for the operator, `exit_code` for a process supervisor."""

    def __init__(self, message: str, exit_code: int = EXIT_CONFIG) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def check_installation() -> None:
    """Reject `python -O` (assertions guard the data), missing packages and a mixed installation."""
    if sys.flags.optimize:
        raise StartupError("python -O disables assertions that guard the data: start without it")
    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        raise StartupError(f"not installed: {', '.join(missing)}; run {install_command('server')}")
    places = set()
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise StartupError(f"package {name} is missing; run {install_command('server')}")
        place = Path(spec.origin).resolve().parent.parent
        places.add(DIRECTORY.resolve() if name == "neve" and DIRECTORY.is_dir() else place)
    if len(places) > 1:
        where = ", ".join(sorted(str(place) for place in places))
        raise StartupError(
            f"neve's packages come from several directories ({where}): install neve in its own environment"
        )


def addresses(bind_address: str) -> list[str]:
    """Return the addresses of a `bindAddress`, which may be a list such as `0.0.0.0,::`."""
    return [part.strip() for part in bind_address.split(",") if part.strip()] or ["0.0.0.0"]


def check_port(bind_address: str, port: int, what: str = "port") -> None:
    """Raise StartupError if a port is in use, before the data directory is changed."""
    for host in addresses(bind_address) if port else []:
        try:
            _bound(host, port).close()
        except OSError as error:
            raise StartupError(f"{what} {port} on {host}: {error.strerror or error}", EXIT_IN_USE) from error


def free_port(bind_address: str) -> int:
    """Return an unused port, below those of outgoing connections if possible."""
    host = addresses(bind_address)[0]
    chosen = (_NOT_EPHEMERAL[salt(system_entropy) % len(_NOT_EPHEMERAL)] for _ in range(_TRIES))
    for port in (*chosen, 0):
        with suppress(OSError), _bound(host, port) as probe:
            return int(probe.getsockname()[1])
    raise OSError(errno.EADDRINUSE, f"no port of {host} is free")


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    probe = socket.socket(family, kind, protocol)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind(address)
    except OSError:
        probe.close()
        raise
    return probe


def open_files_limit() -> int:
    """Return the limit of open files of this process; a large number if there is none."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def local_address(peer: str | None = None) -> str:
    """Return the local address of the route to `peer`, which other machines can reach. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer or "192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
