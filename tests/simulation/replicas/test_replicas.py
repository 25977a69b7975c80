"""Some histories of a broker set; `make simulate` runs thousands."""

from __future__ import annotations

import pytest

from tests.simulation.replicas.world import ReplicasWorld


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_histories_keep_all_promises(first: int) -> None:
    for seed in range(first, first + 20):
        ReplicasWorld(seed).run()


def test_seed_determines_the_history() -> None:
    for seed in (3, 8):
        told = []
        for _ in range(2):
            world = ReplicasWorld(seed)
            world.run()
            told.append(world.history)
        assert told[0] == told[1]
