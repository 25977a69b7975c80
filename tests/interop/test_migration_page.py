"""docs/migration.md: each of its lines runs, with stock clients at work from the first to the last."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bench import jvm
from bench.wire import SEND_V2, Client, send_ext
from neve.remoting.codes import ResponseCode
from tests.interop.promoted import FILE_SIZE, Pair, apache_alone
from tests.interop.steady import TOPIC as ORDERS
from tests.interop.steady import Steady, assert_each_offset_once_acknowledged_and_consumed
from tests.servers.neve import Serving
from tests.waiting import wait_until

pytestmark = pytest.mark.servers

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text("utf-8")
_S = 120.0
_STARTED_IN_BACKGROUND = "neve broker -c /etc/neve/broker.conf &"


def blocks(heading: str) -> list[str]:
    """Of a part of the page."""
    (part,) = re.findall(rf"^## {heading}.*?\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(r"^```\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)


def lines(block: str) -> list[str]:
    return [line.partition("   ")[0].strip() for line in block.splitlines()]


class Operator:
    """Does what the page says, on one machine."""

    def __init__(self, pair: Pair, directory: Path) -> None:
        self.pair, self.directory, self.conf = pair, directory, directory / "broker.conf"
        self.broker = pair.slave
        tools = directory / "bin"
        tools.mkdir()
        admin = jvm.java(f"{jvm.jars()}/*", "org.apache.rocketmq.tools.command.MQAdminStartup", home=directory)
        (tools / "mqadmin").write_text(f'#!/bin/sh\nexec {shlex.join(admin)} "$@"\n')
        (tools / "mqadmin").chmod(0o755)
        (directory / "conf").mkdir()
        self._path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    def write(self, conf: str) -> None:
        """The page's keys, beside what a broker on this machine needs."""
        port, admin_port = self.pair.listen
        own = f"listenPort={port}\nadminPort={admin_port}\nbindAddress=127.0.0.1\nbrokerIP1=127.0.0.1\n"
        own += f"mappedFileSizeCommitLog={FILE_SIZE}\nregisterNameServerPeriod=10s\narchiveMinBytes=1m\n"
        self.conf.write_text(self._here(conf) + own)

    def _here(self, text: str) -> str:
        port, admin_port = self.pair.listen
        for there, here in (
            ("names:9876", self.pair.namesrv),
            ("apache:10911", self.pair.master.broker),
            ("neve:10911", f"127.0.0.1:{port}"),
            ("127.0.0.1:10913", f"127.0.0.1:{admin_port}"),
            ("/etc/neve/broker.conf", str(self.conf)),
            ("/var/lib/neve", str(self.directory / "data")),
            ("s3://bucket/prefix?region=eu-central-1", f"dir:{self.directory / 'bucket'}"),
            ("-g tour", "-g g_steady"),
            ("/home/mq/store", str(self.pair.master.directory / "store")),
        ):
            text = text.replace(there, here)
        return text

    def does(self, line: str) -> str:
        """What was printed."""
        if line == _STARTED_IN_BACKGROUND:
            self.broker = Serving(self.directory, "broker", "-c", str(self.conf)).start()
            return ""
        if line.endswith("--import-from /home/mq/store &"):
            arguments = ["-c", str(self.conf), "--import-from", str(self.pair.master.directory / "store")]
            self.broker = Serving(self.directory, "broker", *arguments).start()
            return ""
        if line == "kill %1":
            self.broker.stop()
            return ""
        if line == "mqshutdown broker":
            self.pair.master.stop()
            return ""
        command = self._here(line)
        env = {**os.environ, "PATH": self._path, "ROCKETMQ_HOME": str(self.directory)}
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=_S,
            check=False,
            env=env,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        assert "Exception" not in done.stdout + done.stderr, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


def test_an_operator_moves_a_broker_line_by_line(tmp_path: Path) -> None:
    with apache_alone(tmp_path) as pair:
        operator = Operator(pair, pair.directory)
        with Client(pair.master.broker) as client:
            client.create_topic(ORDERS, 2)
            client.create_topic("bulk", 1)
            for _ in range(50):
                client.send("bulk", 0, bytes(100_000))
        try:
            with Steady(pair.namesrv, jvm.SERVER, tmp_path / "clients") as clients:
                clients.go_on(["stock"])
                _move(operator, clients)
            assert_each_offset_once_acknowledged_and_consumed(clients.acked, clients.got)
        finally:
            operator.broker.stop()


def _move(operator: Operator, clients: Steady) -> None:
    pair = operator.pair
    conf, following = blocks("1")
    operator.write(conf)
    for line in lines(following):
        operator.does(line)
    pair.slave = operator.broker
    pair.has_all()
    (archive,) = blocks("2")
    (looks,) = lines(archive)
    wait_until(lambda: "bulk" in operator.does(looks), "the archive", _S)
    (check,) = blocks("3")
    status, metrics, _ready, cluster = [operator.does(line) for line in lines(check)]
    assert "127.0.0.1" in status
    assert "neve_slave_attached 1" in metrics
    assert len([row for row in cluster.splitlines() if " stock " in row]) == 2

    (change,) = blocks("4")
    printed = dict[str, str]()
    for line in lines(change):
        printed[line] = operator.does(line)
        if "haStatus" in line:
            pair.has_log()  # "until Diff is 0"
    rows = [row for row in printed["mqadmin clusterList -n names:9876"].splitlines() if " stock " in row]
    assert len(rows) == 1, "the other one is retired"
    assert operator.broker.broker in rows[0]
    clients.go_on(["stock"], 60)
    clients.stop_sending()
    clients.drained("stock")

    (back,) = blocks("5")
    for line in lines(back):
        operator.does(line)
    with Client(operator.broker.broker) as client:
        answer = client.invoke(SEND_V2, send_ext(ORDERS, 0), b"m")
        assert answer.code == ResponseCode.NO_PERMISSION


def test_an_operator_imports_a_directory_line_by_line(tmp_path: Path) -> None:
    with apache_alone(tmp_path) as pair:
        operator = Operator(pair, pair.directory)
        with Client(pair.master.broker) as client:
            client.create_topic(ORDERS, 2)
        conf, steps = blocks("6")
        operator.write(conf)
        stop, dry, *others = lines(steps)
        try:
            with Steady(pair.namesrv, jvm.SERVER, tmp_path / "clients") as clients:
                clients.go_on(["stock"])
                written = json.loads(operator.does(dry))["log_end"]
                assert written > 0
                clients.go_on(["stock"])
                operator.does(stop)
                assert json.loads(operator.does(dry))["log_end"] > written
                status, progress = [operator.does(line) for line in others][1:]
                assert "stock" in status
                assert "stock" in progress
                clients.go_on(["stock"], 2 * 30)
                clients.stop_sending()
                clients.drained("stock")
            assert_each_offset_once_acknowledged_and_consumed(clients.acked, clients.got)
        finally:
            operator.broker.stop()


def test_the_page_is_run_whole() -> None:
    assert PAGE.count("\n```\n") == 2 * sum(len(blocks(number)) for number in "123456")
    started = [line for number in "12345" for block in blocks(number) for line in lines(block)]
    assert started.count(_STARTED_IN_BACKGROUND) == 2
