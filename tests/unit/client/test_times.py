"""Points in time: milliseconds since 1970, or a datetime with a time zone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from neve.client import AsyncClient, MessageQueue, connect
from neve.client.times import start_position, time_ms
from neve.errors import ClientError
from tests.kit.cluster.fake_cluster import Answer
from tests.kit.cluster.group_broker import GroupBroker

QUEUE = MessageQueue("t", "b0", 0)
AT = datetime(2026, 3, 1, 12, 0, 0, 250_000, tzinfo=UTC)
AT_MS = 1_772_366_400_250
SEARCH = 29


class TimedBroker(GroupBroker):
    """A broker that records the times of requests."""

    def __init__(self) -> None:
        super().__init__(90)
        self.times: list[int] = []

    def __call__(self, request: Any) -> Answer:
        if request.code == SEARCH and request.ext["topic"] == "t":
            self.times.append(int(request.ext["timestamp"]))
        return super().__call__(request)


@pytest.mark.parametrize("when", [AT, AT.astimezone(timezone(timedelta(hours=8))), AT_MS])
def test_time_is_read_as_milliseconds_since_1970(when: Any) -> None:
    assert time_ms(when) == start_position(when) == AT_MS


@pytest.mark.parametrize("when", [AT.replace(tzinfo=None), 1.5, True, None])
def test_value_that_is_no_point_in_time_is_refused(when: Any) -> None:
    with pytest.raises(ClientError, match=r"a datetime needs a time zone|a time is a datetime or milliseconds"):
        time_ms(when)


@pytest.mark.parametrize("start", ["first", "last", "", "0"])
def test_unknown_start_is_refused(start: Any) -> None:
    with pytest.raises(ClientError, match=f"start must be 'earliest', 'latest' or a time, got {start!r}"):
        start_position(start)


async def by_start_of_a_consumer(client: AsyncClient) -> None:
    async with client.consumer("g", "t", start=AT):
        pass


async def by_start_of_a_lite_pull_consumer(client: AsyncClient) -> None:
    async with client.lite_pull_consumer("g", start=AT) as consumer:
        await consumer.subscribe("t")


async def by_reader(client: AsyncClient) -> None:
    async for _ in client.reader("t", start=AT):
        return


async def by_offset(client: AsyncClient) -> None:
    await client.offset_by_time("t", QUEUE, AT)


async def by_seek_of_a_consumer(client: AsyncClient) -> None:
    async with client.consumer("g", "t", start="latest") as consumer:
        await consumer.seek_to_time(AT)


async def by_seek_of_a_lite_pull_consumer(client: AsyncClient) -> None:
    async with client.lite_pull_consumer("g") as consumer:
        await consumer.assign([QUEUE])
        await consumer.seek_to_time(AT, QUEUE)


@pytest.mark.parametrize(
    "ask",
    [
        by_start_of_a_consumer,
        by_start_of_a_lite_pull_consumer,
        by_reader,
        by_offset,
        by_seek_of_a_consumer,
        by_seek_of_a_lite_pull_consumer,
    ],
)
async def test_datetime_is_accepted_for_every_time(
    fake_cluster: Any, ask: Callable[[AsyncClient], Awaitable[None]]
) -> None:
    broker = TimedBroker()
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        await ask(client)
    assert broker.times == [AT_MS]
