"""Run each line of the procedures in docs/migrate with stock clients at work from the first line to the last.

For each procedure the broker has messages, a group in the middle of them, and pending messages: `in_transit`.
"""

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
from neve.client import sync
from neve.remoting.codes import ResponseCode
from tests.interop.in_transit import GROUP, LATER, MESSAGES, PAID, TOPIC, InTransit, Taking
from tests.interop.promoted import FILE_SIZE, ApacheAndSlave, apache_alone, offsets_at
from tests.interop.steady import TOPIC as ORDERS
from tests.interop.steady import Steady, assert_each_offset_once_acknowledged_and_consumed
from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import NEVE, Serving, settings_as_options

pytestmark = pytest.mark.servers

PAGES = Path(__file__).parents[2] / "docs" / "migrate"
_S = 120.0 + MESSAGES / 100
_ALL_TOPICS = 21
_STARTED_IN_BACKGROUND = "neve broker -c /etc/neve/broker.conf &"


def blocks(name: str, heading: str = "Steps") -> list[str]:
    """Return the code blocks of a section of a page."""
    text = (PAGES / f"{name}.md").read_text("utf-8")
    (part,) = re.findall(rf"^## {heading}.*?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return all_blocks(part)


def printed_report() -> str:
    """Return the report of a dry run that the page of the import shows."""
    (block,) = all_blocks((PAGES / "directory.md").read_text("utf-8"), "text")
    return block


def all_blocks(text: str, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [code for name, code in found if name == language]


def lines(block: str) -> list[str]:
    return [line.partition("   ")[0].strip() for line in block.splitlines()]


class MigrationOperator:
    """Executes the procedures of the page on one machine."""

    def __init__(self, pair: ApacheAndSlave, directory: Path, other: str = "") -> None:
        """Create an operator; `other` are the name servers of another cluster."""
        self._other = other
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
        """Write the page's keys, with the settings that a broker on this machine needs."""
        port, admin_port = self.pair.listen
        own = f"listenPort={port}\nadminPort={admin_port}\nbindAddress=127.0.0.1\nbrokerIP1=127.0.0.1\n"
        own += f"mappedFileSizeCommitLog={FILE_SIZE}\nregisterNameServerPeriod=10s\narchiveMinBytes=1m\n"
        own += "archiveWorkerPriority=normal\n"  # A busy machine may not give another process enough time.
        self.conf.write_text(self._here(conf) + own)

    def takes_apaches_own(self, conf: str) -> None:
        """Append the page's keys to the Apache broker's file, without the keys that are rejected."""
        own = (self.pair.master.directory / "conf" / "broker.conf").read_text()
        self.write(own + conf)
        told = subprocess.run(
            [NEVE, "doctor", "-c", str(self.conf), "--keys", "-o", "json"], capture_output=True, text=True, check=False
        )
        assert told.returncode == 1
        refused = {row["check"] for row in json.loads(told.stdout) if row["state"] == "fail"}
        assert refused == {"storePathCommitLog", "allAckInSyncStateSet"}, "the log is elsewhere; of a controller's set"
        lines = own.splitlines(keepends=True)
        self.write("".join(line for line in lines if line.partition("=")[0] not in refused) + conf)

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
            ("%DLQ%tour", f"%DLQ%{GROUP}"),
            ("dlq show tour", f"dlq show {GROUP}"),
            ("lag tour", f"lag {GROUP}"),
            ("new:9876", self._other),
            ("/var/tmp", str(self.directory)),
            ("/home/mq/store", str(self.pair.master.directory / "store")),
        ):
            text = text.replace(there, here)
        return text

    def does(self, line: str) -> str:
        """Execute a line; return its output."""
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


def test_promotion_procedure_of_the_page_works(tmp_path: Path) -> None:
    with apache_alone(tmp_path) as pair:
        operator = MigrationOperator(pair, pair.directory)
        transit = InTransit(pair.namesrv, pair.master.broker)
        with Client(pair.master.broker) as client:
            client.create_topic(ORDERS, 2)
            client.create_topic("bulk", 1)
            for _ in range(50):
                client.send("bulk", 0, bytes(100_000))
        try:
            with Steady(pair.namesrv, jvm.SERVER, tmp_path / "clients") as clients:
                clients.send_more(["stock"])
                _move(operator, clients, transit)
            assert_each_offset_once_acknowledged_and_consumed(clients.acked, clients.got)
        finally:
            operator.broker.stop()


def _goes_on(transit: InTransit, namesrv: str, broker: str, home: Path) -> None:
    """Check that the replacing broker delivers all messages that were in transit."""
    transit.end_transactions(broker)
    with Taking(namesrv, home) as clients:
        transit.is_consumed(clients)
        transit.assert_offsets_are_as_they_were(clients, broker)
    transit.assert_dead_letters_are_at(broker)


def _move(operator: MigrationOperator, clients: Steady, transit: InTransit) -> None:
    pair = operator.pair
    conf, following = blocks("follow", "1")
    operator.write(conf)
    for line in lines(following):
        operator.does(line)
    pair.slave = operator.broker
    pair.has_all()
    (archive,) = blocks("follow", "2")
    (looks,) = lines(archive)
    wait_until(lambda: "bulk" in operator.does(looks), "the archive", 3 * _S)
    (check,) = blocks("follow", "3")
    status, metrics, _ready, cluster = [operator.does(line) for line in lines(check)]
    assert "127.0.0.1" in status
    assert "neve_slave_attached 1" in metrics
    assert len([row for row in cluster.splitlines() if " stock " in row]) == 2

    (change,) = blocks("follow", "4")
    printed = dict[str, str]()
    transit.before_the_end()
    transit.assert_is_on_its_way()
    for line in lines(change):
        printed[line] = operator.does(line)
        if "haStatus" in line:
            pair.has_log()  # "until Diff is 0"
    rows = [row for row in printed["mqadmin clusterList -n names:9876"].splitlines() if " stock " in row]
    assert len(rows) == 1, "the other one is retired"
    assert operator.broker.broker in rows[0]
    clients.send_more(["stock"], 60)
    clients.stop_sending()
    clients.drained("stock")
    _goes_on(transit, pair.namesrv, operator.broker.broker, operator.directory / "taking")

    (back,) = blocks("follow", "5")
    for line in lines(back):
        operator.does(line)
    with Client(operator.broker.broker) as client:
        answer = client.invoke(SEND_V2, send_ext(ORDERS, 0), b"m")
        assert answer.code == ResponseCode.NO_PERMISSION


def test_import_procedure_of_the_page_works(tmp_path: Path) -> None:
    with apache_alone(tmp_path) as pair:
        operator = MigrationOperator(pair, pair.directory)
        transit = InTransit(pair.namesrv, pair.master.broker)
        with Client(pair.master.broker) as client:
            client.create_topic(ORDERS, 2)
        conf, steps = blocks("directory")
        operator.write(conf)
        stop, dry, *others = lines(steps)
        try:
            with Steady(pair.namesrv, jvm.SERVER, tmp_path / "clients") as clients:
                clients.send_more(["stock"])
                report = json.loads(operator.does(dry))
                assert list(report) == list(json.loads(printed_report()))
                written = report["log_end"]
                assert written > 0
                clients.send_more(["stock"])
                transit.before_the_end()
                transit.assert_is_on_its_way()
                operator.does(stop)
                assert json.loads(operator.does(dry))["log_end"] > written
                status, progress = [operator.does(line) for line in others][1:]
                assert "stock" in status
                assert "stock" in progress
                clients.send_more(["stock"], 2 * 30)
                clients.stop_sending()
                clients.drained("stock")
            _goes_on(transit, pair.namesrv, operator.broker.broker, tmp_path / "taking")
            assert_each_offset_once_acknowledged_and_consumed(clients.acked, clients.got)
        finally:
            operator.broker.stop()


def test_side_by_side_procedure_of_the_page_works(tmp_path: Path) -> None:
    with apache_alone(tmp_path) as pair:
        operator = MigrationOperator(pair, pair.directory)
        transit = InTransit(pair.namesrv, pair.master.broker)
        conf, steps = blocks("side-by-side")
        operator.takes_apaches_own(conf)
        keys, start, dry, *copies, drain, dead, kept, stop, cluster = lines(steps)
        assert [line.split()[2] for line in copies] == ["topics", "groups", "offsets"]
        assert "honoured" in operator.does(keys)
        operator.does(start)
        try:
            with sync.connect(pair.namesrv) as client:
                wait_until(lambda: "fresh" in client.admin.cluster_info(), "its registration", _S)
                assert TOPIC in operator.does(dry)
                with Client(operator.broker.broker) as raw:
                    assert f'"{TOPIC}"'.encode() not in raw.ask(_ALL_TOPICS, {}).body, "nothing was written"
                first, again = ([operator.does(f"{line} -o json") for line in copies] for _ in range(2))
                topics, groups, offsets = map(json.loads, first)
                assert {(row["topic"], row["state"]) for row in topics} == {
                    (t, "created") for t in (TOPIC, LATER, PAID)
                }
                assert [(row["group"], row["state"]) for row in groups] == [(GROUP, "created")]
                assert {(row["to_offset"], row["how"]) for row in offsets} == {(0, "beginning")}
                topics, groups, offsets = map(json.loads, again)
                assert {row["state"] for row in topics + groups} == {"same"}
                assert {(row["to_offset"], row["how"]) for row in offsets} == {(0, "kept")}
                transit.before_the_end(drained=True)
                transit.assert_is_on_its_way()
                transit.end_transactions(pair.master.broker)
                with Taking(pair.namesrv, tmp_path / "taking") as clients:
                    operator.does(drain)
                    new = [f"new {number}" for number in range(100)]
                    assert {client.send(TOPIC, body).queue.broker_name for body in new} == {"fresh"}
                    transit.is_consumed(clients, new)
                    assert {one.broker for one in clients.got} == {"stock", "fresh"}
            assert operator.does(dead).count(TOPIC) == min(20, len(transit.dead)), "the last of them"
            operator.does(kept)
            (file,) = (operator.directory / "dead").glob("*/*.jsonl")
            assert sorted(json.loads(line)["body"] for line in file.read_text().splitlines()) == sorted(transit.dead)
            operator.does(stop)
            wait_until(lambda: "stock" not in operator.does(cluster), "the end of stock", _S)
            assert sum(offsets_at(operator.broker.broker)[f"{TOPIC}@{GROUP}"].values()) == len(new)
        finally:
            operator.broker.stop()


def test_cluster_migration_procedure_of_the_page_works(tmp_path: Path) -> None:
    names = Serving(tmp_path, "namesrv", *settings_as_options({"listenPort": 0, "bindAddress": "127.0.0.1"}))
    with apache_alone(tmp_path / "old") as pair, names:
        operator = MigrationOperator(pair, pair.directory, names.namesrv)
        transit = InTransit(pair.namesrv, pair.master.broker)
        conf, steps = blocks("cluster")
        operator.write(conf)
        keys, start, topics, groups, *first, wipe, lag, export, export_dead, again, offsets, lag_there = lines(steps)
        assert "honoured" in operator.does(keys)
        operator.does(start)
        try:
            with sync.connect(names.namesrv) as client:
                wait_until(lambda: "fresh" in client.admin.cluster_info(), "its registration", _S)
            operator.does(topics)
            operator.does(groups)
            transit.before_the_end(drained=True)
            transit.assert_is_on_its_way()
            for line in first:
                operator.does(line)
            transit.stand_at({queue: position + 7 for queue, position in transit.positions.items()})
            transit.end_transactions(pair.master.broker)
            operator.does(wipe)
            transit.waiting_is_due()
            transit.retries_are_read()
            left = operator.does(f"{lag} -o json")
            for line in (export, export_dead, again):
                operator.does(line)
            rows = json.loads(operator.does(f"{offsets} -o json"))
            placed = {(row["queue"], row["how"]): row["to_offset"] for row in rows if row["topic"] == TOPIC}
            assert placed == {(queue, "same offset"): at for queue, at in transit.positions.items()}
            there = operator.does(f"{lag_there} -o json")
            assert _lags(left) == _lags(there)
            with Taking(names.namesrv, tmp_path / "taking") as clients:
                transit.is_consumed(clients)
                transit.assert_offsets_are_as_they_were(clients, operator.broker.broker)
            transit.assert_dead_letters_are_at(operator.broker.broker)
        finally:
            operator.broker.stop()


def _lags(told: str) -> dict[tuple[str, int], int]:
    """Return the lags of the topics' queues."""
    found = json.loads(told)
    rows = found["queues"] if isinstance(found, dict) else found
    return {(row["topic"], row["queue"]): row["lag"] for row in rows if not row["topic"].startswith("%")}


def test_all_code_blocks_of_the_procedures_are_run() -> None:
    run = {"follow": list("12345"), "directory": ["Steps"], "side-by-side": ["Steps"], "cluster": ["Steps"]}
    for name, headings in run.items():
        written = all_blocks((PAGES / f"{name}.md").read_text("utf-8"))
        assert written == [block for heading in headings for block in blocks(name, heading)], name
    started = [line for heading in "12345" for block in blocks("follow", heading) for line in lines(block)]
    assert started.count(_STARTED_IN_BACKGROUND) == 2


def test_checks_of_a_slave_are_those_of_the_procedure() -> None:
    _settings, checks = all_blocks((PAGES / "slave.md").read_text("utf-8"))
    (procedure,) = blocks("follow", "3")
    assert set(lines(checks)) < set(lines(procedure))
