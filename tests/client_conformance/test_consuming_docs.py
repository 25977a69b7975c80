"""The examples of `docs/develop/consuming.md`, and every mode of `neve consume`."""

from __future__ import annotations

import asyncio
import inspect
import re
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neve import connect
from neve.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "develop" / "consuming.md"
DEADLINE_S = 60


def examples() -> list[Any]:
    """Return the functions of the page by name."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 8
    found: dict[str, Any] = {}
    for block in blocks:
        scope: dict[str, Any] = {}
        exec(compile(block, str(PAGE), "exec"), scope)
        found |= {name: value for name, value in scope.items() if inspect.iscoroutinefunction(value)}
    return [pytest.param(value, id=name) for name, value in found.items()]


@pytest.fixture(scope="module")
def orders(server: Any) -> str:
    """Return the address of a broker that has the page's topic, filled once for all examples."""

    async def fill() -> None:
        async with asyncio.timeout(DEADLINE_S), connect(server.namesrv) as client:
            for number in range(24):
                properties = {"size": str(number), "colour": "red"}
                await client.send("orders", str(number), tags="new", properties=properties)

    asyncio.run(fill())
    return str(server.namesrv)


@pytest.mark.parametrize("example", examples())
async def test_example_runs(orders: str, example: Callable[[Any], Any]) -> None:
    async with asyncio.timeout(DEADLINE_S), connect(orders) as client:
        await example(client)


@pytest.mark.parametrize(
    "how",
    [
        ["--sql", "size = 7"],
        ["--group", "cli-sql", "--sql", "size = 7"],
        ["--group", "cli-pop", "--pop", "--sql", "size = 7"],
        ["--group", "cli-all", "--broadcast", "--sql", "size = 7"],
    ],
    ids=["reader", "group", "pop", "broadcast"],
)
def test_consume_modes_select_messages(
    orders: str, how: list[str], capfd: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    idle = ["--idle", "30"] if "--group" in how else []
    assert main.run(["consume", "orders", "--namesrv", orders, "--count", "1", *idle, *how]) == 0
    assert capfd.readouterr().out == "7\n"
    assert (tmp_path / ".rocketmq_offsets").exists() == ("--broadcast" in how)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ([], "the queues have no more"),
        (["--group", "cli-fewer", "--idle", "1"], "no message for 1 s"),
        (["--group", "cli-fewer-pop", "--pop", "--idle", "1"], "no message for 1 s"),
    ],
    ids=["reader", "group", "pop"],
)
def test_consume_exit_code_reports_fewer_messages_than_requested(
    orders: str, how: list[str], why: str, capfd: Any
) -> None:
    sevens = ["consume", "orders", "--namesrv", orders, "--sql", "size = 7", *how]
    assert main.run([*sevens, "--count", "3"]) == 7
    captured = capfd.readouterr()
    assert captured.out == "7\n"
    assert captured.err.endswith(f"error: 1 of 3 messages: {why}\n")


def test_consume_rejects_conflicting_options(capfd: Any) -> None:
    for arguments in (["--pop"], ["--broadcast"], ["--sql", "a > 1", "--tags", "b"]):
        assert main.run(["consume", "orders", *arguments]) == 2
    assert "--tags and --sql exclude each other" in capfd.readouterr().err


def test_handler_that_closes_its_consumer_handles_each_message_once(orders: str) -> None:
    """The page's example is run three times by a new group; each run resumes after the previous one."""
    (handle,) = [param.values[0] for param in examples() if param.id == "handle"]
    group = f"charging-{uuid.uuid4().hex[:8]}"
    charged: list[str] = []
    handle = types.FunctionType(handle.__code__, {"print": lambda _, body: charged.append(body.decode())}, "handle")

    class Grouped:
        """The client, with a group that no other test uses."""

        def __init__(self, client: Any) -> None:
            self._client = client

        def consumer(self, _: str, topic: str, **arguments: Any) -> Any:
            return self._client.consumer(group, topic, **arguments)

    async def work() -> None:
        async with asyncio.timeout(DEADLINE_S), connect(orders) as client:
            for _ in range(3):
                await handle(Grouped(client))

    asyncio.run(work())
    assert len(charged) == len(set(charged)) == 3
