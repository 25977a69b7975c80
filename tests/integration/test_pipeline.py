"""A short run of the Spark pipeline. It compares its consumer's data with pandas, so its exit code is the test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.servers


def test_pipeline_matches_pandas_after_its_job_is_killed() -> None:
    command = [sys.executable, "-m", "examples.pipeline", "--limit", "3000", "--stops", "1"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every figure is what pandas says" in done.stdout
    assert "killed after" in done.stdout
