"""`neve up --replicas 3` like a user runs it: a whole broker set whose killed members are restarted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import psutil
import pytest

from bench.wire import Client, Refused
from neve.errors import BrokerError, NeveError
from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import NEVE, Serving
from tests.kit.server.security import ROOT, make_certificate, round_trip, trusting

_CHANGE_S = 60.0
ANY_PORTS = ("--namesrv-port", "0", "--controller-port", "0", "--port", "0")
CONFIG = 2


def up(directory: Path, *options: str) -> Serving:
    data = directory / "data"
    return Serving(directory, "up", "--replicas", "3", "--data", str(data), *ANY_PORTS,
                   "--set", "mappedFileSizeCommitLog=1m", *options)  # fmt: skip


def sent(addresses: list[str], body: bytes) -> str | None:
    """Send a message; return the address of the broker that acknowledged it, or None."""
    for address in addresses:
        try:
            with Client(address, timeout=10) as client:
                client.create_topic("orders", 1)
                client.send("orders", 0, body)
        except (OSError, Refused):
            continue
        return address
    return None


def has(address: str, count: int) -> bool:
    """Return whether the broker has at least `count` messages; a member without a role shows none yet."""
    try:
        with Client(address) as client:
            return client.bounds("orders", 0)[1] >= count
    except (OSError, Refused):
        return False


def test_killed_master_is_replaced_and_restarted(tmp_path: Path) -> None:
    with up(tmp_path) as servers:
        master, members = servers.ready["master"], servers.ready["members"]
        addresses = [member["broker"] for member in members]
        assert len(set(addresses)) == 3
        assert sent([master], b"before") == master
        killed = next(member for member in members if member["broker"] == master)
        os.kill(killed["pid"], signal.SIGKILL)
        others = [address for address in addresses if address != master]
        wait_until(lambda: sent(others, b"after") is not None, "another takes messages", _CHANGE_S)
        again = f"member {members.index(killed) + 1} restarted"
        wait_until(lambda: again in servers.log(), again, _CHANGE_S)
        wait_until(lambda: has(master, 2), "it has what was sent without it", _CHANGE_S)
        processes = [process.pid for process in servers.alive()]
        assert servers.stop() == 0
        assert not [pid for pid in processes if psutil.pid_exists(pid)]


def test_stopped_set_restarts_with_its_messages(tmp_path: Path) -> None:
    servers = up(tmp_path)
    for count in (1, 2):
        with servers:
            master = servers.ready["master"]
            assert sent([master], b"%d" % count) == master
            assert has(master, count)


def test_users_of_an_authenticated_set_exist_on_every_member(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "set")
    keys = (
        "authenticationEnabled=true",
        f"initAuthenticationUser={ROOT}",
        'innerClientAuthenticationCredentials={"accessKey":"member","secretKey":"members-secret"}',
        "tlsServerMode=enforcing",
        f"tlsCertPath={certificate}",
        f"tlsKeyPath={key}",
    )
    options = [word for one in keys for word in ("--set", one)]
    root = {"credentials": ("root", "root-secret"), "tls": trusting(certificate)}

    def serves(names: str, topic: str) -> bool:
        try:
            return asyncio.run(round_trip(names, topic, **root)) == b"over the wire"
        except NeveError:
            return False

    for topic in ("First", "Second"):
        with up(tmp_path, *options) as servers:
            names, master, members = (servers.ready[name] for name in ("namesrv", "master", "members"))
            with pytest.raises(BrokerError):
                asyncio.run(round_trip(names, topic, **{**root, "credentials": ("root", "guess")}))
            assert serves(names, topic)
            os.kill(next(one["pid"] for one in members if one["broker"] == master), signal.SIGKILL)
            wait_until(partial(serves, names, f"{topic}OfAnother"), "another serves them", _CHANGE_S)


def test_members_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    with up(tmp_path) as servers:
        processes = servers.alive()
        servers.process.kill()
        _, left = psutil.wait_procs([one for one in processes if one.pid != servers.process.pid], timeout=_CHANGE_S)
        for process in left:  # The members have sessions of their own, so no other process ends them.
            process.kill()
        assert not left


def test_unsupported_settings_are_rejected_before_any_file_is_created(tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        done = subprocess.run(
            [NEVE, "up", "--replicas", "3", "--data", str(tmp_path / "data"), *ANY_PORTS, *arguments],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == CONFIG, done.stderr
        return done.stderr

    assert "listenPort with --replicas" in refused("--set", "listenPort=1")
    assert "nothing would be replicated" in refused("--set", "replication=none")
    alone = refused("--set", "authenticationEnabled=true")
    assert "innerClientAuthenticationCredentials, equal on all members" in alone
    assert "tlsServerMode=enforcing" in alone
    assert "authConfigPath with --replicas" in refused("--set", "authConfigPath=/tmp/users.json")
    assert "--restore-from" in refused("--restore-from", f"dir:{tmp_path}")
    assert not (tmp_path / "data").exists()
