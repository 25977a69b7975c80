"""`neve broker-set`, called in this process: its output and its exit code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from neve.cli import main


class Neve:
    """The command line and its output."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.err = ""

    def __call__(self, *arguments: str, code: int = 0) -> str:
        ended = main.run(["broker-set", *arguments])
        said = self._capfd.readouterr()
        assert ended == code, said.err
        self.err = said.err
        return said.out

    def rows(self, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self(*arguments, "-o", "json", code=code))
        return found
