"""`neve context`: named sets of connection settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from neve.cli import completed
from neve.cli.aliases import VerbGroup
from neve.cli.contexts import SETTINGS, Contexts, read_contexts, write_contexts
from neve.cli.output import emit, output_option, say

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path, resolve_path=True)


@click.group(cls=VerbGroup)
def context() -> None:
    """Contexts: name servers, credentials, TLS and store under a name.

    The command line and the environment override a context. `neve --context NAME VERB` and NEVE_CONTEXT choose another
    context than the current one.
    """


def _store(_context: click.Context, _parameter: click.Parameter, url: str | None) -> str | None:
    """Check the URL: one with credentials is refused, and not printed."""
    from neve.archive.store.url import BadUrl, parse_store_url

    try:
        if url is not None:
            parse_store_url(url)
    except BadUrl as error:
        raise click.BadParameter(str(error)) from error
    return url


@context.command()
@click.argument("name")
@click.option("-n", "--namesrv", help="Name servers, host:port[;host:port].")
@click.option("--credentials", type=_FILE, help="File with accessKey and secretKey; only its name is stored.")
@click.option("--tls/--no-tls", default=None, help="Connect over TLS.")
@click.option("--tls-ca", type=_FILE, help="Trust this PEM.")
@click.option("--tls-cert", type=_FILE, help="Certificate to show.")
@click.option("--tls-key", type=_FILE, help="Private key of the certificate.")
@click.option("--store", callback=_store, help="Archive store.")
@click.option("--use", "is_used", is_flag=True, help="Make it the current context.")
def create(name: str, is_used: bool, **settings: Any) -> None:
    """Create a context, or replace one."""
    known = read_contexts()
    kept = {
        key: str(settings[key]) if isinstance(settings[key], Path) else settings[key]
        for key in SETTINGS
        if settings[key] is not None
    }
    current = name if is_used or known.current is None else known.current
    write_contexts(Contexts(current, {**known.named, name: kept}))
    say(f"created context {name}" + (", which is the current one" if current == name else ""))


@context.command()
@click.argument("name", shell_complete=completed.contexts)
def use(name: str) -> None:
    """Make a context the current one."""
    known = read_contexts()
    known.get(name)
    write_contexts(known._replace(current=name))
    say(f"the current context is {name}")


@context.command(name="list")
@output_option
def list_contexts(output: str) -> None:
    """List the contexts; a star marks the current one."""
    known = read_contexts()
    rows = [
        {"current": "*" if name == known.current else "", "context": name, **settings}
        for name, settings in sorted(known.named.items())
    ]
    if output == "json":
        rows = [{**row, "current": bool(row["current"])} for row in rows]
    emit(rows, ["current", "context", "namesrv", "credentials", "tls", "store"], output)


@context.command()
@click.argument("name", shell_complete=completed.contexts)
def delete(name: str) -> None:
    """Delete a context. If it was the current one, no context is current afterwards."""
    known = read_contexts()
    known.get(name)
    left = {other: settings for other, settings in known.named.items() if other != name}
    write_contexts(Contexts(None if known.current == name else known.current, left))
    say(f"deleted context {name}")
