"""Where somebody listens, as RocketMQ writes it: `host:port`, and `[v6]:port`."""

from __future__ import annotations


def parse_address(address: str) -> tuple[str, int]:
    """(host, port). ValueError: it is no such thing."""
    host, _, port = address.strip().rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)
