"""Message ids: by place (offsetMsgId) and by producer (UNIQ_KEY).

Source: RocketMQ's MessageDecoder, MessageClientIDSetter.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache

from neve.record.codec import Host, pack_host
from neve.record.layout import I32, I64


def offset_msg_id(host: Host, physical_offset: int) -> str:
    """Return the offsetMsgId: host and physical offset in upper-case hex (32 characters for IPv4, 56 for IPv6)."""
    return _host_part(host) + I64.pack(physical_offset).hex().upper()


@lru_cache(maxsize=256)
def _host_part(host: Host) -> str:
    return pack_host(host).hex().upper()


def parse_offset_msg_id(msg_id: str) -> tuple[str, int, int]:
    """Parse an offsetMsgId into (ip, port, physical offset).

    Raises:
        ValueError: the text is not an offsetMsgId.
    """
    raw = bytes.fromhex(msg_id)
    if len(raw) not in (16, 28):
        raise ValueError(f"{msg_id!r} is not an offsetMsgId")
    address, rest = raw[: len(raw) - 12], raw[len(raw) - 12 :]
    return str(ipaddress.ip_address(address)), I32.unpack_from(rest)[0], I64.unpack_from(rest, 4)[0]


class UniqueIdGenerator:
    """Generates UNIQ_KEYs in upper-case hex: ip, pid i16, salt i32, ms since creation i32, counter i16."""

    def __init__(self, host_ip: str, pid: int, salt: int, now_ms: int) -> None:
        address = pack_host((host_ip, 0))[:-4]
        self._prefix = (
            (address + (pid & 0xFFFF).to_bytes(2, "big") + (salt & 0xFFFFFFFF).to_bytes(4, "big")).hex().upper()
        )
        self._begin_ms = now_ms
        self._counter = 0
        self._stamp, self._stamped_ms = "", -1  # the common prefix of ids of one millisecond

    def next(self, now_ms: int) -> str:
        """Return the next id."""
        if now_ms != self._stamped_ms:
            self._stamp = f"{self._prefix}{(now_ms - self._begin_ms) & 0xFFFFFFFF:08X}"
            self._stamped_ms = now_ms
        self._counter = (self._counter + 1) & 0xFFFF
        return f"{self._stamp}{self._counter:04X}"
