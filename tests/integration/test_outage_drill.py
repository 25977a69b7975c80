"""An outage drill: check the output of every surface while something is down, and that each reports the outage once.

Six outages (the store, the disk, the name server, the broker, the clock, the certificate) by ten surfaces: `/readyz`,
`/archive/status`, `neve_condition`, the log, `neve broker show`, `neve produce`, `neve consume`, the results of a
client's send and of its read of an archived message, and the name server. `make drill` lets each outage last for
minutes, checks each of them and prints the table; here each lasts for some seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import neve
from infra.objects import minio
from neve.client import ClientOptions
from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import NEVE, Serving, settings_as_options
from tests.kit.server.processes import free_ports
from tests.kit.wire.admin_port import post_request

pytestmark = pytest.mark.servers
_S = 120.0
#: The number of minutes that each outage lasts; 0: as long as one check takes.
_MINUTES = int(os.environ.get("NEVE_DRILL_MINUTES", "0"))
_MINUTE_S = 60.0
#: If a condition were logged each second, it would be logged several times in this period.
_TELLS_AGAIN_S = 4.0
_SMALL_DISK = "48m"

Said = dict[str, str]


class SurfaceOutput(NamedTuple):
    """The output of one surface at one moment of an outage."""

    outage: str
    minute: str
    surface: str
    said: str


TABLE: list[SurfaceOutput] = []


class OnASmallDisk(Serving):
    """A broker whose data are on its own disk in memory, which ends with it; needs user namespaces."""

    def __init__(self, directory: Path, data: Path, *arguments: str) -> None:
        super().__init__(directory, *arguments)
        mounted = f'mount -t tmpfs -o size={_SMALL_DISK} tmpfs "$0" && exec "$@"'
        own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted, str(data)]
        self._command = [*own, *self._command]

    def seen_from_here(self, path: Path) -> Path:
        """Return the path of the broker's file that works in this namespace."""
        return Path(f"/proc/{self.process.pid}/root{path}")


