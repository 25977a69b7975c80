"""Tests of `neve doctor -c FILE`, which checks a broker configuration before a start."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.doctor import checks
from infra.clock import ManualClock
from infra.disk.filesystem import RealDisk, Room
from neve.cli import main
from neve.cli.checks import Check
from tests.kit.broker.in_process import running
from tests.kit.server.processes import free_ports


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Create a certificate that is valid for two days."""
    home = tmp_path_factory.mktemp("tls")
    pair = home / "server.pem", home / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=neve", "-keyout", str(pair[1]), "-out", str(pair[0])]
    subprocess.run(command, check=True, capture_output=True)
    return pair


@pytest.fixture(autouse=True)
def roomy_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RealDisk, "room", lambda self, path: Room(400 << 30, 600 << 30))


@pytest.fixture
def listening() -> Iterator[str]:
    """Listen on a port that passes for a name server, and yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield "127.0.0.1:{}".format(*server.getsockname()[1:])


def written(home: Path, listening: str, **keys: str) -> Path:
    """Write a valid broker.conf with the given changes."""
    port, admin = free_ports(2)
    well = {
        "storePathRootDir": f"{home}/data", "storeUrl": f"dir:{home}/archive", "namesrvAddr": listening,
        "listenPort": port, "adminPort": admin, "bindAddress": "127.0.0.1", "mappedFileSizeCommitLog": "1m",
    }  # fmt: skip
    path = home / "broker.conf"
    path.write_text("".join(f"{key}={value}\n" for key, value in {**well, **keys}.items()))
    path.chmod(0o600)
    return path


def found(path: Path, clock: ManualClock | None = None) -> dict[str, Check]:
    return {check.check: check for check in checks(path, (), clock)}


def test_valid_configuration_passes_and_nothing_is_created(
    tmp_path: Path, listening: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, listening)
    before = sorted(tmp_path.rglob("*"))
    assert main.run(["doctor", "-c", str(path), "-o", "json"]) == 0
    states = {check["check"]: check["state"] for check in json.loads(capsys.readouterr().out)}
    named = {"configuration", "data directory", "disk", "listenPort", "listenPort - 2", "adminPort", "name server"}
    assert {states[name] for name in named | {"store"}} == {"ok"}
    assert sorted(tmp_path.rglob("*")) == before
    assert main.run(["doctor", "-c", str(path), "--set", "storeUrl=ftp://x"]) == 1
    assert "storeUrl must be dir:PATH or s3://" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "check", "state", "text"),
    [
        ({"storePathRoot": "x"}, "configuration", "fail", "broker.conf:8: unknown key storePathRoot"),
        ({"storePathRootDir": "{home}/broker.conf/data"}, "data directory", "fail", "Not a directory"),
        ({"storeUrl": "dir:{home}/broker.conf/x"}, "store", "fail", "Not a directory"),
        ({"storeUrl": "s3://archive?regoin=x"}, "store", "fail", "regoin"),
        ({"storeUrl": ""}, "store", "warn", "older than 72 hours (fileReservedTime) are deleted"),
        ({"namesrvAddr": "127.0.0.1:1"}, "name server", "warn", "refused"),
        ({"namesrvAddr": "nowhere"}, "name server", "fail", "not HOST:PORT"),
        ({"namesrvAddr": ""}, "name server", "warn", "no route"),
        ({"adminPort": "10909", "listenPort": "10911"}, "ports", "fail", "two below"),
        ({"diskMaxUsedSpaceRatio": "90"}, "disk thresholds", "warn", "before segments are evicted"),
        ({"diskMaxUsedSpaceRatio": "39"}, "disk", "warn", "40.0%"),
        ({"diskMaxUsedSpaceRatio": "30", "diskSpaceWarningLevelRatio": "39"}, "disk", "fail", "from 39 % on"),
        ({"tlsServerMode": "enforcing"}, "TLS certificate", "fail", "needs tlsCertPath"),
        ({"tlsCertPath": "/nowhere.pem", "tlsKeyPath": "/nowhere.key"}, "TLS certificate", "fail", "No such file"),
        ({"tlsEnable": "true", "tlsTrustCertPath": "/nowhere.pem"}, "TLS trust", "fail", "No such file"),
        ({"authorizationEnabled": "true"}, "authorizationEnabled", "fail", "authenticationEnabled"),
        ({"authenticationEnabled": "true"}, "users", "fail", "without any user"),
        ({"initAuthenticationUser": "root:secret"}, "users", "fail", "initAuthenticationUser"),
    ],
)
def test_wrong_settings_are_reported(
    tmp_path: Path, listening: str, keys: dict[str, str], check: str, state: str, text: str
) -> None:
    path = written(tmp_path, listening, **{key: value.format(home=tmp_path) for key, value in keys.items()})
    told = found(path)[check]
    assert told.state == state, told
    assert text in told.found


def test_unwritable_directory_is_reported(tmp_path: Path, listening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    told = found(written(tmp_path, listening))
    assert (told["data directory"].state, told["store"].state) == ("fail", "fail")
    assert f"may not write to {tmp_path}" in told["data directory"].found


def test_missing_disk_space_for_the_log_is_reported(
    tmp_path: Path, listening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RealDisk, "room", lambda self, path: Room(999 << 30, 1 << 30))
    told = found(written(tmp_path, listening, mappedFileSizeCommitLog="1g"))
    assert (told["room for the log"].state, told["disk"].state) == ("fail", "fail")


def test_readable_file_with_secrets_is_reported(tmp_path: Path, listening: str) -> None:
    path = written(tmp_path, listening, initAuthenticationUser='{"username":"root","password":"root-secret"}')
    assert found(path)["secrets"].state == "ok"
    path.chmod(0o644)
    assert found(path)["secrets"] == ("secrets", "warn", f"{path} holds secrets and has mode 644: chmod 600")


def test_expiring_certificate_is_reported(tmp_path: Path, listening: str, certificate: tuple[Path, Path]) -> None:
    pair = {"tlsCertPath": str(certificate[0]), "tlsKeyPath": str(certificate[1])}
    path = written(tmp_path, listening, **pair)
    assert found(path)["TLS certificate"].state == "warn", "two days are few"
    assert "ends in 2 days" in found(path)["TLS certificate"].found
    now = int(certificate[0].stat().st_mtime * 1000)
    assert found(path, ManualClock(now - 30 * 86_400_000))["TLS certificate"].state == "ok"
    assert found(path, ManualClock(now + 3 * 86_400_000))["TLS certificate"].state == "fail"
    exchanged = written(tmp_path, listening, tlsCertPath=pair["tlsKeyPath"], tlsKeyPath=pair["tlsCertPath"])
    assert found(exchanged)["TLS certificate"].state == "fail"


async def test_taken_port_fails_unless_its_own_broker_uses_it(tmp_path: Path, listening: str) -> None:
    taken = listening.rpartition(":")[2]
    path = written(tmp_path, listening, listenPort=taken)
    assert found(path)["listenPort"].state == "fail"
    assert "in use" in found(path)["listenPort"].found

    port, admin = free_ports(2)
    ports = {"listenPort": str(port), "adminPort": str(admin)}
    own = written(tmp_path, listening, storePathRootDir=f"{tmp_path}/own", **ports)
    async with running(tmp_path / "own", *(f"{key}={value}" for key, value in ports.items())):
        told = await asyncio.to_thread(found, own)
    assert {told[name].state for name in ("listenPort", "listenPort - 2", "adminPort")} == {"ok"}
    assert "in use by the broker that runs on the data directory" in told["listenPort"].found


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("haListenPort", {"replication": "sync", "controllerAddr": "127.0.0.1:1"}),
        ("metricsPromExporterPort", {"metricsExporterType": "PROM", "metricsPromExporterHost": "127.0.0.1"}),
    ],
)
def test_taken_port_of_slaves_or_metrics_is_a_fault(
    tmp_path: Path, listening: str, key: str, keys: dict[str, str]
) -> None:
    taken = listening.rpartition(":")[2]
    told = found(written(tmp_path, listening, **keys, **{key: taken}))
    assert (told[key].state, "in use" in told[key].found) == ("fail", True)


def test_taken_replication_port_derived_from_listen_port_is_found(tmp_path: Path, listening: str) -> None:
    taken = int(listening.rpartition(":")[2])
    keys = {"replication": "sync", "controllerAddr": "127.0.0.1:1", "listenPort": str(taken - 1)}
    assert found(written(tmp_path, listening, **keys))["haListenPort"].state == "fail"
    assert "haListenPort" not in found(written(tmp_path, listening, listenPort=str(taken - 1)))


def test_options_that_duplicate_the_file_are_refused(
    tmp_path: Path, listening: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(written(tmp_path, listening))
    assert main.run(["doctor", "-c", path, "--data", str(tmp_path)]) == 2
    assert main.run(["doctor", "-c", path, "--store", f"dir:{tmp_path}"]) == 2
    assert main.run(["doctor", "--set", "listenPort=1"]) == 2
    monkeypatch.setenv("NEVE_STORE", "ftp://of-the-environment")
    assert main.run(["doctor", "-c", path]) == 0
    capsys.readouterr()
