"""A message pulled from the archive is byte-identical to the same message pulled from the log.

This includes messages whose object was compacted, and redelivered messages. `make test` runs a few thousand messages;
`make identity` runs the 100,000 of the acceptance run (NEVE_IDENTITY_MESSAGES).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import random
import socket
import struct
import subprocess
import sys
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from infra.objects import minio
from infra.objects.open import open_store
from neve.archive.catalog.journal_reader import catalogs
from neve.record.bodies import encode_batch
from neve.record.codec import decode_record
from neve.remoting.command import RemotingCommand, decode_command, encode_command
from neve.remoting.frame import FrameDecoder
from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import NeveServer
from tests.kit.wire.admin_port import post_request

if TYPE_CHECKING:
    from collections.abc import Iterator

MESSAGES = int(os.environ.get("NEVE_IDENTITY_MESSAGES", "3000"))
BODY_MAX = 1 << 20
SMALL_BODY_MAX = 4 << 10  # Small enough that one object of all messages is still below the size limit of compaction.
TOPIC = "shapes"
QUEUES = 4
PARTS = 5  # Each batch becomes an object; all but the last are compacted twice.
NOW = 1_700_000_000_000

Shaped = tuple[str, bytes, bytes, dict[str, str]]  # Shape, body, properties, and changes to the send header.


def shapes(random_: random.Random, body_max: int = BODY_MAX) -> Iterator[Shaped]:
    """Yield messages without end; all shapes are equally frequent."""
    makers: list[Callable[[bytes], tuple[str, bytes, bytes, dict[str, str]]]] = [
        lambda b: ("plain", b, b"TAGS\x01a\x02KEYS\x01k1 k2\x02", {}),
        lambda b: ("no properties", b, b"", {}),
        lambda b: ("many properties", b, b"".join(b"name%d\x01value%d\x02" % (i, i) for i in range(200)), {}),
        lambda b: ("unicode", b, "TAGS\x01é😀\x02ключ\x01значение\x02".encode(), {}),
        lambda b: ("no last separator", b, b"TAGS\x01b\x02x\x01y", {}),
        lambda b: ("repeated key", b, b"x\x011\x02x\x012\x02KEYS\x01k\x02", {}),
        lambda b: ("empty value, missing separator", b, b"x\x01\x02lonely\x02\x01v\x02\x02", {}),
        lambda b: ("invalid utf-8", b, b"TAGS\x01\xff\xfe\x02x\x01\xc3\x28\x02", {}),
        lambda b: ("born in an absurd time", b, b"TAGS\x01c\x02", {"g": str(random_.choice([2**62, -1, -(2**62), 0]))}),
        lambda b: ("compressed", zlib.compress(b), b"TAGS\x01d\x02", {"f": str(0x301)}),
        lambda b: ("empty body", b"", b"TAGS\x01e\x02", {}),
        lambda b: ("flags", b, b"TAGS\x01f\x02", {"h": "-7", "j": "3"}),
    ]
    while True:
        for make in makers:
            length = int(math.exp(random_.uniform(0, math.log(body_max)))) - 1
            yield make(random_.randbytes(length))


class Pulled(NamedTuple):
    """A record as a consumer received it."""

    size: int
    digest: bytes
    body_length: int
    body_crc: int


class RawClient:
    """A client that pipelines requests over one socket and sets bytes that a stock client would not set."""

    def __init__(self, address: str, host: str | None = None) -> None:
        named, port = address.rsplit(":", 1)
        self._socket = socket.create_connection((host or named, int(port)), timeout=60)
        self._decoder = FrameDecoder()
        self._opaque = 0

    def close(self) -> None:
        self._socket.close()

    def request(self, code: int, ext: dict[str, str], body: bytes = b"") -> int:
        self._opaque += 1
        command = RemotingCommand(code=code, opaque=self._opaque, ext=ext, body=body)
        encoded = encode_command(command)
        self._socket.sendall(encoded if isinstance(encoded, bytes) else b"".join(encoded))
        return self._opaque

    def response(self) -> RemotingCommand:
        while (frame := self._decoder.next_frame()) is None:
            received = self._socket.recv(1 << 20)
            assert received, "the broker closed the connection"
            self._decoder.receive_data(received)
        return decode_command(frame)

    def call(self, code: int, ext: dict[str, str], body: bytes = b"") -> RemotingCommand:
        self.request(code, ext, body)
        return self.response()


def send(address: str, messages: Iterator[tuple[int, Shaped]]) -> Counter[str]:
    """Send each message with the batch request code, the only one that copies properties unchanged.

    Every second block is sent from an IPv6 address.
    """
    sent: Counter[str] = Counter()
    clients = RawClient(address), RawClient(address, "::1")
    client, in_flight = clients[0], 0
    for number, (shape, body, properties, changes) in messages:
        header = {
            "a": "identity", "b": TOPIC, "c": "TBW102", "d": str(QUEUES), "e": str(number % QUEUES), "f": "0",
            "g": str(NOW + number), "h": "0", "i": "", "j": "0", "k": "false", "m": "true",
        }  # fmt: skip
        several = [(body, int(changes.get("h", "0")), properties)] * (3 if number % 50 == 0 and len(body) < 4096 else 1)
        client.request(320, header | changes, encode_batch(several))
        sent[shape] += len(several)
        if client is clients[1]:
            sent["born at an IPv6 host"] += len(several)
        if len(several) > 1:
            sent["several in a batch"] += len(several)
        in_flight += 1
        if in_flight == 16:
            for _ in range(in_flight):
                assert client.response().code == 0
            in_flight, client = 0, clients[client is clients[0]]
    for _ in range(in_flight):
        assert client.response().code == 0
    for each in clients:
        each.close()
    return sent


def pull(client: RawClient, queue: int, offset: int) -> RemotingCommand:
    """Repeat a pull while the broker asks for it; on a busy machine a row group may take longer than a pull waits."""
    answers: list[RemotingCommand] = []

    def answered() -> bool:
        answer = client.call(
            11,
            {
                "consumerGroup": "identity", "topic": TOPIC, "queueId": str(queue), "queueOffset": str(offset),
                "maxMsgNums": "32", "sysFlag": "4", "commitOffset": "0", "suspendTimeoutMillis": "0",
                "subscription": "*", "subVersion": "0", "expressionType": "TAG", "maxMsgBytes": str(4 << 20),
            },
        )  # fmt: skip
        answers.append(answer)
        return answer.code != 2

    wait_until(answered, f"offset {offset} of queue {queue}")
    assert answers[-1].code == 0, (answers[-1].code, answers[-1].remark, queue, offset)
    return answers[-1]


def pull_all(client: RawClient) -> dict[tuple[int, int], Pulled]:
    """Return each record as received, by (queue, offset)."""
    records: dict[tuple[int, int], Pulled] = {}
    for queue in range(QUEUES):
        offset, bound = 0, 1
        while offset < bound:
            answer = pull(client, queue, offset)
            body, at = bytes(answer.body), 0
            while at < len(body):
                (size,) = struct.unpack_from(">i", body, at)
                key = struct.unpack_from(">i", body, at + 12)[0], struct.unpack_from(">q", body, at + 20)[0]
                assert key == (queue, offset), "offsets are dense"
                wire = body[at : at + size]
                record = decode_record(wire)
                records[key] = Pulled(size, hashlib.sha256(wire).digest(), len(record.body), zlib.crc32(record.body))
                at, offset = at + size, offset + 1
            bound = int(answer.ext["maxOffset"])
    return records


def told_by(admin: str, order: str) -> list[dict[str, object]]:
    request = post_request(f"http://{admin}/archive/{order}")
    with urllib.request.urlopen(request, timeout=1800) as answer:
        return [json.loads(line) for line in answer if line.strip()]


def keys_in(store: str) -> list[str]:
    """Return the keys of the objects in the readers' view, in log order."""
    (catalog,) = catalogs(open_store(store)).values()
    return [name.key for name in catalog.objects(TOPIC)]


