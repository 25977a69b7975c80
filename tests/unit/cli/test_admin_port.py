"""Tests that the command line finds the token of the admin port, or explains how to provide it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
from click.testing import CliRunner, Result

from infra.disk.filesystem import RealDisk
from infra.net.admin_http import AdminHttp, Request, Response, json_response
from infra.net.admin_token import AdminToken
from neve.admin_token import TOKEN_FILE
from neve.cli.failures import Failure
from neve.cli.main import neve
from neve.entropy import system_entropy


@pytest.fixture
def port(tmp_path: Path) -> Iterator[str]:
    """Run an admin port with data directory `tmp_path`, and yield its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    token = AdminToken(RealDisk(), tmp_path, system_entropy)
    token.renew()
    http = AdminHttp(token=token)

    async def confirm(request: Request) -> Response:
        return json_response({"event": "confirmed", "before": {"trusted": True}})

    http.route("POST", "/clock/confirm", confirm)
    host, number = asyncio.run_coroutine_threadsafe(http.start(), loop).result(10)
    yield f"{host}:{number}"
    asyncio.run_coroutine_threadsafe(http.shutdown(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def confirm_clock(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(neve, ["archive", "confirm-clock", *arguments], env=environment)


@pytest.mark.parametrize("form", ["{}", "http://{}", "http://{}/"])
def test_cli_reads_the_token_that_the_port_names(port: str, form: str) -> None:
    done = confirm_clock("--admin", form.format(port))
    assert (done.exit_code, done.exception) == (0, None), done.output
    assert "trusted already" in done.output


@pytest.mark.parametrize("text", ["https://127.0.0.1:1", "127.0.0.1", "http://127.0.0.1:1/x", ":1"])
def test_admin_address_that_is_not_host_and_port_is_a_usage_error(text: str) -> None:
    done = confirm_clock("--admin", text)
    assert done.exit_code == 2
    assert "is not HOST:PORT" in done.output


def test_token_file_may_be_given(port: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    (tmp_path / TOKEN_FILE).rename(copy)
    assert confirm_clock("--admin", port, "--admin-token", str(copy)).exit_code == 0
    assert confirm_clock("--admin", port, NEVE_ADMIN_TOKEN_FILE=str(copy)).exit_code == 0


def failure(*arguments: str) -> Failure:
    error = confirm_clock(*arguments).exception
    assert isinstance(error, Failure)
    assert error.exit_code == 4
    return error


class AdminRelay:
    """A process on the port of a stopped broker that relays requests to another broker and records them."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self.got: list[bytes] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                client, _ = self._listener.accept()
                with client, socket.create_connection(self._target) as broker:
                    self.got.append(client.recv(1 << 16))
                    broker.sendall(self.got[-1])
                    while answer := broker.recv(1 << 16):
                        client.sendall(answer)


def test_process_on_another_port_gets_no_token_and_no_authority(port: str, tmp_path: Path) -> None:
    token = (tmp_path / TOKEN_FILE).read_bytes().strip()
    with AdminRelay(port) as relay:
        text = str(failure("--admin", relay.address))
    assert "is not signed with the token of" in text
    assert len(relay.got) == 2
    assert b"Authorization: Neve " in relay.got[1]
    assert token not in b"".join(relay.got)


def test_unreadable_token_is_explained(port: str, tmp_path: Path) -> None:
    (tmp_path / TOKEN_FILE).unlink()
    text = str(failure("--admin", port))
    assert f"{tmp_path / TOKEN_FILE} cannot be read: No such file or directory" in text
    assert "--admin-token" in text


def test_token_of_another_broker_is_refused(port: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("0" * 64)
    assert "the token sent is not that of" in str(failure("--admin", port, "--admin-token", str(other)))


def test_file_without_a_token_is_not_sent(port: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("secret")
    assert "holds no admin token" in str(failure("--admin", port, "--admin-token", str(other)))


def test_cli_reads_only_token_files_named_by_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.net.admin_token.TOKEN_FILE", "id_rsa")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    token = AdminToken(RealDisk(), tmp_path, system_entropy)
    token.renew()
    http = AdminHttp(token=token)

    async def page(request: Request) -> Response:
        raise AssertionError("reached")

    http.route("POST", "/clock/confirm", page)
    host, number = asyncio.run_coroutine_threadsafe(http.start(), loop).result(10)
    try:
        assert "names no file adminToken" in str(failure("--admin", f"{host}:{number}"))
    finally:
        asyncio.run_coroutine_threadsafe(http.shutdown(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
