"""The admin port: metrics, health and the archive's verbs, on loopback."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from broker.stats.conditions import Condition, conditions, store_away
from broker.stats.topic_metrics import Largest, archive_ages, families, take_figures
from infra.admin_http import AdminHttp, Request, Response, json_response
from infra.loop_pause import LoopPause
from infra.metrics import render
from infra.supervisor import Trouble
from lifecycle.lifecycle import ArchiveLifecycle
from neve.archive.journal import decode_entry
from neve.archive.keys import journal_key

if TYPE_CHECKING:
    from broker.broker_controller import BrokerController

R = TypeVar("R")

_PAGE = 10_000
# What runs in threads has its own: it may wait for the store, and tables are written by asyncio's.
_THREADS = 8
_CHEAP = 2
# Of the archive's status: what is told, in which unit, and its meaning.
_BACKLOG: tuple[tuple[str, str, float, str], ...] = (
    ("backlog_bytes", "backlog_bytes", 1, "bytes of the log that are not archived yet"),
    ("backlog_age_seconds", "backlog_age_ms", 1e-3, "age of the oldest message that is not archived yet"),
    ("upload_bytes_per_second", "upload_bytes_per_second", 1, "limit in force for uploads, 0 for none"),
    ("upload_waited_seconds_total", "upload_waited_ms", 1e-3, "how long a limit has held uploads back"),
    ("rows_total", "rows", 1, "rows written into objects"),
    (
        "rows_with_wire_total",
        "rows_with_wire",
        1,
        "archived rows that are kept whole, too: their columns do not rebuild them",
    ),
    ("rows_damaged_total", "rows_damaged", 1, "archived rows whose record is damaged: CRC or framing do not hold"),
    ("objects", "objects", 1, "objects that readers see"),
    ("gaps", "gaps", 1, "ranges recorded as lost"),
    ("open_names", "open_names", 1, "objects that a round named and has not published"),
    ("topics_set_aside", "topics_set_aside", 1, "topics whose messages can't be archived or expired as they are"),
)


class _Pages:
    def __init__(self, controller: BrokerController) -> None:
        self._controller = controller
        self._pool = ThreadPoolExecutor(_THREADS, "admin")
        self._archive = controller.archive
        self._backlog: dict[str, Any] = {}
        pause = LoopPause()
        pause.start()
        counter, gauge = controller.metrics.counter, controller.metrics.gauge
        gauge("loop_pause_seconds", "longest pause of the event loop since the last scrape", pause.take)
        if self._archive.journal is not None:
            for name, item, unit, text in _BACKLOG:
                kind = counter if name.endswith("_total") else gauge
                kind(f"archive_{name}", text, functools.partial(self._backlog_of, item, unit))

    def _in_thread(self, work: Callable[..., R], *arguments: Any) -> asyncio.Future[R]:
        return asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(work, *arguments))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _backlog_of(self, item: str, unit: float) -> float:
        return float(self._backlog.get(item, 0)) * unit

    async def metrics(self, request: Request) -> Response:
        limit = self._controller.config.metrics_max_series
        ages = await self._in_thread(self._look_at_backlog, limit)
        figures = await take_figures(self._controller.context, ages, limit)
        whole = list(self._controller.metrics.families())
        text = await self._in_thread(lambda: render([*whole, *families(figures)]))
        return Response(body=text, content_type="text/plain; version=0.0.4")

    def _look_at_backlog(self, limit: int) -> Largest[tuple[str, int]]:
        """The age of each topic's oldest message that is not archived. Asks the loop: in a thread."""
        lifecycle = self._archive.lifecycle
        if not isinstance(lifecycle, ArchiveLifecycle):
            return archive_ages({}, limit)
        backlog = lifecycle.backlog()
        ages = lifecycle.ages_ms(backlog)
        self._backlog = {**lifecycle.status(backlog), "backlog_age_ms": max(ages.values(), default=0)}
        return archive_ages(ages, limit)

    async def live(self, request: Request) -> Response:
        """503: only a new process helps. What may pass by itself is named below the first line."""
        troubles = self._controller.troubles()
        dead = self._controller.context.flusher.failed or any(each.kind != "failing" for each in troubles)
        return self._health("not live" if dead else "live", 503 if dead else 200, troubles)

    async def ready(self, request: Request) -> Response:
        """503 also where a task of the broker fails again and again; a store that is away is no reason."""
        troubles = self._controller.troubles()
        ready = self._controller.life.accepting and not troubles
        text = "ready" if ready else "not ready"
        return self._health(text, 200 if ready else 503, troubles, self._conditions())

    def _conditions(self) -> list[Condition]:
        return conditions(self._controller.context, self._archive)

    def _health(
        self, word: str, status: int, troubles: Sequence[Trouble], conditions: Sequence[Condition] = ()
    ) -> Response:
        lines = [word, *(f"task {name}: {kind} {text}" for name, kind, text in troubles)]
        lines += [f"{name}{_since(since)}: {why}; {means}" for name, since, why, means in conditions]
        lines += [f"job {name}: {failing.error}" for name, failing in sorted(self._archive.jobs.failing().items())]
        return Response(status, "".join(f"{line}\n" for line in lines).encode())

    async def status(self, request: Request) -> Response:
        status = await self._in_thread(self._archive.status)
        jobs = self._archive.jobs
        errors = {name: failing.error for name, failing in jobs.failing().items()}
        found = self._conditions()
        if any(one.name == "archive unreachable" for one in found):
            status["archive"] = "unreachable"
        told = [one._asdict() for one in found]
        return json_response({**status, "conditions": told, "jobs": dict(jobs.runs), "errors": errors})

    async def offload(self, request: Request) -> Response:
        lifecycle = self._archive.lifecycle
        if not isinstance(lifecycle, ArchiveLifecycle):
            return Response(409, b"no archive: set storeUrl\n")
        return Response(lines=self._offload_lines(roll=request.flag("roll"), evict=request.flag("evict")))

    async def _offload_lines(self, *, roll: bool, evict: bool) -> AsyncIterator[object]:
        """Progress as it comes, then a summary; an error is the last line."""
        lifecycle = self._archive.lifecycle
        assert isinstance(lifecycle, ArchiveLifecycle)
        loop = asyncio.get_running_loop()
        lines: asyncio.Queue[Any] = asyncio.Queue()

        def progress(item: Mapping[str, Any]) -> None:
            loop.call_soon_threadsafe(lines.put_nowait, dict(item))

        work = asyncio.ensure_future(self._in_thread(lifecycle.offload.run, roll, evict, progress))
        work.add_done_callback(lambda _: lines.put_nowait(None))
        while (item := await lines.get()) is not None:
            yield item
        reports = work.result()
        status = await self._in_thread(lifecycle.status)
        yield {
            "event": "done",
            "rounds": len(reports),
            "objects": sum(len(report.committed) for report in reports),
            "failed": sum(len(report.failed) for report in reports),
            "set_aside": lifecycle.set_aside(),
            # A round in the background may have taken it all a moment ago.
            "archived_objects": status["objects"],
            "backlog_bytes": status["backlog_bytes"],
            "last_round": status["last_round"],
        }

    async def ls(self, request: Request) -> Response:
        journal = self._archive.journal
        if journal is None:
            return Response(409, b"no archive: set storeUrl\n")
        rows = []
        for one in journal.catalog.objects(request.query.get("topic")):
            rows.append(
                {
                    "topic": one.topic,
                    "broker": journal.broker,
                    "day": one.day,
                    "rows": one.rows,
                    "size": one.size,
                    "wire_bytes": one.wire_bytes,
                    "from": one.min_time,
                    "to": one.max_time,
                    "key": one.key,
                }
            )
        return json_response(rows)

    async def journal(self, request: Request) -> Response:
        journal = self._archive.journal
        if journal is None:
            return Response(409, b"no archive: set storeUrl\n")
        text = request.query.get("from", "0")
        if not text.isdecimal():
            return Response(400, b"from is the number of an entry\n")
        first = int(text)

        def read() -> list[dict[str, Any]]:
            rows = []
            for seq in range(first, min(journal.catalog.next_seq, first + _PAGE)):
                entry = decode_entry(journal.store.get(journal_key(journal.prefix, journal.broker, seq)))
                fields = msgspec.to_builtins(entry, str_keys=True)
                rows.append(
                    {
                        "broker": journal.broker,
                        "seq": seq,
                        "type": type(entry).__name__.upper(),
                        "epoch": entry.epoch,
                        "time": entry.time_ms,
                        "what": fields,
                    }
                )
            return rows

        return json_response(await self._in_thread(read))

    async def verify(self, request: Request) -> Response:
        lifecycle = self._archive.lifecycle
        if not isinstance(lifecycle, ArchiveLifecycle):
            return Response(409, b"no archive: set storeUrl\n")
        report = await self._in_thread(lifecycle.verify, request.flag("deep"))
        return json_response({"objects": report.objects, "rows": report.rows, "findings": report.problems})

    async def unexpire(self, request: Request) -> Response:
        return json_response({"event": "unexpired", **await self._in_thread(self._archive.lifecycle.unexpire.run)})

    async def sweep(self, request: Request) -> Response:
        lifecycle = self._archive.lifecycle
        if not isinstance(lifecycle, ArchiveLifecycle):
            return Response(409, b"no archive: set storeUrl\n")
        found = await self._in_thread(lifecycle.sweep.run, request.flag("repair"))
        return json_response({"event": "swept", "orphans": found})

    async def confirm_clock(self, request: Request) -> Response:
        before = await self._in_thread(self._archive.safe_clock.confirm)
        return json_response({"event": "confirmed", "before": msgspec.to_builtins(before)})

    async def run_job(self, request: Request) -> Response:
        name = request.path.removeprefix("/jobs/").removesuffix("/run")
        try:
            self._archive.jobs.run_now(name)
        except KeyError:
            return Response(404, f"no job {name!r}: {', '.join(self._archive.jobs.names())}\n".encode())
        return json_response({"job": name, "started": True})


