"""Totals and rates of messages in and out, and totals by day."""

from broker.broker_stats import BrokerStats
from broker.intake.intake import Intake
from infra.clock import Clock

_DAY = 86_400_000


class Totals:
    """Messages in and out, with rates over the last 10, 60 and 600 s from one sample per second."""

    _WINDOWS = (10, 60, 600)

    def __init__(self, clock: Clock, intake: Intake, stats: BrokerStats) -> None:
        self._clock, self._intake, self._stats = clock, intake, stats
        self._samples: list[tuple[float, int, int]] = []
        self._day = clock.now_ms() // _DAY
        # Messages in and out at the beginning (UTC) of yesterday and of today.
        self._yesterday = self._today = (0, 0)

    def sample(self) -> None:
        """Take one sample; called every second."""
        day = self._clock.now_ms() // _DAY
        if day != self._day:
            self._day, self._yesterday, self._today = day, self._today, (self.put(), self.got())
        self._samples.append((self._clock.monotonic(), self.put(), self.got()))
        del self._samples[: -(self._WINDOWS[-1] + 1)]

    def mornings(self) -> dict[str, str]:
        """Return RocketMQ's totals of yesterday morning, this morning and now, by key."""
        put, got = zip(self._yesterday, self._today, (self.put(), self.got()), strict=True)
        whens = ("YesterdayMorning", "TodayMorning", "TodayNow")
        rows = (("Put", put), ("Get", got))
        return {f"msg{what}Total{when}": str(n) for what, row in rows for when, n in zip(whens, row, strict=True)}

    def size(self) -> int:
        return self._intake.bytes

    def put(self) -> int:
        return self._intake.messages

    def got(self) -> int:
        return self._stats.messages_out

    def average_size(self) -> float:
        return self._intake.bytes / self._intake.messages if self._intake.messages else 0.0

    def put_rates(self) -> str:
        """Return messages per second over 10, 60 and 600 s, separated by spaces."""
        return self._rates(1)

    def get_rates(self) -> str:
        """Return messages read per second over 10, 60 and 600 s, separated by spaces."""
        return self._rates(2)

    def _rates(self, column: int) -> str:
        rates = []
        for window in self._WINDOWS:
            part = self._samples[-(window + 1) :]
            seconds = part[-1][0] - part[0][0] if len(part) > 1 else 0
            rates.append((part[-1][column] - part[0][column]) / seconds if seconds > 0 else 0.0)
        return " ".join(f"{rate:.1f}" for rate in rates)
