"""Tests of Pace, which limits the share of the interpreter for background work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from infra.clock import ManualClock, SystemClock
from infra.loop.in_steps import LoopPace
from infra.loop.locks import Event
from infra.loop.pace import Pace
from infra.loop.threads import SystemThreads
from infra.observe.metrics import Histogram, Metrics, Series, render


class Waits(SystemThreads):
    """Threads that record waiting times instead of waiting."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def event(self) -> Event:
        told = self.seconds

        class Noted(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                assert timeout is not None
                told.append(timeout)
                return False

        return Noted()


@pytest.mark.parametrize(("share", "seconds"), [(0.5, 0.01), (0.1, 0.09), (0.01, 0.99), (1.0, 0.0)])
def test_pause_is_proportional_to_the_work(share: float, seconds: float) -> None:
    clock, waits = ManualClock(), Waits()
    pace = Pace(clock, waits, share)
    clock.worked_s += 0.01
    pace.pause()
    pace.pause()
    assert waits.seconds == [pytest.approx(seconds)]


def test_small_pieces_share_one_pause() -> None:
    clock, waits = ManualClock(), Waits()
    pace = Pace(clock, waits, 0.01)
    for _ in range(100):
        clock.worked_s += 0.0001
        pace.pause()
    assert len(waits.seconds) <= 20
    assert sum(waits.seconds) == pytest.approx(99 * 0.01, rel=0.1)


def test_pauses_are_bounded_for_a_quick_stop() -> None:
    clock, waits = ManualClock(), Waits()
    pace = Pace(clock, waits, 0.001)
    clock.worked_s += 3600
    pace.pause()
    assert waits.seconds == [2.0]


def test_metrics_are_rendered_by_family_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, breaths = Metrics(), list[int]()
    for number in range(10):
        metrics.gauge(f"gauge_{number}", 'of "many"', lambda: 1)
        metrics.counter(f"counter_{number}_total", "of many", lambda: 2)
    metrics.histogram("waits_seconds", "of many", Histogram((0.1, 1.0)))
    told, asked = list(metrics.families()), list[str]()

    def one_by_one() -> Iterator[Metric]:
        for family in told:
            assert len(breaths) == len(asked), "the one before has been written"
            asked.append(family.name)
            yield family

    text = render(one_by_one(), pause=lambda: breaths.append(1))
    registry = CollectorRegistry()
    monkeypatch.setattr(registry, "collect", lambda: told)
    assert (text, len(breaths)) == (generate_latest(registry), len(told))


def test_long_series_are_rendered_in_parts_equal_to_prometheus_client() -> None:
    rows = [((f"t{number}", f'g\\{number}"\n'), number / 4) for number in range(1_001)]
    told = [
        Series("neve_lag_messages", "gauge", "behind, by topic", ("topic", "group"), rows),
        Series("neve_in_total", "counter", "in, by topic", ("topic",), [(("%RETRY%a b=,{}",), 7), (("ü",), 1 << 50)]),
        Series("neve_none", "gauge", "of nothing", ("topic",), []),
    ]
    gauge = GaugeMetricFamily("neve_lag_messages", "behind, by topic", labels=["topic", "group"])
    for values, number in rows:
        gauge.add_metric(list(values), number)
    counter = CounterMetricFamily("neve_in_total", "in, by topic", labels=["topic"])
    counter.add_metric(["%RETRY%a b=,{}"], 7)
    counter.add_metric(["ü"], 1 << 50)
    none = GaugeMetricFamily("neve_none", "of nothing", labels=["topic"])
    breaths = list[int]()
    text = render([], told, lambda: breaths.append(1))
    assert list(text_string_to_metric_families(text.decode())) == [gauge, counter, none]
    assert text.decode().splitlines()[:3] == [
        "# HELP neve_lag_messages behind, by topic",
        "# TYPE neve_lag_messages gauge",
        'neve_lag_messages{topic="t0",group="g\\\\0\\"\\n"} 0.0',
    ]
    assert len(breaths) >= 5


def test_loop_pace_pauses_and_lets_other_tasks_run() -> None:
    clock = ManualClock()

    async def main() -> float:
        pace, loop = LoopPace(clock, 0.1), asyncio.get_running_loop()
        began = loop.time()
        for _ in range(5):
            clock.worked_s += 0.002
            others = loop.create_task(asyncio.sleep(0))
            await pace.pause()
            assert others.done()
        return loop.time() - began

    assert asyncio.run(main()) >= 5 * 0.018


def test_loop_pace_does_not_count_the_work_of_other_tasks() -> None:
    clock = ManualClock()

    async def main() -> float:
        pace, loop = LoopPace(clock, 0.001), asyncio.get_running_loop()

        def work_of_others() -> None:
            clock.worked_s += 60.0

        loop.call_soon(work_of_others)
        await pace.pause()
        began = loop.time()
        await pace.pause()
        return loop.time() - began

    assert asyncio.run(main()) < 1.0, "2 s at least, had it been counted"


def test_thread_time_excludes_other_threads() -> None:
    """With the real clock, a thread that waits for another one accumulates no time."""
    clock, found = SystemClock(), list[Any]()

    def busy() -> None:
        while clock.thread_seconds() < 0.05:
            pass
        found.append(clock.thread_seconds())

    before = clock.thread_seconds()
    thread = threading.Thread(target=busy)
    thread.start()
    thread.join()
    assert found[0] >= 0.05
    assert clock.thread_seconds() - before < 0.04
