"""One word for each action, and the former words and options as hidden aliases.

The words are `list`, `show`, `create`, `set` and `delete`. An alias works and does not appear in the help.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from typing_extensions import override
else:

    def override(method: Any) -> Any:
        return method


Command = TypeVar("Command", bound=Callable[..., Any])

_ALIASES: Mapping[str, str] = {
    "ls": "list",
    "get": "show", "describe": "show", "info": "show", "status": "show",
    "add": "create", "new": "create",
    "alter": "set", "update": "set", "edit": "set",
    "rm": "delete", "remove": "delete", "forget": "delete",
}  # fmt: skip


class VerbGroup(click.Group):
    """A group of verbs that also answers to other words for them. `former` names verbs that have moved."""

    def __init__(self, *args: Any, former: Mapping[str, click.Command] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.former: dict[str, click.Command] = dict(former or {})

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, cmd_name) or self.former.get(cmd_name)
        return found or self.commands.get(_ALIASES.get(cmd_name, ""))


class _OptionWithFormerNames(click.Option):
    def __init__(self, *args: Any, former: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._former = list(former)

    @override
    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        shown = self.opts
        self.opts = [*shown, *self._former]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = shown


def option(*names: str, former: Sequence[str] = (), **settings: Any) -> Callable[[Command], Command]:
    """Return a decorator as `click.option`; the former names work and do not appear in the help."""
    decorate: Callable[[Command], Command] = click.option(*names, cls=_OptionWithFormerNames, former=former, **settings)
    return decorate