def register_pages(http: AdminHttp, controller: BrokerController) -> None:
    pages = _Pages(controller)
    http.on_shutdown(pages.close)
    http.route("GET", "/metrics", pages.metrics, at_once=_CHEAP)
    http.route("GET", "/livez", pages.live)
    http.route("GET", "/readyz", pages.ready)
    http.route("GET", "/archive/status", pages.status, at_once=_CHEAP)
    http.route("GET", "/archive/ls", pages.ls)
    http.route("GET", "/archive/journal", pages.journal, at_once=1)
    http.route("POST", "/archive/verify", pages.verify, at_once=1)
    http.route("POST", "/archive/offload", pages.offload, at_once=1)
    http.route("POST", "/archive/unexpire", pages.unexpire, at_once=1)
    http.route("POST", "/archive/sweep", pages.sweep, at_once=1)
    http.route("POST", "/clock/confirm", pages.confirm_clock)
    http.route("POST", "/jobs/", pages.run_job)
    _register_metrics(controller)
    _register_clock_metrics(controller)
    _register_archive_metrics(controller)
    _register_connections(controller)


def _register_metrics(controller: BrokerController) -> None:
    counter, gauge = controller.metrics.counter, controller.metrics.gauge
    context = controller.context
    counter("messages_in_total", "messages stored", controller.totals.put)
    counter("messages_out_total", "messages read", controller.totals.got)
    counter("bytes_in_total", "bytes stored", lambda: controller.intake.bytes)
    counter("bytes_out_total", "bytes read", lambda: context.stats.bytes_out)
    counter("pop_revives_total", "popped messages that came back", lambda: controller.revive.revived)
    gauge("pop_revives_waiting", "messages to come back that wait to be read", lambda: controller.revive.waiting)
    gauge("unfinished_bytes", "held by unfinished frames of all connections", controller.unfinished_bytes)
    gauge("in_work_bytes", "bodies of requests in work, of all connections", controller.in_work_bytes)
    gauge("client_bytes", "what heartbeats say, of all connections", lambda: context.clients.bytes)
    gauge("queue_locks", "queues that ordered consumers hold locked", lambda: context.locks.count)
    gauge("held_pulls", "pulls that wait for a message", lambda: context.hold.count)
    gauge(
        "flush_lag_bytes",
        "appended, not yet flushed",
        lambda: context.store.max_physical_offset - context.store.flushed_offset,
    )
    counter("flush_rounds_total", "group commits", lambda: context.flusher.rounds)
    counter(
        "index_skipped_keys_total",
        "keys not indexed, for want of room",
        lambda: context.store.skipped_keys,
    )
    gauge(
        "disk_used_ratio",
        "used share of the data disk, as `df` counts it: used / (used + available)",
        controller.totals.disk_ratio,
    )
    gauge("topics", "topics of this broker", lambda: len(context.topics.topics))
    gauge("consumer_groups_online", "groups with a member", lambda: len(context.clients.consumers))
    gauge("name_servers", "name servers that know this broker", lambda: len(controller.name_servers.registered))
    context.tiered.register_metrics(controller.metrics)
    reader = controller.archive.reader
    if reader is not None:
        gauge("cold_queue", "row groups in line to be fetched", lambda: reader.waiting)
        counter("cold_filters_total", "objects whose filters or bounds a query asked", lambda: reader.counts.filters)
        counter("cold_fetches_total", "row groups fetched", lambda: reader.counts.fetches)
        counter(
            "cold_fetched_bytes_total",
            "bytes of row groups and footers that the store sent",
            lambda: reader.counts.fetched_bytes,
        )
        counter("cold_fetch_failures_total", "fetches of row groups that failed", lambda: reader.counts.failures)
        counter(
            "cold_disk_hits_total",
            "fetches of row groups that the disk cache answered",
            lambda: reader.counts.disk_hits,
        )
        counter("cold_memory_hits_total", "cold reads whose row group was in memory", lambda: reader.counts.memory_hits)
        gauge("cold_memory_bytes", "decoded row groups in memory", lambda: reader.cached_bytes)
    jobs = controller.archive.jobs
    counter("task_failures_total", "failed runs of the broker's own tasks", controller.task_failures)
    gauge("tasks_in_trouble", "tasks that fail again and again, hang or have ended", lambda: len(controller.troubles()))
    counter("items_set_aside_total", "messages, answers and waiting pulls that failed alone", controller.faults.total)
    counter("job_failures_total", "failed runs of jobs", lambda: sum(jobs.failures.values()))


