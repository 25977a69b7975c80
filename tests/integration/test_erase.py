"""Erasure by key through the admin interface: consumers, queries, retries, Spark's plan, and the certificate."""

from __future__ import annotations

import asyncio
import errno
import json
import mmap
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from typing_extensions import override

import neve.archive
from broker.archiving.archive import BrokerArchive
from broker.broker_controller import BrokerController
from broker.tables.changes import CHANGES, RowsErased, decode_change
from broker.waiting.delivery import Quarantine
from infra import failpoint
from infra.disk.filesystem import OutOfDescriptors, RealDisk
from infra.net.remoting_server import Connection
from infra.objects.open import open_store
from lifecycle.lifecycle import ArchiveLifecycle
from neve.archive.catalog.journal_reader import catalogs
from neve.archive.read.selection import Selection
from neve.archive.read.verify import verify
from neve.cli.main import neve as neve_command
from neve.record.codec import MalformedRecord, iter_records
from neve.record.ids import parse_offset_msg_id
from neve.remoting.codes import RequestCode as Code
from neve.remoting.names import METADATA_LOG, SCHEDULE_TOPIC
from neve.spark.reader import plan
from tests.kit.broker.in_process import ask, offload, running, send
from tests.kit.broker.pop_member import PopMember, Taken
from tests.kit.clock.waiting import until
from tests.kit.wire.admin_port import post_request

COUNT = 60
MEANT = frozenset(range(3, COUNT, 10))


async def send_all(connection: Connection) -> list[str]:
    ids = []
    for n in range(COUNT):
        properties = f"UNIQ_KEY\x01U{n}\x02KEYS\x01{'who' if n in MEANT else f'k{n % 10}'} all\x02"
        ids.append((await send(connection, "T", b"%d" % n, properties)).ext["msgId"])
    return ids


async def post(broker: BrokerController, **query: str) -> list[Any]:
    assert broker.admin_address is not None
    url = "http://{}:{}/archive/erase?".format(*broker.admin_address) + urllib.parse.urlencode(query)
    lines = await asyncio.to_thread(lambda: urllib.request.urlopen(post_request(url), timeout=60).read().splitlines())
    return [json.loads(line) for line in lines]


async def read(
    connection: Connection, topic: str, end: int, offset: int = 0, *, expression: str = "*", kind: str = "TAG"
) -> dict[int, bytes]:
    """Return the messages of a client that follows the offsets in the answers; an unanswered pull fails the test."""
    found: dict[int, bytes] = {}
    while offset < end:
        answer = await ask(
            connection, Code.PULL_MESSAGE, consumerGroup="g", topic=topic, queueId=0, queueOffset=offset, maxMsgNums=7,
            sysFlag=4, commitOffset=0, suspendTimeoutMillis=0, subscription=expression, subVersion=0,
            expressionType=kind,
        )  # fmt: skip
        assert answer.code in {0, 20}, "a gap is no wrong offset"
        found |= {record.queue_offset: bytes(record.body) for record in iter_records(answer.body)}
        following = int(answer.ext["nextBeginOffset"])
        assert following > offset, (offset, answer.code)
        offset = following
    return found


async def by_key(connection: Connection, topic: str, key: str) -> list[int]:
    answer = await ask(
        connection, Code.QUERY_MESSAGE, topic=topic, key=key, maxNum=64, beginTimestamp=0, endTimestamp=1 << 60
    )
    return [record.queue_offset for record in iter_records(answer.body)]


