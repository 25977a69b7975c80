"""Counts of messages in and out by topic and group, over the last minute, hour and day (request 315)."""

from collections.abc import Callable, Iterable, Iterator
from itertools import filterfalse, islice
from typing import Any

import msgspec
from typing_extensions import override

from infra.clock import Clock
from infra.observe.metrics import Histogram

# Traffic is counted in periods of 10 s. A window has a number of steps, each of a number of periods. The last step is
# still in progress: a minute covers 50 to 60 seconds, as in RocketMQ's StatsItem.
_PERIOD_S = 10
_WINDOWS = {"statsMinute": (1, 6), "statsHour": (60, 6), "statsDay": (360, 24)}
_IDLE_PERIODS = 360 * 24
# Items checked for idleness in each sample: takes a fraction of a millisecond.
_SWEEP = 500


# Counts at the start of a period: the period, calls, messages, bytes. A tuple of numbers is not tracked by the garbage
# collector, and a broker has a million of them.
_Mark = tuple[int, int, int, int]


class _Time:
    """The current period of all items of a broker: the number of periods since the clock's zero."""

    __slots__ = ("marks", "now_s", "period")

    def __init__(self, now_s: float) -> None:
        self.period = -1
        self.move(now_s)

    def move(self, now_s: float) -> None:
        self.now_s = now_s
        period = int(now_s // _PERIOD_S)
        if period != self.period:
            self.period = period
            #: Marks of all items that begin in this period.
            self.marks: tuple[_Mark, ...] = ((period, 0, 0, 0),)


class Traffic:
    """Traffic of a topic, a group or the broker since it was first seen.

    Periods without traffic cost nothing. The first message in a period notes the counts at its start. An item without a
    mark since then has not changed. A broker has one for each queue of each group.
    """

    __slots__ = ("_born_s", "_marks", "_time", "calls", "count", "size")

    def __init__(self, time: _Time) -> None:
        self._time = time
        self._born_s = time.now_s
        # The last mark is of the period of the last message.
        self._marks = time.marks
        self.calls = self.count = self.size = 0

    def add(self, count: int, size: int, calls: int = 1) -> None:
        if self._marks[-1][0] != self._time.period:
            self._mark()
        self.calls += calls
        self.count += count
        self.size += size

    def _mark(self) -> None:
        period = self._time.period
        kept: list[_Mark] = []
        last = (-1,) * len(_WINDOWS)
        for mark in self._marks:
            steps = tuple(mark[0] // length for length, _ in _WINDOWS.values())
            # Keep the first mark of each step, as long as the step is in its window.
            if any(
                step != before and step > period // length - number
                for step, before, (length, number) in zip(steps, last, _WINDOWS.values(), strict=True)
            ):
                kept.append(mark)
            last = steps
        self._marks = (*kept, (period, self.calls, self.count, self.size))

    def idle(self) -> bool:
        """Return whether there was no traffic for a day."""
        return self._time.period - self._marks[-1][0] >= _IDLE_PERIODS

    def to_wire(self, now_s: float, *, sizes: bool) -> dict[str, dict[str, float]]:
        """Return RocketMQ's BrokerStatsItem by window. `now_s` is the clock's monotonic time."""
        return {name: self._over(now_s, *window, sizes=sizes) for name, window in _WINDOWS.items()}

    def _over(self, now_s: float, length: int, steps: int, *, sizes: bool) -> dict[str, float]:
        first = (int(now_s // _PERIOD_S) // length - steps + 1) * length
        now: _Mark = (0, self.calls, self.count, self.size)
        _, calls, messages, size = next((mark for mark in self._marks if mark[0] >= first), now)
        total = self.size - size if sizes else self.count - messages
        seconds = now_s - max(first * _PERIOD_S, self._born_s)
        return {
            "avgpt": total / (self.calls - calls) if self.calls > calls else 0.0,
            "sum": total,
            "tps": total / seconds if seconds > 0 else 0.0,
        }


#: Upper bounds of RocketMQ's histogram of sizes.
SIZES = (1024.0, 4096.0, 524_288.0, 1_048_576.0, 2_097_152.0, 4_194_304.0)


class SizedTraffic(Traffic):
    """Traffic with a histogram of the mean message size of each call, as RocketMQ has it."""

    __slots__ = ("sizes",)

    def __init__(self, time: _Time) -> None:
        super().__init__(time)
        self.sizes = Histogram(SIZES)

    @override
    def add(self, count: int, size: int, calls: int = 1) -> None:
        super().add(count, size, calls)
        self.sizes.observe(size / count, count)


class TopicTraffic(msgspec.Struct, frozen=True, gc=False):
    """Traffic of a topic. The counts restart at 0 after a day without traffic."""

    topic: str
    messages_in: int
    bytes_in: int
    messages_out: int
    bytes_out: int


class BrokerStats:
    """Statistics of a broker. Items are created with their first message and deleted after a day without one."""

    def __init__(self, clock: Clock, *, sized: bool = False) -> None:
        """Create statistics. `sized`: count sizes of messages into topics, too."""
        self._clock = clock
        self._time = _Time(clock.monotonic())
        self._of_topic: Callable[[_Time], Traffic] = SizedTraffic if sized else Traffic
        self._topics: dict[str, Traffic] = {}
        # Messages into a topic that are not normal messages, by topic and kind.
        self._kinds: dict[tuple[str, str], Traffic] = {}
        # Messages out of a topic, to any group. A sum over groups would fall when a group is deleted.
        self._readings: dict[str, Traffic] = {}
        self._groups: dict[tuple[str, str], Traffic] = {}
        self._backs: dict[tuple[str, str], Traffic] = {}
        # Latencies by topic and group, then by queue. The counts are milliseconds.
        self._latencies: dict[tuple[str, str], dict[int, Traffic]] = {}
        self._broker_put, self._broker_get = self._new(), self._new()
        self._nothing = self._new()
        self._sweep = self._forget_idle()

    def put(self, topic: str, size: int) -> None:
        self.of_topic(topic).add(1, size)
        self.put_all(1, size)

    def of_topic(self, topic: str) -> Traffic:
        """Return the traffic into a topic."""
        traffic = self._topics.get(topic)
        if traffic is None:
            traffic = self._topics[topic] = self._of_topic(self._time)
        return traffic

    def of_a_kind(self, topic: str, kind: str, size: int) -> None:
        """Count the kind of a message that was counted by `put`: one that waits before delivery, or has waited."""
        self._of(self._kinds, topic, kind).add(1, size)

    def put_all(self, count: int, size: int) -> None:
        """Count messages into the broker, each as a call of its own."""
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

    def topics(self) -> list[str]:
        """Return the topics that were written to or read from within a day."""
        return [*self._topics, *filterfalse(self._topics.__contains__, self._readings)]

    def messages_of(self, topics: Iterable[str]) -> list[int]:
        """Return the number of messages into and out of each topic."""
        sent, read, nothing = self._topics.get, self._readings.get, self._nothing
        return [sent(topic, nothing).count + read(topic, nothing).count for topic in topics]

    def of(self, topic: str) -> TopicTraffic:
        sent, read = self._topics.get(topic, self._nothing), self._readings.get(topic, self._nothing)
        return TopicTraffic(topic, sent.count, sent.size, read.count, read.size)

    def readings(self) -> list[tuple[str, str]]:
        """Return (topic, group) of all groups that have read within a day."""
        return list(self._groups)

    def of_reading(self, topic: str, group: str) -> tuple[int, int]:
        """Return messages and bytes that a group has read of a topic."""
        read = self._groups.get((topic, group), self._nothing)
        return read.count, read.size

    def of_kind(self, topic: str, kind: str) -> tuple[int, int]:
        """Return messages and bytes into a topic of a kind. They are counted with all others, too."""
        found = self._kinds.get((topic, kind), self._nothing)
        return found.count, found.size

    def sizes_of(self, topic: str) -> Histogram | None:
        """Return the histogram of a topic; None: no traffic, or sizes are not counted."""
        traffic = self._topics.get(topic)
        return traffic.sizes if isinstance(traffic, SizedTraffic) else None

    def took(self, queue_id: int, topic: str, group: str, ms: int) -> None:
        """Count the duration of the read of one pull."""
        queues = self._latencies.get((topic, group))
        if queues is None:
            queues = self._latencies[topic, group] = {}
        traffic = queues.get(queue_id)
        if traffic is None:
            traffic = queues[queue_id] = self._new()
        traffic.add(ms, 0)

    def sent_back(self, topic: str, group: str) -> None:
        self._of(self._backs, topic, group).add(1, 0)

    def sample(self) -> None:
        """Advance the time, and delete some of the idle items. Called once a second."""
        self._time.move(self._clock.monotonic())
        for _ in islice(self._sweep, _SWEEP):
            pass

    def _forget_idle(self) -> Iterator[None]:
        """Visit all items in an endless loop, one per step, and delete those that are idle."""
        while True:
            yield
            tables: tuple[dict[Any, Traffic], ...] = (
                self._topics,
                self._kinds,
                self._readings,
                self._groups,
                self._backs,
            )
            for table in tables:
                yield from self._forget_idle_of(table)
            for pair in list(self._latencies):
                yield from self._forget_idle_of(self._latencies[pair])
                if not self._latencies[pair]:
                    del self._latencies[pair]

    @staticmethod
    def _forget_idle_of(table: dict[Any, Traffic]) -> Iterator[None]:
        for key in list(table):
            if table[key].idle():
                del table[key]
            yield

    def view(self, name: str, key: str) -> dict[str, dict[str, float]] | None:
        """Return the answer to request 315; None: the item is not counted."""
        traffic = self._find(name, key)
        return None if traffic is None else traffic.to_wire(self._clock.monotonic(), sizes=name.endswith("_SIZE"))

    def put_rate(self, topic: str) -> float:
        """Return messages per second over the last minute."""
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
                queue_id, _, pair = key.partition("@")
                topic, _, group = pair.partition("@")
                queues = self._latencies.get((topic, group), {})
                return queues.get(int(queue_id)) if queue_id.isdecimal() else None
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
        return Traffic(self._time)
