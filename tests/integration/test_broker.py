"""A broker and its name server as processes, tested over the wire."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.net.remoting_server import Connection, open_connection
from neve.record.codec import decode_record, iter_records
from neve.record.ids import parse_offset_msg_id
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand
from tests.kit.server.neve import NEVE, NeveServer

# Longer than the timeout of any request, so an answered pull must have been notified.
HELD_MS = 600_000
SMALL = {"mappedFileSizeCommitLog": "4m"}


@pytest.fixture
def up(tmp_path: Path) -> Iterator[NeveServer]:
    with NeveServer(tmp_path, settings=SMALL) as server:
        yield server


def send_ext(topic: str, properties: str = "", queue: int = 0) -> dict[str, str]:
    return {
        "a": "p", "b": topic, "c": "TBW102", "d": "4", "e": str(queue), "f": "0",
        "g": "1700000000000", "h": "0", "i": properties, "j": "0", "k": "false", "m": "false",
    }  # fmt: skip


async def ask(connection: Connection, code: int, ext: dict[str, str], body: bytes = b"") -> RemotingCommand:
    return await connection.invoke(RemotingCommand(code, ext=ext, body=body), 20)


async def send(
    connection: Connection, topic: str, body: bytes, properties: str = "", queue: int = 0
) -> RemotingCommand:
    return await ask(connection, Code.SEND_MESSAGE_V2, send_ext(topic, properties, queue), body)


async def pull(
    connection: Connection, topic: str, offset: int, *, queue: int = 0, expression: str = "*", hold_ms: int = 0
) -> RemotingCommand:
    ext = {
        "consumerGroup": "g", "topic": topic, "queueId": str(queue), "queueOffset": str(offset), "maxMsgNums": "32",
        "sysFlag": str(4 | (2 if hold_ms else 0)), "commitOffset": "0", "suspendTimeoutMillis": str(hold_ms),
        "subVersion": "0", "subscription": expression, "expressionType": "TAG",
    }  # fmt: skip
    return await ask(connection, Code.PULL_MESSAGE, ext)


def run(up: NeveServer, work: Callable[[Connection], Any]) -> Any:
    async def main() -> Any:
        connection = await open_connection(*up.address)
        try:
            return await work(connection)
        finally:
            connection.close()

    return asyncio.run(main())


def bodies(answer: RemotingCommand) -> list[bytes]:
    return [record.body for record in iter_records(answer.body)]


def test_sent_messages_are_pulled_with_their_tags(up: NeveServer) -> None:
    async def work(connection: Connection) -> None:
        for index in range(6):
            tag = "even" if index % 2 == 0 else "odd"
            answer = await send(connection, "orders", b"%d" % index, f"TAGS\x01{tag}\x02KEYS\x01k{index}\x02")
            assert (answer.code, answer.ext["queueOffset"]) == (0, str(index))
            assert answer.ext["MSG_REGION"] == "DefaultRegion"
            assert answer.ext["msgId"]
        everything = await pull(connection, "orders", 0)
        assert (everything.code, everything.ext["nextBeginOffset"], everything.ext["maxOffset"]) == (0, "6", "6")
        assert bodies(everything) == [b"0", b"1", b"2", b"3", b"4", b"5"]
        odd = await pull(connection, "orders", 0, expression="odd")
        assert bodies(odd) == [b"1", b"3", b"5"]
        assert {record.properties["TAGS"] for record in iter_records(odd.body)} == {"odd"}
        assert (await pull(connection, "orders", 0, expression="none")).code == 20
        assert (await pull(connection, "orders", 6)).code == 19
        assert (await pull(connection, "orders", 99)).code == 21
        found = await ask(connection, Code.QUERY_MESSAGE, {
            "topic": "orders", "key": "k3", "maxNum": "8", "beginTimestamp": "0", "endTimestamp": str(2**62),
        })  # fmt: skip
        assert bodies(found) == [b"3"]
        record = next(iter_records(everything.body))
        viewed = await ask(connection, Code.VIEW_MESSAGE_BY_ID, {"offset": str(record.physical_offset)})
        assert decode_record(viewed.body) == record

    run(up, work)


def test_waiting_pull_is_answered_by_the_next_matching_message(up: NeveServer) -> None:
    async def work(connection: Connection) -> None:
        await send(connection, "orders", b"first", "TAGS\x01a\x02")
        sender = await open_connection(*up.address)
        waiting = asyncio.create_task(pull(connection, "orders", 1, expression="b", hold_ms=HELD_MS))
        await send(sender, "orders", b"second", "TAGS\x01a\x02")
        await send(sender, "orders", b"third", "TAGS\x01b\x02")
        answer = await waiting
        sender.close()
        if answer.code == 20:  # The pull began to wait after the second message.
            answer = await pull(connection, "orders", int(answer.ext["nextBeginOffset"]), expression="b")
        assert bodies(answer) == [b"third"]
        assert (await pull(connection, "orders", 3, hold_ms=200)).code == 19

    run(up, work)


@pytest.mark.parametrize(
    ("topic", "body", "properties", "queue", "code"),
    [
        ("bad topic", b"", "", 0, 29),
        ("SCHEDULE_TOPIC_XXXX", b"", "", 0, 16),
        ("orders", b"", "", 4, 29),
        ("orders", b"x" * ((4 << 20) + 1), "", 0, 13),
        ("orders", b"", "K\x01" + "v" * 32_768 + "\x02", 0, 13),
        ("orders", b"", "TIMER_DELAY_SEC\x01259201\x02", 0, 13),
        ("orders", b"", "TIMER_DELAY_SEC\x01soon\x02", 0, 13),
    ],
)
def test_invalid_send_is_rejected(
    up: NeveServer, topic: str, body: bytes, properties: str, queue: int, code: int
) -> None:
    async def work(connection: Connection) -> None:
        answer = await send(connection, topic, body, properties, queue)
        assert answer.code == code, answer.remark
        assert (await send(connection, "orders", b"fine")).code == 0
        assert (await ask(connection, 4711, {})).code == 3

    run(up, work)


def test_message_sent_back_is_redelivered_and_becomes_a_dead_letter(up: NeveServer) -> None:
    async def work(connection: Connection) -> None:
        await send(connection, "orders", b"hard", "TAGS\x01a\x02")
        record = next(iter_records((await pull(connection, "orders", 0)).body))
        back = {"offset": str(record.physical_offset), "group": "g", "delayLevel": "1", "originTopic": "orders"}
        assert (await ask(connection, Code.CONSUMER_SEND_MSG_BACK, back)).code == 0
        answer = await pull(connection, "%RETRY%g", 0, hold_ms=HELD_MS)
        again = next(iter_records(answer.body))
        assert (again.body, again.reconsume_times) == (b"hard", 1)
        assert again.properties["RETRY_TOPIC"] == "orders"
        dead = {"offset": str(again.physical_offset), "group": "g", "delayLevel": "-1"}
        assert (await ask(connection, Code.CONSUMER_SEND_MSG_BACK, dead)).code == 0
        assert bodies(await pull(connection, "%DLQ%g", 0)) == [b"hard"]

    run(up, work)


def test_offsets_and_messages_survive_a_clean_stop_and_a_kill(tmp_path: Path) -> None:
    async def work(connection: Connection) -> None:
        answers = await asyncio.gather(*(send(connection, "orders", b"%d" % index) for index in range(100)))
        assert {answer.code for answer in answers} == {0}
        ext = {"consumerGroup": "g", "topic": "orders", "queueId": "0", "commitOffset": "42"}
        assert (await pull(connection, "orders", 0)).code == 0
        assert (await ask(connection, Code.UPDATE_CONSUMER_OFFSET, ext)).code == 0

    async def check(connection: Connection) -> None:
        answer = await ask(connection, Code.GET_MAX_OFFSET, {"topic": "orders", "queueId": "0"})
        assert answer.ext["offset"] == "200"
        ext = {"consumerGroup": "g", "topic": "orders", "queueId": "0"}
        assert (await ask(connection, Code.QUERY_CONSUMER_OFFSET, ext)).ext["offset"] == "42"

    settings = SMALL | {"flushDiskType": "SYNC_FLUSH", "flushConsumerOffsetInterval": "100"}
    with NeveServer(tmp_path, settings=settings) as server:
        run(server, work)
        assert server.stop() == 0
        run(server.start(), work)
        server.kill()
        run(server.start(), check)
        assert server.stop() == 0


def end_ext(stored: RemotingCommand, outcome: int, group: str = "p") -> dict[str, str]:
    return {
        "producerGroup": group,
        "tranStateTableOffset": stored.ext["queueOffset"],
        "commitLogOffset": str(parse_offset_msg_id(stored.ext["msgId"])[2]),
        "commitOrRollback": str(outcome),
        "msgId": stored.ext["transactionId"],
    }


def test_transactions_end_once_and_survive_a_kill(tmp_path: Path) -> None:
    async def begin(connection: Connection) -> list[RemotingCommand]:
        half = "TRAN_MSG\x01true\x02PGROUP\x01p\x02"
        stored = [await send(connection, "orders", b"%d" % number, half) for number in range(3)]
        assert (await pull(connection, "orders", 0)).code != 0
        assert (await ask(connection, Code.END_TRANSACTION, end_ext(stored[0], 8))).code == 0
        assert (await ask(connection, Code.END_TRANSACTION, end_ext(stored[1], 12))).code == 0
        return stored

    async def end(connection: Connection) -> None:
        assert bodies(await pull(connection, "orders", 0)) == [b"0"]
        for wrong in (end_ext(stored[0], 12), end_ext(stored[1], 8), end_ext(stored[2], 8, "another")):
            assert (await ask(connection, Code.END_TRANSACTION, wrong)).code == 1
        for _ in range(2):
            assert (await ask(connection, Code.END_TRANSACTION, end_ext(stored[2], 8))).code == 0
        assert bodies(await pull(connection, "orders", 0)) == [b"0", b"2"]

    with NeveServer(tmp_path, settings=SMALL) as server:
        stored = run(server, begin)
        server.kill()
        run(server.start(), end)


def test_timer_message_survives_a_kill_and_is_never_delivered_early(tmp_path: Path) -> None:
    async def begin(connection: Connection) -> int:
        due = int(time.time() * 1000) + 2500
        assert (await send(connection, "orders", b"timed", f"TIMER_DELIVER_MS\x01{due}\x02")).ext["recallHandle"]
        return due

    async def wait(connection: Connection) -> None:
        answer = await pull(connection, "orders", 0, hold_ms=10_000)
        while answer.code != 0:
            answer = await pull(connection, "orders", 0, hold_ms=10_000)
        record = decode_record(answer.body)
        assert record.body == b"timed"
        assert due <= record.store_timestamp

    with NeveServer(tmp_path, settings=SMALL) as server:
        due = run(server, begin)
        server.kill()
        run(server.start(), wait)


def test_cold_messages_equal_hot_messages_byte_for_byte(up: NeveServer) -> None:
    async def read(connection: Connection) -> bytes:
        return (await pull(connection, "orders", 0)).body

    async def fill(connection: Connection) -> bytes:
        for index in range(20):
            await send(connection, "orders", b"body %d" % index, f"KEYS\x01k{index}\x02")
        return await read(connection)

    hot = run(up, fill)
    events = [item.get("event") for item in up.post("/archive/offload?roll=1&evict=1")]
    assert events[-1] == "done"
    assert "evicted" in events
    assert run(up, read) == hot
    figures = dict(line.rsplit(" ", 1) for line in up.get("/metrics").splitlines() if not line.startswith("#"))
    wanted = {"cold_reads": 1, "archive_rows": 20, "archive_rows_with_wire": 0, "archive_rows_damaged": 0}
    assert {name: float(figures[f"neve_{name}_total"]) for name in wanted} == wanted
    assert json.loads(up.get("/archive/ls"))[0]["topic"] == "orders"
    assert up.post("/archive/verify")[0]["findings"] == []

    async def young(connection: Connection) -> None:
        ext = {"consumerGroup": "new", "topic": "orders", "queueId": "0"}
        assert (await ask(connection, Code.QUERY_CONSUMER_OFFSET, ext)).code == 22
        minimum = await ask(connection, Code.GET_MIN_OFFSET, {"topic": "orders", "queueId": "0"})
        assert minimum.ext["offset"] == "0"

    run(up, young)


def test_recreated_topic_is_empty_and_continues_above_old_offsets(up: NeveServer) -> None:
    async def fill(connection: Connection) -> None:
        for index in range(5):
            assert (await send(connection, "orders", b"%d" % index)).code == 0

    async def again(connection: Connection) -> None:
        assert (await ask(connection, Code.DELETE_TOPIC_IN_BROKER, {"topic": "orders"})).code == 0
        assert (await pull(connection, "orders", 0)).code == 17
        assert (await send(connection, "orders", b"new")).ext["queueOffset"] == "5"
        moved = await pull(connection, "orders", 0)
        assert (moved.code, moved.ext["nextBeginOffset"]) == (21, "5")
        assert bodies(await pull(connection, "orders", 5)) == [b"new"]

    run(up, fill)
    up.post("/archive/offload?roll=1&evict=1")
    run(up, again)


def test_port_or_directory_in_use_ends_with_one_line_and_exit_code(tmp_path: Path) -> None:
    with NeveServer(tmp_path, settings=SMALL) as server:
        command = [NEVE, "broker", "--set", "mappedFileSizeCommitLog=4m"]
        root = f"storePathRootDir={tmp_path / 'data' / 'broker'}"
        taken = subprocess.run(
            [*command, "--set", root, "--set", "listenPort=0", "--set", "adminPort=-1"],
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert (taken.returncode, b"in use by another broker" in taken.stderr) == (3, True), taken.stderr
        port = f"listenPort={server.address[1]}"
        taken = subprocess.run(
            [*command, "--set", f"storePathRootDir={tmp_path / 'x'}", "--set", port],
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert (taken.returncode, taken.stderr.count(b"\n")) == (3, 1), taken.stderr
        assert server.stop() == 0


def test_broker_imports_neither_pyarrow_nor_boto3() -> None:
    code = "import sys, broker.command, broker.broker_controller; print({'pyarrow', 'boto3'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code]).strip() == b"set()"
