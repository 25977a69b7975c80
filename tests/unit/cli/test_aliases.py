"""Tests of command aliases: former command names and options work, but are hidden."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from neve.cli import main
from neve.cli.aliases import VerbGroup, option

WORDS = {"list", "show", "create", "set", "delete"}
FORMER = {
    "ls", "get", "describe", "info", "status", "add", "new", "alter", "update", "edit", "rm", "remove", "forget",
}  # fmt: skip


def groups() -> Iterator[tuple[str, click.Group]]:
    def below(words: str, group: click.Group) -> Iterator[tuple[str, click.Group]]:
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if isinstance(command, click.Group):
                yield f"{words} {name}", command
                yield from below(f"{words} {name}", command)

    yield from below("neve", main.neve)


@pytest.mark.parametrize(("words", "group"), groups())
def test_command_groups_list_no_former_names(words: str, group: click.Group) -> None:
    assert not FORMER & set(group.list_commands(click.Context(group))), words


@pytest.mark.parametrize(
    "words",
    [
        ["topic", "ls"],
        ["topic", "describe"],
        ["topic", "alter"],
        ["topic", "ttl", "get"],
        ["user", "add"],
        ["user", "rm"],
        ["acl", "ls"],
        ["archive", "ls"],
        ["context", "rm"],
        ["dlq", "ls"],
        ["group", "describe"],
        ["message", "get"],
        ["replay", "forget"],
        ["broker", "describe"],
        ["broker", "wipe-write"],
        ["broker", "add-write"],
        ["broker", "config", "get"],
        ["cluster", "describe"],
        ["cluster", "status"],
        ["cluster", "members"],
        ["cluster", "switch"],
        ["cluster", "init"],
        ["cluster", "add"],
        ["cluster", "remove"],
        ["cluster", "replace"],
    ],
)
def test_former_command_names_work(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*words, "--help"]) == 0
    assert f"Usage: neve {' '.join(words)}" in capsys.readouterr().out


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["topic", "lst"]) == 2
    assert "No such command" in capsys.readouterr().err


def test_alias_needs_its_target_in_the_group() -> None:
    group = VerbGroup(commands={"list": click.Command("list")})
    context = click.Context(group)
    assert group.get_command(context, "ls") is group.commands["list"]
    assert group.get_command(context, "rm") is None


def test_former_option_works_and_is_hidden() -> None:
    @click.command()
    @option("--offsets", former=["--offset"])
    def command(offsets: str) -> None:
        click.echo(offsets)

    runner = CliRunner()
    assert runner.invoke(command, ["--offset", "5"]).output == "5\n"
    assert runner.invoke(command, ["--offsets", "6"]).output == "6\n"
    shown = runner.invoke(command, ["--help"]).output
    assert "--offsets" in shown
    assert "--offset " not in shown
