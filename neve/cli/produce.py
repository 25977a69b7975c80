"""`neve produce`: sends a text, lines of stdin, or files as messages."""

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
from neve.cli.options import DURATION
from neve.cli.output import say
from neve.cli.progress import MessageProgress, shown_by_default
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
    "-K", "--key-delimiter", metavar="TEXT", callback=_delimiter, help="Lines start with keys that end with this."
)
@click.option(
    "-H",
    "--property-delimiter",
    metavar="TEXT",
    callback=_delimiter,
    help="Lines continue with NAME=VALUE,NAME=VALUE that end with this.",
)
@click.option(
    "-D",
    "--delimiter",
    metavar="TEXT",
    default="\\n",
    show_default=True,
    callback=_delimiter,
    help=r"End of a line of stdin: text, \0, \xHH.",
)
@click.option("--json", "as_json", is_flag=True, help="Read JSON lines as `neve consume -o json` prints them.")
@click.option(
    "--file",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="Send a file as one message; may be repeated. - is all of stdin.",
)
@click.option("--queue", type=click.IntRange(0), help="Send to this queue only.")
@click.option("--order-key", help="Send all to the queue of this key, one after the other.")
@click.option("--delay", type=DURATION, metavar="DURATION", help="Deliver after this time, as 30s.")
@click.option("-q", "--quiet", is_flag=True, help="Print no receipts.")
@click.option("--progress/--no-progress", default=None, help="Print progress to stderr.  [default: on a terminal]")
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

    With --json a line has `body` (text) or `body_base64`, and optionally `tags`, `keys`, `properties` and `flag`.
    Fields that describe a stored message are ignored, and so are properties that clients or brokers added.

    Lines that arrive together are sent together. Lines keep their order within a queue, except lines with --delay and
    those of a broker that fails, which go to another broker's queues. The first line that cannot be sent ends the
    command, with the number of stored messages and the exit code of its error.
    """
    from neve.cli.sending import How

    parts = LineParts(key_delimiter, property_delimiter)
    if queue is not None and order_key is not None:
        raise click.UsageError("--queue and --order-key exclude each other")
    if as_json and body is not None:
        raise click.UsageError("--json reads lines of stdin: leave BODY out")
    if files and (as_json or body is not None):
        raise click.UsageError("--file sends the file unchanged: leave BODY and --json out")
    if as_json and (tags is not None or keys or properties or parts != LineParts()):
        raise click.UsageError("--json reads tags, keys and properties from each line: leave these options out")
    if parts != LineParts() and (files or body is not None):
        raise click.UsageError("--key-delimiter and --property-delimiter apply to lines of stdin only")
    if order_key is not None and not order_key:
        raise click.UsageError("--order-key is empty")
    common = Outgoing(b"", tags, keys, dict(_pair(text) for text in properties))
    how = How(queue, order_key, delay, quiet)
    if body is not None:
        source = ProduceSource(_once(body.encode()), lambda text: common._replace(body=text), is_numbered=False)
    elif files:
        source = ProduceSource(_each(files), lambda name: _file(name, common), names=tuple(map(str, files)))
    elif as_json:
        source = ProduceSource(stdin_lines(delimiter=delimiter), from_line)
    else:
        source = ProduceSource(stdin_lines(delimiter=delimiter), lambda line: parts.message(line, common))
    if body is None and not files and sys.stdin.isatty():
        say("reading lines from the terminal; Ctrl-D ends")
    shown = shown_by_default() if progress is None else progress
    asyncio.run(_produce(namesrv, topic, how, source, shown_progress=shown))


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--property")
    return name, value


class ProduceSource(NamedTuple):
    """A source of messages: batches of texts, and the function that makes a message of each text."""

    texts: AsyncIterator[list[Numbered]]
    message: Callable[[bytes], Outgoing]
    names: tuple[str, ...] | None = None
    is_numbered: bool = True


async def _once(body: bytes) -> AsyncIterator[list[Numbered]]:
    yield [(0, body)]


async def _each(files: tuple[Path, ...]) -> AsyncIterator[list[Numbered]]:
    for number, file in enumerate(files, 1):
        yield [(number, os.fsencode(file))]


# Above the limit of every broker; longer files are refused.
_FILE_BYTES = 64 << 20


def _file(name: bytes, common: Outgoing) -> Outgoing:
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if name == b"-" else Path(os.fsdecode(name)).open("rb") as file:
            body = file.read(_FILE_BYTES + 1)
    except OSError as error:
        raise BadLine(str(error)) from error
    if len(body) > _FILE_BYTES:
        raise BadLine(f"the file is longer than {_FILE_BYTES} bytes")
    return common._replace(body=body)


# Long enough for a batch among many: a batch that is retried too early is stored twice.
_CALL_S, _ATTEMPT_S = 60.0, 20.0


async def _produce(namesrv: str, topic: str, how: How, source: ProduceSource, *, shown_progress: bool) -> None:
    from neve.cli.sending import Sending

    progress = MessageProgress("sent", shown=shown_progress)
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
            why = "their reader has closed the pipe" if isinstance(error, BrokenPipeError) else str(error)
            raise Failure(FAILED, f"receipts are missing: {why}") from error
    took = progress.end()
    sending.raise_failure()
    say(f"sent {sending.stored} messages to {topic}" + (f" in {took}" if shown_progress else ""))


async def _stop(sending: Sending, progress: MessageProgress) -> None:
    """Print the receipts of messages in flight, if possible: they may be stored."""
    progress.end()
    with contextlib.suppress(BrokenPipeError, NotPrinted):  # the command stops because of it
        await sending.settle()
    sending.report_interruption()


async def _send_all(sending: Sending, source: ProduceSource) -> None:
    """Send until the first failure, and wait for all answers."""
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
