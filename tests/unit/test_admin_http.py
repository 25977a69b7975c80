"""Tests of the admin port: it answers only local tools, and runs expensive requests one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from broker.stats import admin_pages
from infra.disk.filesystem import DiskFull, RealDisk
from infra.net import admin_http
from infra.net.admin_http import AdminHttp, Request, Response
from infra.net.admin_token import AdminToken
from lifecycle.lifecycle import ArchiveLifecycle
from neve.admin_token import signature
from neve.entropy import system_entropy
from tests.kit.broker.in_process import running
from tests.kit.clock.waiting import until
from tests.kit.store.sim_disk import SimDisk

_ROOT = Path("/data")


class Page:
    """A page that answers after `go` and counts its concurrent requests."""

    def __init__(self) -> None:
        self.inside, self.done = 0, 0
        self.go = asyncio.Event()

    async def __call__(self, request: Request) -> Response:
        self.inside += 1
        await self.go.wait()
        self.done += 1
        return Response(body=b"done")

    async def stream(self, request: Request) -> Response:
        async def lines() -> AsyncGenerator[object, None]:
            self.inside += 1
            yield {"event": "begun"}
            await self.go.wait()

        return Response(lines=lines())


def new_token(disk: SimDisk) -> AdminToken:
    disk.make_dirs(_ROOT)
    token = AdminToken(disk, _ROOT, system_entropy)
    token.renew()
    return token


def authorization(disk: SimDisk) -> str:
    return f"Authorization: Bearer {disk.read(_ROOT / 'adminToken').decode().strip()}"


@asynccontextmanager
async def serving(page: Page, disk: SimDisk | None = None) -> AsyncIterator[int]:
    http = AdminHttp(token=new_token(disk or SimDisk()))
    http.route("GET", "/cheap", page)
    http.route("POST", "/dear", page, at_once=1)
    http.route("POST", "/stream", page.stream, at_once=1)
    _, port = await http.start()
    try:
        async with asyncio.timeout(60):
            yield port
    finally:
        await http.shutdown()


async def ask(port: int, first: str, *headers: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("\r\n".join([f"{first} HTTP/1.1", *headers, "", ""]).encode())
    try:
        answer = await reader.read()
    except ConnectionError:
        answer = b""
    writer.close()
    if not answer:
        return 0, b""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize("method", ["GET /cheap", "POST /dear"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["Host: 127.0.0.1:10913"], 200),
        (["Host: localhost:8080"], 200),
        (["Host: [::1]:10913"], 200),
        (["Host: 127.0.0.1", "Sec-Fetch-Site: none"], 200),
        (["Host: evil.example:10913"], 403),
        (["Host: 127.0.0.1.evil.example"], 403),
        (["Host: 10.0.0.1:10913"], 403),
        (["Host: [::1"], 403),
        ([], 403),
        (["Host: 127.0.0.1", "Origin: http://evil.example"], 403),
        (["Host: 127.0.0.1", "Origin: null"], 403),
        (["Host: 127.0.0.1", "Sec-Fetch-Site: cross-site"], 403),
        (["Host: 127.0.0.1", "Sec-Fetch-Site: same-site"], 403),
    ],
)
async def test_only_local_non_browser_requests_are_answered(method: str, headers: list[str], status: int) -> None:
    page, disk = Page(), SimDisk()
    page.go.set()
    async with serving(page, disk) as port:
        found, _ = await ask(port, method, *headers, authorization(disk))
        assert (found, page.done) == (status, int(status == 200))


@pytest.mark.parametrize("path", ["/dear", "/stream"])
async def test_expensive_requests_run_one_at_a_time(path: str) -> None:
    page, disk = Page(), SimDisk()
    async with serving(page, disk) as port:
        token = authorization(disk)
        first = asyncio.create_task(ask(port, f"POST {path}", "Host: localhost", token))
        await until(lambda: page.inside == 1)
        status, text = await ask(port, f"POST {path}", "Host: localhost", token)
        assert (status, b"at a time" in text) == (409, True)
        assert (await ask(port, f"GET {path}", "Host: localhost"))[0] == 404
        page.go.set()
        assert (await first)[0] == 200
        assert (await ask(port, f"POST {path}", "Host: localhost", token))[0] == 200
        assert page.inside == 2


async def test_connections_are_bounded() -> None:
    page = Page()
    async with serving(page) as port:
        waiting = [asyncio.create_task(ask(port, "GET /cheap", "Host: localhost")) for _ in range(64)]
        await until(lambda: page.inside == 64)
        assert (await ask(port, "GET /cheap", "Host: localhost"))[0] == 0, "hung up"
        page.go.set()
        assert {status for status, _ in await asyncio.gather(*waiting)} == {200}


async def test_slow_verify_does_not_block_other_threads(tmp_path: Path) -> None:
    async with running(tmp_path / "data", f"storeUrl=dir:{tmp_path / 'archive'}") as (broker, _):
        assert broker.admin_address is not None
        lifecycle = broker.archive.lifecycle
        assert isinstance(lifecycle, ArchiveLifecycle)
        loop, begun, go = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        verify = lifecycle.verify

        def slow(deep: bool) -> object:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(go.wait(), loop).result(60)
            return verify(deep)

        lifecycle.verify = slow  # type: ignore[assignment, method-assign]
        port = broker.admin_address[1]
        token = f"Authorization: Bearer {(tmp_path / 'data' / 'adminToken').read_text().strip()}"
        first = asyncio.create_task(ask(port, "POST /archive/verify?deep=1", "Host: localhost", token))
        await begun.wait()
        asked = (ask(port, "POST /archive/verify", "Host: localhost", token) for _ in range(40))
        others = await asyncio.gather(*asked)
        assert {status for status, _ in others} == {409}
        assert (await ask(port, "GET /metrics", "Host: localhost"))[0] == 200
        assert (await ask(port, "GET /archive/verify", "Host: localhost"))[0] == 404
        broker.topics.file.touch()
        await broker.topics.file.save()
        go.set()
        assert (await first)[0] == 200


@pytest.mark.parametrize(
    "header", ["X-Nothing: 1", "Authorization: Bearer ", f"Authorization: Bearer {'0' * 64}", "Authorization: Basic {}"]
)
async def test_post_without_the_token_is_refused(header: str) -> None:
    page, disk = Page(), SimDisk()
    page.go.set()
    async with serving(page, disk) as port:
        token = authorization(disk).rpartition(" ")[2]
        status, text = await ask(port, "POST /dear", "Host: localhost", header.format(token))
        assert (status, page.done) == (401, 0)
        assert b"/data/adminToken" in text
        assert token.encode() not in text
        assert (await ask(port, "GET /cheap", "Host: localhost"))[0] == 200, "reads need no token"


def test_port_without_a_token_has_no_post_route() -> None:
    with pytest.raises(ValueError, match="needs a token"):
        AdminHttp().route("POST", "/dear", Page())


async def test_every_changing_request_of_a_broker_needs_the_token(tmp_path: Path) -> None:
    paths = ["archive/verify", "archive/offload", "archive/compact", "archive/erase", "archive/unexpire", "topic/trim"]
    paths += ["archive/sweep", "clock/confirm", "jobs/expire/run", "set/hand-over"]

    async with running(tmp_path / "data", f"storeUrl=dir:{tmp_path / 'archive'}") as (broker, _):
        assert broker.admin_address is not None
        port = broker.admin_address[1]
        found = {path: (await ask(port, f"POST /{path}", "Host: localhost"))[0] for path in paths}
        assert found == dict.fromkeys(paths, 401)
        for page in ("livez", "readyz", "metrics"):
            assert (await ask(port, f"GET /{page}", "Host: localhost"))[0] == 200


def test_token_is_private_and_renewed_at_each_start(tmp_path: Path) -> None:
    (tmp_path / ".adminToken.tmp").touch(0o644)
    found = []
    for _ in range(2):
        token = AdminToken(RealDisk(), tmp_path, system_entropy)
        token.renew()
        assert token.path.stat().st_mode & 0o777 == 0o600
        found.append(token.path.read_text().strip())
        assert token.accepts(f"Bearer {found[-1]}", 1, "POST", "/dear")
    assert len(set(found)) == 2


def test_token_of_the_last_start_stays_valid_on_a_full_disk() -> None:
    disk = SimDisk()
    new_token(disk)
    disk.capacity = 0
    token = AdminToken(disk, _ROOT, system_entropy)
    token.renew()
    assert token.accepts(authorization(disk).removeprefix("Authorization: "), 1, "POST", "/dear")
    disk.remove(token.path)
    with pytest.raises(DiskFull):
        token.renew()


def test_signature_holds_for_its_request_port_and_start_alone() -> None:
    disk = SimDisk()
    token = new_token(disk)
    text = disk.read(token.path).decode().strip()
    signed = f"Neve {signature(text, token.nonce, 10913, 'POST', '/archive/erase?topic=t')}"
    assert token.accepts(signed, 10913, "POST", "/archive/erase?topic=t")
    assert not token.accepts(signed, 10915, "POST", "/archive/erase?topic=t")
    assert not token.accepts(signed, 10913, "POST", "/archive/erase?topic=u")
    assert not token.accepts(signed, 10913, "PUT", "/archive/erase?topic=t")
    assert not token.accepts(f"Neve {text}", 10913, "POST", "/archive/erase?topic=t")
    disk.capacity = 0
    again = AdminToken(disk, _ROOT, system_entropy)
    again.renew()
    assert disk.read(again.path).decode().strip() == text
    assert not again.accepts(signed, 10913, "POST", "/archive/erase?topic=t"), "it was made for another start"


async def test_silent_connections_do_not_keep_other_clients_out() -> None:
    page = Page()
    page.go.set()
    async with serving(page) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(64)]
        for _, writer in silent:
            writer.write(b"GET /cheap HTTP/1.1\r\n")
        statuses = [(await ask(port, "GET /cheap", "Host: localhost"))[0] for _ in range(16)]
        assert statuses == [200] * 16
        assert await silent[0][0].read() == b"", "the oldest was closed"
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize("path", ["/stream", "/large"])
async def test_client_that_does_not_read_frees_its_route(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_http, "_WRITE_TIMEOUT_S", 0.2)
    ended = asyncio.Event()

    async def stream(request: Request) -> Response:
        async def lines() -> AsyncGenerator[object, None]:
            try:
                while True:
                    yield {"text": "x" * 100_000}
            finally:
                ended.set()

        return Response(lines=lines())

    async def large(request: Request) -> Response:
        ended.set()
        return Response(body=bytes(64 << 20))

    disk = SimDisk()
    http = AdminHttp(token=new_token(disk))
    http.route("POST", path, stream if path == "/stream" else large, at_once=1)
    _, port = await http.start()
    async with asyncio.timeout(60):
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{authorization(disk)}\r\n\r\n".encode()
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(head)
        await ended.wait()
        await until(lambda: not http._connections)
        assert http._routes["POST", path].running == 0
        writer.close()
    await http.shutdown()


async def test_progress_for_a_slow_client_is_bounded_and_ends_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_pages, "_MAX_LINES", 10)

    def work(*, progress: Callable[[Mapping[str, object]], None]) -> None:
        for number in range(1000):
            progress({"number": number})

    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def in_thread(work: Callable[[], None]) -> asyncio.Future[None]:
        future = loop.run_in_executor(None, work)
        future.add_done_callback(lambda _: done.set())
        return future

    lines = admin_pages.progress_lines(in_thread, work)
    await anext(lines)
    await done.wait()
    rest = [item async for item in lines]
    assert len(rest) <= 10
    assert rest[-1] == {"number": 999}
