"""An outage drill: what every surface says while something is down, that it says it once, and that it ends by itself.

A disk that is full no test can make: `unit/broker/test_conditions.py` has one that says so. Of each: `/readyz`,
`/archive/status`, `neve_condition`, `neve broker describe`, the log, and what clients are told.
"""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from infra import minio
from tests.servers.neve import NEVE, Serving, settings_as_options
from tests.servers.processes import free_ports
from tests.waiting import wait_until

pytestmark = pytest.mark.servers
_S = 60.0
_UNREACHABLE = 6
# How each begins at `/readyz`, in the log and in `neve broker describe`.
_MEANS = {
    "archive unreachable": "messages that are not on the local disk can't be read",
    "name servers unreachable": "clients that know this broker go on with it",
    "clock not trusted": "s late",
    "certificate expired": "clients that check it can't connect any more",
}


@dataclass
class Drill:
    """A name server, a broker and its store, each a process."""

    directory: Path
    store: Store
    names: Serving
    broker: Serving

    def __post_init__(self) -> None:
        self.namesrv = self.names.namesrv

    # ---- what is said

    def neve(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [NEVE, *words, "-n", self.namesrv]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=_S, check=False)

    def conditions(self) -> dict[str, dict[str, str]]:
        told = json.loads(self.broker.get("/archive/status"))["conditions"]
        return {one["name"]: one for one in told}

    def begins(self, name: str, *, described: bool = True) -> None:
        """Every surface tells it, with what it means."""
        wait_until(lambda: name in self.conditions(), name, _S)
        one = self.conditions()[name]
        assert one["why"]
        assert _MEANS[name] in one["means"]
        assert one["then"]
        ready = self.broker.get("/readyz")
        assert ready.startswith("ready\n"), "what can be done is done"
        (line,) = [line for line in ready.splitlines() if line.startswith(name)]
        assert re.fullmatch(rf"{name} since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC: .+; .+; .+", line), line
        assert self.broker.metric(f'neve_condition{{condition="{name}"}}') == 1
        if described:
            told = self.neve("broker", "describe", "broker-a", "-o", "json")
            assert f"{name}: " in json.loads(told.stdout)["conditions"], told.stderr
        wait_until(lambda: self.lines(name) == [f"{name}: "], "the log", _S)

    def ends(self, name: str) -> None:
        """Every surface takes it back."""
        wait_until(lambda: name not in self.conditions(), f"no {name}", _S)
        assert name not in self.broker.get("/readyz")
        assert self.broker.metric(f'neve_condition{{condition="{name}"}}') == 0
        wait_until(lambda: self.lines(name) == [f"{name}: ", f"{name}: no more"], "once each", _S)

    def lines(self, name: str) -> list[str]:
        """What the log says of it, line by line, without the reasons."""
        found = re.findall(rf"WARNING broker\.stats\.conditions ({name}: (?:no more)?)", self.broker.log())
        return [str(one) for one in found]

    # ---- what is done

    def sends(self) -> subprocess.CompletedProcess[str]:
        return self.neve("produce", "orders", stdin="one\n")

    def runs(self, job: str) -> None:
        url = f"http://{self.broker.admin}/jobs/{job}/run"
        urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=_S).close()


