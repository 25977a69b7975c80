"""Archiving by a broker set whose members are processes: masters are killed while they archive."""

from __future__ import annotations

import io
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq

from bench.wire import Client
from infra.objects.open import open_store
from neve.archive.catalog.journal_reader import catalogs
from neve.archive.format.journal import Epoch, decode_entry
from neve.archive.format.keys import journal_key
from tests.kit.clock.waiting import wait_until
from tests.kit.server.broker_set import TOPIC, BrokerSet, create_topic, producing, store_of, takes
from tests.kit.server.members import NAME
from tests.kit.server.neve import Serving

_ARCHIVED_S = 60.0


def archived(url: str) -> list[tuple[int, bytes]]:
    """Return (offset, body) of each row in each visible object, read like any Parquet reader does."""
    store = open_store(url)
    catalog = catalogs(store)[NAME]
    rows: list[tuple[int, bytes]] = []
    for name in catalog.objects(TOPIC):
        table = pq.read_table(io.BytesIO(store.get(name.key)), columns=["queue_offset", "body"])
        rows += zip(table.column("queue_offset").to_pylist(), table.column("body").to_pylist(), strict=True)
    return sorted(rows)


def archived_end(url: str) -> int:
    try:
        return catalogs(open_store(url))[NAME].max_offset(TOPIC, 0) or 0
    except FileNotFoundError:
        return 0  # The first master may not have run its first archiving round yet.


def archives_above(url: str, offset: int) -> bool:
    return archived_end(url) > offset


def read_from_the_first(member: Serving) -> list[bytes]:
    with Client(member.broker) as client:
        _, end = client.bounds(TOPIC, 0)
        return [bytes(record.body) for record in client.read(TOPIC, 0, 0, end)]


def test_archive_has_each_message_once_when_archiving_masters_are_killed(tmp_path: Path) -> None:
    url = f"dir:{tmp_path / 'bucket'}"
    settings = {"archiveMinBytes": 1, "archivePeriod": "1s", "statePeriod": "1s"}
    with BrokerSet(tmp_path, replication="sync", storeUrl=url, settings=settings) as brokers:
        create_topic(brokers)
        with producing(brokers) as producer:
            for _ in range(3):
                producer.has_sent(200)
                reached = archived_end(url)
                wait_until(partial(archives_above, url, reached), "the master archives", _ARCHIVED_S)
                former = brokers.master
                former.kill()
                assert brokers.master_after(former) is not former
                producer.has_sent(200)
                former.start()
                brokers.wait_until_in_sync(*brokers.members)
        with Client(brokers.master.broker) as client:
            _, end = client.bounds(TOPIC, 0)
        wait_until(lambda: archived_end(url) == end, "all is archived", _ARCHIVED_S)
        rows, read = archived(url), read_from_the_first(brokers.master)
        assert [offset for offset, _ in rows] == list(range(end)), "none missing, none twice"
        assert [body for _, body in rows] == read
        assert set(producer.acknowledged) <= {int(body) for body in read}
        store = open_store(url)
        catalog = catalogs(store)[NAME]
        assert catalog.gaps() == []
        entries = [decode_entry(store.get(journal_key("", NAME, seq))) for seq in range(catalog.next_seq)]
        said = [entry.master_epoch or 0 for entry in entries if isinstance(entry, Epoch)]
        assert said == sorted(said)
        assert len(set(said)) == 4
        assert len({entry.log_uuid for entry in entries if isinstance(entry, Epoch)}) == 1
        assert all("Traceback" not in member.log() for member in brokers.members)


def test_member_added_after_eviction_becomes_master_without_offset_reuse(tmp_path: Path) -> None:
    """The member joins when all messages of a topic are only in the bucket, and becomes master after all others die."""
    url = f"dir:{tmp_path / 'bucket'}"
    settings = {"archiveMinBytes": 1, "archivePeriod": "1s"}
    with ExitStack() as stack:
        brokers = stack.enter_context(
            BrokerSet(tmp_path, members=2, replication="sync-available", storeUrl=url, settings=settings)
        )
        create_topic(brokers)
        former, (slave,) = brokers.master, brokers.slaves
        for number in range(5):
            assert takes(former, b"%d" % number)

        def has_evicted() -> bool:
            former.post("/archive/offload?roll=1&evict=1")
            return not (store_of(former) / "commitlog" / f"{0:020d}").exists()

        wait_until(has_evicted, "all is archived, and what may go is gone", _ARCHIVED_S)
        young = stack.enter_context(brokers.newcomer())
        brokers.members.append(young)
        brokers.wait_until_in_sync(*brokers.members)
        assert not (store_of(young) / "commitlog" / f"{0:020d}").exists()
        slave.kill()
        brokers.wait_until_in_sync(former, young)
        former.kill()
        assert brokers.master_after(former) is young
        wait_until(lambda: takes(young, b"5"), "the new master takes messages", _ARCHIVED_S)
        assert read_from_the_first(young) == [b"%d" % number for number in range(6)]
        wait_until(lambda: archived_end(url) == 6, "it archives", _ARCHIVED_S)
        assert [offset for offset, _ in archived(url)] == list(range(6))
        assert catalogs(open_store(url))[NAME].gaps() == []
