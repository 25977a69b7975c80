"""The source of a copy at brokers: an empty answer is not the end of a queue."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from typing import Any, cast

import pytest

from neve.client.client import AsyncClient
from neve.client.model import Message, MessageQueue, PullResult, PullStatus
from neve.copy import source
from neve.copy.source import BrokerSource, Chunk, OffsetRange
from neve.errors import ClientError

QUEUE = MessageQueue("orders", "a", 0)


class Behind:
    """A slave with the offsets 0 ... 4 of ten, which is replaced by its master after `pulls` pulls."""

    def __init__(self, pulls: int) -> None:
        self._left = pulls

    async def pull(self, _topic: str, queue: MessageQueue, offset: int, count: int) -> PullResult:
        has = 10
        if self._left:
            has, self._left = 5, self._left - 1
        if offset >= has:
            return PullResult(PullStatus.NO_NEW_MESSAGE, (), offset, 0, has)
        following = min(offset + count, has)
        found = tuple(Message("orders", b"x", queue=queue, queue_offset=n) for n in range(offset, following))
        return PullResult(PullStatus.FOUND, found, following, 0, has)


def read(pulls: int) -> Chunk:
    client: Any = Behind(pulls)
    return asyncio.run(BrokerSource(cast("AsyncClient", client), "orders").read(QUEUE, 0, 10, 100))


def test_lagging_slave_is_pulled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_PAUSE_S", 0.0)
    chunk = read(3)
    assert ([one.queue_offset for one in chunk.messages], chunk.next_offset) == (list(range(10)), 10)


def test_missing_rest_of_a_queue_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_PATIENCE_S", 0.0)
    with pytest.raises(ClientError, match="no message at offset 5"):
        read(100)


HOUR = 3_600_000


class Searched:
    """A queue whose broker searches by time like RocketMQ, which assumes ascending store times."""

    def __init__(self, times: list[int]) -> None:
        self._times = times

    async def offset_by_time(self, _topic: str, _queue: MessageQueue, time_ms: int) -> int:
        return bisect_left(self._times, time_ms)


@pytest.mark.parametrize("back", [1, 12, 24])
def test_broker_source_span_holds_all_times_after_clock_steps(back: int) -> None:
    """Sixty days of messages, an hour apart; three times the clock is set back."""
    times: list[int] = []
    now = 100 * HOUR
    for number in range(60 * 24):
        now += HOUR if number % 400 else -back * HOUR
        times.append(now)
    client: Any = Searched(times)
    bounds = OffsetRange(0, len(times))
    for since in range(0, times[-1], 7 * HOUR):
        until = since + 5 * HOUR
        meant = [at for at, time in enumerate(times) if since <= time < until]
        begin, end = asyncio.run(BrokerSource(client, "orders").span(QUEUE, bounds, since, until))
        assert meant == [at for at in meant if begin <= at < end]
        assert end - begin <= 4 * 24 + 6, "the span is no more than the steps that it allows for"


class SearchedForNearest:
    """A queue whose broker searches by time like RocketMQ 4.9, which returns the nearest record."""

    def __init__(self, times: list[int]) -> None:
        self._times = times

    async def offset_by_time(self, _topic: str, _queue: MessageQueue, time_ms: int) -> int:
        return min(range(len(self._times)), key=lambda at: abs(self._times[at] - time_ms))


def test_broker_source_span_holds_the_last_message_at_brokers_of_4_9() -> None:
    client: Any = SearchedForNearest([100 * HOUR, 101 * HOUR, 102 * HOUR])
    bounds = OffsetRange(0, 3)
    assert asyncio.run(BrokerSource(client, "orders").span(QUEUE, bounds, None, 200 * HOUR)) == bounds
