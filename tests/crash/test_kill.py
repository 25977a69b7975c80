"""SIGKILL to a whole `neve up` under load, and at each step of an offload round; then disk and bucket are asked.

NEVE_KILLS=50 sets the number of kills under load; a few are enough for every commit.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import threading
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path

import pytest

from bench.servers import NeveServer, wait_until
from bench.wire import OPAQUE_FIRST, SEND_V2, SUCCESS, Client, request, send_ext
from infra.object_store import open_store
from neve.archive.follow import catalogs

KILLS = int(os.environ.get("NEVE_KILLS", "4"))
SEED = int(os.environ.get("NEVE_SEED", "20"))
QUEUES = 4
IN_FLIGHT = 128
#: How long after the first acknowledgement a kill may come.
KILL_WITHIN_S = 0.8

Place = tuple[int, int]  # queue, offset


class Ledger:
    """Every acknowledgement that any incarnation of the broker gave, and what was read back so far."""

    def __init__(self) -> None:
        self.acknowledged: dict[Place, bytes] = {}
        self.sent = itertools.count()
        self.in_flight_at_kill: list[int] = []

    def note(self, place: Place, body: bytes) -> None:
        assert place not in self.acknowledged, f"{place} was given to {self.acknowledged[place]!r} and to {body!r}"
        self.acknowledged[place] = body


def load_until_dead(server: NeveServer, topic: str, ledger: Ledger, delay: float) -> None:
    """Keeps IN_FLIGHT sends under way until the broker is killed, `delay` seconds after its first answer."""
    open_sends: dict[int, tuple[int, bytes]] = {}
    killer: threading.Timer | None = None
    with Client(server.broker) as client, contextlib.suppress(ConnectionError):
        while True:
            frames = []
            while len(open_sends) < IN_FLIGHT:
                number = next(ledger.sent)
                queue, body = number % QUEUES, b"%d|" % number + b"x" * (number % 700)
                open_sends[OPAQUE_FIRST + number] = (queue, body)
                frames.append(request(SEND_V2, OPAQUE_FIRST + number, send_ext(topic, queue), body))
            client.socket.sendall(b"".join(frames))
            data = client.socket.recv(1 << 18)
            if not data:
                break
            for answer in client.responses.feed(data):
                assert answer.code == SUCCESS, answer
                queue, body = open_sends.pop(answer.opaque)
                ledger.note((queue, int(answer.extFields["queueOffset"])), body)
            if killer is None:
                killer = threading.Timer(delay, server.kill)
                killer.start()
    assert killer is not None, "the broker died before its first answer"
    killer.join()
    ledger.in_flight_at_kill.append(len(open_sends))


def check_everything(server: NeveServer, topic: str, ledger: Ledger) -> None:
    """Each acknowledged message is where it was said to be, offsets are dense, and no message is there twice."""
    seen: set[bytes] = set()
    with Client(server.broker) as client:
        for queue in range(QUEUES):
            first, end = client.bounds(topic, queue)
            assert first == 0
            expected = 0
            for record in client.read(topic, queue, 0, end):
                assert record.queue_offset == expected, f"queue {queue}"
                expected += 1
                assert record.body not in seen, f"{record.body[:20]!r} is stored twice"
                seen.add(record.body)
                acknowledged = ledger.acknowledged.get((queue, record.queue_offset))
                assert acknowledged is None or acknowledged == record.body, f"{queue}/{record.queue_offset} changed"
                # What is visible now may be consumed now: from here on it must stay.
                ledger.acknowledged[(queue, record.queue_offset)] = record.body
            assert expected == end
            lost = [offset for q, offset in ledger.acknowledged if q == queue and offset >= end]
            assert not lost, f"queue {queue} ends at {end}; acknowledged and gone: {lost[:5]}"


def torn_tails(server: NeveServer) -> int:
    """Recoveries that had to cut something off, by the broker's own account."""
    reported = re.findall(r"cut[^0-9]{1,40}(\d+) bytes|torn", server.log())
    return len(reported)


