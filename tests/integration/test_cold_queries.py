"""Queries for messages that only the archive has: by key, by message id, by time and with an SQL92 expression."""

from pathlib import Path

from broker.broker_controller import BrokerController
from infra.net.remoting_server import Connection
from neve.record.codec import iter_records
from neve.record.ids import parse_offset_msg_id
from neve.remoting.codes import RequestCode as Code
from tests.kit.broker.in_process import ask, offload, running, send

COUNT = 50


async def send_keyed(connection: Connection, n: int) -> str:
    properties = f"UNIQ_KEY\x01U{n}\x02KEYS\x01key{n % 10} all\x02n\x01{n}\x02"
    return (await send(connection, "T", b"key7 all", properties)).ext["msgId"]


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
    ids = [await send_keyed(connection, n) for n in range(COUNT)]
    assert b'"evicted"' in await offload(broker)
    place = parse_offset_msg_id(ids[7])[2]
    assert broker.store.reader.record_at(place) is None
    await send_keyed(connection, COUNT)
    found = await ask(connection, Code.VIEW_MESSAGE_BY_ID, offset=place)
    assert [record.queue_offset for record in iter_records(found.body)] == [7]
    assert (await ask(connection, Code.VIEW_MESSAGE_BY_ID, offset=place + 1)).code == 1
    # A consumer sends back a message by its physical offset, which is no longer local.
    back = await ask(connection, Code.CONSUMER_SEND_MSG_BACK, group="g", offset=place, delayLevel=-1, originTopic="T")
    assert back.code == 0, back.remark
    assert await dead_letters(connection) == ["U7"]
    # Both tiers, the newest matches, in queue order. A body that contains the key does not match.
    assert await by_key(connection, "key0", 3) == [30, 40, 50]
    assert await by_key(connection, "key7", 32) == [7, 17, 27, 37, 47]
    assert await by_key(connection, "U42", 32) == [42]
    assert await by_key(connection, "none", 32) == []
    assert await by_sql(connection, "n BETWEEN 10 AND 12 AND KEYS CONTAINS 'all'") == [10, 11, 12]
    oldest = await ask(connection, Code.GET_EARLIEST_MSG_STORETIME, topic="T", queueId=0)
    assert int(oldest.ext["timestamp"]) > 0


async def test_archived_messages_are_found_by_key_id_time_and_filter(tmp_path: Path) -> None:
    settings = (f"storeUrl=dir:{tmp_path / 'archive'}", "enablePropertyFilter=true")
    async with running(tmp_path / "data", *settings) as (broker, connection):
        await check(broker, connection)
