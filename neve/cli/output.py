"""Data to stdout as a table or JSON, messages to stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from neve.cli.contexts import from_context

Command = TypeVar("Command", bound=Callable[..., Any])
# The environment variable with the path of an admin token file, and the key of that path in `Context.meta`.
ADMIN_TOKEN = "NEVE_ADMIN_TOKEN_FILE"
_JSON_ALIAS = "neve.cli.output.json"
Row = Mapping[str, Any]


def output_option(command: Command) -> Command:
    """Add `-o table|json`."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="Form of the data.",
    )(command)


def json_option(text: str) -> Callable[[Command], Command]:
    """Return the option `-o text|json` of a command with progress, as the argument `as_json`.

    `--json` is a hidden alias of `-o json`.
    """

    def add(command: Command) -> Command:
        alias = click.option(
            "--json", "json_alias", is_flag=True, hidden=True, is_eager=True, expose_value=False, callback=_keep_alias
        )
        choice = click.option(
            "-o",
            "--output",
            "as_json",
            type=click.Choice(["text", "json"]),
            default="text",
            show_default=True,
            callback=_is_json,
            help=text,
        )
        return choice(alias(command))

    return add


def _keep_alias(context: click.Context, _parameter: click.Parameter, is_given: bool) -> None:
    context.meta[_JSON_ALIAS] = is_given


def _is_json(context: click.Context, _parameter: click.Parameter, value: str) -> bool:
    return value == "json" or bool(context.meta.get(_JSON_ALIAS))


def admin_option(command: Command) -> Command:
    """Add `--admin` and `--admin-token`; `neve.cli.admin` reads the file."""
    command = click.option(
        "--admin-token",
        "admin_token",
        type=click.Path(path_type=Path),
        envvar=ADMIN_TOKEN,
        show_envvar=True,
        expose_value=False,
        callback=_keep_token_file,
        metavar="FILE",
        help="File with the admin token of the broker.  [default: adminToken in the broker's data directory]",
    )(command)
    return click.option(
        "--admin",
        envvar="NEVE_ADMIN",
        show_envvar=True,
        callback=_host_and_port,
        metavar="HOST:PORT",
        help="Admin port of the broker.  [default: as the broker reports it, or 127.0.0.1:10913]",
    )(command)


def _keep_token_file(context: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
    context.meta[ADMIN_TOKEN] = path


def _host_and_port(_context: click.Context, _parameter: click.Parameter, text: str | None) -> str | None:
    """Return the address without the `http://` and the final slash of a URL."""
    if text is None:
        return None
    address = text.removeprefix("http://").removesuffix("/")
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise click.BadParameter(f"{text!r} is not HOST:PORT, as 127.0.0.1:10913 (the admin port has no TLS)")
    return address


def store_option(required: bool = False) -> Callable[[Command], Command]:
    """Return the option `--store`."""
    text = "Archive store: dir:PATH or s3://BUCKET/PREFIX?endpoint=URL."

    def checked(context: click.Context, parameter: click.Parameter, store: str | None) -> str | None:
        if required and store is None:  # click takes the None of a default function as a value
            raise click.MissingParameter(ctx=context, param=parameter)
        return store

    def add(command: Command) -> Command:
        return click.option(
            "--store",
            envvar="NEVE_STORE",
            show_envvar=True,
            default=from_context("store"),
            callback=checked,
            help=text,
        )(command)

    return add


def chosen_store(store: str | None) -> str | None:
    """Return the store to read, unless the command line names an admin port and the store is a default."""
    context = click.get_current_context()
    typed = click.core.ParameterSource.COMMANDLINE
    by_store, by_admin = (context.get_parameter_source(name) is typed for name in ("store", "admin"))
    if by_store and by_admin:
        raise click.UsageError("--store reads the store, --admin asks a broker: give one of them")
    if by_admin or store is None:
        return None
    if not by_store:
        is_set = context.get_parameter_source("store") is click.core.ParameterSource.ENVIRONMENT
        origin = "NEVE_STORE" if is_set else "from the context"
        say(f"reading the store {store} ({origin}); --admin asks a broker")
    return store


def ask(question: str) -> None:
    """Ask for confirmation on the terminal.

    Raises:
        Failure: the answer was no, or there is no terminal.
    """
    from neve.cli.failures import FAILED, Failure

    try:
        agreed = click.confirm(question, err=True)
    except click.Abort as abort:
        if isinstance(abort.__context__, KeyboardInterrupt):
            raise
        raise Failure(FAILED, "nothing was changed: no answer to the question; --yes skips it") from abort
    if not agreed:
        raise Failure(FAILED, "nothing was changed")


def say(text: str) -> None:
    """Print a message to stderr."""
    click.echo(text, err=True)


def emit(rows: Iterable[Row], columns: Sequence[str], output: str) -> None:
    """Print rows as a table of these columns, or as one JSON array of complete rows."""
    if output == "json":
        click.echo(json.dumps([dict(row) for row in rows], ensure_ascii=False, default=_plain))
        return
    click.echo("\n".join(table([[_cell(row.get(name)) for name in columns] for row in rows], columns)))


def emit_one(row: Row, output: str) -> None:
    """Print one row as a line for each field, or as one JSON object."""
    if output == "json":
        click.echo(json.dumps(dict(row), ensure_ascii=False, default=_plain))
        return
    width = max((len(name) for name in row), default=0)
    for name, value in row.items():
        click.echo(f"{name:<{width}}  {_cell(value)}")


def table(cells: Sequence[Sequence[str]], columns: Sequence[str]) -> list[str]:
    """Return the lines of a table; columns of numbers are aligned to the right."""
    widths = [max([len(name), *(len(row[at]) for row in cells)]) for at, name in enumerate(columns)]
    right = [bool(cells) and all(_is_number(row[at]) for row in cells) for at in range(len(columns))]

    def line(values: Sequence[str]) -> str:
        return "  ".join(
            value.rjust(width) if number else value.ljust(width)
            for value, width, number in zip(values, widths, right, strict=True)
        ).rstrip()

    return [line([name.upper() for name in columns]), *(line(row) for row in cells)]


def size_text(count: int) -> str:
    """Return bytes in the largest unit below 1024."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def time_text(milliseconds: int | None) -> str:
    """Return a time in ISO 8601, to the second; an empty text for None."""
    if milliseconds is None or milliseconds < 0:
        return ""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)) and all(isinstance(one, (str, int)) for one in value):
        return ", ".join(map(str, value))
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value, ensure_ascii=False, default=_plain)
    return str(value)


def _is_number(text: str) -> bool:
    return text == "" or text.lstrip("-").replace(".", "", 1).isdigit()


def _plain(value: Any) -> Any:
    """Return a value that JSON can represent."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)
