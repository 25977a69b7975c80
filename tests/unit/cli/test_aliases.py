"""Verbs answer to the other words of their meaning."""

from __future__ import annotations

import click
import pytest

from neve.cli import main
from neve.cli.aliases import AliasedGroup


@pytest.mark.parametrize(
    "words",
    [
        ["topic", "ls"],
        ["topic", "ttl", "show"],
        ["topic", "ttl", "ls"],
        ["user", "list"],
        ["archive", "list"],
        ["context", "delete"],
        ["broker", "config", "show"],
    ],
)
def test_verb_answers_to_its_alias(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*words, "--help"]) == 0
    said = capsys.readouterr()
    assert "Usage: neve" in said.out
    assert "No such command" not in said.err


def test_ambiguous_alias_is_refused() -> None:
    group = AliasedGroup(commands={"get": click.Command("get"), "describe": click.Command("describe")})
    context = click.Context(group)
    assert group.get_command(context, "show") is None
    assert group.get_command(context, "get") is group.commands["get"]
