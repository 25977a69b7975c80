"""The TTL of a topic as people write it, and as RocketMQ's attribute `reserve.time` carries it: whole hours."""

from __future__ import annotations

import re

import click

from neve.archive.policy.ttl import FOR_EVER_HOURS

BROKER_DEFAULT = -1
_MINUTES = {"m": 1, "h": 60, "d": 24 * 60, "w": 7 * 24 * 60}


#: Other words for a TTL, and the spelling that is accepted.
_MEANT = {"unlimited": "forever", "never": "forever", "infinite": "forever", "-1": "forever, or `unset`"}


def _no_ttl(text: str, hint: str | None) -> str:
    accepted = "whole hours, days or weeks, as 36h, 90d, 2w, or forever"
    return f"{text!r} is not a TTL: write {accepted}" + ("" if hint is None else f"; {hint}")


def parse_ttl(text: str) -> int:
    """Hours of `36h`, `90d`, `2w`, `120m` or `forever`; ValueError with the reason for anything else."""
    cleaned = text.strip().lower()
    if cleaned == "forever":
        return FOR_EVER_HOURS
    found = re.fullmatch(r"(\d+)([mhdw])", cleaned)
    if found is None:
        meant = f"{cleaned}h" if cleaned.isdecimal() else _MEANT.get(cleaned)
        raise ValueError(_no_ttl(text, None if meant is None else f"did you mean {meant}?"))
    minutes = int(found[1]) * _MINUTES[found[2]]
    if minutes == 0:
        raise ValueError("a TTL of 0 would delete every message at once: delete the topic if that is meant")
    hours, rest = divmod(minutes, 60)
    if rest:
        raise ValueError(_no_ttl(text, f"the nearest are {hours}h and {hours + 1}h" if hours else "the shortest is 1h"))
    if hours >= FOR_EVER_HOURS:
        raise ValueError(f"{text!r} is longer than {FOR_EVER_HOURS - 1}h: write forever")
    return hours


def format_ttl(hours: int | None) -> str:
    """The shortest exact spelling."""
    if hours is None or hours == BROKER_DEFAULT:
        return "default"
    if hours >= FOR_EVER_HOURS:
        return "forever"
    return f"{hours // 24}d" if hours % 24 == 0 else f"{hours}h"


def shorter(new: int, old: int | None) -> bool:
    """Whether the new TTL may delete what the old one kept; the broker's default may be for ever."""
    return new < FOR_EVER_HOURS and (old is None or old == BROKER_DEFAULT or new < old)


def ttl_value(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A click callback: hours, or a usage error that says what is wrong."""
    if value is None:
        return None
    try:
        return parse_ttl(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error