def make_certificate(pem: Path, key: Path, days: int) -> None:
    """Good for so many days from now on; none: its time was yesterday."""
    private, today = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "neve")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(private.public_key())
    builder = builder.serial_number(x509.random_serial_number()).add_extension(address, critical=False)
    builder = builder.not_valid_before(today - timedelta(days=2)).not_valid_after(today + timedelta(days=days or -1))
    plain = serialization.NoEncryption()
    made = private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    key.write_bytes(made)
    pem.write_bytes(builder.sign(private, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


class Store:
    """An S3 server that goes and comes back with what it has."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._running = directory, ExitStack()
        self.server = self._running.enter_context(minio.running(directory))
        minio.create_bucket(self.server, "archive")

    def goes(self) -> None:
        self._running.close()

    def comes_back(self) -> None:
        port, keys = int(self.server.endpoint.rpartition(":")[2]), (self.server.access_key, self.server.secret_key)
        self._running.enter_context(minio.running(self._directory, port, keys))


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drill]:
    directory = tmp_path_factory.mktemp("drill")
    port, names_port, admin_port = free_ports(3)
    pem, key = directory / "server.pem", directory / "server.key"
    make_certificate(pem, key, 365)
    store = Store(directory / "minio")
    settings = {
        "brokerName": "broker-a", "namesrvAddr": f"127.0.0.1:{names_port}", "storePathRootDir": directory / "data",
        "listenPort": port, "bindAddress": "127.0.0.1", "brokerIP1": "127.0.0.1", "adminPort": admin_port,
        "mappedFileSizeCommitLog": "1m", "storeUrl": store.server.url("archive"), "tlsServerMode": "permissive",
        "tlsCertPath": pem, "tlsKeyPath": key, "registerNameServerPeriod": "10s", "diskSpaceWarningLevelRatio": 99,
    }  # fmt: skip
    own = directory / "names.pem", directory / "names.key"
    make_certificate(*own, 365)
    options = settings_as_options({
        "listenPort": names_port, "bindAddress": "127.0.0.1", "tlsServerMode": "permissive", "tlsCertPath": own[0],
        "tlsKeyPath": own[1],
    })  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.server.environment.items():
            patch.setenv(name, value)
        try:
            with (
                Serving(directory / "names", "namesrv", *options) as names,
                Serving(directory / "broker", "broker", *settings_as_options(settings)) as broker,
            ):
                drill = Drill(directory, store, names, broker)
                created = drill.neve("topic", "create", "orders")
                assert created.returncode == 0, created.stderr
                yield drill
        finally:
            store.goes()


def test_the_store_is_down(drill: Drill) -> None:
    drill.store.goes()
    drill.runs("state")
    drill.begins("archive unreachable")
    assert drill.sends().returncode == 0, "hot traffic goes on"
    drill.store.comes_back()
    drill.runs("state")
    drill.ends("archive unreachable")


def test_the_name_server_is_gone(drill: Drill) -> None:
    drill.names.stop()
    drill.begins("name servers unreachable", described=False)
    sent = drill.sends()
    assert sent.returncode == _UNREACHABLE, sent.stderr
    assert drill.namesrv in sent.stderr, "who can't be reached is said"
    drill.names.start()
    drill.ends("name servers unreachable")
    wait_until(lambda: drill.sends().returncode == 0, "its route is back", _S)


def test_the_broker_is_killed(drill: Drill) -> None:
    address = drill.broker.broker
    drill.broker.kill()
    wait_until(lambda: drill.neve("broker", "describe", "broker-a").returncode != 0, "the name server knows it", _S)
    sent = drill.sends()
    assert sent.returncode != 0
    assert "orders" in sent.stderr or address in sent.stderr, sent.stderr
    drill.broker.start()
    wait_until(lambda: drill.sends().returncode == 0, "it is back", _S)
    assert drill.conditions() == {}
    assert drill.broker.get("/readyz") == "ready\n"


def test_the_clock_is_off(drill: Drill) -> None:
    """A start finds the wall clock far before what was trusted last."""
    drill.broker.stop()
    before = len(drill.broker.log())
    (drill.directory / "data" / "clock").write_text('{"version":1,"trusted_ms":1000000000000}')
    drill.broker.start()
    wait_until(lambda: "clock not trusted" in drill.broker.log()[before:], "the log", _S)
    drill.begins("clock not trusted")
    assert drill.neve("archive", "confirm-clock").returncode == 0
    drill.ends("clock not trusted")


def test_the_certificate_is_over(drill: Drill) -> None:
    pem, key = drill.directory / "server.pem", drill.directory / "server.key"
    make_certificate(pem, key, 0)
    drill.begins("certificate expired")
    trusted = drill.directory / "trusted.pem"
    trusted.write_text(pem.read_text() + (drill.directory / "names.pem").read_text())
    sent = drill.neve("produce", "orders", "--tls-ca", str(trusted), stdin="one\n")
    assert sent.returncode != 0
    assert "certificate" in sent.stderr, sent.stderr
    make_certificate(pem, key, 365)
    drill.ends("certificate expired")
    assert drill.neve("produce", "orders", stdin="one\n").returncode == 0
