"""Messages that are only in the archive: found by key, by their place, by time and by an SQL92 expression."""

import asyncio
import urllib.request
from pathlib import Path

from broker.broker_controller import BrokerController
from infra.clock import SystemClock
from infra.config import BrokerConfig, load
from infra.disk import RealDisk
from infra.remoting_server import Connection, open_connection
from neve.message import iter_records, parse_offset_msg_id
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand

COUNT = 50


async def ask(connection: Connection, code: int, body: bytes = b"", **ext: object) -> RemotingCommand:
    texts = {name: str(value) for name, value in ext.items()}
    return await connection.invoke(RemotingCommand(code, ext=texts, body=body), 30)


async def send(connection: Connection, n: int) -> str:
    properties = f"UNIQ_KEY\x01U{n}\x02KEYS\x01key{n % 10} all\x02n\x01{n}\x02"
    answer = await ask(
        connection, Code.SEND_MESSAGE_V2, b"key7 all", a="p", b="T", c="TBW102", d=1, e=0, f=0, g=1, h=0, i=properties,
        j=0, k="false", m="false",
    )  # fmt: skip
    assert answer.code == 0, answer.remark
    return answer.ext["msgId"]


async def by_key(connection: Connection, key: str, count: int) -> list[int]:
    answer = await ask(
        connection, Code.QUERY_MESSAGE, topic="T", key=key, maxNum=count, beginTimestamp=0, endTimestamp=1 << 60
    )
    return [record.queue_offset for record in iter_records(answer.body)]


async def by_sql(connection: Connection, expression: str) -> list[int]:
    answer = await ask(
        connection, Code.PULL_MESSAGE, consumerGroup="g", topic="T", queueId=0, queueOffset=0, maxMsgNums=32, sysFlag=4,
        commitOffset=0, suspendTimeoutMillis=0, subVersion=0, subscription=expression, expressionType="SQL92",
    )  # fmt: skip
    return [record.queue_offset for record in iter_records(answer.body)]


async def dead_letters(connection: Connection) -> list[str]:
    answer = await ask(
        connection, Code.PULL_MESSAGE, consumerGroup="g", topic="%DLQ%g", queueId=0, queueOffset=0, maxMsgNums=32,
        sysFlag=4, commitOffset=0, suspendTimeoutMillis=0, subVersion=0, subscription="*", expressionType="TAG",
    )  # fmt: skip
    return [record.properties["UNIQ_KEY"] for record in iter_records(answer.body)]


async def check(broker: BrokerController, connection: Connection) -> None:
    ids = [await send(connection, n) for n in range(COUNT)]
    assert broker.admin_address is not None
    url = "http://{}:{}/archive/offload?roll=1&evict=1".format(*broker.admin_address)
    request = urllib.request.Request(url, method="POST")
    told = await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=60).read())
    assert b'"evicted"' in told
    place = parse_offset_msg_id(ids[7])[2]
    assert broker.context.store.record_at(place) is None
    await send(connection, COUNT)
    found = await ask(connection, Code.VIEW_MESSAGE_BY_ID, offset=place)
    assert [record.queue_offset for record in iter_records(found.body)] == [7]
    assert (await ask(connection, Code.VIEW_MESSAGE_BY_ID, offset=place + 1)).code == 1
    # A consumer that failed on it gives back its place in the log, which is local no longer.
    back = await ask(connection, Code.CONSUMER_SEND_MSG_BACK, group="g", offset=place, delayLevel=-1, originTopic="T")
    assert back.code == 0, back.remark
    assert await dead_letters(connection) == ["U7"]
    # Both tiers, the newest ones, in the order of the queue; a body with the word is no hit.
    assert await by_key(connection, "key0", 3) == [30, 40, 50]
    assert await by_key(connection, "key7", 32) == [7, 17, 27, 37, 47]
    assert await by_key(connection, "U42", 32) == [42]
    assert await by_key(connection, "none", 32) == []
    assert await by_sql(connection, "n BETWEEN 10 AND 12 AND KEYS CONTAINS 'all'") == [10, 11, 12]
    oldest = await ask(connection, Code.GET_EARLIEST_MSG_STORETIME, topic="T", queueId=0)
    assert int(oldest.ext["timestamp"]) > 0


def test_archived_messages_are_found(tmp_path: Path) -> None:
    settings = [
        f"storePathRootDir={tmp_path / 'data'}", f"storeUrl=dir:{tmp_path / 'archive'}", "listenPort=0", "adminPort=0",
        "bindAddress=127.0.0.1", "brokerIP1=127.0.0.1", "mappedFileSizeCommitLog=1m", "enablePropertyFilter=true",
    ]  # fmt: skip

    async def main() -> None:
        broker = BrokerController(load(BrokerConfig, None, settings), SystemClock(), RealDisk())
        await broker.start()
        connection = await open_connection(*broker.context.address)
        try:
            async with asyncio.timeout(60):
                await check(broker, connection)
        finally:
            connection.close()
            await broker.shutdown()

    asyncio.run(main())
