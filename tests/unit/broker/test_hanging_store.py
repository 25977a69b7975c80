"""An object store that hangs delays only the requests that wait for it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from neve.remoting.codes import RequestCode as Code
from tests.kit.broker.in_process import ask, offload, running, send
from tests.kit.clock.waiting import until

TOPICS = 8


async def test_topic_deletions_in_a_hanging_store_occupy_no_thread_of_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    async with running(tmp_path / "data", f"storeUrl=dir:{tmp_path / 'archive'}") as (broker, connection):
        for number in range(TOPICS):
            await send(connection, f"t{number}")
        await offload(broker)
        journal = broker.archive.journal
        assert journal is not None
        append, answers, asked = journal.append, threading.Event(), threading.Event()

        def hangs(*arguments: Any, **more: Any) -> int:
            asked.set()
            assert answers.wait(60)
            return append(*arguments, **more)

        monkeypatch.setattr(journal, "append", hangs)
        deletions = [
            asyncio.create_task(ask(connection, Code.DELETE_TOPIC_IN_BROKER, topic=f"t{number}"))
            for number in range(TOPICS)
        ]
        try:
            await until(asked.is_set)
            await asyncio.wait_for(broker.offsets.file.save(), 20)
            assert await asyncio.wait_for(asyncio.to_thread(threading.active_count), 20)
            assert not any(deletion.done() for deletion in deletions)
        finally:
            answers.set()
        assert [answer.code for answer in await asyncio.gather(*deletions)] == [0] * TOPICS