class Drill:
    """A name server and a broker as processes, and the broker's store if it has one."""

    def __init__(self, directory: Path, names: Serving, broker: Serving, store: RestartedS3 | None = None) -> None:
        self.directory, self.names, self.broker, self.store = directory, names, broker, store
        self.namesrv = names.namesrv
        #: TLS options of the clients.
        self.tls: tuple[str, ...] = ()

    # ---- output of the surfaces

    def look(self) -> Said:
        """Return one line for each surface."""
        return {
            "/readyz": self._page("/readyz"),
            "/archive/status": " | ".join(f"{name}: {one['why']}" for name, one in self.conditions().items()) or "none",
            "metrics": self._metrics(self.broker, r'^neve_condition{condition="(.+)"} 1.0$'),
            "log": " | ".join(self.told()) or "nothing",
            "neve broker show": self._describe(),
            "neve produce": self._ran(self.neve("produce", "orders", *self.tls, stdin="one\n")),
            "neve consume": self._ran(self.neve("consume", "orders", "--last", "1", *self.tls)),
            "client, send": asyncio.run(self._client(lambda client: client.send("orders", b"one"))),
            "client, read": self.reads_what_is_archived(),
            "name server": self._page("/readyz", self.names)
            + ", brokers: "
            + self._metrics(self.names, r"^neve_namesrv_brokers (\d+)"),
        }

    def reads_what_is_archived(self) -> str:
        return asyncio.run(self._client(lambda client: client.pull("past", 0, 0, timeout=60)))

    def conditions(self) -> dict[str, dict[str, str]]:
        try:
            told = json.loads(self.broker.get("/archive/status"))["conditions"]
        except OSError as error:
            return {"no answer": {"why": _reason(error)}}
        return {one["name"]: one for one in told}

    def told(self) -> list[str]:
        """Return the conditions that the broker logged since the outage began, without their reasons."""
        lines = re.findall(r"WARNING broker\.stats\.conditions ([^:]+: (?:ended)?)", self.broker.log()[self._before :])
        return [str(line).rstrip(": ") for line in lines]

    def begins(self) -> None:
        self._before = len(self.broker.log())

    def _page(self, path: str, server: Serving | None = None) -> str:
        url = f"http://{(server or self.broker).admin}{path}"
        try:
            with urllib.request.urlopen(url, timeout=_S) as page:
                return f"{page.status} {' | '.join(page.read().decode().splitlines())}"
        except urllib.error.HTTPError as error:
            return f"{error.code} {' | '.join(error.read().decode().splitlines())}"
        except OSError as error:
            return _reason(error)

    @staticmethod
    def _metrics(server: Serving, pattern: str) -> str:
        try:
            return " | ".join(re.findall(pattern, server.get("/metrics"), re.MULTILINE)) or "none"
        except OSError as error:
            return _reason(error)

    def _describe(self) -> str:
        done = self.neve("broker", "describe", "broker-a", "-o", "json", *self.tls)
        return str(json.loads(done.stdout)["conditions"]) if done.returncode == 0 else self._ran(done)

    @staticmethod
    def _ran(done: subprocess.CompletedProcess[str]) -> str:
        lines = done.stderr.strip().splitlines()
        return f"exit code {done.returncode}" + (f": {lines[-1]}" if done.returncode and lines else "")

    async def _client(self, ask: Callable[[neve.AsyncClient], object]) -> str:
        """Return the kind of result that a program gets."""
        options = ClientOptions(tls=ssl.create_default_context(cafile=self.tls[1]) if self.tls else False)
        try:
            async with asyncio.timeout(_S), neve.connect(self.namesrv, options=options) as client:
                result = await ask(client)  # type: ignore[misc]
        except (neve.NeveError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"
        messages = getattr(result, "messages", None)
        return "stored" if messages is None else f"{len(messages)} messages, {result.status}"

    # ---- phases of an outage

    def neve(self, *words: str, stdin: str = "", check: bool = False) -> subprocess.CompletedProcess[str]:
        command = [NEVE, *words, "-n", self.namesrv]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=_S, check=check)

    def runs(self, job: str) -> None:
        url = f"http://{self.broker.admin}/jobs/{job}/run"
        urllib.request.urlopen(post_request(url), timeout=_S).close()

    @contextmanager
    def outage(self, ends: Callable[[], object]) -> Iterator[None]:
        """End the outage even if a surface fails its check: the next outage belongs to another test."""
        try:
            yield
        finally:
            ends()

    def during(self, outage: str, condition: str | None, expected: Mapping[str, str], minutes: int = _MINUTES) -> None:
        """Check every surface at once and, in a long drill, in each minute; the log reports the outage once."""
        began = time.monotonic()
        for minute in range(minutes + 1):
            minute_is_over = partial(_is_past, began + minute * _MINUTE_S)
            wait_until(minute_is_over, f"minute {minute}", 2 * _MINUTE_S)
            said = self.look()
            TABLE.extend(SurfaceOutput(outage, str(minute), surface, text) for surface, text in said.items())
            assert set(said) == set(expected)
            for surface, pattern in expected.items():
                assert re.search(pattern, said[surface]), f"{surface}, minute {minute}: {said[surface]!r}"
        if condition is not None:
            wait_until(partial(_is_past, began + _TELLS_AGAIN_S), "a log that repeats itself would have", _S)
            assert self.told() == [condition], "once, and not each second"

    def after(self, outage: str, condition: str | None) -> None:
        """Check that every surface reports normal operation again."""
        wait_until(lambda: self.conditions() == {}, f"{outage} is over", _S)
        if condition is not None:
            wait_until(lambda: self.told() == [condition, f"{condition}: ended"], "once each", _S)
        assert self._page("/readyz") == "200 ready"
        assert self._metrics(self.broker, r'^neve_condition{condition="(.+)"} 1.0$') == "none"
        wait_until(lambda: self.neve("produce", "orders", stdin="one\n").returncode == 0, "sends are taken", _S)
        TABLE.append(SurfaceOutput(outage, "after", "all", "200 ready, no condition, sends are taken"))


def _is_past(moment: float) -> bool:
    return time.monotonic() >= moment


def _reason(error: OSError) -> str:
    reason = getattr(error, "reason", error)
    return str(getattr(reason, "strerror", None) or reason).lower()


def make_certificate(pem: Path, key: Path, days: int) -> None:
    """Make a certificate that is valid for some days from now, or one that expired yesterday if `days` is 0."""
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


