"""Test of `python -m tests.histories.run` if it is ended early."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.histories import run as runner
from tests.histories.checker import Report


def test_run_ended_early_fails_and_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def one_round_and_a_half(directory: Path, *, reports: list[Report], **_: Any) -> list[Report]:
        held = Report([], Counter(), elections=0, faults=Counter(), silent_ms=0)
        reports.append(held)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
        return reports

    monkeypatch.setattr(runner, "run", one_round_and_a_half)
    monkeypatch.setattr("sys.argv", ["run", "--rounds", "2"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert runner.main() == 1
    assert "1 rounds of 2: 1 held" in capsys.readouterr().out
    assert list(tmp_path.iterdir())
