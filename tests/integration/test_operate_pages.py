"""The pages of docs/operate: their commands run in the printed order, and print what the pages show."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from neve.archive.format.broker_state import BrokerState, read_state
from neve.cli.main import neve as neve_command
from neve.cli.store import open_source
from neve.record.ids import parse_offset_msg_id
from neve.remoting.codes import RequestCode as Code
from tests.kit.clock.waiting import wait_until
from tests.kit.docs.page import Page, Step
from tests.kit.server.neve import NeveServer, Serving, settings_as_options
from tests.kit.server.processes import free_ports
from tests.kit.server.requests import ask

pytestmark = pytest.mark.servers
_S = 120.0
#: Patterns of output that differs between runs, with replacements.
VARYING = (
    (r"\d{4}-\d\d-\d\d( |T)\d\d:\d\d:\d\d(\+00:00|Z)", "TIME"),
    (r"\d{4}-\d\d-\d\d", "DAY"),
    (r"\b[0-9a-f]{64}\b", "HASH"),
    (r"127\.0\.0\.1:\d+", "ADDRESS"),
    (r"\b\d+(ms|s|m)\b( \d+s)?", "DURATION"),
    (r"\b\d+(\.\d+)? (B|KiB|MiB)\b", "SIZE"),
    (r"\b\d+\.\d{3,}\b", "RATIO"),
    (r"\be\d+\.\d+\b", "ID"),
    (r"\b\d+ topics\b", "COUNT topics"),
    (r"dir:[\w/.-]+", "STORE"),
    (r" +", " "),
)


def shape(line: str) -> str:
    for pattern, replacement in VARYING:
        line = re.sub(pattern, replacement, line)
    return line.rstrip()


def run(command: str, server: Serving, directory: Path) -> list[str]:
    """Return the printed lines; a command fails only with a line that begins with "error:"."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    changed = {"PATH": path, "NAMESRV_ADDR": server.namesrv, "NEVE_REPLAYS": str(directory / "replays")}
    for printed, real in (("127.0.0.1:10913", server.admin), ("dir:/var/lib/neve/archive", f"dir:{directory}/archive")):
        command = command.replace(printed, real)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=_S, check=False, env={**os.environ, **changed},
    )  # fmt: skip
    assert done.returncode == 0 or "error: " in done.stdout, f"{command}: {done.stdout[-2000:]}"
    return done.stdout.splitlines()


def follow(page: Page, server: Serving, directory: Path) -> None:
    for command, printed in page.steps():
        found = run(command, server, directory)
        assert [shape(line) for line in found] == [shape(line) for line in printed], f"{command}\n" + "\n".join(found)


def make_dead_letters(server: Serving) -> None:
    """Make three messages of the topic `parcels` dead letters of the group `shipping`."""
    ext = {"a": "p", "b": "parcels", "c": "TBW102", "d": "1", "e": "0", "f": "0", "g": "0", "h": "0", "i": "", "j": "0",
           "k": "false", "m": "false"}  # fmt: skip
    for sent in ask(server, *((Code.SEND_MESSAGE_V2, ext, b"parcel %d" % number) for number in range(3))):
        place = str(parse_offset_msg_id(sent.ext["msgId"])[2])
        back = {"group": "shipping", "offset": place, "delayLevel": "-1", "originTopic": "parcels"}
        (answer,) = ask(server, (Code.CONSUMER_SEND_MSG_BACK, back, b""))
        assert answer.code == 0, answer.remark


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NeveServer]:
    with NeveServer(tmp_path, store=f"dir:{tmp_path}/archive") as neve:
        yield neve


@pytest.mark.parametrize("name", ["monitor", "retention", "erase", "upgrade", "groups-replay-dlq"])
def test_commands_of_a_page_print_what_it_shows(name: str, server: NeveServer, tmp_path: Path) -> None:
    if name == "groups-replay-dlq":
        make_dead_letters(server)
    follow(Page(f"operate/{name}.md"), server, tmp_path)


