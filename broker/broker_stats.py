"""Counts of messages in and out by topic and group, over the last minute, hour and day (request 315)."""

from collections.abc import Callable, Iterable, Iterator
from itertools import filterfalse, islice
from typing import Any

import msgspec
from typing_extensions import override

from infra.clock import Clock
from infra.observe.metrics import Histogram

# Traffic is counted by periods of 10 s. A window is so many of its own steps, each so many periods: the last of them
# is under way, so that a minute tells of 50 to 60 seconds, as RocketMQ's StatsItem does.
_PERIOD_S = 10
_WINDOWS = {"statsMinute": (1, 6), "statsHour": (60, 6), "statsDay": (360, 24)}
_IDLE_PERIODS = 360 * 24
# Items looked at in each sample to find those that are idle: a fraction of a millisecond.
_SWEEP = 500


# What had been counted when a period began: the period, calls, messages, bytes. Plain tuples of numbers: the garbage
# collector does not look at them, and a broker has a million.
_Mark = tuple[int, int, int, int]


class _Time:
    """The period that all items of a broker are in: the number of periods since the clock's zero."""

    __slots__ = ("begun", "now_s", "period")

    def __init__(self, now_s: float) -> None:
        self.period = -1
        self.move(now_s)

    def move(self, now_s: float) -> None:
        self.now_s = now_s
        period = int(now_s // _PERIOD_S)
        if period != self.period:
            self.period = period
            #: The marks of all items that begin in this period.
            self.begun: tuple[_Mark, ...] = ((period, 0, 0, 0),)


class Traffic:
    """What went through one topic, group or the broker since it was first seen.

    Nothing is done for an item in a period without traffic: what it had counted when a period began is noted by the
    first message in it, and an item without a mark since then had counted what it has now. A broker has one for each
    queue of each group.
    """

    __slots__ = ("_born_s", "_marks", "_time", "calls", "count", "size")

    def __init__(self, time: _Time) -> None:
        self._time = time
        self._born_s = time.now_s
        # The last one is of the period in which the last message came.
        self._marks = time.begun
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
            # The first of a step, as long as the step is in its window.
            if any(
                step != before and step > period // length - number
                for step, before, (length, number) in zip(steps, last, _WINDOWS.values(), strict=True)
            ):
                kept.append(mark)
            last = steps
        self._marks = (*kept, (period, self.calls, self.count, self.size))

    def idle(self) -> bool:
        """Nothing within a day."""
        return self._time.period - self._marks[-1][0] >= _IDLE_PERIODS

    def to_wire(self, now_s: float, *, sizes: bool) -> dict[str, dict[str, float]]:
        """RocketMQ's BrokerStatsItem by window; `now_s` is the clock's monotonic time."""
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


#: Upper bounds of the sizes that RocketMQ's histogram has.
SIZES = (1024.0, 4096.0, 524_288.0, 1_048_576.0, 2_097_152.0, 4_194_304.0)


class SizedTraffic(Traffic):
    """The same, and how large what came together was in the mean: by upper bound, as RocketMQ tells it."""

    __slots__ = ("sizes",)

    def __init__(self, time: _Time) -> None:
        super().__init__(time)
        self.sizes = Histogram(SIZES)

    @override
    def add(self, count: int, size: int, calls: int = 1) -> None:
        super().add(count, size, calls)
        self.sizes.observe(size / count, count)


class TopicTraffic(msgspec.Struct, frozen=True, gc=False):
    """Of one topic; each begins again at 0 after a day of silence."""

    topic: str
    messages_in: int
    bytes_in: int
    messages_out: int
    bytes_out: int


class BrokerStats:
    """Items come with their first message and go after a day without one."""

    def __init__(self, clock: Clock, *, sized: bool = False) -> None:
        """`sized`: the sizes of what comes into a topic are counted, too."""
        self._clock = clock
        self._time = _Time(clock.monotonic())
        self._of_topic: Callable[[_Time], Traffic] = SizedTraffic if sized else Traffic
        self._topics: dict[str, Traffic] = {}
        # Of what came into a topic: what is no plain message, by topic and kind.
        self._kinds: dict[tuple[str, str], Traffic] = {}
        # Messages out of a topic, to whichever group: a sum over groups would fall when one of them is forgotten.
        self._readings: dict[str, Traffic] = {}
        self._groups: dict[tuple[str, str], Traffic] = {}
        self._backs: dict[tuple[str, str], Traffic] = {}
        # By topic and group, then by queue; their counts are milliseconds.
        self._latencies: dict[tuple[str, str], dict[int, Traffic]] = {}
        self._broker_put, self._broker_get = self._new(), self._new()
        self._nothing = self._new()
        self._sweep = self._forget_idle()

    def put(self, topic: str, size: int) -> None:
        self.of_topic(topic).add(1, size)
        self.put_all(1, size)

    def of_topic(self, topic: str) -> Traffic:
        """Where the messages into a topic are counted."""
        traffic = self._topics.get(topic)
        if traffic is None:
            traffic = self._topics[topic] = self._of_topic(self._time)
        return traffic

    def of_a_kind(self, topic: str, kind: str, size: int) -> None:
        """A message that was counted is no plain one: it waits first, or has waited."""
        self._of(self._kinds, topic, kind).add(1, size)

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

    def topics(self) -> list[str]:
        """Where anything was written to or read from within a day."""
        return [*self._topics, *filterfalse(self._topics.__contains__, self._readings)]

    def messages_of(self, topics: Iterable[str]) -> list[int]:
        """Into and out of each."""
        sent, read, nothing = self._topics.get, self._readings.get, self._nothing
        return [sent(topic, nothing).count + read(topic, nothing).count for topic in topics]

    def of(self, topic: str) -> TopicTraffic:
        sent, read = self._topics.get(topic, self._nothing), self._readings.get(topic, self._nothing)
        return TopicTraffic(topic, sent.count, sent.size, read.count, read.size)

    def readings(self) -> list[tuple[str, str]]:
        """Topics and groups that read from them within a day."""
        return list(self._groups)

    def of_reading(self, topic: str, group: str) -> tuple[int, int]:
        """Messages and bytes that the group has read of the topic."""
        read = self._groups.get((topic, group), self._nothing)
        return read.count, read.size

    def of_kind(self, topic: str, kind: str) -> tuple[int, int]:
        """Messages and bytes into a topic that are of a kind; they are counted with all others, too."""
        found = self._kinds.get((topic, kind), self._nothing)
        return found.count, found.size

    def sizes_of(self, topic: str) -> Histogram | None:
        """None: nothing came, or sizes are not counted."""
        traffic = self._topics.get(topic)
        return traffic.sizes if isinstance(traffic, SizedTraffic) else None

    def took(self, queue_id: int, topic: str, group: str, ms: int) -> None:
        """How long the reading for one pull took."""
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
        """Once a second: the time moves on, and a few of the items that there are are asked whether they are idle."""
        self._time.move(self._clock.monotonic())
        for _ in islice(self._sweep, _SWEEP):
            pass

    def _forget_idle(self) -> Iterator[None]:
        """Goes round for ever over everything that is counted, a step for each item."""
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
        """The answer of request 315; None for what isn't counted."""
        traffic = self._find(name, key)
        return None if traffic is None else traffic.to_wire(self._clock.monotonic(), sizes=name.endswith("_SIZE"))

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
