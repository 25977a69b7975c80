"""`neve completion`: what a shell needs to complete verbs, options, and names of topics, groups and brokers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem, get_completion_class

from neve.cli.cluster import connect
from neve.cli.contexts import read_contexts
from neve.errors import NeveError

if TYPE_CHECKING:
    from neve.client import AsyncClient

_WITHIN_S = 3.0
_VARIABLE = "_NEVE_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what completes `neve` in a shell: verbs, options, and the cluster's topics, groups and brokers.

    \b
    bash   eval "$(neve completion bash)"       in ~/.bashrc
    zsh    eval "$(neve completion zsh)"        in ~/.zshrc
    fish   neve completion fish > ~/.config/fish/completions/neve.fish
    """
    from neve.cli.main import neve

    found = get_completion_class(shell)
    assert found is not None, "click completes in these shells"
    # `source` asks an installed bash for its version, which a script for another machine need not
    made = found(neve, {}, "neve", _VARIABLE)
    click.echo(made.source_template % made.source_vars())


Names = Callable[["AsyncClient"], Awaitable[list[str]]]


def topics(context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The users' topics."""
    from neve.cli.topic_names import topic_names

    return _named(context, begun, lambda client: topic_names(client, everything=False))


def brokers(context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    async def names(client: AsyncClient) -> list[str]:
        return sorted(await client.cluster_info())

    return _named(context, begun, names)


def groups(context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    from neve.cli.consumer_groups import consumer_groups
    from neve.remoting.names import is_system_group

    async def names(_: AsyncClient) -> list[str]:
        async with consumer_groups(_namesrv(context)) as asked:
            return [group for group in await asked.settings() if not is_system_group(group)]

    return _named(context, begun, names)


def contexts(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(read_contexts().named) if name.startswith(begun)]


def _named(context: click.Context, begun: str, ask: Names) -> list[CompletionItem]:
    """Nothing where the cluster does not answer: whoever presses a key wants no error."""

    async def inside() -> list[str]:
        async with asyncio.timeout(_WITHIN_S), connect(_namesrv(context)) as client:
            return await ask(client)

    level = logging.root.manager.disable
    logging.disable()  # nor a line of a log
    try:
        with context.scope(cleanup=False):
            found = asyncio.run(inside())
    except (NeveError, OSError, TimeoutError, click.ClickException):
        return []
    finally:
        logging.disable(level)
    return [CompletionItem(name) for name in found if name.startswith(begun)]


def _namesrv(context: click.Context) -> str:
    named = context.params.get("namesrv")
    if isinstance(named, str):
        return named
    option = next(one for one in context.command.params if one.name == "namesrv")
    value, _ = option.consume_value(context, {})
    return str(value)
