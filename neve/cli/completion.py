"""`neve completion`: shell completion of commands, options, and names of topics, groups and brokers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem, get_completion_class

from neve.cli.cluster import administer
from neve.cli.contexts import read_contexts
from neve.errors import NeveError

if TYPE_CHECKING:
    from neve.admin import ClusterAdmin

_WITHIN_S = 3.0
_VARIABLE = "_NEVE_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes `neve` in a shell: commands, options, topics, groups and brokers.

    \b
    bash   eval "$(neve completion bash)"       in ~/.bashrc
    zsh    eval "$(neve completion zsh)"        in ~/.zshrc
    fish   neve completion fish > ~/.config/fish/completions/neve.fish
    """
    from neve.cli.main import neve

    found = get_completion_class(shell)
    assert found is not None, "click completes in these shells"
    # `source` would check the version of the installed bash, which a script for another machine does not need
    made = found(neve, {}, "neve", _VARIABLE)
    click.echo(made.source_template % made.source_vars())


Names = Callable[["ClusterAdmin"], Awaitable[list[str]]]


def topics(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the users' topics that start with this text."""

    return _named(context, incomplete, lambda admin: admin.topics.names())


def brokers(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    async def names(admin: ClusterAdmin) -> list[str]:
        return admin.brokers.require(None)

    return _named(context, incomplete, names)


def groups(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from neve.remoting.names import is_system_group

    async def names(admin: ClusterAdmin) -> list[str]:
        return [group for group in await admin.groups.settings() if not is_system_group(group)]

    return _named(context, incomplete, names)


def contexts(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(read_contexts().named) if name.startswith(incomplete)]


def _named(context: click.Context, incomplete: str, ask: Names) -> list[CompletionItem]:
    """Return the matching names; none if the cluster does not answer, for a completion must print no error."""

    async def inside() -> list[str]:
        async with asyncio.timeout(_WITHIN_S), administer(_namesrv(context)) as admin:
            return await ask(admin)

    level = logging.root.manager.disable
    logging.disable()
    try:
        with context.scope(cleanup=False):
            found = asyncio.run(inside())
    except (NeveError, OSError, TimeoutError, click.ClickException):
        return []
    finally:
        logging.disable(level)
    return [CompletionItem(name) for name in found if name.startswith(incomplete)]


def _namesrv(context: click.Context) -> str:
    named = context.params.get("namesrv")
    if isinstance(named, str):
        return named
    option = next(one for one in context.command.params if one.name == "namesrv")
    value, _ = option.consume_value(context, {})
    return str(value)
