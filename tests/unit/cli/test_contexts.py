"""Tests of contexts, the named clusters of the command line, and of shell completion."""

from __future__ import annotations

import json
import logging
import subprocess
from pathlib import Path

import click
import pytest
from click.shell_completion import CompletionItem

from neve.cli import cluster, completion, main
from neve.cli.contexts import contexts_file, read_contexts

NOT_FOUND, UNREACHABLE = 3, 6
VARIABLES = ("NAMESRV_ADDR", "NEVE_CONTEXT", "NEVE_TLS", "NEVE_CREDENTIALS", "NEVE_STORE")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NEVE_CONTEXTS", str(tmp_path / "deep" / "contexts.json"))
    return contexts_file()


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Record the connection arguments of commands instead of connecting."""
    found: list[dict[str, object]] = []

    @click.command()
    @cluster.cluster_options
    def probe(namesrv: str) -> None:
        found.append({"namesrv": namesrv, "tls": bool(cluster.security_of_the_command().tls)})

    monkeypatch.setattr(main.neve, "commands", {**main.neve.commands, "probe": probe})
    return found


def test_current_context_is_overridden_by_environment_and_options(
    chosen: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main.run(["probe"]) == 0
    assert main.run(["context", "create", "one", "-n", "ns1:9876"]) == 0
    assert main.run(["context", "create", "two", "-n", "ns2:9876", "--tls"]) == 0
    assert main.run(["probe"]) == 0
    assert main.run(["context", "use", "two"]) == 0
    assert main.run(["probe"]) == 0
    assert main.run(["--context", "one", "probe"]) == 0
    assert main.run(["probe", "-n", "typed:1", "--no-tls"]) == 0
    monkeypatch.setenv("NEVE_CONTEXT", "one")
    assert main.run(["probe"]) == 0
    monkeypatch.setenv("NAMESRV_ADDR", "set:1")
    assert main.run(["probe"]) == 0
    assert [one["namesrv"] for one in chosen] == [
        "127.0.0.1:9876", "ns1:9876", "ns2:9876", "ns1:9876", "typed:1", "ns1:9876", "set:1"
    ]  # fmt: skip
    assert [one["tls"] for one in chosen] == [False, False, True, False, False, False, False]


def test_contexts_are_listed_replaced_and_deleted(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = file.parent.parent / "secret.yml"
    secret.write_text("accessKey: a\nsecretKey: hidden\n")
    main.run(["context", "create", "one", "-n", "ns1:9876", "--credentials", str(secret)])
    main.run(["context", "create", "two", "-n", "ns2:9876", "--use"])
    capsys.readouterr()
    assert main.run(["context", "list", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"current": False, "context": "one", "namesrv": "ns1:9876", "credentials": str(secret)},
        {"current": True, "context": "two", "namesrv": "ns2:9876"},
    ]
    assert "hidden" not in file.read_text()
    assert main.run(["context", "create", "one", "-n", "ns3:9876"]) == 0
    assert main.run(["context", "delete", "two"]) == 0
    assert read_contexts() == (None, {"one": {"namesrv": "ns3:9876"}})


def test_missing_context_is_an_error(chosen: list[dict[str, object]]) -> None:
    main.run(["context", "create", "one", "-n", "ns1:9876"])
    assert main.run(["--context", "nobody", "probe"]) == NOT_FOUND
    assert main.run(["context", "use", "nobody"]) == NOT_FOUND
    assert main.run(["context", "delete", "nobody"]) == NOT_FOUND
    assert chosen == []


def test_damaged_context_file_is_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.parent.mkdir()
    file.write_text("{")
    assert main.run(["topic", "list"]) == 2
    assert str(file) in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_is_printed_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_NEVE_COMPLETE" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)


def test_completion_covers_contexts_and_ignores_unreachable_clusters() -> None:
    main.run(["context", "create", "prod", "-n", "127.0.0.1:1"])
    main.run(["context", "create", "test", "-n", "127.0.0.1:1"])
    command = main.neve.get_command(click.Context(main.neve), "consume")
    assert command is not None
    context = click.Context(command)
    (topic, *_) = command.params
    assert values(completion.contexts(context, topic, "p")) == ["prod"]
    assert completion.topics(context, topic, "") == []
    assert logging.getLogger("neve").isEnabledFor(logging.ERROR), "a process that goes on is not silent for ever"


def values(items: list[CompletionItem]) -> list[str]:
    return [item.value for item in items]


def test_store_url_with_credentials_is_not_saved(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["context", "create", "one", "--store", "s3://bucket/prefix?endpoint=http://127.0.0.1:9000"]) == 0
    assert main.run(["context", "create", "two", "--store", "s3://key:hush@bucket/prefix"]) == 2
    assert "hush" not in file.read_text() + capsys.readouterr().err
