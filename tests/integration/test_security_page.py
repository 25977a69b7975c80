"""docs/deploy/security.md: its commands secure a name server and a broker, and rotate their secrets, as printed."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from access.config import SecurityConfig
from infra.config.properties import wire_name
from tests.kit.docs.page import Page, replaced, shell
from tests.kit.server.neve import Serving
from tests.kit.server.processes import free_ports

pytestmark = pytest.mark.servers
PAGE = Page("deploy/security.md")
STAND_INS = {"chown": "exit 0", "sudo": 'shift 2; exec "$@"'}
PASSWORDS = {"alice": "alice-secret", "alice2": "second-secret", "inner2": "another-inner-secret"}
REFUSED = 4


class SecuredCluster:
    """A name server and a broker with the page's settings, below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        names, broker, admin = free_ports(3)
        self.words = {
            "10.0.0.1:9876": f"127.0.0.1:{names}",
            "10.0.0.5": "127.0.0.1",
            "127.0.0.1:10913": f"127.0.0.1:{admin}",
            "/etc/neve": str(root / "etc"),
            "/var/lib/neve": str(root / "data"),
            "./adminToken": str(root / "adminToken"),
        }
        (root / "etc").mkdir()
        tools = root / "tools"
        tools.mkdir()
        for name, body in STAND_INS.items():
            (tools / name).write_text(f"#!/bin/bash\n{body}\n")
            (tools / name).chmod(0o755)
        for name, password in PASSWORDS.items():
            (root / f"{name}.password").write_text(f"{password}\n")
        self.admin = {**self.exported(0), "NEVE_ADMIN": f"127.0.0.1:{admin}"}
        self.files = {
            "namesrv": f"listenPort={names}\nkvConfigPath={root}/names/kv.json\n",
            "broker": f"listenPort={broker}\nadminPort={admin}\nbrokerIP1=127.0.0.1\nstorePathRootDir={root}/data\n"
            f"namesrvAddr=127.0.0.1:{names}\nstoreUrl=dir:{root}/bucket\nmappedFileSizeCommitLog=64m\n",
        }
        self.settings: str = replaced(PAGE.blocks("Enable TLS and users")[0], self.words)
        self.servers: list[Serving] = []

    def exported(self, number: int) -> dict[str, str]:
        """Return the variables of an `export` line of the page."""
        lines = [one for one in PAGE.commands("Create users and policies") if one.startswith("export ")]
        return dict(word.split("=", 1) for word in shlex.split(replaced(lines[number], self.words))[1:])

    def run(self, command: str, env: dict[str, str], code: int = 0) -> list[str]:
        text = f"set -e\n{replaced(command, self.words)}"
        return shell(text, self.root, env, tools=[self.root / "tools"], code=code)

    def start(self) -> None:
        for server, text in self.files.items():
            path = self.root / "etc" / f"{server}.conf"
            path.write_text(text + self.settings)
            path.chmod(0o600)
            self.servers.append(Serving(self.root / server, server, "-c", str(path)).start())

    def stop(self) -> None:
        while self.servers:
            assert self.servers.pop().stop() == 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    """Follow the page up to the verification of the new user."""
    found = SecuredCluster(tmp_path_factory.mktemp("cluster"))
    (certificate,) = PAGE.blocks("Create a certificate")
    found.run(certificate, {})
    found.start()
    try:
        create, _ = PAGE.blocks("Create users and policies")
        found.run(create, found.admin)
        yield found
    finally:
        found.stop()


def user(cluster: SecuredCluster, name: str) -> dict[str, str]:
    return {**cluster.exported(1), "NEVE_ACCESS_KEY": name, "NEVE_SECRET_KEY": PASSWORDS[name]}


def test_new_user_may_do_what_the_policy_permits(cluster: SecuredCluster) -> None:
    _, verify = PAGE.blocks("Create users and policies")
    assert "hello" in cluster.run(verify, {})
    assert cluster.exported(1) == user(cluster, "alice")
    cluster.run("neve topic create mine", user(cluster, "alice"), REFUSED)
    plain = {key: value for key, value in user(cluster, "alice").items() if key != "NEVE_TLS_CA"}
    cluster.run("neve produce orders hello", plain, code=6)


def test_doctor_checks_secrets_and_certificate(cluster: SecuredCluster) -> None:
    checks = "\n".join(cluster.run("neve doctor -c /etc/neve/broker.conf", cluster.admin))
    lines = {line.partition("  ")[0]: line for line in checks.splitlines()}
    assert " ok " in lines["secrets"]
    assert " ok " in lines["TLS certificate"]
    assert " ok " in lines["name server"]


def test_admin_port_needs_the_token(cluster: SecuredCluster) -> None:
    as_owner, with_copy, curl = PAGE.blocks("Admin token")
    cluster.run(as_owner, cluster.admin)
    token = cluster.root / "data" / "adminToken"
    copy = cluster.root / "adminToken"
    copy.write_text("another token")
    cluster.run(with_copy, cluster.admin, REFUSED)
    copy.write_bytes(token.read_bytes())
    cluster.run(with_copy, cluster.admin)
    cluster.run(curl, {})
    cluster.run(curl.replace("Bearer $", "Bearer no$"), {}, code=22)  # curl's code for a refused request.


def test_password_is_rotated_without_an_interruption(cluster: SecuredCluster) -> None:
    create, delete = PAGE.blocks("Rotate a password without an interruption")
    cluster.run(create, cluster.admin)
    for name in ("alice", "alice2"):
        cluster.run("neve produce orders hello", user(cluster, name))
    cluster.run(delete, cluster.admin)
    cluster.run("neve produce orders hello", user(cluster, "alice"), REFUSED)
    cluster.run("neve produce orders hello", user(cluster, "alice2"))


def test_inner_credentials_are_rotated(cluster: SecuredCluster) -> None:
    section = PAGE.section("Rotate the inner credentials")
    create, delete = (text for text in section.split("`") if text.startswith("neve user "))
    cluster.run(create, cluster.admin)
    former = json.dumps({"accessKey": "inner", "secretKey": "another-long-secret"}, separators=(",", ":"))
    assert former in cluster.settings
    new = json.dumps({"accessKey": "inner2", "secretKey": PASSWORDS["inner2"]})
    cluster.settings = cluster.settings.replace(former, new)
    cluster.stop()
    cluster.start()
    cluster.run(delete, cluster.admin)
    (row,) = json.loads("".join(cluster.run("neve broker list -o json", cluster.admin)))
    assert row["broker"] == "broker-a"
    users = json.loads("".join(cluster.run("neve user list -o json", cluster.admin)))
    assert sorted(one["user"] for one in users) == ["admin", "alice2", "inner2"]


def test_page_names_the_keys_of_the_code() -> None:
    (block, *_) = PAGE.blocks("Enable TLS and users")
    keys = {line.partition("=")[0] for line in block.splitlines()}
    assert keys == {wire_name(item.name) for item in dataclasses.fields(SecurityConfig)} - {"authConfigPath"}
