"""`neve produce`: a text, lines of stdin, or files become messages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from neve.cli import completed
from neve.cli.cluster import cluster_options, connect
from neve.cli.failures import FAILED, Failure
from neve.cli.line_parts import LineParts, delimiter_bytes
from neve.cli.message_lines import BadLine, Outgoing, from_line
from neve.cli.output import say
from neve.cli.progress import Progress, shown_by_default
from neve.cli.stdin_lines import LineTooLong, Numbered, stdin_lines
from neve.cli.stdout_bytes import NotPrinted, StdoutBytes

if TYPE_CHECKING:
    from neve.cli.sending import How, Sending


def _delimiter(_context: click.Context, _parameter: click.Parameter, text: str | None) -> bytes | None:
    return None if text is None else delimiter_bytes(text)


@click.command()
@click.argument("topic", shell_complete=completed.topics)
@click.argument("body", required=False)
@click.option("--tags", help="Tag of the message.")
@click.option("-k", "--key", "keys", multiple=True, help="A key; may be repeated.")
@click.option(
    "-p", "--property", "properties", multiple=True, metavar="NAME=VALUE", help="A property; may be repeated."
)
@click.option(
    "-K", "--key-delimiter", metavar="TEXT", callback=_delimiter, help="A line begins with its keys, up to this."
)
@click.option(
    "-H",
    "--property-delimiter",
    metavar="TEXT",
    callback=_delimiter,
    help="A line begins (behind its keys) with NAME=VALUE,NAME=VALUE, up to this.",
)
@click.option(
    "-D",
    "--delimiter",
    metavar="TEXT",
    default="\\n",
    show_default=True,
    callback=_delimiter,
    help=r"What ends a line of stdin: text, \0, \xHH.",
)
@click.option("--json", "as_json", is_flag=True, help="Lines are JSON as `neve consume -o json` prints them.")
@click.option(
    "--file",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="A file is one message; may be repeated. - is all of stdin.",
)
@click.option("--queue", type=int, help="Into this queue only.")
@click.option("--order-key", help="All into the queue of this key, one after the other.")
@click.option("--delay", type=click.FloatRange(0), metavar="SECONDS", help="Deliver so many seconds later.")
@click.option("-q", "--quiet", is_flag=True, help="Print no receipts.")
@click.option(
    "--progress/--no-progress", default=None, help="Tell on stderr how far it is.  [default: where that is a terminal]"
)
@cluster_options
def produce(
    *,
    topic: str,
    body: str | None,
    tags: str | None,
    keys: tuple[str, ...],
    properties: tuple[str, ...],
    key_delimiter: bytes | None,
    property_delimiter: bytes | None,
    delimiter: bytes,
    as_json: bool,
    files: tuple[Path, ...],
    queue: int | None,
    order_key: str | None,
    delay: float | None,
    quiet: bool,
    progress: bool | None,
    namesrv: str,
) -> None:
    """Send BODY as one message, or each line of stdin that is not empty, or files. Prints a JSON line for each.

    With --json a line has `body` (text) or `body_base64`, and if wanted `tags`, `keys`, `properties` and `flag`. What
    it says of where it was stored does not count, and of a stored message no property that clients or brokers added.

    Lines that come together are sent together. Lines keep their order within a queue, except for those with --delay and
    those of a broker that fails, which go to another broker's queues. The first that can't be sent ends it: it is
    named, with how many were stored; the exit code is its own.
    """
    from neve.cli.sending import How

    parts = LineParts(key_delimiter, property_delimiter)
    if queue is not None and order_key is not None:
        raise click.UsageError("--queue and --order-key exclude each other")
    if as_json and body is not None:
        raise click.UsageError("--json reads lines of stdin: leave BODY out")
    if files and (as_json or body is not None):
        raise click.UsageError("--file is a message as it is: leave BODY and --json out")
    if as_json and (tags is not None or keys or properties or parts != LineParts()):
        raise click.UsageError("--json: each line has its own tags, keys and properties")
    if parts != LineParts() and (files or body is not None):
        raise click.UsageError("--key-delimiter and --property-delimiter are for lines of stdin")
    if order_key is not None and not order_key:
        raise click.UsageError("--order-key is empty")
    common = Outgoing(b"", tags, keys, dict(_pair(text) for text in properties))
    how = How(queue, order_key, delay, quiet)
    if body is not None:
        source = Source(_once(body.encode()), lambda text: common._replace(body=text), is_numbered=False)
    elif files:
        source = Source(_each(files), lambda name: _file(name, common), names=tuple(map(str, files)))
    elif as_json:
        source = Source(stdin_lines(delimiter=delimiter), from_line)
    else:
        source = Source(stdin_lines(delimiter=delimiter), lambda line: parts.message(line, common))
    if body is None and not files and sys.stdin.isatty():
        say("reading lines from the terminal; Ctrl-D ends")
    shown = shown_by_default() if progress is None else progress
    asyncio.run(_produce(namesrv, topic, how, source, shown_progress=shown))


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--property")
    return name, value


class Source(NamedTuple):
    """Where messages come from: texts, those that come together, and what one makes of each."""

    texts: AsyncIterator[list[Numbered]]
    message: Callable[[bytes], Outgoing]
    names: tuple[str, ...] | None = None
    is_numbered: bool = True


async def _once(body: bytes) -> AsyncIterator[list[Numbered]]:
    yield [(0, body)]


async def _each(files: tuple[Path, ...]) -> AsyncIterator[list[Numbered]]:
    for number, file in enumerate(files, 1):
        yield [(number, os.fsencode(file))]


#: No message is as long, and no more of a file is read.
_FILE_BYTES = 64 << 20


def _file(name: bytes, common: Outgoing) -> Outgoing:
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if name == b"-" else Path(os.fsdecode(name)).open("rb") as file:
            body = file.read(_FILE_BYTES + 1)
    except OSError as error:
        raise BadLine(str(error)) from error
    if len(body) > _FILE_BYTES:
        raise BadLine(f"it is longer than {_FILE_BYTES} bytes")
    return common._replace(body=body)


#: Of a batch among many: one that is given up too early is sent twice.
_CALL_S, _ATTEMPT_S = 60.0, 20.0


async def _produce(namesrv: str, topic: str, how: How, source: Source, *, shown_progress: bool) -> None:
    from neve.cli.sending import Sending

    progress = Progress("sent", shown=shown_progress)
    receipts = StdoutBytes()
    async with connect(namesrv, timeout=_CALL_S, attempt_timeout=_ATTEMPT_S) as client:
        noun = "line" if source.names is None else "file"
        sending = Sending(client, topic, how, receipts=receipts, progress=progress, noun=noun, names=source.names)
        try:
            async with receipts.watched():
                await _send_all(sending, source)
        except asyncio.CancelledError:
            await _stop(sending, progress)
            raise
        except (BrokenPipeError, NotPrinted) as error:
            await _stop(sending, progress)
            why = "nobody reads them any more" if isinstance(error, BrokenPipeError) else str(error)
            raise Failure(FAILED, f"receipts are missing: {why}") from error
    took = progress.end()
    sending.tell()
    say(f"sent {sending.stored} messages to {topic}" + (f" in {took}" if shown_progress else ""))


async def _stop(sending: Sending, progress: Progress) -> None:
    """What has left may be stored: its receipt is printed, if that can be."""
    progress.end()
    with contextlib.suppress(BrokenPipeError, NotPrinted):  # that is what it stops for
        await sending.settle()
    sending.tell_where_it_stopped()


async def _send_all(sending: Sending, source: Source) -> None:
    """Up to the first that can't be sent; everything that left has its answer then."""
    try:
        async for texts in source.texts:
            for number, text in texts:
                if not text and source.is_numbered:
                    continue
                try:
                    message = source.message(text)
                except BadLine as error:
                    sending.refuse(number, error)
                else:
                    sending.add(number, message)
                if sending.has_failed:
                    break
            await sending.send()
            if sending.has_failed:
                break
    except LineTooLong as error:
        sending.refuse(error.number, error)
    await sending.settle()