def test_commands_of_the_runbooks_run(server: NeveServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of broker sets run in test_high_availability_page.py."""
    run("neve topic create orders --queues 1 && seq 9 | neve produce orders --quiet", server, tmp_path)
    run("neve consume orders --group billing --count 5", server, tmp_path)
    monkeypatch.setenv("NAMESRV_ADDR", server.namesrv)
    quoted = dict.fromkeys(re.findall(r"`((?:neve|curl) [^`]+)`", Page("operate/runbooks.md").text))
    elsewhere = re.compile(r"broker-set|neve doctor -c|DIR|--json|127.0.0.1:10913/set|neve archive`?$")
    commands = [one for one in quoted if not elsewhere.search(one)]
    assert len(commands) > 15
    # A group is deleted last.
    for command in sorted(commands, key=lambda one: one.startswith("neve group delete")):
        if command.startswith("curl"):
            server.get(command.partition("10913")[2])
            continue
        words = command.replace("URL", server.store).split()[1:]
        done = CliRunner().invoke(neve_command, [*words, *(["--yes"] if words[1] == "delete" else [])])
        assert done.exit_code == 0, (command, done.output)


def test_restore_page_recovers_a_broker_from_its_bucket(tmp_path: Path) -> None:
    dry_run, restore, *checks = Page("operate/backup-restore.md").steps()
    store = tmp_path / "archive"
    with NeveServer(tmp_path, store=f"dir:{store}", settings={"statePeriod": "100"}) as lost:
        run("neve topic create orders --queues 1", lost, tmp_path)
        run("seq 1000 | neve produce orders --quiet && neve archive offload --roll", lost, tmp_path)
        run("neve consume orders --group billing --count 1000 > read.txt", lost, tmp_path)
        run("seq 10 | neve produce orders --quiet", lost, tmp_path)
        wait_until(lambda: is_in(read_state(open_source(f"dir:{store}"), "broker-a")), "the state is saved", _S)
        lost.kill()
    names_port, port, admin_port = free_ports(3)
    (tmp_path / "broker.conf").write_text(
        f"brokerName=broker-a\nnamesrvAddr=127.0.0.1:{names_port}\nlistenPort={port}\nadminPort={admin_port}\n"
        f"storePathRootDir={tmp_path}/new\nbindAddress=127.0.0.1\nbrokerIP1=127.0.0.1\nmappedFileSizeCommitLog=1m\n"
        "diskSpaceWarningLevelRatio=99\n"
    )
    names = {"listenPort": names_port, "bindAddress": "127.0.0.1", "adminPort": 0}
    with Serving(tmp_path / "names", "namesrv", *settings_as_options(names)) as namesrv:
        command = dry_run.command.replace("/backup/archive", str(store))
        tried = json.loads("".join(run(command, namesrv, tmp_path)))
        shown = json.loads("".join(dry_run.printed))
        assert flat(tried) == flat(shown)
        words = restore.command.replace("/backup/archive", str(store)).split()
        assert words[:4] == ["neve", "broker", "-c", "broker.conf"]
        arguments = ["broker", "-c", str(tmp_path / "broker.conf"), *words[4:]]
        with Serving(tmp_path / "restored", *arguments) as restored:
            shown = json.loads("".join(restore.printed))
            assert restored.ready.keys() == shown.keys()
            assert flat(restored.ready["restored"]) == flat(shown["restored"])
            restored.ready["namesrv"] = namesrv.namesrv
            for check in checks:
                has_printed = partial(prints, check, restored, tmp_path)
                wait_until(has_printed, check.command, _S)
        options = [*arguments[:3], "--set", f"storeUrl=dir:{store}"]
        with Serving(tmp_path / "restored", *options) as restored:
            assert restored.get("/readyz") == "ready\n"


def prints(step: Step, server: Serving, directory: Path) -> bool:
    return list(map(shape, run(step.command, server, directory))) == list(map(shape, step.printed))


def is_in(state: BrokerState | None) -> bool:
    """Return whether a saved state has all messages and the offset of the group."""
    return (
        state is not None and state.queues.get("orders") == {0: 1010} and state.offsets == {"orders@billing": {0: 1000}}
    )


def flat(value: object) -> object:
    """Return a value with times, sizes and ages replaced."""
    return json.loads(re.sub(r'"(bytes|age_seconds|log_start|time_ms)": \d+', r'"\1": 0', shape(json.dumps(value))))