def test_no_acknowledged_message_is_lost(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    ledger = Ledger()
    server = NeveServer(tmp_path, settings={"flushDiskType": "SYNC_FLUSH"})
    try:
        server.start()
        with Client(server.broker) as client:
            client.create_topic("crash", QUEUES)
        for _ in range(KILLS):
            load_until_dead(server, "crash", ledger, chance.uniform(0.0, KILL_WITHIN_S))
            server.start()
            check_everything(server, "crash", ledger)
        # Not every kill meets a full pipe, but a harness that never does proves nothing.
        assert max(ledger.in_flight_at_kill) >= 100, ledger.in_flight_at_kill
        print(
            f"kills {KILLS}, stored {len(ledger.acknowledged)}, in flight at the kills {ledger.in_flight_at_kill}, "
            f"torn tails {torn_tails(server)}"
        )
        assert server.stop() == 0
        server.start()
        check_everything(server, "crash", ledger)
    finally:
        server.kill()


# ---- the offload round ------------------------------------------------------------------------------------

MESSAGES = 400
STEPS = [
    "offload.before_intent",
    "offload.after_intent",
    "offload.after_upload",
    "offload.before_commit",
    "offload.after_commit",
    "store.roll:2",  # the first is the first segment of an empty log
    "store.evict",
]


def post_offload(server: NeveServer) -> list[dict[str, object]]:
    """One round with roll and evict; [] where the broker died on the way."""
    call = urllib.request.Request(f"http://{server.admin}/archive/offload?roll=1&evict=1", method="POST")
    try:
        with urllib.request.urlopen(call, timeout=60) as answer:
            return [json.loads(line) for line in answer.read().splitlines() if line.strip()]
    except (urllib.error.URLError, ConnectionError, TimeoutError, OSError, json.JSONDecodeError):
        return []


def produce(server: NeveServer, start: int, count: int) -> dict[Place, bytes]:
    sent: dict[Place, bytes] = {}
    with Client(server.broker) as client:
        for number in range(start, start + count):
            body = b"%d|" % number + b"y" * (number % 300)
            sent[(number % QUEUES, client.send("tiles", number % QUEUES, body))] = body
    return sent


def stored(server: NeveServer) -> dict[Place, bytes]:
    found: dict[Place, bytes] = {}
    with Client(server.broker) as client:
        for queue in range(QUEUES):
            _, end = client.bounds("tiles", queue)
            for record in client.read("tiles", queue, 0, end):
                assert (queue, record.queue_offset) not in found
                found[(queue, record.queue_offset)] = record.body
    return found


def assert_tiles(store_url: str) -> int:
    """The catalog that the journal adds up to: each queue's runs follow one another from 0 on. Returns the rows."""
    store = open_store(store_url)
    rows = 0
    for catalog in catalogs(store).values():
        assert not catalog.gaps()
        assert not catalog.open_intents()
        runs: dict[int, list[tuple[int, int]]] = defaultdict(list)
        ranges = sorted((name.start, name.end) for name in catalog.objects("tiles"))
        for (_, before), (after, _) in itertools.pairwise(ranges):
            assert before <= after, "two objects of one topic overlap"
        for name in catalog.objects("tiles"):
            assert store.head(name.key).size == name.size
            for queue, (first, last, _) in name.queues.items():
                runs[queue].append((first, last))
        for queue, tiles in runs.items():
            expected = 0
            for first, last in sorted(tiles):
                assert first == expected, f"queue {queue}: {first} after {expected - 1}"
                expected = last + 1
            rows += expected
    return rows


@pytest.mark.parametrize("step", STEPS)
def test_kill_inside_an_offload_round(tmp_path: Path, step: str) -> None:
    server = NeveServer(tmp_path, settings={"archiveMinBytes": "1"})
    try:
        server.start(env={"NEVE_FAILPOINT": f"{step}=crash"})
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
        assert assert_tiles(server.store) == len(sent)
        assert server.stop() == 0
    finally:
        server.kill()


def is_alive(pid: int) -> bool:
    """Whether the process still runs; a zombie that nobody has waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