def test_key_is_erased_from_all_objects_of_the_archive(tmp_path: Path) -> None:
    url = f"dir:{tmp_path / 'archive'}"

    async def main() -> None:
        settings = (f"storeUrl={url}", "archiveMinBytes=1", "archivePeriod=24h")
        async with running(tmp_path / "data", *settings) as (broker, connection):
            ids = await send_all(connection)
            await offload(broker)
            for n in (3, 4, 13):
                place = parse_offset_msg_id(ids[n])[2]
                back = await ask(
                    connection, Code.CONSUMER_SEND_MSG_BACK, group="g", offset=place, delayLevel=-1, originTopic="T"
                )
                assert back.code == 0, back.remark
            await send(connection, "T", b"late", "KEYS\x01who\x02")  # No archiving round has archived it yet.
            *_, planned = await post(broker, topic="T", key="who", **{"dry-run": "1"})
            assert planned["rows"] == len(MEANT)

            *_, told = await post(broker, topic="T", key="who", evict="1")
            assert (told["complete"], told["rows"]) == (True, len(MEANT) + 1 + 2), told
            assert {(one["topic"], one["queue"]) for one in told["erased"]} == {("T", 0), ("%DLQ%g", 0)}
            assert all(b"who" not in file.read_bytes() for file in (tmp_path / "archive").rglob("*.parquet"))
            assert told["remains"] == {"objects": [], "in_no_view": [], "local_log": [], "other_members": False}

            left = {n: b"%d" % n for n in range(COUNT) if n not in MEANT}
            assert await read(connection, "T", COUNT + 1) == left
            assert await read(connection, "T", COUNT + 1, 13) == {n: body for n, body in left.items() if n >= 13}
            assert list((await read(connection, "%DLQ%g", 3)).values()) == [b"4"]
            assert await by_key(connection, "T", "who") == await by_key(connection, "%DLQ%g", "who") == []
            assert await by_key(connection, "T", "U3") == []
            assert await by_key(connection, "T", "k4") == list(range(4, COUNT, 10))
            gone = await ask(connection, Code.VIEW_MESSAGE_BY_ID, offset=parse_offset_msg_id(ids[3])[2])
            assert gone.code != 0
            *_, again = await post(broker, topic="T", key="who")
            assert (again["complete"], again["rows"]) == (True, 0)
            await send(connection, "T", b"new", "KEYS\x01who\x02")
            assert await by_key(connection, "T", "who") == [COUNT + 1], "it is another's business"
            for query in ({"topic": "T"}, {"key": "k"}, {"topic": "T", "key": "k", "grace": "soon"}):
                try:
                    await post(broker, **query)
                except urllib.error.HTTPError as error:
                    assert error.code == 400
                else:
                    raise AssertionError(query)
        async with running(tmp_path / "data", *settings) as (broker, connection):
            assert await read(connection, "T", COUNT + 1) == left, "over a restart"

    asyncio.run(main())
    store = open_store(url)
    (catalog,) = catalogs(store).values()
    assert verify(catalog, store, deep=True).problems == []
    names, _ = plan({"b": catalog}, "T", Selection())
    keys = [name.key for name in names]
    assert set(keys) == {name.key for name in catalog.objects("T")}
    read_by_program = [record.queue_offset for record in neve.archive.open(store).topic("T").read(0, 0)]
    assert read_by_program[: COUNT - len(MEANT)] == [n for n in range(COUNT) if n not in MEANT]
    assert not [key for key in keys if b"who" in store.get(key)]
    listed = CliRunner().invoke(neve_command, ["archive", "journal", "--store", url])
    assert f"{len(MEANT)} rows of T erased" in listed.output


# ---- in the local log, whose segments still contain the messages


def properties_of(n: int) -> str:
    who = "who" if n in MEANT else f"k{n % 10}"
    return f"UNIQ_KEY\x01U{n}\x02KEYS\x01{who} all\x02TAGS\x01{'even' if n % 2 == 0 else 'odd'}\x02n\x01{n}\x02"


async def fill(connection: Connection) -> list[int]:
    """Fill the topic; return the physical offsets of the messages."""
    return [
        parse_offset_msg_id((await send(connection, "T", b"%d" % n, properties_of(n))).ext["msgId"])[2]
        for n in range(COUNT)
    ]


