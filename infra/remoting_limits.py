"""What a server's peers may cost it."""

from __future__ import annotations

from dataclasses import dataclass

from neve.remoting.frame import MAX_FRAME


@dataclass(frozen=True, slots=True)
class RemotingLimits:
    """What one peer may cost."""

    max_frame: int = MAX_FRAME
    max_connections: int = 8192
    backlog: int = 1024  # connections that wait to be accepted, and are at once
    idle_seconds: float = 120.0
    frame_seconds: float = 10.0
    max_in_flight: int = 1024  # answers still being computed, per connection; beyond it reading pauses
    max_requests_out: int = 4096  # requests to the peer that wait for their answer
    write_high_water: int = 4 * 1024 * 1024
    max_unwritten: int = 64 * 1024 * 1024  # a peer that reads nothing while answers it waited for arrive is dropped
    max_unfinished: int = 256 * 1024 * 1024  # what unfinished frames hold, of all peers together
