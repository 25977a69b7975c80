"""Tests of the figures of `neve bench` and `neve top`."""

from __future__ import annotations

import os
import socket
import time

import pytest

from neve.admin.lag import QueueProgress
from neve.cli.bench_figures import Cost, Latencies, figures
from neve.cli.process_cpu import listening_at
from neve.cli.traffic import Rate, busiest, group_row, topic_row
from neve.client import MessageQueue


def test_latency_percentiles_are_upper_bounds_of_their_share() -> None:
    latencies = Latencies()
    for number in reversed(range(1, 1001)):
        latencies.add(number / 1000)
    assert latencies.figures() == {"p50_ms": 500, "p90_ms": 900, "p99_ms": 990, "p999_ms": 999, "max_ms": 1000}
    assert set(Latencies().figures().values()) == {None}
    one = Latencies()
    one.add(0.25)
    assert set(one.figures().values()) == {250}


def test_figures_have_cost_per_message_and_known_broker_cost() -> None:
    told = figures("produce", 1000, 1 << 20, 2.0, Cost(client=0.5, brokers=None))
    assert (told["messages_per_s"], told["mib_per_s"], told["client_cpu_us"]) == (500, 0.5, 500)
    assert (told["broker_cpu_us"], told["client_cpu_share"]) == (None, 0.25)
    assert figures("produce", 1000, 0, 2.0, Cost(0.5, 0.25))["broker_cpu_us"] == 250
    assert figures("produce", 0, 0, 1.0, Cost(0.5, 0.25))["client_cpu_us"] is None


def test_process_listening_on_a_local_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = listening_at(f"127.0.0.1:{port}")
        assert found is not None
        before = found.cpu_seconds()
        assert before == pytest.approx(sum(os.times()[:4]), abs=0.2)
        until = time.process_time() + 0.1
        while time.process_time() < until:
            pass
        after = found.cpu_seconds()
        assert after is not None and before is not None
        assert after >= before + 0.05
        assert listening_at(f"192.0.2.1:{port}") is None
    assert listening_at(f"127.0.0.1:{port}") is None


def standing(queue: int, *, lag: int, cold: int | None) -> QueueProgress:
    return QueueProgress(MessageQueue("T", "b", queue), 0, 0, lag, lag, cold, lag, None)


def test_group_tier_follows_from_its_remaining_messages() -> None:
    def tier(*standings: QueueProgress) -> object:
        return group_row("g", "T", Rate(), standings)["tier"]

    assert tier(standing(0, lag=5, cold=0)) == "hot"
    assert tier(standing(0, lag=5, cold=2), standing(1, lag=0, cold=0)) == "cold"
    assert tier(standing(0, lag=5, cold=5), standing(1, lag=1, cold=0)) == "cold+hot"
    assert tier(standing(0, lag=0, cold=0)) is None
    assert tier(standing(0, lag=5, cold=None)) is None


def test_rows_are_sorted_by_rate_then_lag() -> None:
    out = {("g", "A"): Rate(1.0, 10), ("h", "A"): Rate(2.0, 20), ("g", "B"): Rate(0.0, 0)}
    assert topic_row("A", Rate(4.04, 99.6), out) == {
        "topic": "A",
        "in_per_s": 4.0,
        "in_bytes_per_s": 100,
        "out_per_s": 3.0,
        "out_bytes_per_s": 30,
    }
    rows = [
        group_row("quiet", "T", Rate(), [standing(0, lag=1, cold=None)]),
        group_row("behind", "T", Rate(), [standing(0, lag=9, cold=None)]),
        group_row("busy", "T", Rate(3.0), []),
    ]
    assert [row["group"] for row in busiest(rows)] == ["busy", "behind", "quiet"]