async def check_none_is_returned(broker: BrokerController, connection: Connection, places: list[int]) -> None:
    """Check that no request returns an erased message, and that all others are returned."""
    left = {n: b"%d" % n for n in range(COUNT) if n not in MEANT}
    assert await read(connection, "T", COUNT) == left
    assert await read(connection, "T", COUNT, 13) == {n: body for n, body in left.items() if n >= 13}
    for begin in (3, 4, 53):
        assert set(await read(connection, "T", COUNT, begin)) == {n for n in left if n >= begin}
    even, odd = ({n: body for n, body in left.items() if n % 2 == rest} for rest in (0, 1))
    assert await read(connection, "T", COUNT, expression="even") == even
    assert await read(connection, "T", COUNT, expression="odd") == odd, "those that were erased had this tag"
    assert await read(connection, "T", COUNT, expression="even || odd") == left
    few = {n: body for n, body in left.items() if 10 <= n <= 30}
    assert await read(connection, "T", COUNT, expression="n BETWEEN 10 AND 30", kind="SQL92") == few
    assert await by_key(connection, "T", "who") == []
    assert sorted(await by_key(connection, "T", "all")) == sorted(left)
    for n, place in enumerate(places):
        if n < 15:
            assert await by_key(connection, "T", f"U{n}") == ([] if n in MEANT else [n])
        seen = await ask(connection, Code.VIEW_MESSAGE_BY_ID, offset=place)
        assert (seen.code == 0) == (n not in MEANT), (n, seen.remark)
    back = await ask(
        connection, Code.CONSUMER_SEND_MSG_BACK, group="g", offset=places[13], delayLevel=0, originTopic="T"
    )
    assert back.code == 1 and "look message by offset failed" in (back.remark or "")
    entries = await ask(connection, Code.QUERY_CONSUME_QUEUE, topic="T", queueId=0, index=0, count=COUNT)
    listed = {entry["physicOffset"] for entry in json.loads(entries.body)["queueData"]}
    assert listed == {place for n, place in enumerate(places) if n not in MEANT}
    for n in range(COUNT):
        time = broker.store.reader.store_time("T", 0, n)
        for bound in ("LOWER", "UPPER"):
            answer = await ask(
                connection, Code.SEARCH_OFFSET_BY_TIMESTAMP, topic="T", queueId=0, timestamp=time, boundaryType=bound
            )
            assert int(answer.ext["offset"]) in left, (n, bound)
    assert await queue_ends(connection) == (0, COUNT), "offsets are dense as before"


async def queue_ends(connection: Connection) -> tuple[int, int]:
    low = await ask(connection, Code.GET_MIN_OFFSET, topic="T", queueId=0)
    high = await ask(connection, Code.GET_MAX_OFFSET, topic="T", queueId=0)
    return int(low.ext["offset"]), int(high.ext["offset"])


@pytest.mark.parametrize("level", ["NOT_IN_DISK", "NOT_IN_MEM", "FORCE"])
async def test_erased_rows_in_the_local_log_are_hidden_once_certified(tmp_path: Path, level: str) -> None:
    """This holds for both orders of the tiers, and after a restart."""
    url = f"dir:{tmp_path / 'archive'}"
    settings = (f"storeUrl={url}", "archiveMinBytes=1", "archivePeriod=24h", f"tieredStorageLevel={level}")

    async with running(tmp_path / "data", *settings) as (broker, connection):
        places = await fill(connection)
        *_, told = await post(broker, topic="T", key="who")
        assert (told["complete"], told["rows"]) == (True, len(MEANT))
        (copies,) = told["remains"]["local_log"]
        assert copies["rows"] == copies["hidden"] == len(MEANT), "their bytes are there"
        assert broker.store.min_physical_offset == 0, "nothing was evicted"
        await check_none_is_returned(broker, connection, places)
        await send(connection, "T", b"new", "KEYS\x01who\x02")
        assert await by_key(connection, "T", "who") == [COUNT], "it came later"
    async with running(tmp_path / "data", *settings) as (broker, connection):
        assert set(await read(connection, "T", COUNT + 1)) == {*range(COUNT + 1)} - MEANT
        assert await by_key(connection, "T", "U3") == []


async def test_erased_copies_in_retry_and_dead_letter_topics_are_hidden(tmp_path: Path) -> None:
    settings = (f"storeUrl=dir:{tmp_path / 'archive'}", "archiveMinBytes=1", "archivePeriod=24h")

    async with running(tmp_path / "data", *settings) as (broker, connection):
        places = await fill(connection)
        for n in (3, 4, 13):
            back = await ask(
                connection, Code.CONSUMER_SEND_MSG_BACK, group="g", offset=places[n], delayLevel=-1, originTopic="T"
            )
            assert back.code == 0, back.remark
        dead = broker.store.reader.entries("%DLQ%g", 0, 1 << 60)[0].physical.tolist()
        *_, told = await post(broker, topic="T", key="who")
        assert told["rows"] == len(MEANT) + 2
        assert list((await read(connection, "%DLQ%g", 3)).values()) == [b"4"]
        assert await by_key(connection, "%DLQ%g", "who") == []
        seen = [(await ask(connection, Code.VIEW_MESSAGE_BY_ID, offset=place)).code == 0 for place in dead]
        assert seen == [False, True, False]


