"""Requests of tests to a `neve up` in its own process (the fixture `neve_up`), over the wire and to its admin port."""

from __future__ import annotations

import asyncio
import json
import subprocess
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from infra.net.remoting_server import open_connection
from neve.archive.catalog.journal_reader import entries
from neve.cli.store import open_source
from neve.record.codec import iter_records
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand
from tests.kit.server.neve import NEVE
from tests.kit.wire.admin_port import post_request

Up = Callable[..., AbstractContextManager[Any]]
SMALL = ("--set", "mappedFileSizeCommitLog=64k")
TOPIC = "orders"
FOUND, NOTHING_YET, GOES_ON, MOVED = 0, 19, 20, 21
GROUP = {"consumerGroup": "g", "topic": TOPIC, "queueId": "0"}


def ask(neve: Any, *requests: tuple[int, dict[str, str], bytes]) -> list[RemotingCommand]:
    host, _, port = neve.broker.rpartition(":")

    async def main() -> list[RemotingCommand]:
        connection = await open_connection(host, int(port))
        try:
            return [
                await connection.invoke(RemotingCommand(code, ext=ext, body=body), 30) for code, ext, body in requests
            ]
        finally:
            connection.close()

    return asyncio.run(main())


def send(neve: Any, *bodies: bytes) -> list[int]:
    """Send messages; return their queue offsets."""
    ext = {
        "a": "p", "b": TOPIC, "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "0", "h": "0", "i": "", "j": "0",
        "k": "false", "m": "false",
    }  # fmt: skip
    answers = ask(neve, *((Code.SEND_MESSAGE_V2, ext, body) for body in bodies))
    assert {answer.code for answer in answers} == {0}, answers[0].remark
    return [int(answer.ext["queueOffset"]) for answer in answers]


def pull(neve: Any, offset: int) -> RemotingCommand:
    ext = {
        "consumerGroup": "g", "topic": TOPIC, "queueId": "0", "queueOffset": str(offset), "maxMsgNums": "32",
        "sysFlag": "4", "commitOffset": "0", "suspendTimeoutMillis": "0", "subVersion": "0", "subscription": "*",
        "expressionType": "TAG",
    }  # fmt: skip
    return ask(neve, (Code.PULL_MESSAGE, ext, b""))[0]


def read_all(neve: Any) -> dict[int, bytes]:
    """Return every message from offset 0 on; like a consumer, follow the offsets in the answers."""
    found: dict[int, bytes] = {}
    offset = 0
    while True:
        answer = pull(neve, offset)
        assert answer.code in {FOUND, GOES_ON, MOVED, NOTHING_YET}, answer.remark
        if answer.code == NOTHING_YET:
            return found
        found |= {record.queue_offset: bytes(record.body) for record in iter_records(answer.body)}
        following = int(answer.ext["nextBeginOffset"])
        assert following > offset
        offset = following


def get(neve: Any, path: str) -> Any:
    with urllib.request.urlopen(f"http://{neve.admin}{path}", timeout=60) as response:
        return json.loads(response.read())


def post(neve: Any, path: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(post_request(f"http://{neve.admin}{path}"), timeout=90) as response:
        return [json.loads(line) for line in response]


def offload(neve: Any, query: str = "?roll=1") -> dict[str, Any]:
    return post(neve, f"/archive/offload{query}")[-1]


def journal_of(store: Path) -> list[Any]:
    return [entry for _, entry in entries(open_source(f"dir:{store}"), "broker-a")]


def refusal(data: Path, store: str, *settings: str) -> str:
    """Return the one-line error of a `neve broker` that may not start; its exit code is the archive's."""
    options = [f"storePathRootDir={data / 'broker'}", f"storeUrl={store}", "listenPort=0", "adminPort=-1", *settings]
    command = [NEVE, "broker", "--set", "mappedFileSizeCommitLog=64k"]
    ended = subprocess.run(
        [*command, *(part for option in options for part in ("--set", option))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 5, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr.strip().splitlines()[-1]
