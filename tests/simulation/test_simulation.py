"""Dozens of histories of the whole storage side; `make simulate` runs thousands."""

from __future__ import annotations

import re

import pytest

from tests.simulation.model import Message
from tests.simulation.world import BrokenInvariant, StorageWorld


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_histories_keep_all_invariants(first: int) -> None:
    for seed in range(first, first + 10):
        StorageWorld(seed).run()


@pytest.mark.parametrize("seed", range(3))
def test_histories_keep_all_invariants_with_the_real_encoder(seed: int) -> None:
    StorageWorld(seed, real_worker=True).run(60)


def test_seed_determines_the_history() -> None:
    told = []
    for _ in range(2):
        world = StorageWorld(7)
        world.run()
        told.append(re.sub(r"[0-9a-f]{32,}", "", "\n".join(world.history)))
    assert told[0] == told[1]


def test_violation_names_the_seed_and_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The injected defect moves the end of each message."""
    monkeypatch.setattr(
        Message, "end", property(lambda message: message.physical + len(message.record) + 1_000_000), raising=True
    )
    with pytest.raises(BrokenInvariant, match=r"(?s)seed 3: .*the last steps:.*put 1 "):
        StorageWorld(3).run()
