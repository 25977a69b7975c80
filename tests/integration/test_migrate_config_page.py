"""docs/migrate/config.md: the report on an example file is the output of `neve doctor`."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from tests.kit.server.neve import NEVE

PAGE = (Path(__file__).parents[2] / "docs" / "migrate" / "config.md").read_text("utf-8")


def test_report_on_the_example_file_is_the_one_on_the_page(tmp_path: Path) -> None:
    conf, session = re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "broker.conf").write_text(conf)
    command, _, report = session.partition("\n")
    verb, *arguments = shlex.split(command.removeprefix("$ "))
    assert verb == "neve"
    done = subprocess.run([NEVE, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == report
    assert done.returncode == 1