async def test_copies_are_erased_despite_a_forged_origin_property(tmp_path: Path) -> None:
    """A bridge republishes messages with all their properties, including RETRY_TOPIC."""
    settings = (f"storeUrl=dir:{tmp_path / 'archive'}", "archiveMinBytes=1", "archivePeriod=24h")
    stated = "KEYS\x01who\x02RETRY_TOPIC\x01elsewhere\x02DLQ_ORIGIN_TOPIC\x01elsewhere\x02"

    async with running(tmp_path / "data", *settings) as (broker, connection):
        sent = await send(connection, "T", b"secret", stated)
        place = int(sent.ext["msgId"][16:], 16)
        for level in (-1, 1):
            back = await ask(
                connection, Code.CONSUMER_SEND_MSG_BACK, group="g", offset=place, delayLevel=level, originTopic="T"
            )
            assert back.code == 0, back.remark
        member = PopMember(broker, connection, "T", "poppers")
        assert len(await member.pop(invisible=1000)) == 1
        copies = ("%DLQ%g", "%RETRY%g", broker.retry_names.of_pair("poppers", "T"))
        store = broker.store
        await until(lambda: all(store.queues.max_offset(topic, 0) == 1 for topic in copies), "the copies")
        assert (await post(broker, topic="elsewhere", key="who"))[-1]["rows"] == 0
        *_, told = await post(broker, topic="T", key="who")
        assert (told["complete"], told["rows"]) == (True, 4)
        assert [await read(connection, topic, 1) for topic in ("T", *copies)] == [{}] * 4


async def test_message_sent_to_a_pop_retry_topic_is_erased_by_its_topic_name(tmp_path: Path) -> None:
    """A client can send to a retry topic with any origin; the group receives the message as one of the named topic."""
    settings = (f"storeUrl=dir:{tmp_path / 'archive'}", "archiveMinBytes=1", "archivePeriod=24h")
    retry, forged = "%RETRY%poppers+T", "KEYS\x01who\x02RETRY_TOPIC\x01elsewhere\x02"

    async with running(tmp_path / "data", *settings, "enableRetryTopicV2=true") as (broker, connection):
        await send(connection, "T", b"other")
        member = PopMember(broker, connection, "T", "poppers")
        assert len(await member.pop(invisible=1000)) == 1
        await until(lambda: broker.store.queues.max_offset(retry, 0) == 1, "the copy")
        sent = await send(connection, retry, b"secret", forged)
        back = await ask(
            connection, Code.CONSUMER_SEND_MSG_BACK, group="poppers", offset=int(sent.ext["msgId"][16:], 16),
            delayLevel=-1, originTopic=retry,
        )  # fmt: skip
        assert back.code == 0, back.remark
        *_, told = await post(broker, topic="T", key="who")
        assert (told["complete"], told["rows"]) == (True, 2)
        assert await read(connection, "%DLQ%poppers", 1) == {}
        assert list((await read(connection, retry, 2)).values()) == [b"other"]


def is_retry(taken: Taken) -> bool:
    """Return whether the message is a retry according to its receipt; it is delivered under its own topic."""
    return taken.receipt.split(" ")[4] != "0"


async def test_pop_group_skips_erased_messages(tmp_path: Path) -> None:
    """Both peek and pop skip erased messages. Erased messages in flight are not redelivered and do not block others."""
    settings = (f"storeUrl=dir:{tmp_path / 'archive'}", "archiveMinBytes=1", "archivePeriod=24h")

    async with running(tmp_path / "data", *settings) as (broker, connection):
        await fill(connection)
        member = PopMember(broker, connection, "T", "poppers")
        out = await member.pop(6)  # Three of these match the erased key.
        assert [one.offset for one in out] == [*range(6)]
        await member.ack(out[0])
        *_, told = await post(broker, topic="T", key="who")
        assert told["complete"]
        for one in out[1:]:
            await member.hide(one, 1)  # Their invisible time is over.
        peeked = await ask(connection, Code.PEEK_MESSAGE, consumerGroup="peekers", topic="T", queueId=0, maxMsgNums=32)
        assert [record.queue_offset for record in iter_records(peeked.body)] == [n for n in range(32) if n not in MEANT]
        taken = []
        while more := await member.pop(9):
            taken += more
        fresh = [one for one in taken if not is_retry(one)]
        assert [one.offset for one in fresh] == [n for n in range(6, COUNT) if n not in MEANT]
        await member.ack(*taken)
        again = [one.body for one in taken if is_retry(one)]

        async def come_again() -> bool:
            for one in await member.pop():
                again.append(one.body)
                await member.ack(one)
            return len(again) >= 4

        await until(come_again)
        assert sorted(again) == [b"1", b"2", b"4", b"5"]

        def is_at_rest() -> bool:
            queue = broker.pops.find("poppers", "T", 0)
            return queue is None or not queue.flights

        await until(is_at_rest, "what was erased is taken off the book: it is not looked for again and again")

        async def is_through() -> bool:
            return await member.offset() == COUNT

        await until(is_through)


