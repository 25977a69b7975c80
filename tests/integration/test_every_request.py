"""Send every request code to both servers with hostile fields and bodies.

Each field is absent, empty, huge, negative, of another type or a hostile name; bodies are invalid or expand when they
are decompressed. Each request is answered with a deliberate refusal, not with a handler's unexpected error; memory does
not grow, and the servers keep running. The codes come from the codec, and the fields from the servers' sources, so that
new ones are tested automatically.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import logging
import resource
import struct
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.intake.intake import TELLS_ELSEWHERE
from broker.waiting.half_messages import HalfMessages
from broker.waiting.schedule_message import ScheduleMessage
from broker.waiting.timer_message import TimerMessages
from infra.clock import SystemClock
from infra.disk.filesystem import RealDisk
from infra.net.remoting_server import Connection, open_connection
from namesrv.namesrv_config import NamesrvConfig
from namesrv.namesrv_controller import NamesrvController
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand
from tests.fuzz.made import REQUESTS
from tests.kit.broker.in_process import ask, running, send
from tests.kit.clock.waiting import until

ROOT = Path(__file__).parents[2]
READERS = frozenset({"require_str", "require_int", "optional_int", "optional_bool"})
HEADERS = ("neve.remoting.headers", "broker.requests.pop_request")
#: Values that a valid request could have; any other field is 0.
ORDINARY = {
    "topic": "T", "b": "T", "group": "g", "consumerGroup": "g", "a": "p", "producerGroup": "p", "srcGroup": "g",
    "destGroup": "h", "groupName": "g", "defaultTopic": "TBW102", "c": "TBW102", "defaultTopicQueueNums": "1", "d": "1",
    "properties": "TAGS\x01a\x02", "i": "TAGS\x01a\x02", "readQueueNums": "1", "writeQueueNums": "1", "perm": "6",
    "maxMsgNums": "8", "invisibleTime": "1000", "subscription": "*", "expressionType": "TAG", "clientID": "c",
    "clusterName": "c", "brokerName": "n", "brokerAddr": "127.0.0.1:1", "namespace": "n", "key": "k", "value": "v",
    "extraInfo": "0 1700000000000 1000 0 0 broker-a 0 0", "reconsumeTimes": "0", "attributes": "", "sysFlag": "4",
    "batch": "false", "m": "false", "unitMode": "false", "k": "false",
}  # fmt: skip
HOSTILE = (
    "", "-1", "9" * 30, str(2**31), str(2**63 - 1), str(-(2**63)), "x", "1.5", "true", "\x00\n\r\x1b[2J",
    "../../etc/passwd", "%RETRY%", "|" * 100, "a" * 100_000, "\N{SNOWMAN}\U0001f600", "1\x012\x02", "TBW102",
    "SCHEDULE_TOPIC_XXXX", "%DLQ%g",
)  # fmt: skip
PER_FIELD = 4
BODIES: tuple[bytes, ...] = (
    b"", b"{", b"[]", b"7", b'"x"', b"null", b"{}", b"\xff\xfe", b"[" * 100_000, b"9" * 10_000,
    b'{"a":' * 40 + b"1" + b"}" * 40,
    b'{"a":{"$ref":"$"}}',
    struct.pack(">i", 1 << 30) + bytes(64),
    zlib.compress(bytes(1 << 25)),
)  # fmt: skip
#: A few KiB or MiB of these would take gigabytes in memory; sent to the codes that read a body.
BOMBS: tuple[bytes, ...] = (
    b"{'a':[" + b"{}," * 2_500_000 + b"0]}",
    b'{"a":[' + b"{}," * 2_500_000 + b"0]}",
    b"[" + b'{"a":{"a":{"a":{}}}},' * 500_000 + b"0]",
    b'{"z":[' + b"1," * 5000 + b'1],"a":[' + b'{"$ref":"$.z"},' * 5000 + b"0]}",
)
MANY = 2500
#: Codes whose body is a table, in addition to those of the fuzzer's corpus.
TABLES: dict[Code, Any] = {
    Code.HEART_BEAT: {
        "clientID": "c",
        "producerDataSet": [{"groupName": "p"}],
        "consumerDataSet": [
            {"groupName": "g", "subscriptionDataSet": [{"topic": "T", "tagsSet": [], "subString": ""}]}
        ],
    },
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: {"groupName": "g", "retryQueueNums": 1, "groupRetryPolicy": {"t": ""}},
    Code.CHECK_CLIENT_CONFIG: {"clientId": "c", "group": "g", "subscriptionData": {"topic": "T", "subString": "*"}},
    Code.QUERY_ASSIGNMENT: {"topic": "T", "consumerGroup": "g", "clientId": "c", "strategyName": "AVG"},
    Code.REGISTER_BROKER: {
        "topicConfigSerializeWrapper": {
            "topicConfigTable": {"T": {"topicName": "T", "readQueueNums": 1, "attributes": {"a": "b"}}},
            "dataVersion": {"counter": 1},
        },
        "filterServerList": [],
    },
    Code.QUERY_DATA_VERSION: {"counter": 1},
    Code.REGISTER_TOPIC_IN_NAMESRV: {"queueDatas": [{"brokerName": "n", "readQueueNums": 1}], "brokerDatas": []},
} | {code: json.loads(body) for code, _, body in REQUESTS if body[:1] == b"{"}
WRONG: tuple[Any, ...] = (None, -1, 10**30, 2**31, "x", "", [], {}, [[1]], {"a": {"b": 1}}, True, "a" * 100_000, 1.5)
TIMEOUT_S = 60
REBUILD = -2
ROOM = 128 << 20


def fields() -> list[str]:
    """Return every header field that a server's source names."""
    found: set[str] = set()
    for module in HEADERS:
        for value in vars(importlib.import_module(module)).values():
            if isinstance(value, type) and issubclass(value, msgspec.Struct):
                found.update(value.__struct_encode_fields__)
    for package in ("broker", "namesrv", "infra"):
        for path in (ROOT / package).rglob("*.py"):
            found.update(_named(ast.parse(path.read_text("utf-8"))))
    return sorted(found)


