"""Tests that the pages of `neve help TOPIC` match the commands, options, formats and exit codes."""

from __future__ import annotations

import re

import click
import pytest

from infra.process import startup
from neve.cli import failures, main, message_formats
from neve.cli.help import TOPICS


def commands() -> dict[tuple[str, ...], click.Command]:
    """Return every command by its words."""
    found: dict[tuple[str, ...], click.Command] = {}

    def walk(words: tuple[str, ...], command: click.Command) -> None:
        found[words] = command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                below = command.get_command(context, name)
                assert below is not None
                walk((*words, name), below)

    walk((), main.neve)
    for name in ("broker", "controller", "namesrv", "up"):  # server commands in the same groups
        found[name, ""] = main.joined(name)
    return found


def options(command: click.Command) -> set[str]:
    return {text for parameter in command.params for text in (*parameter.opts, *parameter.secondary_opts)}


ALL = commands()
EVERY_OPTION = set().union(*map(options, ALL.values()))


@pytest.mark.parametrize("name", TOPICS)
def test_help_page_fits_a_screen_and_names_existing_commands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["help", name]) == 0
    page = capsys.readouterr().out
    assert page.startswith(TOPICS[name].line)
    assert len(page.splitlines()) < 50
    assert max(map(len, page.splitlines())) <= 100
    assert set(re.findall(r"(?<![-\w])--?[a-z][a-z-]+\b", page)) - {"-c"} <= EVERY_OPTION
    for found in re.findall(r"\bneve ((?!--)[a-z][^`,:;\n]*)", page):
        line, *_ = found.split("  ")  # the rest is its purpose
        words = tuple(line.split())
        verb = max((known for known in ALL if known == words[: len(known)]), key=len)
        assert verb, f"neve {line}"
        follows = words[len(verb)] if len(verb) < len(words) else ""
        is_example = f"\nneve {line}" in page and isinstance(ALL[verb], click.Group)
        assert not (is_example and re.match("[a-z]", follows)), f"no such command: neve {line}"
        used = set(re.findall(r"(?<= )--?[a-zA-Z][a-z-]*", line))
        assert used <= options(ALL[verb]) | options(ALL.get((*verb, ""), ALL[verb])), f"neve {line}"


def test_help_lists_all_topics_and_suggests_for_typos(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name} " in listed for name in TOPICS)
    assert main.run(["help", "format"]) == 2
    assert "do you mean formats?" in capsys.readouterr().err
    assert main.run(["help", "nonsense"]) == 2


def test_exit_code_page_lists_the_codes_of_the_program() -> None:
    own, _, servers = TOPICS["exit-codes"].text.partition("Servers (")
    assert set(map(int, re.findall(r"^(\d+)  ", own, re.MULTILINE))) == {
        0, failures.FAILED, failures.USAGE, failures.NOT_FOUND, failures.AUTH, failures.CONFLICT, failures.UNREACHABLE,
        failures.FEWER, 130,
    }  # fmt: skip
    assert set(map(int, re.findall(r"^(\d+)  ", servers, re.MULTILINE))) == {
        0, startup.EXIT_CONFIG, startup.EXIT_IN_USE, startup.EXIT_DISK, startup.EXIT_ARCHIVE, startup.EXIT_FAILED, 143
    }  # fmt: skip


def test_format_page_lists_the_supported_formats() -> None:
    told = set(re.findall(r"%([a-zA-Z%])", TOPICS["formats"].text.split("a format:")[1]))
    assert message_formats.__doc__ is not None
    assert told == set(re.findall(r"%([a-zA-Z%])", message_formats.__doc__))
    for letter in told:
        message_formats.by_format(f"%{letter}")
