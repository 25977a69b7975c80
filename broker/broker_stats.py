"""Counts of messages in and out by topic and group, over the last minute, hour and day (request 315)."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from infra.clock import Clock

# Period of the samples in ms, and how many make up the window.
_MINUTE, _HOUR, _DAY = (10_000, 6), (600_000, 6), (3_600_000, 24)
_WINDOWS = (("statsMinute", *_MINUTE), ("statsHour", *_HOUR), ("statsDay", *_DAY))


@dataclass(slots=True, eq=False)
class Traffic:
    """What went through one topic, group or the broker since the start; samples are (ms, calls, count, size)."""

    calls: int = 0
    count: int = 0
    size: int = 0
    samples: dict[str, "deque[tuple[int, int, int, int]]"] = field(default_factory=dict)

    def add(self, count: int, size: int, calls: int = 1) -> None:
        self.calls += calls
        self.count += count
        self.size += size

    def sample(self, now: int) -> None:
        for name, period, number in _WINDOWS:
            kept = self.samples.get(name)
            if kept is None:
                kept = self.samples[name] = deque(maxlen=number)
            if not kept or now - kept[-1][0] >= period:
                kept.append((now, self.calls, self.count, self.size))

    def idle(self) -> bool:
        """Nothing within a day."""
        day = self.samples.get("statsDay")
        return day is not None and len(day) == _DAY[1] and day[0][1] == self.calls

    def to_wire(self, now: int, *, sizes: bool) -> dict[str, dict[str, float]]:
        return {name: self._over(name, now, sizes=sizes) for name, _, _ in _WINDOWS}

    def _over(self, name: str, now: int, *, sizes: bool) -> dict[str, float]:
        start = self.samples[name][0]
        calls = self.calls - start[1]
        total = self.size - start[3] if sizes else self.count - start[2]
        seconds = (now - start[0]) / 1000
        return {
            "avgpt": total / calls if calls else 0.0,
            "sum": total,
            "tps": total / seconds if seconds > 0 else 0.0,
        }


class TopicTraffic(NamedTuple):
    """Of one topic; each begins again at 0 after a day of silence."""

    topic: str
    messages_in: int
    bytes_in: int
    messages_out: int
    bytes_out: int


class BrokerStats:
    """Items come with their first message and go after a day without one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._topics: dict[str, Traffic] = {}
        # Messages out of a topic, to whichever group: a sum over groups would fall when one of them is forgotten.
        self._readings: dict[str, Traffic] = {}
        self._groups: dict[tuple[str, str], Traffic] = {}
        self._backs: dict[tuple[str, str], Traffic] = {}
        # By queue, topic and group; their counts are milliseconds.
        self._latencies: dict[tuple[str, str, str], Traffic] = {}
        self._broker_put, self._broker_get = self._new(), self._new()

    def put(self, topic: str, size: int) -> None:
        self.of_topic(topic).add(1, size)
        self.put_all(1, size)

    def of_topic(self, topic: str) -> Traffic:
        """Where the messages into a topic are counted."""
        traffic = self._topics.get(topic)
        if traffic is None:
            traffic = self._topics[topic] = self._new()
        return traffic

    def put_all(self, count: int, size: int) -> None:
        """Messages into the broker, each a call of its own."""
        self._broker_put.add(count, size, count)

    def got(self, topic: str, group: str, count: int, size: int) -> None:
        self._of(self._groups, topic, group).add(count, size)
        reading = self._readings.get(topic)
        if reading is None:
            reading = self._readings[topic] = self._new()
        reading.add(count, size)
        self._broker_get.add(count, size)

    @property
    def messages_out(self) -> int:
        return self._broker_get.count

    @property
    def bytes_out(self) -> int:
        return self._broker_get.size

    def by_topic(self) -> list[TopicTraffic]:
        nothing = Traffic()
        return [
            TopicTraffic(topic, sent.count, sent.size, read.count, read.size)
            for topic in {**self._topics, **self._readings}
            for sent, read in [(self._topics.get(topic, nothing), self._readings.get(topic, nothing))]
        ]

    def took(self, queue_id: int, topic: str, group: str, ms: int) -> None:
        """How long the reading for one pull took."""
        key = (str(queue_id), topic, group)
        traffic = self._latencies.get(key)
        if traffic is None:
            traffic = self._latencies[key] = self._new()
        traffic.add(ms, 0)

    def sent_back(self, topic: str, group: str) -> None:
        self._of(self._backs, topic, group).add(1, 0)

    def sample(self) -> None:
        now = self._clock.now_ms()
        for table in (self._topics, self._readings, self._groups, self._backs, self._latencies):
            self._sample(table, now)
        for traffic in (self._broker_put, self._broker_get):
            traffic.sample(now)

    @staticmethod
    def _sample(table: dict[Any, Traffic], now: int) -> None:
        for key, traffic in list(table.items()):
            traffic.sample(now)
            if traffic.idle():
                del table[key]

    def view(self, name: str, key: str) -> dict[str, dict[str, float]] | None:
        """The answer of request 315; None for what isn't counted."""
        traffic = self._find(name, key)
        return None if traffic is None else traffic.to_wire(self._clock.now_ms(), sizes=name.endswith("_SIZE"))

    def put_rate(self, topic: str) -> float:
        """Messages a second over the last minute."""
        return self._rate("TOPIC_PUT_NUMS", topic)

    def get_rate(self, topic: str, group: str) -> float:
        return self._rate("GROUP_GET_NUMS", f"{topic}@{group}")

    def _rate(self, name: str, key: str) -> float:
        found = self.view(name, key)
        return found["statsMinute"]["tps"] if found else 0.0

    def _find(self, name: str, key: str) -> Traffic | None:
        topic, _, group = key.partition("@")
        match name:
            case "TOPIC_PUT_NUMS" | "TOPIC_PUT_SIZE":
                return self._topics.get(key)
            case "GROUP_GET_NUMS" | "GROUP_GET_SIZE":
                return self._groups.get((topic, group))
            case "SNDBCK_PUT_NUMS":
                return self._backs.get((topic, group))
            case "GROUP_GET_LATENCY":
                parts = key.split("@", 2)
                return self._latencies.get((parts[0], parts[1], parts[2])) if len(parts) == 3 else None
            case "BROKER_PUT_NUMS":
                return self._broker_put
            case "BROKER_GET_NUMS":
                return self._broker_get
        return None

    def _of(self, table: dict[tuple[str, str], Traffic], topic: str, group: str) -> Traffic:
        traffic = table.get((topic, group))
        if traffic is None:
            traffic = table[topic, group] = self._new()
        return traffic

    def _new(self) -> Traffic:
        traffic = Traffic()
        traffic.sample(self._clock.now_ms())
        return traffic
