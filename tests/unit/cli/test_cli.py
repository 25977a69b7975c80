"""Tests of the command line without a server: help, exit codes, and output streams."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from neve.cli import main
from neve.cli.failures import Failure, explain
from neve.cli.output import size_text, table, time_text
from neve.errors import BrokerError, ClientError, UnknownOutcome
from neve.extras import install_command

HEAVY = ("pyarrow", "boto3", "pyspark", "numpy", "msgspec", "asyncio", "importlib.metadata", "neve.client")


def test_help_imports_no_command_module() -> None:
    code = (
        "import sys; from neve.cli.main import run; assert run(['--help']) == 0; "
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    for verb in main.VERBS:
        assert f"  {verb} " in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [[verb] for verb, about in main.VERBS.items() if about.home]
    + [["topic", "ttl"], ["archive", "offload"], ["spark", "sql"], ["topic", "ttl", "plan"]],
)
def test_every_command_has_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*arguments, "--help"]) == 0
    assert "Usage:" in capsys.readouterr().out


def test_every_option_has_help() -> None:
    def silent(command: click.Command, path: str) -> list[str]:
        options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden and not one.help]
        found = [f"{path} {one.opts[0]}" for one in options] + ([] if command.help else [path])
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                found += silent(inner, f"{path} {name}")
        return found

    assert silent(main.neve, "neve") == []


def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["nonsense"]) == 2
    assert main.run(["topic", "ttl", "set", "orders", "90m"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "write whole hours, days or weeks" in captured.err


def test_missing_store_is_wrong_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("NEVE_STORE", raising=False)
    assert main.run(["topic", "ttl", "plan", "orders"]) == 2
    assert "Missing option '--store'" in capsys.readouterr().err


def test_connection_failure_exits_with_6(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["archive", "offload", "--admin", "127.0.0.1:1"]) == 6
    assert main.run(["topic", "list", "--namesrv", "127.0.0.1:1"]) == 6
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "127.0.0.1:1" in captured.err


def test_admin_option_overrides_the_store_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("NEVE_STORE", f"dir:{tmp_path}")
    for verb in ("ls", "journal", "verify"):
        assert main.run(["archive", verb]) == 3, "the store of the environment has no archive"
        assert main.run(["archive", verb, "--admin", "127.0.0.1:1"]) == 6
        assert main.run(["archive", verb, "--admin", "127.0.0.1:1", "--store", f"dir:{tmp_path}"]) == 2
    capsys.readouterr()


def test_unconfirmed_deletion_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for typed, said in (("", "no answer to the question; --yes skips it"), ("n\n", "nothing was changed")):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        assert main.run(["topic", "delete", "orders", "--namesrv", "127.0.0.1:1"]) == 1
        assert said in capsys.readouterr().err


def test_missing_archive_exits_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("ls", "journal", "verify"):
        assert main.run(["archive", verb, "--store", f"dir:{tmp_path}"]) == 3
    assert main.run(["archive", "list", "--store", f"dir:{tmp_path}/nowhere"]) == 3
    assert capsys.readouterr().out == ""


def test_doctor_checks_a_directory_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["doctor", "--store", f"dir:{tmp_path}", "-o", "json"]) == 0
    states = {check["check"]: check["state"] for check in json.loads(capsys.readouterr().out)}
    assert states["store"] == "ok"
    assert {"java", "disk", "vm.max_map_count", "open files", "clock"} <= states.keys()
    assert list(tmp_path.iterdir()) == []


def test_doctor_reports_an_impossible_store_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main.run(["doctor", "--store", f"dir:{tmp_path}/file/archive", "-o", "json"]) == 1
    found = {check["check"]: check for check in json.loads(capsys.readouterr().out)}["store"]
    assert (found["state"], "Not a directory" in found["found"]) == ("fail", True)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BrokerError(17, "no topic"), 3),
        (BrokerError(16, "no permission"), 4),
        (BrokerError(1, "system error"), 1),
        (ClientError("bad name"), 1),
        (UnknownOutcome("no answer"), 6),
        (FileNotFoundError("x"), 3),
        (PermissionError("x"), 4),
        (ConnectionRefusedError("x"), 6),
        (Failure(5, "x"), 5),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error: Exception, code: int) -> None:
    explained = explain(error)
    assert explained is not None
    assert explained.exit_code == code


def test_unexpected_error_keeps_its_traceback() -> None:
    assert explain(ZeroDivisionError("x")) is None


def test_commands_are_added_by_entry_points(tmp_path: Path) -> None:
    package = tmp_path / "extra-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[neve.commands]\nhello = extra_verb:hello\nbroken = extra_gone:x\n")
    (tmp_path / "extra_verb.py").write_text(
        "import click\n@click.command()\ndef hello():\n    click.echo('hello from outside')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "from neve.cli.main import main; main()"]
    done = subprocess.run([*command, "hello"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "hello from outside\n")
    broken = subprocess.run([*command, "broken"], env=environment, capture_output=True, text=True, check=False)
    assert broken.returncode == 2
    assert "[server]" in broken.stderr


def test_tables_are_aligned_and_text_output_is_exact() -> None:
    assert table([["a", "1"], ["bcd", "12"]], ["name", "n"]) == ["NAME   N", "a      1", "bcd   12"]
    assert size_text(1023) == "1023 B"
    assert size_text(1536) == "1.5 KiB"
    assert time_text(0) == "1970-01-01T00:00:00Z"
    assert time_text(-1) == ""


def test_group_is_a_click_group() -> None:
    assert isinstance(main.neve, click.Group)


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'neve[spark]'"),
        ('{"url": "file:///src/my%20neve", "dir_info": {"editable": true}}', "pip install -e '/src/my neve[spark]'"),
        ('{"url": "file:///w/neve-1.whl", "archive_info": {}}', "pip install '/w/neve-1.whl[spark]'"),
        ('{"url": "https://x/neve-1.whl", "archive_info": {}}', "pip install 'neve[spark] @ https://x/neve-1.whl'"),
    ],
)
def test_install_command_uses_the_origin_of_neve(
    origin: str | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return origin

    monkeypatch.setattr("neve.extras.distribution", lambda name: Installed())
    assert install_command("spark") == command
