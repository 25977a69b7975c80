"""A controller of neve with brokers of Apache RocketMQ."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from bench import jvm
from bench.wire import Client, Refused
from tests.kit.server.apache import ApacheMember
from tests.kit.server.neve import Serving, settings_as_options
from tests.kit.server.processes import free_ports

SOURCES = Path(__file__).parent / "java_admin"
HEARTBEAT, ALTER, ELECT, REGISTER, REPLICA_INFO, METADATA, SYNC_STATE_DATA = 904, 1001, 1002, 1003, 1004, 1005, 1006

TOPIC = "orders"


def controller(directory: Path, register_url: str = "") -> Serving:
    """Run a controller on a port that stays the same over a restart."""
    (port,) = free_ports(1)
    settings = {"listenPort": port, "bindAddress": "127.0.0.1", "controllerStorePath": directory / "register"}
    settings["registerUrl"] = register_url
    return Serving(directory, "controller", *settings_as_options(settings))


def name_server(directory: Path) -> Serving:
    settings = {"listenPort": 0, "bindAddress": "127.0.0.1", "kvConfigPath": directory / "kv.json"}
    return Serving(directory, "namesrv", *settings_as_options(settings))


def broker_set(server: Serving, name: str = "stock") -> dict[str, Any]:
    """Return the controller's information about the set; empty while the set is unknown."""
    with Client(server.ready["controller"]) as client:
        answer = client.ask(SYNC_STATE_DATA, {}, json.dumps([name]).encode())
    found = json.loads(answer.body)["replicasInfoTable"].get(name, {})
    return dict(found)


def in_sync(server: Serving) -> set[str]:
    """Return the addresses of the living members in sync."""
    return {one["brokerAddress"] for one in broker_set(server).get("inSyncReplicas", ()) if one["alive"]}


def may_send(member: ApacheMember) -> bool:
    try:
        with Client(member.broker) as client:
            client.create_topic(TOPIC, 1)
            client.send(TOPIC, 0, b"are you master?")
    except (OSError, Refused):
        return False
    return True


def mqadmin_says(home: Path, *lines: str) -> list[str]:
    """Return the output of the stock admin tool for each of the command lines, run one after the other."""
    home.mkdir(parents=True)
    command = jvm.java(jvm.classes(SOURCES), "Verbs", home=home)
    env = {**os.environ, "ROCKETMQ_HOME": str(home)}
    text = "\n".join(lines)
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False, env=env)
    answers = done.stdout.replace("\t", " ").split("\nVERB ")[1:]
    assert len(answers) == len(lines), done.stdout + done.stderr
    return answers
