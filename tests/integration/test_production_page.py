"""docs/deploy/production.md: its files start the servers, and its commands and tables agree with the code.

Commands of root and of systemd run as stand-ins, which accept the arguments of the page.
"""

from __future__ import annotations

import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from broker.config import BrokerConfig
from controller.controller_config import ControllerConfig
from infra.process import startup
from namesrv.namesrv_config import NamesrvConfig
from tests.kit.docs.page import Page, replaced, shell
from tests.kit.server.neve import Serving
from tests.kit.server.processes import free_ports

pytestmark = pytest.mark.servers
PAGE = Page("deploy/production.md")
ROOT = Path(__file__).parents[2]
STAND_INS = {
    "useradd": "exit 0",
    "systemctl": "exit 0",
    "systemd-run": 'while [ "${1#-}" != "$1" ]; do if [ "$1" = -p ]; then shift; fi; shift; done; exec "$@"',
    "sudo": 'shift 2; exec "$@"',
}


class Machine(NamedTuple):
    """A folder in place of the root of a machine."""

    root: Path
    words: dict[str, str]
    tools: Path
    env: dict[str, str]

    def run(self, command: str, code: int = 0) -> list[str]:
        return shell(replaced(command, self.words), ROOT, self.env, tools=[self.tools], code=code)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    root = tmp_path_factory.mktemp("machine")
    for name in ("opt", "etc/systemd/system", "usr/local/bin", "var/lib/neve", "var/lib/neve-namesrv", "bucket"):
        (root / name).mkdir(parents=True)
    tools = root / "tools"
    tools.mkdir()
    for name, body in STAND_INS.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    names, broker, admin = free_ports(3)
    words = {
        "-o neve -g neve ": "",
        **{f"/{name}": f"{root}/{name}" for name in ("opt/neve", "etc/", "usr/local/bin", "var/lib/neve")},
        "10.0.0.1:9876;10.0.0.2:9876": f"127.0.0.1:{names}",
        "10.0.0.1:9876": f"127.0.0.1:{names}",
        "10.0.0.5": "127.0.0.1",
        "10911": str(broker),
        "10913": str(admin),
        "s3://archive/neve?region=eu-central-1": f"dir:{root}/bucket",
    }
    return Machine(root, words, tools, {"NAMESRV_ADDR": f"127.0.0.1:{names}", "NEVE_ADMIN": f"127.0.0.1:{admin}"})


@pytest.fixture(scope="module")
def installed(machine: Machine) -> Iterator[Machine]:
    """Follow the steps of the installation. The environment of this process replaces the one that step 1 makes."""
    install, copy, conf, secrets, check, start = PAGE.blocks("Install a broker and a name server")
    assert [line.partition("  ")[0] for line in install.splitlines()] == [
        "python3 -m venv /opt/neve-0.1",
        "/opt/neve-0.1/bin/pip install '.[server]'",  # tests/integration/test_install.py does this.
        "ln -sfn /opt/neve-0.1 /opt/neve",
        "ln -s /opt/neve/bin/neve /usr/local/bin/neve",
    ]
    (machine.root / "opt" / "neve-0.1").symlink_to(Path(sys.executable).parents[1])
    machine.run("\n".join(install.splitlines()[2:]))
    machine.run(copy)
    port = machine.words["10.0.0.1:9876"].partition(":")[2]
    names = machine.root / "etc/neve/namesrv.conf"
    names.write_text(replaced(names.read_text(), machine.words) + f"listenPort={port}\n")
    file = machine.root / "etc/neve/broker.conf"
    file.write_text(replaced(conf, machine.words) + f"adminPort={machine.words['10913']}\n")
    assert [line.partition("=")[0] for line in secrets.splitlines()] == ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
    with started(machine, "namesrv"):
        checks = machine.run(check)
        assert not [line for line in checks if " fail " in line]
        assert any(line.startswith("store ") and " ok " in line for line in checks)
        assert start.strip() == "systemctl enable --now neve-broker"
        machine.run(start)
        with started(machine, "broker"):
            yield machine


def started(machine: Machine, server: str) -> Serving:
    """Start the command of an installed unit."""
    unit = (machine.root / f"etc/systemd/system/neve-{server}.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.+)$", unit, re.MULTILINE)
    program, *arguments = replaced(command, machine.words).split()
    assert Path(program).exists()
    return Serving(machine.root / server, *arguments)


