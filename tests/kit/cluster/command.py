"""A command of `neve`, called in this process: its output and its exit code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from neve.cli import main


class Command:
    """`neve NAME …`; `last` are the arguments that follow those of each call."""

    def __init__(self, name: str, capfd: pytest.CaptureFixture[str], *last: str) -> None:
        self._name, self._capfd, self._last = name, capfd, last
        self.err = ""

    def __call__(self, *arguments: str, code: int = 0) -> str:
        self._capfd.readouterr()
        ended = main.run([self._name, *arguments, *self._last])
        shown = self._capfd.readouterr()
        assert ended == code, shown.err
        self.err = shown.err
        return shown.out

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "-o", "json", code=code))
