"""Reads of objects that compaction merges, before, during and after the old objects are deleted."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.broker_controller import BrokerController
from infra.net.remoting_server import Connection
from lifecycle.lifecycle import ArchiveLifecycle
from neve.archive.format.journal import CommittedObject
from neve.record.codec import iter_records
from neve.remoting.codes import RequestCode as Code
from tests.kit.broker.in_process import ask, offload, running, send
from tests.kit.clock.waiting import until
from tests.kit.wire.admin_port import post_request
from tiered.worker.client import DecodedGroup

OBJECTS, EACH = 4, 25  # The number of objects of the topic, and of messages of each of its two queues in one object.
COUNT = OBJECTS * EACH


async def fill(broker: BrokerController, connection: Connection) -> None:
    """Fill two queues: each batch becomes an object, and no message stays local."""
    made = await ask(
        connection, Code.UPDATE_AND_CREATE_TOPIC, topic="T", defaultTopic="TBW102", readQueueNums=2, writeQueueNums=2,
        perm=6, topicFilterType="SINGLE_TAG", topicSysFlag=0, order="false",
    )  # fmt: skip
    assert made.code == 0, made.remark
    for number in range(COUNT):
        for queue in (0, 1):
            properties = f"UNIQ_KEY\x01U{queue}-{number}\x02KEYS\x01key{number % 10}\x02TAGS\x01t{number % 3}\x02"
            await send(connection, "T", b"%d of %d" % (number, queue), properties, queue=queue)
        if (number + 1) % EACH == 0:
            await offload(broker)
    assert len(objects_of(broker)) == OBJECTS
    assert broker.store.queues.min_offset("T", 0) == COUNT


def objects_of(broker: BrokerController) -> list[CommittedObject]:
    assert broker.archive.journal is not None
    return broker.archive.journal.catalog.objects("T")


async def compact(broker: BrokerController) -> None:
    """Compact on an operator's request."""
    assert broker.admin_address is not None
    url = "http://{}:{}/archive/compact?topic=T".format(*broker.admin_address)
    told = await asyncio.to_thread(lambda: urllib.request.urlopen(post_request(url), timeout=60).read())
    assert b'"compacted"' in told, told
    assert len(objects_of(broker)) == 1


async def delete_old(broker: BrokerController, old: list[CommittedObject]) -> None:
    """Delete the old objects like the TTL job after the grace period, which is zero here."""
    lifecycle = broker.archive.lifecycle
    assert isinstance(lifecycle, ArchiveLifecycle) and broker.archive.journal is not None
    assert (await asyncio.to_thread(lifecycle.expire.run))["deleted"] == OBJECTS
    store = broker.archive.journal.store
    assert {info.key for info in store.list("topic=T/")}.isdisjoint(name.key for name in old)


async def pull(connection: Connection, queue: int, offset: int, group: str, most: int) -> Any:
    return await ask(
        connection, Code.PULL_MESSAGE, consumerGroup=group, topic="T", queueId=queue, queueOffset=offset,
        maxMsgNums=most, sysFlag=4, commitOffset=0, suspendTimeoutMillis=0, subscription="*", subVersion=0,
    )  # fmt: skip


async def read(
    connection: Connection, queue: int, offset: int = 0, *, group: str = "g", end: int = COUNT, most: int = 7
) -> list[tuple[int, bytes]]:
    """Return (offset, body) of the messages up to `end`, read by a client that follows the offsets in the answers.

    An unanswered pull fails the test.
    """
    found: list[tuple[int, bytes]] = []
    while offset < end:
        answer = await pull(connection, queue, offset, group, min(most, end - offset))
        assert answer.code == 0, (answer.code, answer.remark)
        found += [(record.queue_offset, bytes(record.body)) for record in iter_records(answer.body)]
        following = int(answer.ext["nextBeginOffset"])
        assert following > offset
        offset = following
    return found


def sent(queue: int, first: int = 0, end: int = COUNT) -> list[tuple[int, bytes]]:
    return [(number, b"%d of %d" % (number, queue)) for number in range(first, end)]


def served(tmp_path: Path, work: Callable[[BrokerController, Connection], Any], *settings: str) -> None:
    async def main() -> None:
        own = (
            f"storeUrl=dir:{tmp_path / 'archive'}",
            "expireGrace=0",
            "archiveReplacedGrace=0",
            "archiveMinBytes=1",
            *settings,
        )
        async with running(tmp_path / "data", *own) as (broker, connection):
            await fill(broker, connection)
            await work(broker, connection)

    asyncio.run(main())


