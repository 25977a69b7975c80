"""The page `/metrics` of a server: collected on its event loop, rendered on a thread."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from prometheus_client.core import Metric

from infra.loop.pace import Pace
from infra.net.admin_http import Request, Response
from infra.observe.metrics import render

CONTENT_TYPE = "text/plain; version=0.0.4"


class MetricsPage:
    """A page of `AdminHttp`."""

    def __init__(self, take: Callable[[], Awaitable[Iterable[Metric]]], pace: Callable[[], Pace]) -> None:
        """`take` collects the metrics on the event loop; `pace` makes the pace of a scrape for its thread."""
        self._take, self._pace = take, pace
        self._pool = ThreadPoolExecutor(1, "metrics")

    async def show(self, request: Request) -> Response:
        families = await self._take()
        text = await asyncio.get_running_loop().run_in_executor(self._pool, self._rendered, families)
        return Response(body=text, content_type=CONTENT_TYPE)

    def _rendered(self, families: Iterable[Metric]) -> bytes:
        return render(families, pause=self._pace().pause)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
