"""Listen addresses in RocketMQ's notation: `host:port` and `[v6]:port`."""

from __future__ import annotations


def parse_address(address: str) -> tuple[str, int]:
    """Parse an address into (host, port). Raises ValueError."""
    host, _, port = address.strip().rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)
