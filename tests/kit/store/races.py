"""Race conditional writes against an object store."""

from __future__ import annotations

import threading

from infra.objects.store import (
    ObjectStore,
    PreconditionFailed,
)


def winners_of_a_race(store: ObjectStore, key: str) -> list[int]:
    """Run eight concurrent conditional PUTs of numbers, and return the numbers that succeeded."""
    barrier = threading.Barrier(8)
    won: list[int] = []

    def race(number: int) -> None:
        barrier.wait()
        try:
            store.put(key, str(number).encode(), if_absent=True)
        except PreconditionFailed:
            return
        won.append(number)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won