def _named(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call | ast.Subscript):
            continue
        if isinstance(node, ast.Subscript):
            owner, arguments = node.value, [node.slice]
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            owner, arguments = node.func.value, node.args
        else:
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            owner, arguments = None, node.args[1:] if name in READERS else []
        if owner is not None and not ast.unparse(owner).endswith("ext"):
            continue
        yield from (a.value for a in arguments[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))


FIELDS = fields()
SOUND = {name: ORDINARY.get(name, "0") for name in FIELDS}


def headers(code: int) -> Iterator[dict[str, str]]:
    """Yield headers with one invalid field at a time, then with all fields invalid."""
    yield {}
    yield SOUND
    for index, name in enumerate(FIELDS):
        yield {other: value for other, value in SOUND.items() if other != name}
        for turn in range(PER_FIELD):
            yield {**SOUND, name: HOSTILE[(code + index * PER_FIELD + turn) % len(HOSTILE)]}
    for value in HOSTILE:
        yield dict.fromkeys(FIELDS[: 1 << 20 // max(len(value), 1)], value)


def bodies(code: int) -> Iterator[bytes]:
    yield from BODIES
    table = TABLES.get(Code(code)) if code in Code.__members__.values() else None
    if table is None:
        return
    yield json.dumps(table).encode()
    yield from BOMBS
    yield from _expanding(table)
    for path in list(_paths(table)):
        for value in (..., *WRONG):
            changed = json.loads(json.dumps(table))
            place = changed
            for step in path[:-1]:
                place = place[step]
            if value is ...:
                del place[path[-1]]
            else:
                place[path[-1]] = value
            yield json.dumps(changed).encode()


def _expanding(table: Any) -> Iterator[bytes]:
    """Return the table with each of its lists at maximum length, and with lists that refer to one another."""
    for path in _paths(table):
        changed = json.loads(json.dumps(table))
        place = changed
        for step in path[:-1]:
            place = place[step]
        items = place[path[-1]]
        if not isinstance(items, list) or not items:
            continue
        place[path[-1]] = [items[0]] * ((8 << 20) // len(json.dumps(items[0])))
        yield json.dumps(changed).encode()
        for key, inner in items[0].items() if isinstance(items[0], dict) else ():
            if isinstance(inner, list) and inner:
                place[path[-1]] = [{**items[0], key: {"$ref": "$.z"}}] * MANY
                yield json.dumps({"z": inner * MANY, **changed}).encode()


def _paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else []
    items = enumerate(value) if isinstance(value, list) else items
    for key, item in items:
        yield (*at, key)
        yield from _paths(item, (*at, key))


def properties() -> Iterator[str]:
    special = TELLS_ELSEWHERE.union(*(room.requested_by for room in (HalfMessages, ScheduleMessage, TimerMessages)))
    for name in sorted({*special, "UNIQ_KEY", "TAGS", "KEYS", "WAIT", "REAL_TOPIC", "REAL_QID", "PGROUP"}):
        yield from (f"{name}\x01{value}\x02TAGS\x01a\x02" for value in HOSTILE)


class Stranger:
    """A client that sends requests and counts them and their answers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.answers: dict[int, int] = {}

    async def ask_all(self, requests: Iterable[tuple[int, dict[str, str], bytes]]) -> None:
        waiting: list[asyncio.Task[None]] = []
        size = 0
        for code, ext, body in requests:
            if code == REBUILD:
                await asyncio.gather(*waiting)
                waiting, size = [], 0
                await self._rebuild()
                continue
            waiting.append(asyncio.create_task(self._ask(code, ext, body)))
            size += len(body) + sum(map(len, ext.values()))
            if len(waiting) == 256 or size > 1 << 22:
                await asyncio.gather(*waiting)
                waiting, size = [], 0
        await asyncio.gather(*waiting)

    async def _rebuild(self) -> None:
        """Create again what an earlier request may have deleted; a name server refuses this."""
        for code, ext, body in (
            (Code.SEND_MESSAGE_V2, SOUND, b"one"),
            (Code.SEND_MESSAGE_V2, SOUND, b"two"),
            (Code.HEART_BEAT, {}, json.dumps(TABLES[Code.HEART_BEAT]).encode()),
            (Code.POP_MESSAGE, SOUND, b""),
            (Code.REGISTER_BROKER, SOUND, json.dumps(TABLES[Code.REGISTER_BROKER]).encode()),
        ):
            await self._ask(code, ext, body)

    async def _ask(self, code: int, ext: dict[str, str], body: bytes) -> None:
        answer = await self._connection.invoke(RemotingCommand(code, ext=ext, body=body), TIMEOUT_S)
        self.answers[answer.code] = self.answers.get(answer.code, 0) + 1


def hostile_requests(served: frozenset[int]) -> Iterator[tuple[int, dict[str, str], bytes]]:
    for code in sorted({*map(int, Code), -1, 0, 1, 77_777, 2**31 - 1}):
        if code not in served:
            yield from ((code, ext, b"") for ext in ({}, SOUND))
            continue
        yield REBUILD, {}, b""
        for ext in headers(code):
            yield code, ext, b""
        for body in bodies(code):
            yield code, SOUND, body


def peak() -> int:
    """Return the peak memory of this process, with its servers and clients."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def accidents(caplog: pytest.LogCaptureFixture) -> set[str]:
    """Return the unexpected errors that handlers logged."""
    return {
        f"{record.getMessage()}: {record.exc_info[1]!r}"[:300]
        for record in caplog.records
        if record.exc_info and record.levelno >= logging.ERROR and record.exc_info[1] is not None
    }


def test_header_fields_are_found_in_the_sources() -> None:
    assert len(FIELDS) > 80
    assert {"topic", "queueId", "i", "consumerGroup", "invisibleTime", "brokerAddr", "maxMsgBytes"} <= set(FIELDS)


def test_broker_answers_hostile_requests_and_keeps_serving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running(tmp_path, "longPollingEnable=false", "enablePropertyFilter=true") as (broker, connection):
            await send(connection, "T")
            before = peak()
            stranger = Stranger(await open_connection(*broker.address))
            await stranger.ask_all(hostile_requests(broker.router.codes))
            await stranger.ask_all((Code.SEND_MESSAGE_V2, {**SOUND, "i": text}, b"x") for text in properties())
            assert stranger.answers[0] > 100
            assert sum(stranger.answers.values()) > 10_000
            assert peak() - before < ROOM
            assert broker.health.troubles() == []
            await send(connection, "after")
            delayed = await send(connection, "after", b"delayed", properties="DELAY\x011\x02")
            assert delayed.code == 0
            await until(lambda: broker.store.queues.max_offset("after", 0) == 2, "the delayed message")
            pulled = await ask(
                connection, Code.PULL_MESSAGE, consumerGroup="after", topic="after", queueId=0, queueOffset=0,
                maxMsgNums=32, sysFlag=4, commitOffset=0, suspendTimeoutMillis=0, subVersion=0, subscription="*",
            )  # fmt: skip
            assert (pulled.code, pulled.ext["nextBeginOffset"]) == (0, "2")
            for part in (broker.topics, broker.groups, broker.offsets):
                part.file.touch()
                await part.file.save()
            assert broker.health.troubles() == []

    asyncio.run(main())
    assert accidents(caplog) == set()


@asynccontextmanager
async def name_server(root: Path) -> AsyncIterator[NamesrvController]:
    config = NamesrvConfig(listen_port=0, bind_address="127.0.0.1", kv_config_path=str(root / "kv.json"))
    server = NamesrvController(config, SystemClock(), RealDisk())
    await server.start()
    try:
        yield server
    finally:
        await server.shutdown()


def test_name_server_answers_hostile_requests_and_keeps_serving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with name_server(tmp_path) as server:
            before = peak()
            stranger = Stranger(await open_connection("127.0.0.1", server.port))
            await stranger.ask_all(hostile_requests(server.codes))
            packed = [(zlib.compress(struct.pack(">i", len(body)) + body), "true") for body in (*BODIES, *BOMBS)]
            await stranger.ask_all(
                (Code.REGISTER_BROKER, {**SOUND, "compressed": compressed}, body) for body, compressed in packed
            )
            assert stranger.answers[0] > 100
            assert sum(stranger.answers.values()) > 3_000
            assert peak() - before < ROOM
            broker = await open_connection("127.0.0.1", server.port)
            named = {"clusterName": "z", "brokerName": "after", "brokerAddr": "127.0.0.1:2", "brokerId": "0"}
            table = json.dumps({"topicConfigSerializeWrapper": {"topicConfigTable": {"U": {"topicName": "U"}}}})
            assert (await ask(broker, Code.REGISTER_BROKER, table.encode(), **named)).code == 0
            assert (await ask(broker, Code.GET_ROUTEINFO_BY_TOPIC, topic="U")).code == 0
            assert (await ask(broker, Code.PUT_KV_CONFIG, namespace="n", key="k", value="v")).code == 0
            assert server.troubles() == []
            for each in (broker, stranger._connection):
                each.close()

    asyncio.run(main())
    assert accidents(caplog) == set()
