"""Numbers for `/metrics`. The hot path counts in plain integers; Prometheus' objects are made when somebody scrapes."""

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Number = int | float


class Metrics:
    """Counters that code adds to, gauges that are asked at a scrape."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._gauges: dict[str, tuple[str, Callable[[], Number]]] = {}
        self._help: dict[str, str] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def counter(self, name: str, text: str) -> str:
        self._help[name] = text
        self.counts[name] += 0
        return name

    def gauge(self, name: str, text: str, value: Callable[[], Number]) -> None:
        self._gauges[name] = (text, value)

    def collect(self) -> Iterator[Metric]:
        for name, value in list(self.counts.items()):
            yield CounterMetricFamily(f"neve_{name}", self._help.get(name, name), value=value)
        for name, (text, read) in self._gauges.items():
            yield GaugeMetricFamily(f"neve_{name}", text, value=read())

    def render(self) -> bytes:
        return bytes(generate_latest(self._registry))
