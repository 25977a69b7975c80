"""The admin port answers tools of this machine, not web pages, and runs what is dear one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from infra.admin_http import AdminHttp, Request, Response
from lifecycle.lifecycle import ArchiveLifecycle
from tests.broker_in_process import running
from tests.waiting import until


class Page:
    """Answers when it may, and counts who is in it."""

    def __init__(self) -> None:
        self.inside, self.done = 0, 0
        self.go = asyncio.Event()

    async def __call__(self, request: Request) -> Response:
        self.inside += 1
        await self.go.wait()
        self.done += 1
        return Response(body=b"done")

    async def stream(self, request: Request) -> Response:
        async def lines() -> AsyncIterator[object]:
            self.inside += 1
            yield {"event": "begun"}
            await self.go.wait()

        return Response(lines=lines())


@asynccontextmanager
async def serving(page: Page) -> AsyncIterator[int]:
    http = AdminHttp()
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
def test_only_a_tool_of_this_machine_is_answered(method: str, headers: list[str], status: int) -> None:
    async def main() -> None:
        page = Page()
        page.go.set()
        async with serving(page) as port:
            found, _ = await ask(port, method, *headers)
            assert (found, page.done) == (status, int(status == 200))

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/dear", "/stream"])
def test_what_is_dear_runs_one_at_a_time(path: str) -> None:
    async def main() -> None:
        page = Page()
        async with serving(page) as port:
            first = asyncio.create_task(ask(port, f"POST {path}", "Host: localhost"))
            await until(lambda: page.inside == 1)
            status, text = await ask(port, f"POST {path}", "Host: localhost")
            assert (status, b"at a time" in text) == (409, True)
            assert (await ask(port, f"GET {path}", "Host: localhost"))[0] == 404
            page.go.set()
            assert (await first)[0] == 200
            assert (await ask(port, f"POST {path}", "Host: localhost"))[0] == 200
            assert page.inside == 2

    asyncio.run(main())


def test_connections_are_bounded() -> None:
    async def main() -> None:
        page = Page()
        async with serving(page) as port:
            waiting = [asyncio.create_task(ask(port, "GET /cheap", "Host: localhost")) for _ in range(64)]
            await until(lambda: page.inside == 64)
            assert (await ask(port, "GET /cheap", "Host: localhost"))[0] == 0, "hung up"
            page.go.set()
            assert {status for status, _ in await asyncio.gather(*waiting)} == {200}

    asyncio.run(main())


def test_a_slow_verify_holds_up_no_other_thread_of_the_broker(tmp_path: Path) -> None:
    async def main() -> None:
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
            first = asyncio.create_task(ask(port, "POST /archive/verify?deep=1", "Host: localhost"))
            await begun.wait()
            others = await asyncio.gather(*(ask(port, "POST /archive/verify", "Host: localhost") for _ in range(40)))
            assert {status for status, _ in others} == {409}
            assert (await ask(port, "GET /metrics", "Host: localhost"))[0] == 200
            assert (await ask(port, "GET /archive/verify", "Host: localhost"))[0] == 404
            broker.topics.file.touch()
            await broker.topics.file.save()
            go.set()
            assert (await first)[0] == 200

    asyncio.run(main())
