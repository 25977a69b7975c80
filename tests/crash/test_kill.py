"""SIGKILL a whole `neve up` under load and at each step of an offload round, then verify disk and bucket.

NEVE_KILLS=50 sets the number of kills under load; a few are enough for every commit. The page cache survives a process,
so a record is torn only if the kill hits the copy into the log: large bodies make that likely.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyarrow.dataset import dataset

import neve.archive
from bench.wire import OPAQUE_FIRST, SEND_V2, SUCCESS, Client, request, send_ext
from infra.objects.open import open_store
from tests.kit.clock.waiting import wait_until
from tests.kit.server.killed_under_load import QUEUES, assert_tiles, post_offload, produce, stored
from tests.kit.server.neve import NeveServer

KILLS = int(os.environ.get("NEVE_KILLS", "4"))
SEED = int(os.environ.get("NEVE_SEED", "20"))
#: With this many kills, a load that never tears a record is unsuitable.
KILLS_THAT_TEAR = 50
#: The maximum number of acknowledgements between the first one of each load and the kill.
KILL_WITHIN = 2000
FIRST_ANSWER_S = 60.0

Place = tuple[str, int, int]  # topic, queue, offset
_POOL = random.Random(SEED).randbytes(3 << 20)


@dataclass(frozen=True, slots=True)
class Load:
    """The sends that one connection keeps in flight."""

    topic: str
    in_flight: int
    smallest: int
    largest: int

    def body(self, number: int) -> bytes:
        size = self.smallest + number * 7919 * 4099 % (self.largest - self.smallest)
        return b"%d|" % number + _POOL[:size]


SMALL = Load("small", 128, 0, 700)
LARGE = Load("large", 4, 256 << 10, 3 << 20)
LOADS = [SMALL, LARGE, LARGE, LARGE]


def digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


class Ledger:
    """All acknowledgements by any incarnation of the broker, and the messages read back so far."""

    def __init__(self) -> None:
        self.acknowledged: dict[Place, bytes] = {}
        self.ends: dict[tuple[str, int], int] = defaultdict(int)  # One above the highest acknowledged offset.
        self.read_to: dict[tuple[str, int], int] = defaultdict(int)
        self.where: dict[bytes, Place] = {}
        self.sent = itertools.count()
        self.in_flight_at_kill: list[int] = []
        self._lock = threading.Lock()

    def note(self, place: Place, body: bytes) -> None:
        topic, queue, offset = place
        with self._lock:
            assert place not in self.acknowledged, f"{place} was given to two messages, now to {body[:20]!r}"
            self.acknowledged[place] = digest(body)
            self.ends[topic, queue] = max(self.ends[topic, queue], offset + 1)


def keep_sending(server: NeveServer, load: Load, ledger: Ledger, answered: threading.Event) -> int:
    """Keep the load's sends in flight until the broker dies; return how many were unanswered then."""
    open_sends: dict[int, tuple[int, bytes]] = {}
    with contextlib.suppress(ConnectionError), Client(server.broker, FIRST_ANSWER_S) as client:
        while True:
            frames = []
            while len(open_sends) < load.in_flight:
                number = next(ledger.sent)
                queue, body = number % QUEUES, load.body(number)
                open_sends[OPAQUE_FIRST + number] = (queue, body)
                frames.append(request(SEND_V2, OPAQUE_FIRST + number, send_ext(load.topic, queue), body))
            client.socket.sendall(b"".join(frames))
            data = client.socket.recv(1 << 18)
            if not data:
                break
            for answer in client.responses.feed(data):
                assert answer.code == SUCCESS, answer
                queue, body = open_sends.pop(answer.opaque)
                ledger.note((load.topic, queue, int(answer.extFields["queueOffset"])), body)
            answered.set()
    return len(open_sends)


def load_until_dead(server: NeveServer, ledger: Ledger, more: int) -> None:
    """Run all loads at once, and kill after each had an answer and `more` answers arrived."""
    answered = [threading.Event() for _ in LOADS]
    with ThreadPoolExecutor(len(LOADS)) as pool:
        running = [
            pool.submit(keep_sending, server, load, ledger, event) for load, event in zip(LOADS, answered, strict=True)
        ]
        missing = [event for event in answered if not event.wait(FIRST_ANSWER_S)]
        try:
            enough = len(ledger.acknowledged) + more
            wait_until(lambda: len(ledger.acknowledged) >= enough, f"{more} acknowledgements")
        finally:
            server.kill()  # The sends end only then.
        ledger.in_flight_at_kill.append(sum(one.result() for one in running))
    assert not missing, "a connection had no answer"


def check(server: NeveServer, ledger: Ledger, *, whole: bool = False) -> None:
    """Check that acknowledged messages are at their offsets, and that offsets are dense and no message occurs twice.

    Only messages that are new since the last check are read, unless `whole` is set.
    """
    with Client(server.broker, FIRST_ANSWER_S) as client:
        for topic, queue in itertools.product((SMALL.topic, LARGE.topic), range(QUEUES)):
            first, end = client.bounds(topic, queue)
            assert first == 0
            promised = max(ledger.ends[topic, queue], ledger.read_to[topic, queue])
            assert end >= promised, f"{topic}/{queue} ends at {end}, acknowledged up to {promised}"
            expected = 0 if whole else ledger.read_to[topic, queue]
            for record in client.read(topic, queue, expected, end):
                assert record.queue_offset == expected, f"{topic}/{queue}"
                place, found = (topic, queue, expected), digest(record.body)
                assert ledger.where.setdefault(found, place) == place, f"{record.body[:20]!r} is stored twice"
                # A visible message may have been consumed, so from here on it must be kept.
                assert ledger.acknowledged.setdefault(place, found) == found, f"{place} changed"
                expected += 1
            assert expected == end
            ledger.read_to[topic, queue] = end


