"""The present traffic of a cluster by broker, topic and group."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from neve.admin import ClusterAdmin
from neve.admin.lag import QueueProgress, total_cold, total_lag
from neve.cli.lag import share_text
from neve.remoting.names import is_retry_or_dlq, is_system_group

# Requests in flight.
_CONCURRENT = 16


class Rate(NamedTuple):
    """Messages and bytes per second."""

    messages: float = 0.0
    bytes: float = 0.0


class TrafficSample(NamedTuple):
    """The traffic at one moment; the busiest come first in each part."""

    brokers: Sequence[dict[str, Any]]
    topics: Sequence[dict[str, Any]]
    groups: Sequence[dict[str, Any]]


class TrafficReader:
    """Reads the traffic of a cluster."""

    def __init__(self, admin: ClusterAdmin) -> None:
        self._admin = admin
        self._slots = asyncio.Semaphore(_CONCURRENT)

    async def look(self, wanted: Sequence[str], everything: bool) -> TrafficSample:
        """Return the traffic of these topics, or of all; `everything` includes those of servers."""
        masters = [
            name for name in self._admin.brokers.require(None) if self._admin.brokers.known[name].master is not None
        ]
        topics = list(wanted) or await self._admin.topics.names(include_system=everything)
        names = [one for one in await self._admin.groups.settings() if everything or not is_system_group(one)]
        progress = await asyncio.gather(*(self._progress(name) for name in names))
        pairs = {
            (group, topic): [one for one in of_group if one.queue.topic == topic]
            for group, of_group in zip(names, progress, strict=True)
            for topic in {one.queue.topic for one in of_group}
            if topic in topics or (not wanted and is_retry_or_dlq(topic))
        }
        into = dict(zip(topics, await asyncio.gather(*(self._into(masters, one) for one in topics)), strict=True))
        out = dict(zip(pairs, await asyncio.gather(*(self._out(masters, *pair) for pair in pairs)), strict=True))
        brokers = [await self._broker(name) for name in masters]
        return TrafficSample(
            brokers,
            busiest(topic_row(topic, rate, out) for topic, rate in into.items()),
            busiest(group_row(*pair, rate, pairs[pair]) for pair, rate in out.items()),
        )

    async def _progress(self, group: str) -> list[QueueProgress]:
        async with self._slots:
            return await self._admin.groups.progress(group)

    async def _into(self, masters: Iterable[str], topic: str) -> Rate:
        rates = await asyncio.gather(*(self._rate(name, "TOPIC_PUT", topic) for name in masters))
        return _sum(rates)

    async def _out(self, masters: Iterable[str], group: str, topic: str) -> Rate:
        rates = await asyncio.gather(*(self._rate(name, "GROUP_GET", f"{topic}@{group}") for name in masters))
        return _sum(rates)

    async def _rate(self, broker: str, what: str, key: str) -> Rate:
        async with self._slots:
            messages = await self._admin.brokers.rate_of_last_minute(broker, f"{what}_NUMS", key)
            if not messages:
                return Rate()
            return Rate(messages, await self._admin.brokers.rate_of_last_minute(broker, f"{what}_SIZE", key))

    async def _broker(self, name: str) -> dict[str, Any]:
        runtime = await self._admin.brokers.runtime(name)
        put, got = (_first(runtime.get(key)) for key in ("putTps", "getTransferredTps"))
        return {"broker": name, "in_per_s": put, "out_per_s": got, "disk": runtime.get("commitLogDiskRatio")}


def _sum(rates: Iterable[Rate]) -> Rate:
    rates = list(rates)
    return Rate(sum(rate.messages for rate in rates), sum(rate.bytes for rate in rates))


def _first(rates: str | None) -> float:
    words = (rates or "").split()
    return round(float(words[0]), 1) if words else 0.0


def topic_row(topic: str, into: Rate, out: dict[tuple[str, str], Rate]) -> dict[str, Any]:
    """Return the row of a topic; `out` has the rates of groups by group and topic."""
    reading = _sum(rate for (_, of), rate in out.items() if of == topic)
    return {
        "topic": topic,
        "in_per_s": round(into.messages, 1),
        "in_bytes_per_s": round(into.bytes),
        "out_per_s": round(reading.messages, 1),
        "out_bytes_per_s": round(reading.bytes),
    }


def group_row(group: str, topic: str, rate: Rate, progress: Sequence[QueueProgress]) -> dict[str, Any]:
    """Return the row of a group: `tier` is where it reads next, `cold` the share of its lag in the archive only."""
    lag, cold = total_lag(progress), total_cold(progress)
    return {
        "group": group,
        "topic": topic,
        "out_per_s": round(rate.messages, 1),
        "out_bytes_per_s": round(rate.bytes),
        "lag": lag,
        "cold": share_text(cold, lag),
        "tier": _tier(progress),
    }


def _tier(progress: Iterable[QueueProgress]) -> str | None:
    """Return the tiers that the group reads next; None without lag, or if no broker reports tiers."""
    reported = [one for one in progress if one.lag and one.cold is not None]
    kinds = {"cold" if one.cold else "hot" for one in reported}
    return "+".join(sorted(kinds)) or None


def busiest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows by messages in and out, then by lag, then by name."""

    def order(row: dict[str, Any]) -> tuple[Any, ...]:
        return -(row.get("in_per_s", 0) + row["out_per_s"]), -row.get("lag", 0), row.get("group", ""), row["topic"]

    return sorted(rows, key=order)
