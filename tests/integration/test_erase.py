"""A broker erases a key, asked as an operator asks it: consumers, queries, retries, Spark's plan, the certificate."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from click.testing import CliRunner

import neve.archive
from broker.broker_controller import BrokerController
from infra.object_store.open import open_store
from infra.remoting_server import Connection
from neve.archive.follow import catalogs
from neve.archive.selection import Selection
from neve.archive.verify import verify
from neve.cli.main import neve as neve_command
from neve.record.codec import iter_records
from neve.record.ids import parse_offset_msg_id
from neve.remoting.codes import RequestCode as Code
from neve.spark.reader import plan
from tests.broker_in_process import ask, offload, running, send

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
    request = urllib.request.Request(url, method="POST")
    lines = await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=60).read().splitlines())
    return [json.loads(line) for line in lines]


async def read(connection: Connection, topic: str, end: int, offset: int = 0) -> dict[int, bytes]:
    """What a client that goes on where it is told gets; no answer is a refusal."""
    found: dict[int, bytes] = {}
    while offset < end:
        answer = await ask(
            connection, Code.PULL_MESSAGE, consumerGroup="g", topic=topic, queueId=0, queueOffset=offset, maxMsgNums=7,
            sysFlag=4, commitOffset=0, suspendTimeoutMillis=0, subscription="*", subVersion=0,
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


def test_a_key_is_erased_wherever_the_archive_has_it(tmp_path: Path) -> None:
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
            await send(connection, "T", b"late", "KEYS\x01who\x02")  # no round has had it
            *_, planned = await post(broker, topic="T", key="who", **{"dry-run": "1"})
            assert planned["rows"] == len(MEANT)

            *_, told = await post(broker, topic="T", key="who", grace="0s", evict="1")
            assert (told["complete"], told["rows"]) == (True, len(MEANT) + 1 + 2), told
            assert {(one["topic"], one["queue"]) for one in told["erased"]} == {("T", 0), ("%DLQ%g", 0)}
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
    assert f"{len(MEANT)} rows of T are erased" in listed.output
