"""Options that mean the same in every command, and the types of their values.

--from, --to        store times, the start included and the end excluded
--offsets FIRST:END queue offsets, the first included and the end excluded
--queue, --broker   one queue number, one broker
--tags, --key       tags as `A || B`, one key
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from neve.cli.aliases import option
from neve.clock import system_now_ms
from neve.units import parse_duration_ms, parse_instant_ms, parse_size_bytes

if TYPE_CHECKING:
    from typing_extensions import override

    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # generic from click 8.4 on

    def override(method: Any) -> Any:
        return method


Command = TypeVar("Command", bound=Callable[..., Any])


class _Parsed(ParamType):
    """A type of values that a function reads from text; its ValueError becomes a usage error."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _seconds(text: str) -> float:
    """Return the seconds of a duration; a number without a unit is seconds."""
    return parse_duration_ms(text, bare_unit="s") / 1000


def _positive_seconds(text: str) -> float:
    seconds = _seconds(text)
    if not seconds:
        raise ValueError(f"{text!r} is not a duration above 0")
    return seconds


def _instant(text: str) -> int:
    return parse_instant_ms(text, system_now_ms())


def _offsets(text: str) -> tuple[int | None, int | None]:
    found = re.fullmatch(r"([0-9]*)(?:(:)([0-9]*))?", text)
    if found is None or not (found[1] or found[3]):
        raise ValueError(f"{text!r} is not FIRST, FIRST:, :END or FIRST:END")
    first, end = (int(part) if part else None for part in (found[1], found[3]))
    if first is not None and end is not None and end < first:
        raise ValueError(f"the end {end} is below the first offset {first}")
    return first, end


DURATION = _Parsed("duration", _seconds)  # seconds
POSITIVE_DURATION = _Parsed("duration", _positive_seconds)  # seconds
SIZE = _Parsed("size", parse_size_bytes)  # bytes
INSTANT = _Parsed("time", _instant)  # milliseconds since 1970
OFFSETS = _Parsed("offsets", _offsets)  # (first, end), each may be None

yes_option = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
queue_option = click.option("--queue", type=click.IntRange(0), help="Only this queue, of each broker.")
broker_option = click.option("--broker", help="Only the queues of this broker.")
key_option = click.option("--key", help="Only messages with this key.")
offsets_option = option(
    "--offsets",
    former=["--offset"],
    type=OFFSETS,
    metavar="FIRST:END",
    help="Only these offsets of each queue, END excluded; either may be left out.",
)


def tags_option(default: str | None = None) -> Callable[[Command], Command]:
    """Return the option `--tags`."""
    decorate: Callable[[Command], Command] = option(
        "--tags", former=["--tag"], default=default, help='Only messages with one of these tags, as "A || B".'
    )
    return decorate


def time_range_options(command: Command) -> Command:
    """Add `--from` and `--to`, as the arguments `start` and `end` in milliseconds since 1970."""
    start = click.option(
        "--from", "start", type=INSTANT, metavar="TIME", help="Stored at this time or later: ISO 8601, or -90m."
    )
    end = click.option("--to", "end", type=INSTANT, metavar="TIME", help="Stored before this time: ISO 8601, or -10m.")
    return start(end(command))
