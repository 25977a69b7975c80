"""Users and policies over the wire: a change is in the broker's own log before its file."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from access.model import User
from access.store import AuthStore, AuthTables
from broker.broker_controller import BrokerController
from infra.disk.filesystem import RealDisk
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.signature import signed
from tests.kit.broker.in_process import running

ROOT = '{"username":"root","password":"root-secret"}'
SETTINGS = ("authenticationEnabled=true", "authorizationEnabled=true", f"initAuthenticationUser={ROOT}")
Work = Callable[[BrokerController, Connection], Awaitable[None]]


def with_broker(root: Path, work: Work) -> None:
    async def main() -> None:
        async with running(root, *SETTINGS) as (broker, connection):
            await work(broker, connection)

    asyncio.run(main())


async def as_root(connection: Connection, code: int, body: object = None, **ext: str) -> RemotingCommand:
    data = b"" if body is None else json.dumps(body).encode()
    fields = signed("root", "root-secret", ext, data)
    return await connection.invoke(RemotingCommand(code, ext=fields, body=data), 30)


async def users(connection: Connection) -> list[str]:
    answer = await as_root(connection, Code.AUTH_LIST_USER, filter="")
    return [user["username"] for user in json.loads(answer.body)]


def test_users_file_older_than_the_log_is_updated_at_the_next_start(tmp_path: Path) -> None:
    file, before = tmp_path / "config" / "auth" / "auth.json", bytearray()
    grant = {
        "policies": [
            {"policyType": "Custom", "entries": [{"resource": "Topic:t", "actions": ["Pub"], "decision": "Allow"}]}
        ]
    }

    async def change(broker: BrokerController, connection: Connection) -> None:
        assert (await as_root(connection, Code.AUTH_CREATE_USER, {"password": "s"}, username="gone")).code == 0
        before.extend(file.read_bytes())
        for code, body, ext in (
            (Code.AUTH_CREATE_USER, {"password": "s"}, {"username": "w"}),
            (Code.AUTH_CREATE_ACL, grant, {"subject": "User:w"}),
            (Code.AUTH_DELETE_USER, None, {"username": "gone"}),
        ):
            assert (await as_root(connection, code, body, **ext)).code == 0

    async def look(broker: BrokerController, connection: Connection) -> None:
        assert await users(connection) == ["root", "w"]
        found = await as_root(connection, Code.AUTH_GET_ACL, subject="User:w")
        assert json.loads(found.body)["policies"][0]["entries"][0]["resource"] == "Topic:t"

    with_broker(tmp_path, change)
    file.write_bytes(before)
    with_broker(tmp_path, look)
    assert stat.S_IMODE((tmp_path / "commitlog").stat().st_mode) == 0o700, "their secrets lie there, too"


def test_change_of_users_that_the_log_refuses_has_no_effect(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        broker.store.follow()
        answer = await as_root(connection, Code.AUTH_CREATE_USER, {"password": "s"}, username="w")
        assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert await users(connection) == ["root"]

    with_broker(tmp_path, work)


def test_users_file_shared_by_two_servers_is_used_unchanged(tmp_path: Path) -> None:
    """The other server's log has other positions, so this log's changes below them are not applied."""
    file = tmp_path / "config" / "auth" / "auth.json"

    async def change(broker: BrokerController, connection: Connection) -> None:
        assert (await as_root(connection, Code.AUTH_CREATE_USER, {"password": "s"}, username="w")).code == 0

    async def look(broker: BrokerController, connection: Connection) -> None:
        assert await users(connection) == ["root"]

    with_broker(tmp_path, change)
    table = json.loads(file.read_bytes())
    assert table["log"]["offset"] == 1
    del table["users"]["w"]
    file.write_text(json.dumps({**table, "log": {"uuid": "another's", "offset": 0}}))
    with_broker(tmp_path, look)


class _Refusing:
    """A log that refuses every record."""

    def record(self, before: AuthTables, after: AuthTables) -> None:
        raise BrokerError(ResponseCode.SERVICE_NOT_AVAILABLE, "the disk is full")

    async def settled(self) -> None:
        raise AssertionError("nothing was changed")


async def test_change_followed_during_a_write_is_not_overwritten(tmp_path: Path) -> None:
    """The writing thread must not replace the newer tables by its older ones."""

    store = AuthStore(tmp_path / "auth.json", RealDisk())
    store.open()
    write, inside = store._write, asyncio.Event()
    loop = asyncio.get_running_loop()
    go = asyncio.Event()

    def slowly(tables: AuthTables) -> None:
        loop.call_soon_threadsafe(inside.set)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result(30)
        write(tables)

    store._write = slowly  # type: ignore[method-assign]
    changing = asyncio.create_task(store.change(lambda tables: tables.users.update(a=User("1"))))
    await inside.wait()
    store._write = write  # type: ignore[method-assign]
    store.change_now(lambda tables: tables.users.update(b=User("2")))
    go.set()
    await changing
    assert store.tables.users == {"a": User("1"), "b": User("2")}
    await store.change(lambda tables: tables.users.update(c=User("3")))
    assert sorted(store.tables.users) == ["a", "b", "c"]


def test_store_whose_log_refuses_keeps_its_tables(tmp_path: Path) -> None:
    store = AuthStore(tmp_path / "auth.json", RealDisk(), _Refusing())
    store.open()
    with pytest.raises(BrokerError, match="the disk is full"):
        asyncio.run(store.change(lambda tables: tables.users.update(a=User("1"))))
    assert store.tables.users == {} and not (tmp_path / "auth.json").exists()
