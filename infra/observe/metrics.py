"""Metrics for `/metrics`. The hot path counts in plain integers; a scrape makes the objects of Prometheus."""

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

Number = int | float

_ROWS = 250  # rendered between two pauses, in some 0.2 ms

#: Upper bounds (s) of latencies, from one iteration of the event loop to a client's timeout. They include the bounds of
#: RocketMQ's metrics.
LATENCIES = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0)


# Exported under the standard names: process_cpu_seconds_total, process_resident_memory_bytes, …
_PROCESS = ProcessCollector(registry=None)
_BUILD = (
    InfoMetricFamily(
        "neve_build",
        "what runs",
        value={"version": version("neve"), "python": ".".join(map(str, sys.version_info[:3]))},
    ),
)


class Histogram:
    """Counts of values by upper bound; only one thread may observe."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return pairs of an upper bound and the number of values up to it, as Prometheus expects them."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


class Metrics:
    """The metrics of a server. A counter never decreases while the process lives."""

    def __init__(self) -> None:
        self._counters: dict[str, tuple[str, Callable[[], Number]]] = {}
        self._gauges: dict[str, tuple[str, Callable[[], Number]]] = {}
        self._histograms: dict[str, tuple[str, Histogram]] = {}
        self._labelled: dict[str, tuple[str, str, Callable[[], Mapping[str, Number]]]] = {}

    def counter(self, name: str, text: str, value: Callable[[], Number]) -> None:
        assert name.endswith("_total"), name
        self._counters[name] = (text, value)

    def gauge(self, name: str, text: str, value: Callable[[], Number]) -> None:
        assert not name.endswith("_total"), name
        self._gauges[name] = (text, value)

    def histogram(self, name: str, text: str, histogram: Histogram) -> None:
        self._histograms[name] = (text, histogram)

    def labelled(self, name: str, text: str, label: str, values: Callable[[], Mapping[str, Number]]) -> None:
        """Add a gauge with one series per value of a label; for labels with few values."""
        self._labelled[name] = (text, label, values)

    def families(self) -> Iterator[Metric]:
        """Return the current values; on the thread that counts."""
        yield from _BUILD
        for name, (text, read) in self._counters.items():
            yield CounterMetricFamily(f"neve_{name}", text, value=read())
        for name, (text, read) in self._gauges.items():
            yield GaugeMetricFamily(f"neve_{name}", text, value=read())
        for name, (text, label, values) in self._labelled.items():
            family = GaugeMetricFamily(f"neve_{name}", text, labels=[label])
            for value, number in values().items():
                family.add_metric([value], number)
            yield family
        for name, (text, histogram) in self._histograms.items():
            yield HistogramMetricFamily(f"neve_{name}", text, buckets=histogram.buckets(), sum_value=histogram.sum)


class _Given:
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def of_process() -> Iterable[Metric]:
    """Return the resource usage of the process. Not on the event loop: it counts all open files."""
    return _PROCESS.collect()


class Series(NamedTuple):
    """All series of one name, which may be thousands (one per topic)."""

    name: str
    kind: str  # counter, gauge
    text: str
    labels: tuple[str, ...]
    rows: Sequence[tuple[tuple[str, ...], Number]]  # label values and number


def render(
    families: Iterable[Metric], series: Iterable[Series] = (), pause: Callable[[], None] = lambda: None
) -> bytes:
    """Return Prometheus' text format. For a thread; `pause` is called between two pieces."""
    pieces: list[bytes] = []
    for family in families:
        pieces.append(bytes(generate_latest(_Given([family]))))
        pause()
    for one in series:
        pieces.append(f"# HELP {one.name} {one.text}\n# TYPE {one.name} {one.kind}\n".encode())
        for first in range(0, len(one.rows), _ROWS):
            pieces.append(_lines(one, one.rows[first : first + _ROWS]))
            pause()
    return b"".join(pieces)


def _lines(series: Series, rows: Sequence[tuple[tuple[str, ...], Number]]) -> bytes:
    """Return the lines of some rows, in a tenth of the time that one Prometheus object per row would take."""
    before = [f'{"," if place else series.name + "{"}{label}="' for place, label in enumerate(series.labels)]
    return "".join(
        [
            "".join([f'{begin}{_escaped(value)}"' for begin, value in zip(before, values, strict=True)])
            + f"}} {float(number)!r}\n"
            for values, number in rows
        ]
    ).encode()


def _escaped(value: str) -> str:
    if "\\" in value or '"' in value or "\n" in value:
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return value
