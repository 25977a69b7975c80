"""A broker of neve as the slave of an Apache master."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.wire import pull_ext
from broker.broker_controller import BrokerController
from broker.store.message_store import MessageStore, PutResult
from infra.net.remoting_server import Connection, RemotingServer
from neve.record.codec import iter_records
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand
from tests.kit.broker.in_process import ask, running, send
from tests.kit.broker.plain_ha import PlainMaster
from tests.unit.broker.metadata.apache_tables import GROUPS, MODES, TOPICS

FILE_SIZE = 1 << 20
SLAVE = ["brokerRole=SLAVE", "brokerId=1", "slaveReadEnable=true"]


class Front:
    """A name server, and the Remoting side of an Apache master whose log is a neve broker's."""

    def __init__(self, source: BrokerController) -> None:
        self.source, self.ha = source, PlainMaster(source.store, FILE_SIZE)
        self.server = RemotingServer(self._serve, host="127.0.0.1", port=0)
        self.master = RemotingServer(self._serve, host="127.0.0.1", port=0)
        self.master_address = ""
        self.timers: tuple[int, int] | None = (0, 0)
        self.delays = "{}"
        self.offsets = '{"offsetTable":{"t@g":{0:2}}}'
        self.knows_master = True
        self.registered: list[dict[str, str]] = []
        self.settings: dict[str, str] = {}
        self.behind = "0 B"
        self.dropped = 0  # the begin of its log, as it reports
        self.others: list[dict[str, object]] = []  # slaves

    @property
    def address(self) -> str:
        """The name server's address."""
        return f"127.0.0.1:{self.server.port}"

    async def start(self) -> None:
        await self.ha.start()
        await self.server.start()
        await self.master.start()
        self.master_address = f"127.0.0.1:{self.master.port}"

    async def stop(self) -> None:
        await self.retire()
        await self.server.shutdown()

    async def retire(self) -> None:
        """Stop the master and unregister it at the name server."""
        self.knows_master = False
        await self.ha.stop()
        await self.master.shutdown()

    def _serve(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        body, ext = "", dict[str, str]()
        store, config = self.source.store, self.source.config
        match request.code:
            case Code.REGISTER_BROKER:
                self.registered.append(dict(request.ext))
                ext = {"masterAddr": self.master_address, "haServerAddr": f"127.0.0.1:{self.ha.port}"}
                ext = ext if self.knows_master else {}
            case Code.GET_BROKER_CONFIG:
                settings = {
                    "brokerClusterName": config.broker_cluster_name, "brokerName": config.broker_name, "brokerId": "0",
                    "mappedFileSizeCommitLog": str(FILE_SIZE), "messageDelayLevel": config.message_delay_level,
                    "flushCommitLogThoroughInterval": "0", "flushIntervalCommitLog": "0",
                }  # fmt: skip
                body = "".join(f"{name}={value}\n" for name, value in {**settings, **self.settings}.items())
            case Code.GET_BROKER_RUNTIME_INFO:
                begin = max(store.min_physical_offset, self.dropped)
                table = {
                    "bootTimestamp": str(self.ha.boot_ms), "commitLogMinOffset": str(begin),
                    "commitLogMaxOffset": str(store.max_physical_offset), "remainHowManyDataToFlush": self.behind,
                }  # fmt: skip
                body = json.dumps({"table": table})
            case Code.EXCHANGE_BROKER_HA_INFO:
                ext = {"masterFlushOffset": str(self.ha.end_at_start), "masterHaAddress": f"127.0.0.1:{self.ha.port}"}
            case Code.GET_BROKER_HA_STATUS:
                slaves = [{"slaveAckOffset": ack, "inSync": True} for ack in self.ha.acks[-1:]]
                status = {"master": True, "masterCommitLogMaxOffset": store.max_physical_offset}
                body = json.dumps({**status, "haConnectionInfo": [*slaves, *self.others]})
            case Code.GET_ALL_TOPIC_CONFIG:
                body = TOPICS % (7, "")
            case Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG:
                body = GROUPS
            case Code.GET_ALL_MESSAGE_REQUEST_MODE:
                body = MODES
            case Code.GET_ALL_DELAY_OFFSET:
                body = f'{{"offsetTable":{self.delays}}}'
            case Code.GET_TIMER_CHECK_POINT:
                if self.timers is None:
                    return RemotingCommand.response(request, 1, "The checkpoint is null")
                read_ms, offset = self.timers
                return RemotingCommand.response(
                    request, 0, body=struct.pack(">7q", read_ms, 0, offset, offset, 0, 0, 0)
                )
            case Code.GET_BROKER_CLUSTER_INFO:
                brokers = {config.broker_name: {"brokerAddrs": {"0": self.master_address}}}
                body = json.dumps({"brokerAddrTable": brokers if self.knows_master else {}})
            case Code.GET_ALL_CONSUMER_OFFSET:
                body = self.offsets
        return RemotingCommand.response(request, 0, ext=ext, body=body.encode())


@asynccontextmanager
async def master(root: Path) -> AsyncIterator[tuple[Front, Connection]]:
    """Yield a master with three messages, two of which a group has consumed."""
    async with running(root / "master") as (source, connection):
        for number in range(3):
            await send(connection, "t", b"%d" % number)
        front = Front(source)
        await front.start()
        try:
            yield front, connection
        finally:
            await front.stop()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(bounded())


async def bodies(connection: Connection, start: int = 0) -> list[bytes]:
    answer = await ask(connection, Code.PULL_MESSAGE, **pull_ext("g", "t", 0, start))
    return [record.body for record in iter_records(bytes(answer.body))] if answer.code == 0 else []


def put(
    store: MessageStore,
    topic: str,
    queue_id: int = 0,
    body: bytes = b"body",
    *,
    sys_flag: int = 0,
    prepared: int = 0,
    times: int = 0,
    **properties: object,
) -> PutResult:
    """Append a message in RocketMQ's format: without the last separator of its properties."""
    text = "\x02".join(f"{name}\x01{value}" for name, value in properties.items())
    return store.put(
        topic, queue_id, body, text.encode(), flag=0, sys_flag=sys_flag, born_timestamp=5, born_host=("127.0.0.1", 1),
        reconsume_times=times, prepared_transaction_offset=prepared,
        tags_code=0 if "TIMER_OUT_MS" not in properties else int(str(properties["TIMER_OUT_MS"])),
    )  # fmt: skip
