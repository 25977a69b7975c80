"""The demo on a short run: it compares all that comes back with what went in, so its exit code is the test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.servers

DEMO = Path(__file__).parents[2] / "examples" / "flights.py"


@pytest.mark.parametrize("store", ["dir", "minio"])
def test_the_demo_on_a_few_flights(store: str) -> None:
    command = [sys.executable, str(DEMO), "--store", store, "--limit", "3000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything that came back is what went in" in done.stdout
