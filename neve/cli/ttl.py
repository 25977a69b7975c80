"""The TTL of a topic as text, and as RocketMQ's attribute `reserve.time` has it: whole hours."""

from __future__ import annotations

import click

from neve.archive.policy.ttl import FOR_EVER_HOURS
from neve.units import HOUR_MS, parse_duration_ms

BROKER_DEFAULT = -1

# Other words for a TTL, and the spelling that is accepted.
_MEANT = {"unlimited": "forever", "never": "forever", "infinite": "forever", "-1": "forever, or `unset`"}


def _not_a_ttl(text: str, hint: str | None) -> ValueError:
    accepted = "whole hours, days or weeks, as 36h, 90d, 2w, or forever"
    return ValueError(f"{text!r} is not a TTL: write {accepted}" + ("" if hint is None else f"; {hint}"))


def parse_ttl(text: str) -> int:
    """Return the hours of `36h`, `90d`, `2w`, `120m` or `forever`.

    Raises:
        ValueError: the text is not a TTL; the message names what is accepted.
    """
    cleaned = text.strip().lower()
    if cleaned == "forever":
        return FOR_EVER_HOURS
    try:
        duration = parse_duration_ms(cleaned)
    except ValueError:
        meant = f"{cleaned}h" if cleaned.isdecimal() else _MEANT.get(cleaned)
        raise _not_a_ttl(text, None if meant is None else f"did you mean {meant}?") from None
    if duration == 0:
        raise ValueError("a TTL of 0 would delete every message at once: delete the topic instead")
    hours, rest = divmod(duration, HOUR_MS)
    if rest:
        raise _not_a_ttl(text, f"the nearest are {hours}h and {hours + 1}h" if hours else "the shortest is 1h")
    if hours >= FOR_EVER_HOURS:
        raise ValueError(f"{text!r} is longer than {FOR_EVER_HOURS - 1}h: write forever")
    return hours


def format_ttl(hours: int | None) -> str:
    """Return the shortest exact spelling."""
    if hours is None or hours == BROKER_DEFAULT:
        return "default"
    if hours >= FOR_EVER_HOURS:
        return "forever"
    return f"{hours // 24}d" if hours % 24 == 0 else f"{hours}h"


def shorter(new: int, old: int | None) -> bool:
    """Return whether the new TTL may delete messages that the old one keeps; the broker's default may be forever."""
    return new < FOR_EVER_HOURS and (old is None or old == BROKER_DEFAULT or new < old)


def ttl_value(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return the hours of an option or argument, as a callback of click."""
    if value is None:
        return None
    try:
        return parse_ttl(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error