class RestartedS3:
    """An S3 server that can be stopped and started with its data."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._running = directory, ExitStack()
        self.server = self._running.enter_context(minio.running(directory))
        minio.create_bucket(self.server, "archive")

    def goes(self) -> None:
        self._running.close()

    def comes_back(self) -> None:
        port, keys = int(self.server.endpoint.rpartition(":")[2]), (self.server.access_key, self.server.secret_key)
        self._running.enter_context(minio.running(self._directory, port, keys))


def settings_of(directory: Path, namesrv: str, **more: object) -> list[str]:
    """Return the settings of a broker whose ports stay the same over restarts."""
    port, admin_port = free_ports(2)
    return settings_as_options({
        "brokerName": "broker-a", "namesrvAddr": namesrv, "storePathRootDir": directory / "data",
        "listenPort": port, "bindAddress": "127.0.0.1", "brokerIP1": "127.0.0.1", "adminPort": admin_port,
        "mappedFileSizeCommitLog": "1m", "registerNameServerPeriod": "10s", "coldReadTimeout": "10s", **more,
    })  # fmt: skip


def name_server(directory: Path, **more: object) -> Serving:
    port, admin_port = free_ports(2)
    settings = {"listenPort": port, "bindAddress": "127.0.0.1", "adminPort": admin_port, **more}
    return Serving(directory / "names", "namesrv", *settings_as_options(settings))


@contextmanager
def tabled() -> Iterator[None]:
    """Print the table of all observations at the end, for `make drill`."""
    try:
        yield
    finally:
        for row in TABLE:
            print(f"{row.outage:<20} {row.minute:>5}  {row.surface:<22} {row.said}")
        TABLE.clear()


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drill]:
    directory = tmp_path_factory.mktemp("drill")
    pem, key = directory / "server.pem", directory / "server.key"
    own = directory / "names.pem", directory / "names.key"
    make_certificate(pem, key, 365)
    make_certificate(*own, 365)
    store = RestartedS3(directory / "minio")
    with tabled(), pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        stack.callback(store.goes)
        for name, value in store.server.environment.items():
            patch.setenv(name, value)
        names = stack.enter_context(name_server(directory, tlsCertPath=own[0], tlsKeyPath=own[1]))
        more = {"storeUrl": store.server.url("archive"), "tlsCertPath": pem, "tlsKeyPath": key}
        more |= {"archiveWorkerPriority": "normal", "coldReadPriority": "normal", "diskSpaceWarningLevelRatio": 99}
        settings = settings_of(directory, names.namesrv, **more)
        broker = stack.enter_context(Serving(directory / "broker", "broker", *settings))
        drill = Drill(directory, names, broker, store)
        for topic in ("orders", "past"):
            assert drill.neve("topic", "create", topic, "--queues", "1").returncode == 0
            assert drill.neve("produce", topic, stdin="one\ntwo\n").returncode == 0
        assert broker.post("/archive/offload?roll=1&evict=1")[-1]["failed"] == 0
        assert drill.neve("produce", "orders", stdin="three\n").returncode == 0
        yield drill


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[Drill, OnASmallDisk, Path]]:
    """Run only a broker, on a disk that a test can fill."""
    data = tmp_path / "data"
    data.mkdir()
    with tabled(), name_server(tmp_path) as names:
        settings = settings_of(tmp_path, names.namesrv)
        with OnASmallDisk(tmp_path / "broker", data, "broker", *settings) as broker:
            drill = Drill(tmp_path, names, broker)
            for topic in ("orders", "past"):
                assert drill.neve("topic", "create", topic, "--queues", "1").returncode == 0
                assert drill.neve("produce", topic, stdin="one\n").returncode == 0
            yield drill, broker, data


WELL: dict[str, str] = {
    "/readyz": r"^200 ready$", "/archive/status": r"^none$", "metrics": r"^none$", "log": r"^nothing$",
    "neve broker show": r"^none$", "neve produce": r"^exit code 0", "neve consume": r"^exit code 0",
    "client, send": r"^stored$", "client, read": "FOUND$", "name server": r"^200 ready, brokers: 1$",
}  # fmt: skip


def told(condition: str, why: str, means: str, **more: str) -> dict[str, str]:
    """Return the expected lines of all surfaces for a condition; all others have to report normal operation."""
    since = r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    return {
        **WELL,
        "/readyz": rf"^200 ready \| {condition} {since}: {why}.*{means}",
        "/archive/status": rf"^{condition}: {why}",
        "metrics": rf"^{condition}$",
        "log": rf"^{condition}$",
        "neve broker show": rf"^{condition}: {why}",
        **more,
    }


def until_told(drill: Drill, condition: str) -> None:
    wait_until(lambda: condition in drill.conditions() and drill.told() == [condition], condition, _S)


def test_surfaces_report_an_unreachable_store(drill: Drill) -> None:
    """Hot traffic continues. Messages that only the archive has cannot be read, and their reader is asked to retry."""
    assert drill.store is not None
    drill.begins()
    means = "messages that are not on the local disk can't be read"
    later = "BrokerError: the archive can't be read now, try again later"
    expected = told("archive unreachable", "StoreUnavailable", means, **{"client, read": f"^{later}"})
    with drill.outage(drill.store.comes_back):
        drill.store.goes()
        drill.runs("state")
        until_told(drill, "archive unreachable")
        drill.during("store down", "archive unreachable", expected)
    drill.runs("state")
    drill.after("store down", "archive unreachable")


def test_surfaces_report_a_full_disk(small: tuple[Drill, OnASmallDisk, Path]) -> None:
    """The broker refuses sends and serves reads; once there is space again, it accepts sends."""
    drill, broker, data = small
    drill.begins()
    filler = broker.seen_from_here(data / "filler")
    room = os.statvfs(broker.seen_from_here(data))
    filler.write_bytes(b"\0" * (int(room.f_bavail * room.f_frsize * 0.95)))
    until_told(drill, "disk full")
    refused = "the broker's disk is full, 9\\d% used, mark 90%"
    expected = told(
        "disk full", refused, "sends are refused with code 14; reads, acks and archiving continue",
        **{"neve produce": f"exit code 1.*{refused}", "client, send": f"(?s).*{refused}"},
    )  # fmt: skip
    drill.during("disk full", "disk full", expected)
    filler.unlink()
    drill.after("disk full", "disk full")


def test_surfaces_report_an_unreachable_name_server(drill: Drill) -> None:
    """The broker serves clients that know it; new clients get an error that names the unreachable name server."""
    drill.begins()
    away = re.escape(drill.namesrv)
    expected = told(
        "name servers unreachable", away, "clients that know this broker continue to use it",
        **dict.fromkeys(("neve broker show", "neve produce", "neve consume"), f"exit code 6.*{away}"),
        **dict.fromkeys(("client, send", "client, read"), f"^ConnectionFailed: .*{away}"),
        **{"name server": "^connection refused"},
    )  # fmt: skip
    with drill.outage(drill.names.start):
        drill.names.stop()
        until_told(drill, "name servers unreachable")
        drill.during("name server gone", "name servers unreachable", expected)
    drill.after("name server gone", "name servers unreachable")


def test_surfaces_report_a_killed_broker(drill: Drill) -> None:
    """The name server reports the loss, and each client reports what it could not reach."""
    drill.begins()
    refused = "^(no answer: )?connection refused"
    expected = {
        "/readyz": refused, "/archive/status": refused, "metrics": refused, "log": "^nothing$",
        "neve broker show": "exit code [36].*(broker-a|knows no broker)", "neve produce": "exit code [136].*orders",
        "neve consume": "exit code [136].*orders", "client, send": ".+: .*orders", "client, read": ".+: .*past",
        "name server": "^200 ready, brokers: 0$",
    }  # fmt: skip
    lost = "broker removed: disconnected"
    before = drill.names.log().count(lost)
    with drill.outage(drill.broker.start):
        drill.broker.kill()
        wait_until(lambda: drill.names.log().count(lost) > before, "the name server has seen it", _S)
        drill.during("broker killed", None, expected)
        assert drill.names.log().count(lost) == before + 1, "once"
    drill.after("broker killed", None)


def test_surfaces_report_an_untrusted_clock(drill: Drill) -> None:
    """At start the wall clock is far ahead of the last trusted time: nothing expires early, all else works."""
    drill.broker.stop()
    (drill.directory / "data" / "clock").write_text('{"version":1,"trusted_ms":1000000000000}')
    drill.begins()
    with drill.outage(lambda: drill.neve("archive", "confirm-clock", check=True)):
        drill.broker.start()
        wait_until(lambda: drill.neve("produce", "orders", stdin="one\n").returncode == 0, "its route is back", _S)
        wait_until(lambda: drill.reads_what_is_archived().endswith("FOUND"), "the archive's worker has begun", _S)
        until_told(drill, "clock not trusted")
        expected = told("clock not trusted", "", "expiry is .* s late")
        # The condition ends when the expiry job compares the clocks.
        drill.during("clock off", "clock not trusted", expected, minutes=0)
        if _MINUTES:
            wait_until(lambda: drill.conditions() == {}, "the store's clock agrees", _S)
    drill.after("clock off", "clock not trusted")


def test_surfaces_report_an_expired_certificate(drill: Drill) -> None:
    """Clients that verify the certificate cannot connect and get the reason; a new one is loaded without a restart."""
    pem, key = drill.directory / "server.pem", drill.directory / "server.key"
    drill.begins()
    expected = told(
        "certificate expired", "", "clients that check it cannot connect; existing connections continue",
        **dict.fromkeys(("neve broker show", "neve produce", "neve consume"), "exit code [16].*certificate"),
        **dict.fromkeys(("client, send", "client, read"), ".+: .*certificate"),
    )  # fmt: skip
    with drill.outage(partial(make_certificate, pem, key, 365)):
        make_certificate(pem, key, 0)
        until_told(drill, "certificate expired")
        trusted = drill.directory / "trusted.pem"
        trusted.write_text(pem.read_text() + (drill.directory / "names.pem").read_text())
        drill.tls = ("--tls-ca", str(trusted))
        drill.during("certificate expired", "certificate expired", expected)
    drill.tls = ()
    drill.after("certificate expired", "certificate expired")


def test_surfaces_report_normal_operation(drill: Drill) -> None:
    """Every surface has the output that the drill expects in normal operation."""
    drill.begins()
    drill.during("none", None, WELL)
