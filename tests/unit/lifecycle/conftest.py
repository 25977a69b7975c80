from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import failpoint
from tests.unit.lifecycle.fakes import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "state")


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    failpoint.disarm()