@pytest.mark.parametrize(
    "caches", [(), ("coldCacheBytes=1m", "coldCacheDiskBytes=0")], ids=["cached", "nothing cached"]
)
def test_consumer_reads_each_message_once_through_compaction_and_deletion(
    tmp_path: Path, caches: tuple[str, ...]
) -> None:
    """One consumer is within an old object at the REPLACE and again at the DELETED; another starts afterwards."""

    async def work(broker: BrokerController, connection: Connection) -> None:
        old = objects_of(broker)
        amid = {queue: await read(connection, queue, group="amid", end=40) for queue in (0, 1)}
        await compact(broker)
        for queue in (0, 1):
            amid[queue] += await read(connection, queue, 40, group="amid", end=60)
        await delete_old(broker, old)
        for queue in (0, 1):
            amid[queue] += await read(connection, queue, 60, group="amid")
            assert amid[queue] == sent(queue)
            assert await read(connection, queue, group="new") == sent(queue)
            assert await read(connection, queue, 13, group="amid") == sent(queue, 13), "one that goes back"

    served(tmp_path, work, *caches)


class HeldSource:
    """A reader's worker that holds back reads of an object until they are released."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.asked, self.resume = threading.Event(), threading.Event()
        self.failed: list[Exception] = []

    def read_group(self, store_url: str, name: CommittedObject, index: int, *, keep: bool) -> DecodedGroup:
        self.asked.set()
        assert self.resume.wait(60)
        try:
            return self._inner.read_group(store_url, name, index, keep=keep)  # type: ignore[no-any-return]
        except Exception as error:
            self.failed.append(error)
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("deleted", [False, True], ids=["replaced", "deleted"])
def test_pull_in_flight_on_a_replaced_object_is_answered(tmp_path: Path, deleted: bool) -> None:
    """The pull has located its row group; by the time it reads it, the object was replaced or deleted."""

    async def work(broker: BrokerController, connection: Connection) -> None:
        old, reader = objects_of(broker), broker.archive.reader
        assert reader is not None
        held = reader._groups._worker = HeldSource(reader._groups._worker)
        pulled = asyncio.create_task(pull(connection, 1, 30, "g", 5))
        try:
            await until(held.asked.is_set, "the pull asks for its row group")
            await compact(broker)
            if deleted:
                await delete_old(broker, old)
        finally:
            held.resume.set()
        answer = await pulled
        assert answer.code == 0, answer.remark
        found = [(record.queue_offset, bytes(record.body)) for record in iter_records(answer.body)]
        assert found == sent(1, 30, 35)
        assert bool(held.failed) is deleted, "an old object is read for as long as it is there"
        assert await read(connection, 1, 35) == sent(1, 35)

    served(tmp_path, work, "coldCacheDiskBytes=0")


def test_queries_by_key_id_and_time_return_no_duplicates_after_compaction(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        async def asked() -> tuple[list[tuple[int, int]], list[int], list[str]]:
            answer = await ask(
                connection, Code.QUERY_MESSAGE, topic="T", key="key7", maxNum=64, beginTimestamp=0, endTimestamp=1 << 60
            )
            by_key = sorted((record.queue_id, record.queue_offset) for record in iter_records(answer.body))
            one = await ask(
                connection, Code.QUERY_MESSAGE, topic="T", key="U1-42", maxNum=64, beginTimestamp=0,
                endTimestamp=1 << 60,
            )  # fmt: skip
            (record,) = iter_records(one.body)
            at = await ask(connection, Code.VIEW_MESSAGE_BY_ID, offset=record.physical_offset)
            by_time = await ask(
                connection, Code.SEARCH_OFFSET_BY_TIMESTAMP, topic="T", queueId=1, timestamp=record.store_timestamp
            )
            found = [one.queue_offset for one in iter_records(at.body)]
            return by_key, found, [by_time.ext["offset"]]

        before, old = await asked(), objects_of(broker)
        assert before[0] == [(queue, number) for queue in (0, 1) for number in range(7, COUNT, 10)]
        assert before[1] == [42]
        await compact(broker)
        assert await asked() == before
        await delete_old(broker, old)
        assert await asked() == before

    served(tmp_path, work)
