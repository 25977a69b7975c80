"""Born hosts of messages in the form of a record, packed once for each host instead of for each message."""

from __future__ import annotations

from struct import Struct

from broker.store.errors import MessageIllegal
from neve.record.codec import pack_host
from neve.record.layout import HEADS, host_flags, host_sizes

_KEPT = 10_000

# The packed host, the struct of a record's head with it, and the system flags for it.
BornHost = tuple[bytes, Struct, int]


class BornHosts(dict[tuple[str, int], BornHost]):
    """Packed born hosts for one store host.

    A dict with `__missing__`, because the hot path looks up the host of each batch.
    """

    def __init__(self, store_host: bytes) -> None:
        super().__init__()
        self._store_size = len(store_host)

    def __missing__(self, host: tuple[str, int]) -> BornHost:
        """Pack and keep a host. Raises MessageIllegal if it is not an address."""
        try:
            born = pack_host(host)
        except ValueError as error:
            raise MessageIllegal(f"born host {host} is no address") from error
        if len(self) >= _KEPT:
            self.clear()
        flags = host_flags(len(born), self._store_size)
        packed = self[host] = born, HEADS[host_sizes(flags)], flags
        return packed
