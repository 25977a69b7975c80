"""The hosts that messages are born at, as a record holds them: packed once for each, not for each message."""

from __future__ import annotations

from struct import Struct

from broker.store.errors import MessageIllegal
from neve.record.codec import pack_host
from neve.record.layout import HEADS, host_flags, host_sizes

_KEPT = 10_000

# The packed host, the struct of a record's head with it, and its flags.
BornHost = tuple[bytes, Struct, int]


class BornHosts(dict[tuple[str, int], BornHost]):
    """Of one store host. A dict that fills itself, because the hot path asks it for each sender's batch."""

    def __init__(self, store_host: bytes) -> None:
        super().__init__()
        self._store_size = len(store_host)

    def __missing__(self, host: tuple[str, int]) -> BornHost:
        """Raises MessageIllegal."""
        try:
            born = pack_host(host)
        except ValueError as error:
            raise MessageIllegal(f"born host {host} is no address") from error
        if len(self) >= _KEPT:
            self.clear()
        flags = host_flags(len(born), self._store_size)
        packed = self[host] = born, HEADS[host_sizes(flags)], flags
        return packed
