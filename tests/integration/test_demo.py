"""Short runs of the demos. They compare all output with the input, so their exit codes are the test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.servers

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("store", ["dir", "minio"])
def test_flights_demo_returns_what_it_sent(store: str) -> None:
    command = [sys.executable, str(EXAMPLES / "flights.py"), "--store", store, "--limit", "3000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything that came back is what went in" in done.stdout


def test_failover_demo_loses_no_message_and_prints_its_timeline() -> None:
    command = [sys.executable, str(EXAMPLES / "failover.py"), "--seconds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every acknowledged message is read where it was acknowledged" in done.stdout
    former = re.search(r"the master is (\S+)", done.stdout)
    elected = re.search(r"(\S+) is elected, in epoch 2", done.stdout)
    assert former is not None
    assert elected is not None
    assert former[1] != elected[1]
    assert f"{former[1]} is back, and in sync again" in done.stdout
