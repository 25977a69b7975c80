"""Queue locks of ordered consumers: a client holds a queue for 60 s after its last renewal."""

from collections.abc import Callable, Iterable

from infra.clock import Clock

LOCK_SECONDS = 60.0
QueueKey = tuple[str, str, int]


class RebalanceLock:
    """Queue locks by group (RocketMQ's RebalanceLockManager), at most `limit`. Locks without renewal expire."""

    def __init__(self, clock: Clock, limit: Callable[[], int]) -> None:
        self._clock, self._limit = clock, limit
        self._locks: dict[str, dict[QueueKey, tuple[str, float]]] = {}
        # Times of a group's last renewal, and of the last search for expired locks.
        self._renewed: dict[str, float] = {}
        self._searched: dict[str, float] = {}
        self.count = 0

    def lock(self, group: str, client: str, queues: Iterable[QueueKey]) -> list[QueueKey]:
        """Lock queues for a client; return those that it holds now."""
        now, limit = self._clock.monotonic(), self._limit()
        if now - self._searched.get(group, now) > LOCK_SECONDS:
            self._search(group, now)
        table = self._locks.get(group, {})
        held = []
        for queue in queues:
            owner, since = table.get(queue, (client, now))
            if owner != client and now - since <= LOCK_SECONDS:
                continue
            if queue not in table:
                if self.count >= limit:
                    continue
                self.count += 1
            table[queue] = (client, now)
            held.append(queue)
        if table:
            self._locks[group], self._renewed[group] = table, now
            self._searched.setdefault(group, now)
        return held

    def unlock(self, group: str, client: str, queues: Iterable[QueueKey]) -> None:
        table = self._locks.get(group, {})
        for queue in queues:
            if queue in table and table[queue][0] == client:
                del table[queue]
                self.count -= 1
        if not table:
            self._forget(group)

    def any_held(self, group: str) -> bool:
        """Return whether any queue of the group is locked now."""
        now = self._clock.monotonic()
        return any(now - since <= LOCK_SECONDS for _, since in self._locks.get(group, {}).values())

    def expire(self) -> None:
        """Remove groups without renewals. Expired locks of other groups are removed when the group locks again."""
        limit = self._clock.monotonic() - LOCK_SECONDS
        for group in [group for group, renewed in self._renewed.items() if renewed < limit]:
            self._forget(group)

    def _search(self, group: str, now: float) -> None:
        self._searched[group] = now
        table = self._locks[group]
        for queue in [queue for queue, (_, since) in table.items() if now - since > LOCK_SECONDS]:
            del table[queue]
            self.count -= 1

    def _forget(self, group: str) -> None:
        self.count -= len(self._locks.pop(group, ()))
        self._renewed.pop(group, None)
        self._searched.pop(group, None)
