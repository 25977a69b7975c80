"""Numbers for `/metrics`. The hot path counts in plain integers; Prometheus' objects are made when somebody scrapes."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

Number = int | float


class Histogram:
    """Counts of values by upper bound; one thread observes."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as Prometheus wants them."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


class Metrics:
    """What is asked at a scrape: counters only grow while the process lives (`rate` and `increase` are for them)."""

    def __init__(self) -> None:
        self._counters: dict[str, tuple[str, Callable[[], Number]]] = {}
        self._gauges: dict[str, tuple[str, Callable[[], Number]]] = {}
        self._histograms: dict[str, tuple[str, Histogram]] = {}

    def counter(self, name: str, text: str, value: Callable[[], Number]) -> None:
        assert name.endswith("_total"), name
        self._counters[name] = (text, value)

    def gauge(self, name: str, text: str, value: Callable[[], Number]) -> None:
        assert not name.endswith("_total"), name
        self._gauges[name] = (text, value)

    def histogram(self, name: str, text: str, histogram: Histogram) -> None:
        self._histograms[name] = (text, histogram)

    def families(self) -> Iterator[Metric]:
        """As they are now: on the thread that counts."""
        for name, (text, read) in self._counters.items():
            yield CounterMetricFamily(f"neve_{name}", text, value=read())
        for name, (text, read) in self._gauges.items():
            yield GaugeMetricFamily(f"neve_{name}", text, value=read())
        for name, (text, histogram) in self._histograms.items():
            yield HistogramMetricFamily(f"neve_{name}", text, buckets=histogram.buckets(), sum_value=histogram.sum)


class _Given:
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def render(families: Iterable[Metric]) -> bytes:
    """Prometheus' text format. Slow where there are thousands of series: in a thread."""
    return bytes(generate_latest(_Given(families)))
