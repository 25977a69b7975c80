"""Verbs of the same meaning: `ls` and `list`, `rm` and `delete`, `show` and `get`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from typing_extensions import override
else:

    def override(method: Any) -> Any:
        return method


_SAME = (("ls", "list"), ("rm", "remove", "delete"), ("show", "get", "describe"))


class AliasedGroup(click.Group):
    """A group whose verb also answers to the other words for it, as long as only one verb has that meaning."""

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, cmd_name)
        if found is not None:
            return found
        meant = [name for words in _SAME if cmd_name in words for name in words if name in self.commands]
        return self.commands[meant[0]] if len(meant) == 1 else None