# Run in a new process: a JVM lives as long as its Python process and keeps its first credentials.
SPARK = """
import json, sys
from neve import spark as neve_spark
from pyspark.sql.functions import expr
store, topic = sys.argv[1:]
spark = neve_spark.session(store, master="local[2]", conf={"spark.ui.enabled": "false"})
sums = "count(*)", "min(queue_offset)", "max(queue_offset)", "sum(length(body))", "sum(crc32(body))"
rows = neve_spark.read_topic(spark, topic, store=store).groupBy("queue_id").agg(*map(expr, sums)).collect()
print(json.dumps([list(row) for row in rows]))
spark.stop()
"""


def seen_by_spark(store: str) -> dict[int, tuple[int, ...]]:
    """Return by queue the count, first and last offset, total body size and sum of CRCs."""
    done = subprocess.run([sys.executable, "-c", SPARK, store, TOPIC], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {row[0]: tuple(row[1:]) for row in json.loads(done.stdout.splitlines()[-1])}


def summed(records: dict[tuple[int, int], Pulled]) -> dict[int, tuple[int, ...]]:
    """Return the same sums for pulled messages."""
    found: dict[int, tuple[int, ...]] = {}
    for queue in range(QUEUES):
        mine = {offset: record for (of, offset), record in records.items() if of == queue}
        lengths, crcs = (sum(column) for column in zip(*(record[2:] for record in mine.values()), strict=True))
        found[queue] = len(mine), min(mine), max(mine), lengths, crcs
    return found


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    with minio.running(tmp_path / "minio") as server:
        minio.create_bucket(server, "neve")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        store = server.url("neve", "identity")
        # Disable throttling of the workers: this test is about bytes, and on a busy machine it would only slow the test
        # down.
        settings = {
            "bindAddress": "127.0.0.1,::1", "mappedFileSizeCommitLog": 64 << 20,
            "archiveWorkerPriority": "normal", "coldReadPriority": "normal",
        }  # fmt: skip
        with NeveServer(tmp_path, store=store, settings=settings) as neve:
            yield neve.ready | {"store": store}
            assert neve.stop() == 0


@pytest.mark.servers
def test_archived_messages_equal_local_messages_byte_for_byte(broker: dict[str, object]) -> None:
    address, admin, store = (str(broker[name]) for name in ("broker", "admin", "store"))
    sent = send(address, itertools.islice(enumerate(shapes(random.Random(1))), MESSAGES))
    client = RawClient(address)
    hot = pull_all(client)
    assert told_by(admin, "offload?roll=true&evict=true"), "the offload told nothing"
    assert_same(client, hot)
    client.close()
    assert seen_by_spark(store) == summed(hot)
    volume = sum(record.size for record in hot.values())
    print(f"{len(hot)} records, {volume / 2**20:.0f} MiB, equal; shapes: {dict(sent)}")


@pytest.mark.servers
def test_twice_compacted_messages_equal_local_messages_byte_for_byte(broker: dict[str, object]) -> None:
    address, admin, store = (str(broker[name]) for name in ("broker", "admin", "store"))
    count = MESSAGES * PARTS // (PARTS - 1)
    messages, sent = itertools.islice(enumerate(shapes(random.Random(2), SMALL_BODY_MAX)), count), Counter[str]()
    made: list[str] = []
    for part in range(PARTS):
        sent += send(address, itertools.islice(messages, count // PARTS if part < PARTS - 1 else None))
        assert told_by(admin, "offload?roll=true"), "the offload told nothing"
        if part % 2 or part == PARTS - 1:
            before = keys_in(store)
            assert set(made) < set(before), "what was made is there, and more"
            *_, done = told_by(admin, f"compact?topic={TOPIC}")
            assert done["made"] == 1, done
            made = keys_in(store)
            assert len(made) == 1
            assert made[0] not in before
    client = RawClient(address)
    hot = pull_all(client)
    told_by(admin, "offload?roll=true&evict=true")
    assert keys_in(store) == made
    assert_same(client, hot)
    client.close()
    assert seen_by_spark(store) == summed(hot)
    print(f"{len(hot)} records, {sum(record.size for record in hot.values()) / 2**20:.0f} MiB, equal; {dict(sent)}")


def assert_same(client: RawClient, hot: dict[tuple[int, int], Pulled]) -> None:
    """Assert that messages pulled from the archive now equal those pulled from the log before."""
    assert client.call(31, {"topic": TOPIC, "queueId": "0"}).ext["offset"] == "0", "the minimum is the archive's"
    cold = pull_all(client)
    assert cold.keys() == hot.keys()
    assert [key for key in hot if hot[key] != cold[key]] == []
