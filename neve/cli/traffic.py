"""What goes through a cluster now, by broker, topic and group, asked of brokers by codes that Apache RocketMQ's answer.

 28  a broker's rates of the last ten seconds      315  messages and bytes of a topic, of a group in a topic, over
201  its groups, 206 by name server its topics          the last minute; code 1 where there were none
208  where a group stands
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from neve.cli.brokers import Brokers
from neve.cli.consumer_groups import ConsumerGroups
from neve.cli.lag import Standing, share_text, total_cold, total_lag
from neve.remoting.names import is_retry_or_dlq, is_system_group

#: Questions at one time.
_AT_ONCE = 16


class Rate(NamedTuple):
    """Messages and bytes a second."""

    messages: float = 0.0
    bytes: float = 0.0


class Seen(NamedTuple):
    """At one moment; in each part the busiest first."""

    brokers: Sequence[dict[str, Any]]
    topics: Sequence[dict[str, Any]]
    groups: Sequence[dict[str, Any]]


class Traffic:
    """Of the brokers that the name server knows."""

    def __init__(self, asked: Brokers, groups: ConsumerGroups) -> None:
        self._asked, self._groups = asked, groups
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def look(self, wanted: Sequence[str], everything: bool) -> Seen:
        """`wanted`: topics, or all. `everything`: the servers' own, too."""
        masters = [name for name in self._asked.named(None) if self._asked.known[name].master is not None]
        topics = list(wanted) or await self._asked.topics(everything=everything)
        names = [one for one in await self._groups.settings() if everything or not is_system_group(one)]
        standings = await asyncio.gather(*(self._standings(name) for name in names))
        pairs = {
            (group, topic): [one for one in of_group if one.queue.topic == topic]
            for group, of_group in zip(names, standings, strict=True)
            for topic in {one.queue.topic for one in of_group}
            if topic in topics or (not wanted and is_retry_or_dlq(topic))
        }
        into = dict(zip(topics, await asyncio.gather(*(self._into(masters, one) for one in topics)), strict=True))
        out = dict(zip(pairs, await asyncio.gather(*(self._out(masters, *pair) for pair in pairs)), strict=True))
        brokers = [await self._broker(name) for name in masters]
        return Seen(
            brokers,
            busiest(topic_row(topic, rate, out) for topic, rate in into.items()),
            busiest(group_row(*pair, rate, pairs[pair]) for pair, rate in out.items()),
        )

    async def _standings(self, group: str) -> list[Standing]:
        async with self._turns:
            return await self._groups.standings(group)

    async def _into(self, masters: Iterable[str], topic: str) -> Rate:
        rates = await asyncio.gather(*(self._rate(name, "TOPIC_PUT", topic) for name in masters))
        return _sum(rates)

    async def _out(self, masters: Iterable[str], group: str, topic: str) -> Rate:
        rates = await asyncio.gather(*(self._rate(name, "GROUP_GET", f"{topic}@{group}") for name in masters))
        return _sum(rates)

    async def _rate(self, broker: str, what: str, key: str) -> Rate:
        async with self._turns:
            messages = await self._asked.per_second(broker, f"{what}_NUMS", key)
            if not messages:
                return Rate()
            return Rate(messages, await self._asked.per_second(broker, f"{what}_SIZE", key))

    async def _broker(self, name: str) -> dict[str, Any]:
        told = await self._asked.runtime(name)
        put, got = (_first(told.get(key)) for key in ("putTps", "getTransferredTps"))
        return {"broker": name, "in_per_s": put, "out_per_s": got, "disk": told.get("commitLogDiskRatio")}


def _sum(rates: Iterable[Rate]) -> Rate:
    rates = list(rates)
    return Rate(sum(rate.messages for rate in rates), sum(rate.bytes for rate in rates))


def _first(rates: str | None) -> float:
    words = (rates or "").split()
    return round(float(words[0]), 1) if words else 0.0


def topic_row(topic: str, into: Rate, out: dict[tuple[str, str], Rate]) -> dict[str, Any]:
    """`out`: by group and topic."""
    reading = _sum(rate for (_, of), rate in out.items() if of == topic)
    return {
        "topic": topic,
        "in_per_s": round(into.messages, 1),
        "in_bytes_per_s": round(into.bytes),
        "out_per_s": round(reading.messages, 1),
        "out_bytes_per_s": round(reading.bytes),
    }


def group_row(group: str, topic: str, rate: Rate, standings: Sequence[Standing]) -> dict[str, Any]:
    """`tier` is where the group reads on, `cold` how much of what it has left the archive alone has."""
    lag, cold = total_lag(standings), total_cold(standings)
    return {
        "group": group,
        "topic": topic,
        "out_per_s": round(rate.messages, 1),
        "out_bytes_per_s": round(rate.bytes),
        "lag": lag,
        "cold": share_text(cold, lag),
        "tier": _tier(standings),
    }


def _tier(standings: Iterable[Standing]) -> str | None:
    """Of what is read next in each queue that has something left; None: nothing is left, or no broker tells."""
    told = [one for one in standings if one.lag and one.cold is not None]
    kinds = {"cold" if one.cold else "hot" for one in told}
    return "+".join(sorted(kinds)) or None


def busiest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """By messages in and out, then by what is left to read, then by name."""

    def order(row: dict[str, Any]) -> tuple[Any, ...]:
        return -(row.get("in_per_s", 0) + row["out_per_s"]), -row.get("lag", 0), row.get("group", ""), row["topic"]

    return sorted(rows, key=order)
