"""Interface of a broker to its machine. The composition passes each part what it uses; no part keeps the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from broker.archiving.environment import Environment
from infra.clock import Clock
from infra.disk.filesystem import Disk
from infra.process.startup import check_port


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Clock, disk, threads and ports. A simulation replaces it. Sockets are the running loop's."""

    clock: Clock
    disk: Disk
    #: Threads, and the archive's interface to the machine.
    environment: Environment = field(default_factory=Environment)
    #: Raises StartupError if a port is in use.
    check_port: Callable[[str, int, str], None] = check_port
