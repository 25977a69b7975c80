"""Fixture of a fake cluster in the event loop of the test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kit.cluster.fake_cluster import running


@pytest.fixture
def fake_cluster() -> Callable[..., object]:
    """Use as `async with fake_cluster(handler, …) as cluster`: one broker per handler, or one for all messages."""
    return running