def test_verification_prints_the_documented_output(installed: Machine) -> None:
    steps = PAGE.steps("Verify the installation")
    assert len(steps) == 7
    for step in steps:
        printed = [line for line in installed.run(step.command) if not line.startswith("asking ")]
        if step.command == "neve broker list":
            assert [line.split()[:7:2] for line in printed] == [
                line.split()[:7:2] for line in replaced("\n".join(step.printed), installed.words).splitlines()
            ]
        else:
            assert printed[: len(step.printed)] == step.printed, step.command
    (delete,) = re.findall(r"`(neve topic delete [^`]+)`", PAGE.section("Verify the installation"))
    installed.run(delete)
    assert installed.run("neve topic list -o json") == ["[]"]


def test_files_have_the_documented_modes(installed: Machine) -> None:
    rows = re.findall(r"^\| (`.+?) \| (.+?), (\d+) \|", PAGE.section("Users, directories and file modes"), re.MULTILINE)
    modes = {path: int(mode, 8) for paths, _, mode in rows for path in re.findall(r"`([^`]+)`", paths)}
    for name in ("/etc/neve/broker.conf", "/etc/neve/broker.env", "/var/lib/neve/adminToken"):
        path = Path(replaced(name, installed.words))
        assert stat.S_IMODE(path.stat().st_mode) == modes[name], name
    data = Path(replaced("/var/lib/neve", installed.words))
    files = [path for path in data.iterdir() if path.is_file()]
    folders = [path for path in data.iterdir() if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


def test_removal_leaves_the_data(machine: Machine) -> None:
    root = machine.root / "removed"
    words = {name: value.replace(str(machine.root), str(root)) for name, value in machine.words.items()}
    for name in ("etc/neve", "etc/systemd/system", "opt/neve-0.1", "usr/local/bin/neve", "var/lib/neve"):
        (root / name).mkdir(parents=True)
    (root / "opt/neve").symlink_to(root / "opt/neve-0.1")
    for server in ("broker", "namesrv"):
        (root / f"etc/systemd/system/neve-{server}.service").touch()
    (removal,) = PAGE.blocks("Undo the installation")
    shell(f"set -e; {replaced(removal, words)}", root, {}, tools=[machine.tools])
    assert {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()} == set()
    assert (root / "var/lib/neve").is_dir()
    assert not any((root / name).exists() for name in ("etc/neve", "opt/neve", "opt/neve-0.1", "usr/local/bin/neve"))


def test_ports_are_the_defaults_of_the_code() -> None:
    rows = re.findall(r"^\| ([\w ]+) \| (\d+|none) \| `(\w+)`(.*?) \|", PAGE.section("Open the ports"), re.MULTILINE)
    found = {(server, key, more.strip()): port for server, port, key, more in rows}
    broker, names, sets = BrokerConfig(), NamesrvConfig(), ControllerConfig()
    assert found == {
        ("name server", "listenPort", ""): str(names.listen_port),
        ("name server", "adminPort", ""): "none" if names.admin_port == -1 else str(names.admin_port),
        ("broker", "listenPort", ""): str(broker.listen_port),
        ("broker", "listenPort", "− 2"): str(broker.listen_port - 2),
        ("broker", "haListenPort", "(`listenPort` + 1)"): str(broker.listen_port + 1),
        ("broker", "adminPort", ""): str(broker.admin_port),
        ("broker", "metricsPromExporterPort", ""): str(broker.metrics_prom_exporter_port),
        ("controller", "listenPort", ""): str(sets.listen_port),
        ("controller", "adminPort", ""): "none" if sets.admin_port == -1 else str(sets.admin_port),
    }


def test_exit_codes_agree_with_the_unit_and_the_code() -> None:
    rows = re.findall(r"^\| (\d+) \| .+ \| (\w+)", PAGE.section("Start, stop and exit codes"), re.MULTILINE)
    unit = (ROOT / "conf/neve-broker.service").read_text()
    (kept,) = re.findall(r"^RestartPreventExitStatus=(.+)$", unit, re.MULTILINE)
    assert [code for code, restarted in rows if restarted == "no"] == ["0", *kept.split()]
    codes = {value for name, value in vars(startup).items() if name.startswith("EXIT_")}
    assert codes <= {int(code) for code, _ in rows}