async def test_start_hides_erased_rows_after_a_crash_before_hiding(tmp_path: Path) -> None:
    """The journal has the entry, but no certificate was issued. The start uses the local copy of the journal."""
    settings = (f"storeUrl=dir:{tmp_path / 'archive'}", "archiveMinBytes=1", "archivePeriod=24h")

    async with running(tmp_path / "data", *settings) as (broker, connection):
        await fill(connection)
        assert isinstance(broker.archive, BrokerArchive)
        broker.archive.lifecycle.hot_erasure._described_below = lambda: 0  # The hiding job does not run again.
        with failpoint.armed("erase.before_hide"):
            lines = await post(broker, topic="T", key="who")
        assert "certificate" not in {line.get("event") for line in lines}
        assert len(await read(connection, "T", COUNT)) == COUNT
    async with running(tmp_path / "data", *settings) as (broker, connection):
        assert set(await read(connection, "T", COUNT)) == {*range(COUNT)} - MEANT
        *_, told = await post(broker, topic="T", key="who")
        assert (told["complete"], told["rows"]) == (True, 0)


class FailingQueueFiles(RealDisk):
    """A disk on which the consume queue files of `topic` cannot be opened."""

    topic = ""
    refused = 0

    def _check(self, path: Path) -> None:
        if self.topic and f"/consumequeue/{self.topic}/" in str(path):
            self.refused += 1
            raise OutOfDescriptors(errno.EMFILE, "no more open files", str(path))

    @override
    def map(self, path: Path, size: int) -> mmap.mmap:
        self._check(path)
        return super().map(path, size)

    @override
    def read_at(self, path: Path, offset: int, size: int) -> bytes:
        self._check(path)
        return super().read_at(path, offset, size)


async def test_certificate_is_incomplete_until_queue_files_can_be_read(tmp_path: Path) -> None:
    settings = (f"storeUrl=dir:{tmp_path / 'archive'}", "archiveMinBytes=1", "archivePeriod=24h")
    disk = FailingQueueFiles()

    async with running(tmp_path / "data", *settings) as (broker, connection):
        await send(connection, "T", b"secret", "KEYS\x01who\x02")
        await send(connection, "T", b"other")
        await archive_all(broker)
    async with running(tmp_path / "data", *settings, disk=disk) as (broker, connection):
        disk.topic = "T"
        *_, told = await post(broker, topic="T", key="who")
        disk.topic = ""
        assert disk.refused
        assert (told["complete"], told["rows"]) == (False, 1)
        assert "no more open files" in told["not_erased"][0]
        await asyncio.to_thread(lifecycle_of(broker).hot_erasure.run)
        assert await read(connection, "T", 2) == {1: b"other"}
        assert await by_key(connection, "T", "who") == []
        *_, told = await post(broker, topic="T", key="who", id=told["id"])
        assert (told["complete"], told["rows"]) == (True, 1)


def lifecycle_of(broker: BrokerController) -> ArchiveLifecycle:
    lifecycle = broker.archive.lifecycle
    assert isinstance(lifecycle, ArchiveLifecycle)
    return lifecycle


async def archive_all(broker: BrokerController) -> None:
    """Archive all messages without evicting any."""
    await asyncio.to_thread(lambda: lifecycle_of(broker).offload.run(roll=True))