def _register_archive_metrics(controller: BrokerController) -> None:
    gauge, context = controller.metrics.gauge, controller.context
    journal = controller.archive.journal
    if journal is not None:
        gauge("archive_epoch", "epoch of this broker's archive", lambda: journal.epoch)
        gauge("archive_fenced", "1: another process took the archive over", lambda: int(journal.fenced))
        gauge(
            "archive_online",
            "1: the store answers",
            lambda: int(journal.online and store_away(context, controller.archive) is None),
        )


def _register_clock_metrics(controller: BrokerController) -> None:
    counter, gauge, clock = controller.metrics.counter, controller.metrics.gauge, controller.archive.safe_clock
    gauge("clock_trusted", "0: what expires does not go by the wall clock", lambda: int(clock.state().trusted))
    gauge(
        "clock_behind_seconds",
        "how far the time that expiries go by is behind the wall clock while that is not trusted",
        lambda: clock.state().behind_ms / 1000,
    )
    counter("clock_jumps_total", "times that the wall clock was set by more than five minutes", lambda: clock.jumps)


def _register_connections(controller: BrokerController) -> None:
    counter, gauge = controller.metrics.counter, controller.metrics.gauge
    server, admission = controller.server, controller.server.admission
    gauge("connections", "connections of clients", lambda: len(server.connections))
    gauge("connections_max", "connections that there may be: maxConnections and the open files", lambda: admission.most)
    counter("connections_refused_total", "connections closed because there were too many", lambda: admission.refused)


def _since(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime(" since %Y-%m-%d %H:%M:%S UTC") if time_ms else ""
