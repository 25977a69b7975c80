"""The cluster in the test's own loop, as a fixture."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.client.fake_cluster import running


@pytest.fixture
def fake_cluster() -> Callable[..., object]:
    """`async with fake_cluster(handler, …) as cluster`: a broker for each handler; one that stores all without any."""
    return running
