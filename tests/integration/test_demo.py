"""Short runs of the demos. They compare all output with the input, so their exit codes are the test."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.servers

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("store", ["dir", "minio"])
def test_demo_returns_what_it_sent_and_writes_its_report(store: str, tmp_path: Path) -> None:
    report = tmp_path / "new" / "report.html"
    command = [sys.executable, "-c", "from neve.cli.main import main; main()", "demo", "--store", store]
    done = subprocess.run(
        [*command, "--limit", "3000", "--report", str(report)],
        capture_output=True, text=True, timeout=300, check=False,
        cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "", "no warning of Java or Spark"
    assert "everything that came back is what went in: 4 comparisons" in done.stdout
    assert re.findall(r"^(\d+)\. ", done.stdout, re.MULTILINE) == [str(number) for number in range(1, 10)]
    assert "\r" not in done.stdout, "no progress without a terminal"
    assert f"report: {report}" in done.stdout
    text = report.read_text()
    for proven in re.findall(r"proven: (.*)", done.stdout):
        assert html.escape(proven) in text
    assert not list(tmp_path.glob("neve-demo-*")), "the data are deleted"


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
