"""Tests that a program based only on the format page, msgpack and PyArrow reads an archive."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.broker_controller import BrokerController
from infra.net.remoting_server import Connection
from infra.objects.directory import DirectoryStore
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import read_catalog
from neve.archive.format.broker_state import read_state
from neve.archive.format.journal import AnyEntry, Checkpoint, Forget, Gap, Topic, Unexpire, anchor, encode_entry
from neve.archive.format.keys import checkpoint_key, journal_key, pack_key
from neve.archive.store.source import open_source
from neve.remoting.codes import RequestCode as Code
from tests.kit.archive.catalog_state import state_of
from tests.kit.archive.checkpoints import put_checkpoint
from tests.kit.broker.in_process import ask, offload, running
from tests.kit.clock.waiting import until
from tests.unit.archive.checkpoint_fields import ERASURES, REWRITES

READER = Path(__file__).with_name("plain_reader.py")
HOUSE = {"broker", "infra", "lifecycle", "namesrv", "neve", "tests", "tiered", "access", "bench", "msgspec"}
COMPRESSED = 1
MESSAGES = [
    (b"", "", 0),
    (b"plain", "TAGS\x01red\x02KEYS\x01k1 k2\x02", 0),
    (bytes(range(256)), "TAGS\x01grün\x02shop\x01Zürich\x02", 0),
    (zlib.compress(b"packed " * 50), "UNIQ_KEY\x01AC110001\x02", COMPRESSED),
]


def read_plainly(root: Path, *options: str) -> Any:
    """Run the plain reader, check that it imports no neve module, and return its output."""
    command = [sys.executable, "-I", str(READER), str(root), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"msgpack", "pyarrow"} <= set(found["modules"])
    assert HOUSE & set(found["modules"]) == set()
    return found


Sent = dict[tuple[str, int, int], tuple[bytes, str, int]]


async def send_all(connection: Connection, topic: str, rounds: int) -> Sent:
    sent: Sent = {}
    for number in range(rounds * len(MESSAGES)):
        body, properties, flags = MESSAGES[number % len(MESSAGES)]
        queue = number % 3
        answer = await ask(
            connection, Code.SEND_MESSAGE_V2, body, a="p", b=topic, c="TBW102", d=4, e=queue, f=flags, g=1, h=7,
            i=properties, j=0, k="false", m="false",
        )  # fmt: skip
        assert answer.code == 0, answer.remark
        sent[topic, queue, int(answer.ext["queueOffset"])] = (body, properties, flags)
    return sent


async def write_checkpoint(broker: BrokerController) -> None:
    """Write a due checkpoint; later entries are read from the journal."""
    journal = broker.archive.journal
    assert journal is not None
    before = journal.catalog.checkpoint
    broker.archive.jobs.run_now("checkpoint")
    await until(lambda: journal.catalog.checkpoint > before, "a checkpoint")


def test_plain_reader_reads_a_brokers_archive_by_the_page_alone(tmp_path: Path) -> None:
    asyncio.run(_archived_lost_and_deleted(tmp_path))


async def _archived_lost_and_deleted(tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = (f"storeUrl=dir:{store}", "archivePeriod=24h", "archiveMinBytes=1", "journalCheckpointEntries=3")
    async with running(tmp_path / "first", *settings) as (broker, connection):
        kept = await send_all(connection, "orders", 6)
        await send_all(connection, "gone%soon", 1)
        await offload(broker)
        assert (await ask(connection, Code.DELETE_TOPIC_IN_BROKER, topic="gone%soon")).code == 0
        kept |= await send_all(connection, "orders", 3)
        kept |= await send_all(connection, "prices", 3)
        await offload(broker)
        await write_checkpoint(broker)
        await ask(connection, Code.PULL_MESSAGE, consumerGroup="g", topic="orders", queueId=1, queueOffset=0,
                  maxMsgNums=1, sysFlag=4, commitOffset=0, suspendTimeoutMillis=0, subVersion=0, subscription="*",
                  expressionType="TAG")  # fmt: skip
        position = {"consumerGroup": "g", "topic": "orders", "queueId": 1, "commitOffset": 5}
        assert (await ask(connection, Code.UPDATE_CONSUMER_OFFSET, **position)).code == 0
        lost = await send_all(connection, "orders", 1)
    async with running(tmp_path / "second", *settings, restoring=True) as (broker, connection):
        kept |= await send_all(connection, "orders", 2)
        await offload(broker)

    found = read_plainly(store)
    assert (found["cluster"], list(found["brokers"])) == ("DefaultCluster", ["broker-a"])
    said = found["brokers"]["broker-a"]
    assert said["checkpoint"] > 0
    assert said["applied"] == said["end"] - said["checkpoint"] - 1

    messages = {(one["topic"], one["queue_id"], one["queue_offset"]): one for one in said["messages"]}
    assert len(messages) == len(said["messages"])
    assert set(messages) == set(kept)
    for place, (body, properties, flags) in kept.items():
        assert_equals_sent(messages[place], body, properties, flags)
    spans = [span for span in said["gaps"] if span[0] == "orders"]
    for _, queue, offset in lost:
        assert any(first <= offset <= last for _, of, first, last in spans if of == queue), "what is nowhere is said"
    for topic, queue, offset in kept:
        assert not any(
            first <= offset <= last for name, of, first, last in said["gaps"] if (name, of) == (topic, queue)
        )
    assert dict(said["tombstones"]["gone%soon"]) == {0: 2, 1: 1, 2: 1}
    assert_is_the_catalog(said, read_catalog(open_source(f"dir:{store}"), "broker-a"))

    state = read_state(open_source(f"dir:{store}"), "broker-a")
    assert state is not None
    assert said["state"]["offsets"]["orders@g"] == {"1": 5}
    assert said["state"] == json.loads(msgspec.json.encode(state))
    assert (said["state"]["clean"], said["state"]["epoch"]) == (True, said["epoch"])


def assert_equals_sent(row: dict[str, Any], body: bytes, properties: str, flags: int) -> None:
    named = dict(pair.split("\x01") for pair in properties.split("\x02") if pair)
    assert base64.b64decode(row["body"]) == body
    assert row["body_codec"] == ("zlib" if flags else "none")
    assert row["tags"] == named.get("TAGS")
    assert (row["keys"] or []) == named.get("KEYS", "").split()
    assert named.items() <= dict(row["properties"]).items()
    assert (row["flag"], row["damaged"], row["reconsume_times"]) == (7, False, 0)
    assert row["born_host"].startswith("127.0.0.1:")
    if "UNIQ_KEY" in named:
        assert row["msg_id"] == named["UNIQ_KEY"]


def assert_is_the_catalog(said: dict[str, Any], catalog: Catalog) -> None:
    state = state_of(catalog)
    assert (said["epoch"], said["end"]) == (catalog.epoch, catalog.next_seq)
    assert said["live"] == sorted(name.key for name in state.names)
    assert said["expiring"] == sorted(name.key for name, _ in state.expiring)
    assert said["open"] == [
        [number, sorted(one.key for one in names)] for number, names in sorted(catalog.rounds.open_intents().items())
    ]
    gaps = [(gap.topic, gap.queue, gap.first, gap.last) for gap in state.gaps]
    assert said["gaps"] == sorted(map(list, gaps))
    minimums = [[topic, queue, minimum] for topic, queue, minimum in state.queues if minimum]
    assert said["minimums"] == sorted(minimums)


HISTORY: list[AnyEntry] = [
    *REWRITES,
    Unexpire(keys=["b", "never heard of"], minimums={"t": {0: 3}, "gone": {0: 2}}),
    *ERASURES,
    Topic(topic="forgotten", deleted=True, minimums={0: 7}),
    Gap(topic="forgotten", queue=0, first=7, last=9, reason="lost"),
    Forget(topics=["forgotten", "never heard of"]),
]


def write_journal(store: DirectoryStore, broker: str, entries: list[AnyEntry], *checkpoints: int) -> Catalog:
    """Write the entries, and a checkpoint after each of the given counts of entries."""
    catalog, newest = Catalog(), -1
    for count, entry in enumerate(entries, 1):
        stood = msgspec.structs.replace(entry, checkpoint=newest)
        store.put(journal_key("", broker, catalog.next_seq), encode_entry(stood), if_absent=True)
        catalog.apply(catalog.next_seq, stood, anchor(encode_entry(stood)))
        if count in checkpoints:
            seq = catalog.next_seq - 1
            key = checkpoint_key("", broker, seq)
            put_checkpoint(store, catalog, broker)
            entry_of_it = Checkpoint(key=key, through_seq=seq, checkpoint=newest)
            store.put(journal_key("", broker, seq + 1), encode_entry(entry_of_it), if_absent=True)
            catalog.apply(seq + 1, entry_of_it, anchor(encode_entry(entry_of_it)))
            newest = seq
    return catalog


def test_plain_reader_applies_every_entry_like_the_catalog(tmp_path: Path) -> None:
    """Each prefix of a history is a broker, without a checkpoint and with one at every position."""
    store = DirectoryStore(tmp_path)
    store.put("_neve/format.msgpack", msgspec.msgpack.encode({"version": 1, "cluster": "c"}))
    expected = {}
    for length in range(1, len(HISTORY) + 1):
        expected[f"plain {length}"] = write_journal(store, f"plain {length}", HISTORY[:length])
        expected[f"cut {length}"] = write_journal(store, f"cut {length}", HISTORY, length)
        both = (length // 2, length) if length > 1 else (length,)
        expected[f"two {length}"] = write_journal(store, f"two {length}", HISTORY, *both)
    brokers = read_plainly(tmp_path, "--journal")["brokers"]
    assert set(brokers) == set(expected)
    for broker, catalog in expected.items():
        assert_is_the_catalog(brokers[broker], catalog)
    assert all(brokers[f"cut {length}"]["checkpoint"] == length - 1 for length in range(1, len(HISTORY) + 1))


@pytest.mark.parametrize("what", ["checkpoint", "pack"])
@pytest.mark.parametrize("harm", ["gone", "cut", "altered"])
def test_plain_reader_falls_back_to_an_earlier_checkpoint(tmp_path: Path, harm: str, what: str) -> None:
    store = DirectoryStore(tmp_path)
    store.put("_neve/format.msgpack", msgspec.msgpack.encode({"version": 1, "cluster": "c"}))
    catalog = write_journal(store, "b", HISTORY, 4, 9)
    file = tmp_path / (checkpoint_key("", "b", 9) if what == "checkpoint" else pack_key("", "b", 9, 0))
    data = file.read_bytes()
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(data[:-9] if harm == "cut" else data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    said = read_plainly(tmp_path, "--journal")["brokers"]["b"]
    assert said["checkpoint"] == 3
    assert_is_the_catalog(said, catalog)
