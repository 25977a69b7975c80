"""docs/ha: the tour runs as printed, and each command on the pages exists."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import click
import pytest

from broker.config import BrokerConfig
from broker.ha.settings import settings_of
from infra.config.properties import read
from neve.cli.broker_set import broker_set
from tests.kit.server.neve import Serving

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "ha" / "operate.md").read_text("utf-8")
PAGES = [path.read_text("utf-8") for path in (*sorted((DOCS / "ha").glob("*.md")), DOCS / "migrate" / "mixed-set.md")]
ANY_PORTS = ("--namesrv-port", "0", "--controller-port", "0", "--port", "0")


def tour() -> list[str]:
    block = re.search(r"^## Try a set on one machine$.*?^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert block is not None
    return [line.partition("   ")[0].strip() for line in block[1].splitlines()]


def printed() -> dict[str, str]:
    """Return the outputs of the tour on the page by command."""
    block = re.search(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert block is not None
    return {command: output for command, _, output in (part.partition("\n") for part in block[1].split("$ ")[1:])}


def shape(output: str) -> list[str]:
    """Return the lines without what differs from run to run: numbers, addresses, widths and the order of members."""
    return sorted(" ".join(re.sub(r"[\d:.]+", "0", line).split()) for line in output.splitlines())


def run(command: str, namesrv: str, directory: Path) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=directory, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PATH": path, "NAMESRV_ADDR": namesrv},
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return done.stdout + done.stderr


def test_tour_of_a_broker_set_runs(tmp_path: Path) -> None:
    up, *commands = tour()
    data = tmp_path / "set"
    verb, *options = shlex.split(up.removesuffix("&"))[1:]
    assert options == ["--replicas", "3", "--data", "/tmp/neve-set"]
    found: dict[str, str] = {}
    with Serving(tmp_path, verb, "--replicas", "3", "--data", str(data), *ANY_PORTS) as servers:
        for command in commands:
            output = run(command.replace("/tmp/neve-set", str(data)), servers.namesrv, tmp_path)
            found[command] = output.replace(str(data), "/tmp/neve-set")
            if command == "neve broker-set list":
                assert servers.ready["master"] in found[command]
        (row,) = json.loads(run("neve broker-set list -o json", servers.namesrv, tmp_path))
        assert row["address"] != servers.ready["master"], "another one leads"
        assert row["epoch"] == 2
    for command, output in printed().items():
        assert shape(found[command]) == shape(output), command
    assert len((tmp_path / "receipts.jsonl").read_text().splitlines()) == 2000
    assert found["neve consume orders --group tour --count 5"].split()[-2:] == ["5", "messages"]


def commands_of_the_pages() -> set[str]:
    text = "\n".join(PAGES)
    found = re.findall(r"`neve broker-set ([^`]+)`", text) + re.findall(
        r"^ *neve broker-set ([^#\n]+)", text, re.MULTILINE
    )
    return {command.strip() for command in found}


@pytest.mark.parametrize("text", sorted(commands_of_the_pages()))
def test_pages_name_only_existing_broker_set_commands(text: str, tmp_path: Path) -> None:
    name, *arguments = shlex.split(
        re.sub(r"\bID\b", "2", text.replace("DIR", str(tmp_path)).replace("/tmp/neve-set/1", str(tmp_path)))
    )
    command = broker_set.get_command(click.Context(broker_set), name)
    assert command is not None, name
    if len(shlex.split(text)) > 1 or not any(
        isinstance(one, click.Argument) and one.required for one in command.params
    ):
        with command.make_context(name, arguments):
            pass


def test_pages_name_every_broker_set_command() -> None:
    named = {text.split()[0] for text in commands_of_the_pages()}
    assert named == set(broker_set.list_commands(click.Context(broker_set)))


def test_printed_settings_of_a_member_are_valid(tmp_path: Path) -> None:
    block = re.search(r"^    ```\n(    brokerName=.*?)^    ```$", PAGE, re.MULTILINE | re.DOTALL)
    assert block is not None
    path = tmp_path / "broker.conf"
    path.write_text(textwrap.dedent(block[1]))
    config = read(BrokerConfig, path).config
    settings = settings_of(config)
    assert settings is not None
    assert settings.rules.confirm.min_in_sync == 2
    assert len(settings.controllers) == 2
