"""`neve user` and `neve acl`: users and policies on all servers of a cluster, of neve and of Apache RocketMQ."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from neve.cli import main
from tests.kit.server.apache import ApacheServer
from tests.kit.server.neve import NeveServer

NOT_FOUND, AUTH, CONFLICT = 3, 4, 5
_ROOT = '{"username":"root","password":"root-secret"}'
_PROVIDER = "org.apache.rocketmq.auth.{0}.provider.{1}{2}Provider"
_ON = {"authenticationEnabled": "true", "authorizationEnabled": "true", "initAuthenticationUser": _ROOT}
_INNER = '{"accessKey":"root","secretKey":"root-secret"}'


class UserCommands:
    """Runs commands as root, unless another user signs."""

    def __init__(self, namesrv: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capfd, self._patch = capfd, monkeypatch
        self.said = ""
        monkeypatch.setenv("NAMESRV_ADDR", namesrv)

    def __call__(
        self, *arguments: str, code: int = 0, stdin: str = "", signed: tuple[str, str] = ("root", "root-secret")
    ) -> str:
        self._patch.setenv("NEVE_ACCESS_KEY", signed[0])
        self._patch.setenv("NEVE_SECRET_KEY", signed[1])
        self._patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        ended = main.run(arguments)
        out, self.said = self._capfd.readouterr()
        assert ended == code, (arguments, out, self.said)
        return out

    def rows(self, *arguments: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self(*arguments, "-o", "json"))
        return found


@pytest.fixture(params=["neve", pytest.param("apache", marks=pytest.mark.servers)])
def shell(
    request: pytest.FixtureRequest, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[UserCommands]:
    with ExitStack() as stack:
        if request.param == "neve":
            yield UserCommands(stack.enter_context(NeveServer(tmp_path, settings=_ON)).namesrv, capfd, monkeypatch)
            return
        providers = {
            "authenticationProvider": _PROVIDER.format("authentication", "Default", "Authentication"),
            "authenticationMetadataProvider": _PROVIDER.format("authentication", "Local", "AuthenticationMetadata"),
            "authorizationProvider": _PROVIDER.format("authorization", "Default", "Authorization"),
            "authorizationMetadataProvider": _PROVIDER.format("authorization", "Local", "AuthorizationMetadata"),
            "innerClientAuthenticationCredentials": _INNER,
        }
        apache = stack.enter_context(ApacheServer(tmp_path, heap="512m", settings={**_ON, **providers}, quick=True))
        yield UserCommands(apache.namesrv, capfd, monkeypatch)
        apache.kill()


def users(shell: UserCommands) -> list[str]:
    """Return the users, except the one with which neve's servers sign requests to each other."""
    return [row["user"] for row in shell.rows("user", "list") if row["user"] != "neve.inner"]


def test_users_and_policies_are_managed_on_all_servers(shell: UserCommands, tmp_path: Path) -> None:
    assert users(shell) == ["root"]
    shell("user", "create", "alice", "--password-file", "-", stdin="alice-secret\n")
    shell("user", "create", "alice", "--password-file", "-", stdin="other\n", code=CONFLICT)
    shell("user", "create", "nobody", stdin="", code=2)  # There is no terminal to ask for the password.
    alice = ("alice", "alice-secret")
    shell("topic", "create", "orders", "--queues", "2")
    shell("topic", "create", "bills", "--queues", "2")
    shell("produce", "orders", "denied", signed=alice, code=AUTH)

    shell("acl", "create", "alice", "topic:orders", "group:b*", "-a", "pub,sub,get")
    shell("acl", "create", "bob", "topic:orders", "-a", "pub", code=NOT_FOUND)
    shell("acl", "create", "alice", "queue:orders", "-a", "pub", code=2)
    rules = {row["resource"]: (row["actions"], row["decision"]) for row in shell.rows("acl", "list", "alice")}
    assert rules == {"Topic:orders": ("Pub,Sub,Get", "allow"), "Group:b*": ("Pub,Sub,Get", "allow")}
    assert [row["resource"] for row in shell.rows("acl", "list", "--resource", "topic:*")] == ["Topic:orders"]
    shell("produce", "orders", "hello", signed=alice)
    shell("produce", "bills", "denied", signed=alice, code=AUTH)
    assert shell("consume", "orders", "--group", "billing", "--count", "1", signed=alice) == "hello\n"

    shell("acl", "create", "alice", "topic:orders", "-a", "pub", "--deny")
    shell("produce", "orders", "denied", signed=alice, code=AUTH)
    shell("acl", "delete", "alice", "topic:orders", "--yes")
    shell("acl", "delete", "alice", "topic:orders", "--yes", code=NOT_FOUND)
    assert [row["resource"] for row in shell.rows("acl", "list")] == ["Group:b*"]

    secret = tmp_path / "secret"
    secret.write_text("new-secret\n")
    shell("user", "set", "alice", "--password-file", str(secret), "--super")
    (row,) = [row for row in shell.rows("user", "list") if row["user"] == "alice"]
    assert (row["type"], row["status"], row["missing_at"]) == ("super", "enabled", [])
    shell("produce", "bills", "now", signed=("alice", "new-secret"))
    shell("produce", "bills", "old", signed=alice, code=AUTH)
    shell("user", "set", "alice", "--disable")
    shell("produce", "bills", "no more", signed=("alice", "new-secret"), code=AUTH)
    shell("user", "set", "bob", "--disable", code=NOT_FOUND)
    shell("user", "delete", "alice", "--yes")
    assert users(shell) == ["root"]
    assert shell.rows("acl", "list") == []
    shell("user", "delete", "alice", "--yes", code=NOT_FOUND)


def test_cluster_without_authentication_is_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with NeveServer(tmp_path) as neve:
        shell = UserCommands(neve.namesrv, capfd, monkeypatch)
        shell("user", "list", code=1)
        assert "set authenticationEnabled=true on each" in shell.said
