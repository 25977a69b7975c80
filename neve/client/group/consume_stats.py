"""The throughput of a consumer in the last minute, as `mqadmin consumerStatus` prints it for each topic."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

WINDOW_S = 60


@dataclass(slots=True)
class _Second:
    """The counters of one second of the loop's clock."""

    at: int
    pulls: int = 0
    pulled: int = 0
    pull_s: float = 0.0
    consumed: int = 0
    consume_s: float = 0.0
    failed: int = 0


@dataclass(slots=True)
class _Topic:
    failed: int = 0
    seconds: deque[_Second] = field(default_factory=lambda: deque(maxlen=WINDOW_S))


class ConsumeStatsTable:
    """Counters by topic. `now` is the loop's time in seconds, `took` a duration in seconds."""

    def __init__(self) -> None:
        self._topics: dict[str, _Topic] = {}

    def pulled(self, topic: str, count: int, took: float, now: float) -> None:
        second = self._second(topic, now)
        second.pulls += 1
        second.pulled += count
        second.pull_s += took

    def consumed(self, topic: str, took: float, now: float) -> None:
        second = self._second(topic, now)
        second.consumed += 1
        second.consume_s += took

    def failed(self, topic: str, now: float) -> None:
        self._second(topic, now).failed += 1
        self._topics[topic].failed += 1

    def status_table(self, now: float) -> Mapping[str, Mapping[str, float]]:
        """Return the ConsumeStatus of each topic: times in ms, rates per second."""
        return {topic: _status(known, now) for topic, known in self._topics.items()}

    def _second(self, topic: str, now: float) -> _Second:
        seconds = self._topics.setdefault(topic, _Topic()).seconds
        if not seconds or seconds[-1].at != int(now):
            seconds.append(_Second(int(now)))
        return seconds[-1]


def _status(topic: _Topic, now: float) -> dict[str, float]:
    recent = [second for second in topic.seconds if second.at > now - WINDOW_S]
    pulls, consumed = sum(s.pulls for s in recent), sum(s.consumed for s in recent)
    return {
        "pullRT": 1000 * sum(s.pull_s for s in recent) / max(pulls, 1),
        "pullTPS": sum(s.pulled for s in recent) / WINDOW_S,
        "consumeRT": 1000 * sum(s.consume_s for s in recent) / max(consumed, 1),
        "consumeOKTPS": consumed / WINDOW_S,
        "consumeFailedTPS": sum(s.failed for s in recent) / WINDOW_S,
        "consumeFailedMsgs": topic.failed,
    }
