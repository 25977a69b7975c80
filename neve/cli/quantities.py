"""Spans of time and sizes on the command line, as configuration files have them: `90m`, `8m`."""

from __future__ import annotations

import re

import click

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def time(text: object) -> float:
    """Seconds of `30s`, `90m`, `6h` or `1d`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(text).strip().lower())
    if found is None or not float(found[1]):
        raise click.BadParameter(f"{text!r} is not a span of time: write 30s, 90m, 6h or 1d")
    return float(found[1]) * _SECONDS[found[2]]


def seconds_or_span(text: object) -> float:
    """Seconds of `5`, `0.5`, or of a span as `time` takes it."""
    try:
        seconds = float(str(text))
    except ValueError:
        return time(text)
    if not 0 <= seconds < float("inf"):
        raise click.BadParameter(f"{text!r} is not a span of time: write 5, 30s, 90m, 6h or 1d")
    return seconds


def size(text: object) -> int:
    """Bytes of `512`, `64k`, `8m` or `1g`."""
    found = re.fullmatch(r"(\d+)([kmg]?)", str(text).strip().lower())
    if found is None or not int(found[1]):
        raise click.BadParameter(f"{text!r} is not a size: write 512, 64k, 8m or 1g")
    return int(found[1]) * _BYTES[found[2]]


def time_span_text(seconds: float) -> str:
    """The shortest exact spelling."""
    for unit in ("d", "h", "m"):
        if seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:g}{unit}"
    return f"{seconds:g}s"