@pytest.mark.parametrize("how", ["deleted", "created again", "its tail"])
async def test_erasure_covers_messages_of_a_deleted_topic_in_the_local_log(tmp_path: Path, how: str) -> None:
    """Either no message of the topic was archived, or only the newest were not."""
    settings = (f"storeUrl=dir:{tmp_path / 'archive'}", "archiveMinBytes=1g", "archiveMaxAge=30d", "archivePeriod=24h")

    async with running(tmp_path / "data", *settings) as (broker, connection):
        if how == "its tail":
            await send(connection, "T", b"archived", "KEYS\x01other who\x02")
            await archive_all(broker)
        places = []
        for body, keys in ((b"secret", "who"), (b"other", "whose"), (b"secret", "a who b")):
            sent = await send(connection, "T", body, f"KEYS\x01{keys}\x02")
            places.append(int(sent.ext["msgId"][16:], 16))
        back = await ask(
            connection, Code.CONSUMER_SEND_MSG_BACK, group="g", offset=places[0], delayLevel=-1, originTopic="T"
        )
        assert back.code == 0, back.remark
        for topic in ("T", "%DLQ%g"):
            assert (await ask(connection, Code.DELETE_TOPIC_IN_BROKER, topic=topic)).code == 0
        if how == "created again":
            for _ in range(3):
                await send(connection, "T", b"later", "KEYS\x01later\x02")
        *_, told = await post(broker, topic="T", key="who")
        assert (told["complete"], told["not_erased"]) == (True, [])
        assert {"T", "%DLQ%g"} <= set(told["searched"]["topics"])
        rows = {one["topic"]: (one["rows"], one["hidden"]) for one in told["remains"]["local_log"]}
        assert rows.pop("%DLQ%g") == (1, 1)
        assert sum(count for count, _ in rows.values()) == 2 + (how == "its tail"), told
        assert all(rows == hidden for rows, hidden in rows.values())
        seen = [(await ask(connection, Code.VIEW_MESSAGE_BY_ID, offset=place)).code for place in places]
        assert 0 not in seen
        *_, told = await post(broker, topic="T", key="later")
        assert (told["complete"], told["rows"]) == (True, 3 if how == "created again" else 0)


async def test_delivered_delayed_message_is_hidden_in_the_schedule_topic_too(tmp_path: Path) -> None:
    settings = (f"storeUrl=dir:{tmp_path / 'archive'}", "archiveMinBytes=1", "archivePeriod=24h")

    async with running(tmp_path / "data", *settings) as (broker, connection):
        await send(connection, "T", b"now")
        await send(connection, "T", b"soon", "KEYS\x01who\x02DELAY\x011\x02")
        waiting = broker.store.reader.entries(SCHEDULE_TOPIC, 0, 1 << 60)[0].physical.tolist()
        await until(lambda: broker.store.queues.max_offset("T", 0) == 2, "the delivery")
        assert (await ask(connection, Code.VIEW_MESSAGE_BY_ID, offset=waiting[0])).code == 0
        *_, told = await post(broker, topic="T", key="who")
        assert (told["complete"], told["rows"]) == (True, 1)
        assert (await ask(connection, Code.VIEW_MESSAGE_BY_ID, offset=waiting[0])).code != 0
        (raw,) = broker.store.reader.get(METADATA_LOG, CHANGES, broker.journal.position - 1, 1, 1 << 20).buffers
        (change,) = iter_records(raw)
        assert decode_change(change.body) == RowsErased(rows={SCHEDULE_TOPIC: {0: [(0, 0)]}}), "for the other members"
        await send(connection, "T", b"later", "KEYS\x01late\x02DELAY\x0118\x02")
        *_, told = await post(broker, topic="T", key="late")
        assert told["not_erased"] == [f"1 messages of {SCHEDULE_TOPIC} may wait for delivery: erase again later"]


async def test_a_quarantined_record_is_deleted(tmp_path: Path) -> None:
    settings = (f"storeUrl=dir:{tmp_path / 'archive'}", "archiveMinBytes=1", "archivePeriod=24h")

    async with running(tmp_path / "data", *settings) as (broker, connection):
        await send(connection, "T", b"now")
        for key in ("who", "other"):
            await send(connection, "T", b"soon", f"KEYS\x01{key}\x02DELAY\x011\x02")
        quarantine = Quarantine(broker.store, SCHEDULE_TOPIC, broker.faults)
        for offset in range(2):
            assert quarantine.failed("a delivery", 0, offset, MalformedRecord("injected"))
        await until(lambda: broker.store.queues.max_offset("T", 0) == 3, "the deliveries")
        files = sorted((tmp_path / "data" / "quarantine").iterdir())
        assert len(files) == 2
        *_, told = await post(broker, topic="T", key="who")
        assert (told["complete"], told["rows"], told["quarantine"]) == (True, 1, [str(files[0])])
        assert [file.exists() for file in files] == [False, True]
