"""The hosts that messages are born at, as a record holds them: packed once for each, not for each message."""

from __future__ import annotations

from struct import Struct

from broker.store.errors import MessageIllegal
from broker.store.layout import HEAD_OF_HOSTS
from neve.record.codec import pack_host
from neve.record.layout import BORN_HOST_V6, STORE_HOST_V6

HOST_FLAGS = BORN_HOST_V6 | STORE_HOST_V6
_KEPT = 10_000

# The packed host, the struct of a record's head with it, and its flags.
BornHost = tuple[bytes, Struct, int]


class BornHosts(dict[tuple[str, int], BornHost]):
    """Of one store host. A dict that fills itself, because the hot path asks it for each sender's batch."""

    def __init__(self, store_host: bytes) -> None:
        super().__init__()
        self._store_is_v6 = len(store_host) > 8

    def __missing__(self, host: tuple[str, int]) -> BornHost:
        """Raises MessageIllegal."""
        try:
            born = pack_host(host)
        except ValueError as error:
            raise MessageIllegal(f"born host {host} is no address") from error
        if len(self) >= _KEPT:
            self.clear()
        is_v6 = len(born) > 8
        struct = HEAD_OF_HOSTS[16 if is_v6 else 4, 16 if self._store_is_v6 else 4]
        packed = self[host] = born, struct, BORN_HOST_V6 * is_v6 | STORE_HOST_V6 * self._store_is_v6
        return packed
