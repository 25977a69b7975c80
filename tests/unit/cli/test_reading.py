"""Tests of reading a topic: an empty answer is not the end of a queue, and added queues are read."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from neve.cli import reading, standstill
from neve.cli.failures import Failure
from neve.cli.importing import QueueImport, _Importing
from neve.cli.message_formats import as_json
from neve.cli.printed import Printed
from neve.cli.reading import Reading
from neve.cli.spans import QueueChoice, RequestedSpan, Span
from neve.client import MessageQueue, Subscription
from neve.client.group.pull import StoredPull
from neve.client.model import PullStatus
from neve.errors import ClientError

QUEUE = MessageQueue("orders", "broker-a", 0)


class Lacking:
    """A queue of 5 messages at a slave that has 2. The master with the rest is found after some pulls."""

    def __init__(self, found_after: int) -> None:
        self._left = found_after
        self.asked: list[int] = []

    async def pull_records(self, queue: MessageQueue, offset: int, max_count: int, **_: Any) -> StoredPull:
        self.asked.append(offset)
        if offset == 0:
            return StoredPull(PullStatus.FOUND, b"", 2, 0, 5)
        if self._left:
            self._left -= 1
            return StoredPull(PullStatus.NO_MATCHED_MESSAGE, b"", offset, 0, 2)
        return StoredPull(PullStatus.FOUND, b"", 5, 0, 5)

    async def pull(self, topic: str, queue: MessageQueue, offset: int, max_count: int) -> Any:
        found = await self.pull_records(queue, offset, max_count)
        return SimpleNamespace(messages=(), next_offset=found.next_offset, status=found.status)

    async def max_offset(self, topic: str, queue: MessageQueue) -> int:
        return 5


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "_PAUSE_S", 0.0)


def read(client: Lacking) -> None:
    printed = Printed(as_json("auto"), limit=None)
    whole = Reading(cast("Any", client), "orders", RequestedSpan(), Subscription(), printed)
    asyncio.run(whole.read([Span(QUEUE, 0, 5, 0)]))


def test_reader_of_a_lagging_slave_continues_at_the_master() -> None:
    client = Lacking(3)
    read(client)
    assert client.asked == [0, 2, 2, 2, 2]


def test_queue_that_never_returns_its_rest_is_an_error() -> None:
    with pytest.raises(Failure, match="returns no message from offset 2 on, but ends at 5"):
        read(Lacking(1000))


def test_import_fails_if_it_cannot_read_the_target_queue(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neve.copy.source._PATIENCE_S", 0.0)
    importing = _Importing(cast("Any", Lacking(1000)), "127.0.0.1:1", tmp_path, "c")
    with pytest.raises(ClientError, match="no message at offset 2"):
        asyncio.run(importing._ids_behind(QueueImport(QUEUE, 0), frozenset()))


class Growing:
    """A topic that gets a second queue while it is read."""

    def __init__(self) -> None:
        self.followed: asyncio.Queue[MessageQueue] = asyncio.Queue()

    async def queues(self, topic: str) -> list[MessageQueue]:
        return [QUEUE, QUEUE._replace(queue_id=1), QUEUE._replace(queue_id=2)]

    async def min_offset(self, topic: str, queue: MessageQueue) -> int:
        return 0

    async def pull_records(self, queue: MessageQueue, offset: int, max_count: int, **_: Any) -> StoredPull:
        self.followed.put_nowait(queue)
        await asyncio.Event().wait()
        raise AssertionError("nothing comes")


@pytest.mark.parametrize(("queue", "numbers"), [(None, {0, 1, 2}), (2, {0, 2})])
def test_queues_added_to_a_topic_are_followed(
    monkeypatch: pytest.MonkeyPatch, queue: int | None, numbers: set[int]
) -> None:
    monkeypatch.setattr(reading, "_NEW_QUEUES_S", 0.0)

    async def inside() -> set[int]:
        client = Growing()
        printed = Printed(as_json("auto"), limit=None)
        followed = Reading(cast("Any", client), "orders", RequestedSpan(), Subscription(), printed)
        following = asyncio.create_task(followed.follow({QUEUE: 5}, None, QueueChoice(queue)))
        async with asyncio.timeout(30):
            found = {(await client.followed.get()).queue_id for _ in numbers}
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        return found

    assert asyncio.run(inside()) == numbers