def recoveries(server: NeveServer) -> Iterator[tuple[bool, int, int]]:
    """Return what each start logged: clean or not, bytes truncated, records without CRC entry."""
    report = r"log recovered: clean=(\w+) .*?records_without_crc=(\d+) truncated_bytes=(\d+)"
    for clean, without_crc, cut in re.findall(report, server.log()):
        yield clean == "True", int(cut), int(without_crc)


def test_acknowledged_messages_survive_kills_under_load(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    ledger = Ledger()
    server = NeveServer(tmp_path, settings={"flushDiskType": "SYNC_FLUSH"})
    try:
        server.start()
        with Client(server.broker) as client:
            for topic in (SMALL.topic, LARGE.topic):
                client.create_topic(topic, QUEUES)
        for _ in range(KILLS):
            load_until_dead(server, ledger, chance.randrange(KILL_WITHIN))
            server.start()
            check(server, ledger)
        check(server, ledger, whole=True)
        # Not every kill hits a full pipe, but a harness whose kills never do proves nothing.
        assert max(ledger.in_flight_at_kill) >= 100, ledger.in_flight_at_kill
        found = list(recoveries(server))[1:]
        assert [clean for clean, _, _ in found] == [False] * KILLS
        torn = [cut for _, cut, _ in found if cut]
        print(
            f"kills {KILLS}, stored {len(ledger.acknowledged)}, in flight at the kills {ledger.in_flight_at_kill}, "
            f"torn records {len(torn)}, bytes cut {torn}, records without CRC entry {sum(n for _, _, n in found)}"
        )
        assert torn or KILLS < KILLS_THAT_TEAR, "no kill tore a record"
        assert server.stop() == 0
        server.start()
        check(server, ledger, whole=True)
    finally:
        server.kill()


# ---- the offload round

MESSAGES = 400
STEPS = [
    "offload.before_intent",
    "offload.after_intent",
    # In the worker, which continues and uploads objects that are no longer awaited.
    "offload.after_encode=crash_parent",
    "offload.after_encode=crash_both",
    "object_store.mid_put=crash_both",
    "offload.after_upload",
    "offload.after_commit",
    "store.roll:2",  # The first visit is the first segment of an empty log.
    "offload.before_evict",
    "store.evict",  # Between renaming the segment and removing it.
]
#: Places in the worker, which the broker survives. If the second visit kills, the next worker has one left.
WORKER_STEPS = ["offload.after_encode:2", "object_store.mid_put"]


def assert_archive_holds(store_url: str, sent: dict[tuple[int, int], bytes]) -> None:
    """Check the archive with the journal, with the library, and with an engine that only lists Parquet files."""
    assert assert_tiles(store_url) == len(sent)
    topic = neve.archive.open(open_store(store_url)).topic("tiles")
    read = {(queue, record.queue_offset): bytes(record.body) for queue in range(QUEUES) for record in topic.read(queue)}
    assert read == sent
    rows = dataset(f"{store_url.removeprefix('dir:')}/topic=tiles", format="parquet", partitioning=None).to_table(
        columns=["queue_id", "queue_offset", "body"]
    )
    assert rows.num_rows == len(sent), "a row is listed twice, or not at all"
    listed = zip(*(rows[name].to_pylist() for name in rows.column_names), strict=True)
    assert {(queue, offset): body for queue, offset, body in listed} == sent


@pytest.mark.parametrize("step", STEPS)
def test_offload_round_survives_a_kill_at_each_step(tmp_path: Path, step: str) -> None:
    server = NeveServer(tmp_path, settings={"archiveMinBytes": "1"})
    try:
        server.start(env={"NEVE_FAILPOINT": step if "=" in step else f"{step}=crash"})
        with Client(server.broker) as client:
            client.create_topic("tiles", QUEUES)
        sent = produce(server, 0, MESSAGES)
        post_offload(server)
        pids = [int(pid) for pid in server.ready["pids"]]
        wait_until(lambda: not all(is_alive(pid) for pid in pids), f"death at {step}", timeout=30)
        server.kill()

        server.start()
        sent |= produce(server, MESSAGES, 40)
        assert post_offload(server), "the next round said nothing"
        assert stored(server) == sent
        assert_archive_holds(server.store, sent)
        assert server.stop() == 0
    finally:
        server.kill()


@pytest.mark.parametrize("step", WORKER_STEPS)
def test_offload_round_survives_a_killed_worker_at_each_step(tmp_path: Path, step: str) -> None:
    """A killed worker is replaced by another, which repeats its objects. Only objects that kill each worker fail."""
    server = NeveServer(tmp_path, settings={"archiveMinBytes": "1", "archivePeriod": "1h"})
    try:
        server.start(env={"NEVE_FAILPOINT": f"{step}=crash"})
        with Client(server.broker) as client:
            for topic in ("tiles", "more", "last"):
                client.create_topic(topic, QUEUES)
            for topic in ("more", "last"):
                client.send(topic, 0, b"x")
        sent = produce(server, 0, MESSAGES)
        events = [event["event"] for event in post_offload(server) if "event" in event]
        dies_each_time = ":" not in step  # Of `tiles`: small objects are not uploaded in parts.
        wait_until(lambda: server.log().count("the tier worker ended with -9") >= 2, "two deaths of a worker")
        assert events.count("uploaded") == (2 if dies_each_time else 3), events
        if dies_each_time:
            server.kill()
            server.start()
            assert post_offload(server), "the next round said nothing"
        assert stored(server) == sent
        assert_archive_holds(server.store, sent)
        assert server.stop() == 0
    finally:
        server.kill()


def is_alive(pid: int) -> bool:
    """Return whether the process still runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
