"""A broker that is killed while producers send to it, and checks of what it stored."""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from collections import defaultdict

from bench.wire import Client
from infra.objects.open import open_store
from neve.archive.catalog.journal_reader import catalogs
from tests.kit.server.neve import NeveServer
from tests.kit.wire.admin_port import post_request

QUEUES = 4


def post_offload(server: NeveServer) -> list[dict[str, object]]:
    """Run one round with roll and evict; return [] if the broker died during it."""
    try:
        call = post_request(f"http://{server.admin}/archive/offload?roll=1&evict=1")
        with urllib.request.urlopen(call, timeout=60) as answer:
            return [json.loads(line) for line in answer.read().splitlines() if line.strip()]
    except (urllib.error.URLError, ConnectionError, TimeoutError, OSError, json.JSONDecodeError):
        return []


def produce(server: NeveServer, start: int, count: int) -> dict[tuple[int, int], bytes]:
    sent: dict[tuple[int, int], bytes] = {}
    with Client(server.broker) as client:
        for number in range(start, start + count):
            body = b"%d|" % number + b"y" * (number % 300)
            sent[(number % QUEUES, client.send("tiles", number % QUEUES, body))] = body
    return sent


def stored(server: NeveServer) -> dict[tuple[int, int], bytes]:
    found: dict[tuple[int, int], bytes] = {}
    with Client(server.broker) as client:
        for queue in range(QUEUES):
            _, end = client.bounds("tiles", queue)
            for record in client.read("tiles", queue, 0, end):
                assert (queue, record.queue_offset) not in found
                found[(queue, record.queue_offset)] = record.body
    return found


def assert_tiles(store_url: str) -> int:
    """Assert that each queue's runs in the journal's catalog are contiguous from 0 on; return the number of rows."""
    store = open_store(store_url)
    rows = 0
    for catalog in catalogs(store).values():
        assert not catalog.gaps()
        assert not catalog.rounds.open_intents()
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
