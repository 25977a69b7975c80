"""The group with the longest legal name is archived; cold reads, the library and the sweep use its full name."""

import asyncio
import json
from pathlib import Path
from typing import Any

from lifecycle.lifecycle import ArchiveLifecycle
from neve import archive
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from tests.kit.broker.in_process import ask, offload, running, send

GROUP = "|" * 120
RETRY = f"%RETRY%{GROUP}"


def heartbeat() -> bytes:
    member: dict[str, Any] = {"groupName": GROUP, "subscriptionDataSet": []}
    return json.dumps({"clientID": "c", "consumerDataSet": [member]}).encode()


def test_group_with_longest_legal_name_is_archived(tmp_path: Path) -> None:
    asyncio.run(_archived(tmp_path))


async def _archived(tmp_path: Path) -> None:
    url = f"dir:{tmp_path / 'store'}"
    async with running(tmp_path / "data", f"storeUrl={url}", "archivePeriod=24h") as (broker, client):
        assert (await ask(client, Code.HEART_BEAT, heartbeat())).code == 0
        await send(client, "orders", b"an order")
        await send(client, RETRY, b"again")
        done = json.loads((await offload(broker)).splitlines()[-1])
        assert (done["objects"], done["failed"], done["set_aside"]) == (2, 0, {})
        assert broker.store.queues.min_offset(RETRY, 0) == 1, "it left the local disk"
        pulled = await ask(
            client, Code.PULL_MESSAGE, consumerGroup=GROUP, topic=RETRY, queueId=0, queueOffset=0, maxMsgNums=8,
            sysFlag=4, commitOffset=0, suspendTimeoutMillis=0, subVersion=0, subscription="*", expressionType="TAG",
        )  # fmt: skip
        assert (pulled.code, b"again" in pulled.body) == (0, True)
        assert isinstance(broker.archive.lifecycle, ArchiveLifecycle)
        assert broker.archive.lifecycle.sweep.run() == []
    assert archive.open(url).topics() == sorted([RETRY, "orders"])
    assert [record.body for record in archive.open(url).topic(RETRY).read(queue=0)] == [b"again"]


def test_pop_rejects_a_retry_topic_name_that_is_too_long(tmp_path: Path) -> None:
    asyncio.run(_refused(tmp_path))


async def _refused(tmp_path: Path) -> None:
    topic = "%DLQ%" + "x" * 200
    async with running(tmp_path / "data") as (broker, client):
        await send(client, topic)
        popped = await ask(
            client, Code.POP_MESSAGE, consumerGroup="g" * 80, topic=topic, queueId=0, maxMsgNums=1,
            invisibleTime=10, pollTime=0, bornTime=0, initMode=0, expType="TAG", exp="*",
        )  # fmt: skip
        assert popped.code == ResponseCode.INVALID_PARAMETER
        assert "longer than topic max length 255" in str(popped.remark)
        assert all(len(name) <= 255 for name in broker.topics.topics)
