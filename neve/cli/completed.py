"""Completions of arguments in a shell; `neve.cli.completion` is imported only when one is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click
    from click.shell_completion import CompletionItem


def topics(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from neve.cli import completion

    return completion.topics(context, parameter, incomplete)


def groups(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from neve.cli import completion

    return completion.groups(context, parameter, incomplete)


def brokers(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from neve.cli import completion

    return completion.brokers(context, parameter, incomplete)


def contexts(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from neve.cli import completion

    return completion.contexts(context, parameter, incomplete)
