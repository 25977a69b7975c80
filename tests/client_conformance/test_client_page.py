"""Run every example of docs/develop/python-client.md, with the test's address, topic and group names."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "develop" / "python-client.md"
LIMIT_S = 90


def examples() -> list[Any]:
    """Return the Python blocks, each with the heading above it."""
    found, heading = [], "first"
    for part in re.finditer(r"^## (?P<heading>[^\n]+)$|^```python\n(?P<code>.+?)^```$", PAGE.read_text(), re.M | re.S):
        if part["heading"]:
            heading = part["heading"]
        else:
            found.append(pytest.param(part["code"], id=heading))
    return found


@pytest.mark.parametrize("code", examples())
def test_example_runs(server: Any, topic: str, unique: str, code: str) -> None:
    code = code.replace("127.0.0.1:9876", server.namesrv).replace('"orders"', f'"{topic}"')
    code = code.replace('"billing"', f'"G-{unique}"').replace('"payments"', f'"P-{unique}"')
    compiled = compile(code, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, Any] = {"__name__": "example"}

    async def run() -> None:
        async with asyncio.timeout(LIMIT_S):
            ended = eval(compiled, names)
            if inspect.isawaitable(ended):
                await ended

    if compiled.co_flags & inspect.CO_COROUTINE:
        asyncio.run(run())
    else:
        eval(compiled, names)


def test_the_page_has_examples() -> None:
    assert len(examples()) >= 10
