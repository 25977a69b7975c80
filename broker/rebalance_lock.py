"""Queue locks of orderly consumers: one client of a group holds a queue for 60 s from its last renewal."""

from collections.abc import Iterable

from infra.clock import Clock

LOCK_SECONDS = 60.0
QueueKey = tuple[str, str, int]


class RebalanceLock:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._locks: dict[str, dict[QueueKey, tuple[str, float]]] = {}

    def lock(self, group: str, client: str, queues: Iterable[QueueKey]) -> list[QueueKey]:
        """Those of the queues that the client holds from now on."""
        now = self._clock.monotonic()
        table = self._locks.setdefault(group, {})
        held = []
        for queue in queues:
            owner, since = table.get(queue, (client, now))
            if owner == client or now - since > LOCK_SECONDS:
                table[queue] = (client, now)
                held.append(queue)
        return held

    def unlock(self, group: str, client: str, queues: Iterable[QueueKey]) -> None:
        table = self._locks.get(group, {})
        for queue in queues:
            if queue in table and table[queue][0] == client:
                del table[queue]

    def any_held(self, group: str) -> bool:
        now = self._clock.monotonic()
        return any(now - since <= LOCK_SECONDS for _, since in self._locks.get(group, {}).values())
