"""Tests of `neve replay` and `neve dlq` without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from neve.cli import dlq, replay
from neve.cli.failures import Failure
from neve.copy.replay import RequestedRange
from neve.copy.source import BrokerSource
from neve.copy.task import DONE, CopyTarget, Task
from neve.copy.task_files import TaskBook
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode


def test_late_cancellation_does_not_end_a_later_replay_of_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = TaskBook(tmp_path)
    task = Task(name="r", source="s", target=CopyTarget(topic="t"), namesrv="x", to_namesrv="x", state=DONE)
    book.save(task)
    with book.locked("r"):
        book.cancel("r")
    seen: list[bool] = []

    async def carried_out(of: Task, book: TaskBook, *_: Any, **__: Any) -> None:
        seen.append(book.is_to_cancel(of.name))

    monkeypatch.setattr(replay, "_carry_out", carried_out)
    replay.begin(task, RequestedRange(), tasks=tmp_path, dry_run=False, output="json", before=[])
    assert seen == [False]


@pytest.mark.parametrize(
    ("code", "kind"), [(ResponseCode.TOPIC_NOT_EXIST, Failure), (ResponseCode.NO_PERMISSION, BrokerError)]
)
def test_unreadable_dead_letters_are_an_error(
    monkeypatch: pytest.MonkeyPatch, code: ResponseCode, kind: type[Exception]
) -> None:
    @asynccontextmanager
    async def connected(_: str) -> AsyncIterator[None]:
        yield None

    async def bounds(_: BrokerSource) -> Any:
        raise BrokerError(code, "as told")

    monkeypatch.setattr(dlq, "connect", connected)
    monkeypatch.setattr(BrokerSource, "bounds", bounds)
    with pytest.raises(kind):
        asyncio.run(dlq._letters("x", "g", 1))
