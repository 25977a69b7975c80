"""etcd on loopback: one node or several, with TLS, with users; a test can kill, stop, freeze and restore it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from infra.objects.s3_server import ServerMissing, find_binary
from tests.kit.clock.waiting import wait_until
from tests.kit.server.processes import Processes, free_ports

_READY_S = 60.0


@dataclass(frozen=True)
class Certificates:
    """PEM files: the authority, the server's pair, a client's pair."""

    authority: Path
    certificate: Path
    key: Path


class Node(Processes):
    """One etcd process. Its ports stay the same over restarts."""

    def __init__(self, directory: Path, name: str, ports: tuple[int, int], tls: Certificates | None = None) -> None:
        super().__init__(directory)
        self.name, self.tls = name, tls
        self.endpoint, self.peer = (f"127.0.0.1:{port}" for port in ports)
        self.data = directory / "data"
        self.token = "neve"  # With another token, empty data form another cluster.
        self.cluster: Sequence[Node] = (self,)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.endpoint}"

    def launch(self) -> None:
        """Start the process and return at once: the first of three nodes is ready only when the second one is."""
        binary = find_binary("etcd")
        if binary is None:
            raise ServerMissing("no etcd: run `make servers`")
        options = {
            "name": self.name,
            "data-dir": self.data,
            "listen-client-urls": self.url,
            "advertise-client-urls": self.url,
            "listen-peer-urls": f"http://{self.peer}",
            "initial-advertise-peer-urls": f"http://{self.peer}",
            "initial-cluster": ",".join(f"{node.name}=http://{node.peer}" for node in self.cluster),
            "initial-cluster-token": self.token,
            "log-level": "warn",
        }
        if self.tls is not None:
            options |= {"cert-file": self.tls.certificate, "key-file": self.tls.key}
            options |= {"trusted-ca-file": self.tls.authority}
        flags = [f"--{key}={value}" for key, value in options.items()]
        if self.tls is not None:
            flags.append("--client-cert-auth")
        self.spawn([str(binary), *flags], "etcd.log")

    def start(self) -> Self:
        self.launch()
        wait_until(self.is_healthy, f"etcd {self.name}", _READY_S)
        return self

    def is_healthy(self) -> bool:
        try:
            self.ask("kv/range", {"key": text("health"), "limit": 1})
        except urllib.error.HTTPError as refused:
            return b"user name is empty" in refused.read()  # The error asks for a user, so there is a leader.
        except OSError:
            return False
        return True

    def ask(self, path: str, request: dict[str, Any], token: str = "") -> dict[str, Any]:
        """Return etcd's answer; raise HTTPError for a refusal."""
        headers = {"Content-Type": "application/json", **({"Authorization": token} if token else {})}
        asked = urllib.request.Request(f"{self.url}/v3/{path}", json.dumps(request).encode(), headers)
        context = None
        if self.tls is not None:
            context = ssl.create_default_context(cafile=str(self.tls.authority))
            context.load_cert_chain(self.tls.certificate, self.tls.key)
        with urllib.request.urlopen(asked, timeout=5, context=context) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def freeze(self) -> None:
        """Suspend it: connections stay open without answers."""
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def wiped(self) -> None:
        """Kill it and delete all its data."""
        self.kill()
        shutil.rmtree(self.data)

    def kept(self, copy: Path) -> None:
        """Stop it and copy its data as a backup."""
        self.stop()
        shutil.copytree(self.data, copy)

    def restored(self, copy: Path) -> None:
        """Kill it and restore its data from a backup."""
        self.wiped()
        shutil.copytree(copy, self.data)

    def add_users(self, root: str, user: str, password: str, prefix: str) -> None:
        """Enable authentication: root, and a user whose access is limited to the prefix."""
        self.ask("auth/user/add", {"name": "root", "password": root})
        self.ask("auth/role/add", {"name": "root"})
        self.ask("auth/user/grant", {"user": "root", "role": "root"})
        self.ask("auth/user/add", {"name": user, "password": password})
        self.ask("auth/role/add", {"name": "controller"})
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        permission = {"permType": "READWRITE", "key": text(prefix), "range_end": text(end)}
        self.ask("auth/role/grant", {"name": "controller", "perm": permission})
        self.ask("auth/user/grant", {"user": user, "role": "controller"})
        self.ask("auth/enable", {})


def node(directory: Path, tls: Certificates | None = None) -> Node:
    """Run a cluster of one node."""
    return Node(directory, "n0", ports(1)[0], tls)


def nodes(directory: Path, count: int = 3) -> list[Node]:
    """Return the nodes of a cluster of several, not started."""
    found = [Node(directory / f"n{index}", f"n{index}", pair) for index, pair in enumerate(ports(count))]
    for one in found:
        one.cluster = found
    return found


def ports(count: int) -> list[tuple[int, int]]:
    free = free_ports(2 * count)
    return list(zip(free[::2], free[1::2], strict=True))


def register_url(*members: Node, prefix: str = "neve") -> str:
    return f"etcd://{','.join(member.endpoint for member in members)}/{prefix}"


def text(value: str) -> str:
    """Return the text as the gateway encodes keys and values."""
    return b64encode(value.encode()).decode()


def certificates(directory: Path) -> Certificates:
    """Create one authority, and one pair for server and client of 127.0.0.1."""
    directory.mkdir(parents=True, exist_ok=True)
    names = Certificates(directory / "ca.pem", directory / "cert.pem", directory / "key.pem")
    new_key = "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    for command in (
        f"{new_key} -x509 -days 2 -subj /CN=authority -keyout ca.key -out {names.authority}",
        f"{new_key} -subj /CN=etcd -keyout {names.key} -out request.pem",
    ):
        _openssl(directory, command.split())
    extensions = "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n"
    (directory / "extensions").write_text(extensions)
    signing = (
        f"x509 -req -in request.pem -CA {names.authority} -CAkey ca.key -CAcreateserial -days 2 -extfile extensions"
    )
    _openssl(directory, [*signing.split(), "-out", str(names.certificate)])
    return names


def _openssl(directory: Path, arguments: list[str]) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, env=os.environ, capture_output=True, check=True)
