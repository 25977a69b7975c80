"""What a broker touches outside of its own process. The composition hands each part what it uses; none keeps this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from broker.archiving.outside import Outside
from infra.clock import Clock
from infra.disk.filesystem import Disk
from infra.process.startup import check_port


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A simulation brings another. Sockets are the running loop's."""

    clock: Clock
    disk: Disk
    #: Threads, and what the archive has of the machine.
    outside: Outside = field(default_factory=Outside)
    #: Raises StartupError where somebody else listens.
    check_port: Callable[[str, int, str], None] = check_port
