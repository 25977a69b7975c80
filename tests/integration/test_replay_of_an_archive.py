"""`neve replay --store` sends archived messages again: only the selected ones, read from the bucket alone."""

from __future__ import annotations

import asyncio
import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from neve import archive
from neve.client import BatchItem, Message, connect
from tests.client_conformance.conftest import create_topic
from tests.kit.server.neve import NEVE, NeveServer

FEW = 300


async def filled(namesrv: str, first: int) -> int:
    """Fill the topic; return the time when all messages are stored, in ms."""
    async with connect(namesrv) as client:
        if not first:
            await create_topic(client, "orders", 2)
            await create_topic(client, "again", 2)
        sender = client.batch_sender()
        numbers = range(first, first + FEW)
        await sender.put_all(BatchItem(Message("orders", f"{n}".encode() * 1000), queue=n % 2) for n in numbers)
        await sender.flush()
        return max([message.store_timestamp async for message in client.reader("orders")])


async def stored(namesrv: str) -> list[Message]:
    async with connect(namesrv) as client:
        return [message async for message in client.reader("again")]


def neve(*arguments: str) -> str:
    done = subprocess.run([NEVE, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_replay_sends_selected_messages_read_from_the_store_alone(tmp_path: Path) -> None:
    with NeveServer(tmp_path) as server:
        after_first = asyncio.run(filled(server.namesrv, 0))
        second = asyncio.run(filled(server.namesrv, FEW))
        assert second > after_first
        neve("archive", "offload", "--roll", "--admin", server.admin)
        topic = archive.open(server.store).topic("orders")
        assert [topic.max_offset(queue) for queue in (0, 1)] == [FEW, FEW]
        since = datetime.fromtimestamp((after_first + 1) / 1000, UTC).isoformat()
        command = ["replay", "run", "r", "orders", "--into", "again", "--store", server.store, "--from", since]
        told: dict[str, Any] = json.loads(
            neve(*command, "--keep-queues", "--tasks", str(tmp_path / "r"), "-o", "json", "-n", server.namesrv)
        )
        assert (told["state"], told["sent"], told["left_offsets"]) == ("done", FEW, 0)
        found = asyncio.run(stored(server.namesrv))
        for queue in (0, 1):
            of_queue = [message.body for message in found if message.queue and message.queue.queue_id == queue]
            expected = [n for n in range(FEW, 2 * FEW) if n % 2 == queue]
            assert of_queue == [f"{n}".encode() * 1000 for n in expected]
