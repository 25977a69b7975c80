"""Pages of the admin port on loopback: metrics, health, and commands for the archive."""

from __future__ import annotations

import asyncio
import functools
import itertools
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from prometheus_client.core import Metric

from broker.archiving.archive import AnyArchive
from broker.config import GRACE_MAX_MS, BrokerConfig
from broker.ha import member_status
from broker.ha.replicas_manager import ReplicasManager, SwitchoverNotDecided, SwitchoverRefused
from broker.life import BrokerLife
from broker.stats.conditions import Conditions
from broker.stats.health import Health
from broker.stats.topic_metrics import Figures, Largest, TopicMetrics, archive_ages, families
from infra.clock import Clock
from infra.config.properties import time_ms
from infra.loop.in_steps import in_slices
from infra.loop.pace import SCRAPE_SHARE, SHARE, Pace
from infra.loop.supervisor import Trouble
from infra.net.admin_http import AdminHttp, Request, Response, json_response
from infra.observe.conditions import Condition
from infra.observe.latest_result import LatestResult
from infra.observe.loop_lag import LoopLag
from infra.observe.metrics import Metrics, of_process, render
from lifecycle.erase import EraseRequest, is_erase_id
from lifecycle.lifecycle import ArchiveLifecycle
from lifecycle.trim import TrimRefused
from neve.archive.catalog.journal_reader import entries
from tiered.journal.named_topics import StalePlan
from tiered.write.offload import RoundReport
from tiered.write.offload_plan import TopicUnreadable
from tiered.write.progress import Progress

R = TypeVar("R")

_PAGE = 10_000
# Threads of their own: calls may block on the store, and asyncio's default threads write tables.
_THREADS = 8
_CHEAP = 2
_MAX_LINES = 1_000  # buffered progress lines for a slow client; older ones are dropped
_NO_ARCHIVE = Response(409, b"no archive: set storeUrl\n")
_IN_NO_SET = Response(409, b"this broker is in no set: replication=none\n")
# Metrics of the archive's status: name, key in the status, factor to the metric's unit, help text.
_BACKLOG: tuple[tuple[str, str, float, str], ...] = (
    ("backlog_bytes", "backlog_bytes", 1, "unarchived bytes of the log"),
    ("backlog_age_seconds", "backlog_age_ms", 1e-3, "age of the oldest unarchived message"),
    ("upload_bytes_per_second", "upload_bytes_per_second", 1, "current limit for uploads, 0: no limit"),
    ("upload_waited_seconds_total", "upload_waited_ms", 1e-3, "time that uploads waited for the limit"),
    (
        "worker_starved_seconds_total",
        "worker_starved_ms",
        1e-3,
        "time that rounds waited while their worker was ready but got no processor",
    ),
    ("rows_total", "rows", 1, "rows written into objects"),
    (
        "rows_with_wire_total",
        "rows_with_wire",
        1,
        "archived rows stored with the whole record, because their columns do not rebuild it",
    ),
    ("rows_damaged_total", "rows_damaged", 1, "archived rows whose record has an invalid CRC or framing"),
    ("objects", "objects", 1, "visible objects"),
    ("compactions_total", "compactions", 1, "objects written by compaction or erasure"),
    (
        "compactions_failed_total",
        "compactions_failed",
        1,
        "failed attempts to write an object by compaction or erasure",
    ),
    ("compacted_objects_total", "compacted_objects", 1, "objects replaced by compaction or erasure"),
    ("compacted_bytes_total", "compacted_bytes", 1, "bytes of objects replaced by compaction or erasure"),
    ("delta_commits_total", "delta_commits", 1, "commits to logs of Delta tables"),
    ("delta_entries_behind", "delta_entries_behind", 1, "journal entries that the Delta tables lack"),
    ("gaps", "gaps", 1, "offset ranges recorded as lost, without erased ones"),
    ("open_names", "open_names", 1, "objects named by a round and not yet published"),
    ("topics_set_aside", "topics_set_aside", 1, "quarantined topics: their messages can't be archived or expired"),
)


class AdminPages:
    """Handlers of a broker's admin pages, with an attached archive."""

    def __init__(
        self,
        config: BrokerConfig,
        life: BrokerLife,
        archive: AnyArchive,
        *,
        metrics: Metrics,
        topic_metrics: TopicMetrics,
        health: Health,
        conditions: Conditions,
        pace: Callable[[float], Pace],
        clock: Clock,
        replicas: ReplicasManager | None = None,
    ) -> None:
        """Create the handlers; `pace(share)` limits a thread's part of a scrape to a share of the interpreter."""
        self._replicas, self._pace = replicas, pace
        self._config, self._life, self._archive = config, life, archive
        self._metrics, self._topic_metrics, self._health, self._conditions = metrics, topic_metrics, health, conditions
        self._pool = ThreadPoolExecutor(_THREADS, "admin")
        self._backlog: dict[str, Any] = {}
        self._last_backlog = LatestResult("look-at-backlog", self._backlog_sampled, clock)
        pause = LoopLag()
        pause.start()
        metrics.gauge("loop_pause_seconds", "longest pause of the event loop since the last scrape", pause.take)
        if archive.journal is not None:
            for name, item, unit, text in _BACKLOG:
                kind = metrics.counter if name.endswith("_total") else metrics.gauge
                kind(f"archive_{name}", text, functools.partial(self._backlog_of, item, unit))

    def _in_thread(self, work: Callable[..., R], *arguments: Any) -> asyncio.Future[R]:
        return asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(work, *arguments))

    def close(self) -> None:
        self._last_backlog.close()
        self._topic_metrics.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _backlog_of(self, item: str, unit: float) -> float:
        return float(self._backlog.get(item, 0)) * unit

    async def metrics(self, request: Request) -> Response:
        figures = await self._topic_metrics.take(self._last_backlog.get())
        whole = [family async for family in in_slices(self._metrics.families())]
        text = await self._in_thread(lambda: self._rendered(whole, figures))
        return Response(body=text, content_type="text/plain; version=0.0.4")

    def _rendered(self, whole: Sequence[Metric], figures: Figures) -> bytes:
        return render(itertools.chain(whole, of_process()), families(figures), self._pace(SCRAPE_SHARE).pause)

    async def _backlog_sampled(self, is_first: bool) -> Largest[tuple[str, int]]:
        return await self._in_thread(self._sample_backlog, SCRAPE_SHARE if is_first else SHARE)

    def _sample_backlog(self, share: float) -> Largest[tuple[str, int]]:
        """Compute the age of each topic's oldest unarchived message.

        It calls the event loop and waits for it, so it must run in a thread.
        """
        lifecycle, limit = self._archive.lifecycle, self._config.metrics_max_series
        if not isinstance(lifecycle, ArchiveLifecycle):
            return archive_ages({}, limit)
        backlog = lifecycle.backlog(self._pace(share).pause)
        ages = lifecycle.ages_ms(backlog)
        self._backlog = {**lifecycle.status(backlog), "backlog_age_ms": max(ages.values(), default=0)}
        return archive_ages(ages, limit)

    async def live(self, request: Request) -> Response:
        """Return 503 if only a restart helps. Temporary troubles are listed after the first line."""
        dead, troubles = self._health.is_dead(), self._health.troubles()
        return self._health_page("not live" if dead else "live", 503 if dead else 200, troubles)

    async def ready(self, request: Request) -> Response:
        """Return 503 also if a task fails repeatedly. An unreachable store does not count."""
        troubles = self._health.troubles()
        ready = self._life.accepting and not troubles
        text = "ready" if ready else "not ready"
        return self._health_page(text, 200 if ready else 503, troubles, self._conditions.now())

    def _health_page(
        self, word: str, status: int, troubles: Sequence[Trouble], conditions: Sequence[Condition] = ()
    ) -> Response:
        lines = [word, *(f"task {name}: {kind} {text}" for name, kind, text in troubles)]
        lines += [one.line for one in conditions]
        lines += [f"job {name}: {failing.error}" for name, failing in sorted(self._archive.jobs.failing().items())]
        return Response(status, "".join(f"{line}\n" for line in lines).encode())

    async def status(self, request: Request) -> Response:
        status = await self._in_thread(self._archive.status)
        jobs = self._archive.jobs
        errors = {name: failing.error for name, failing in jobs.failing().items()}
        found = self._conditions.now()
        if any(one.name == "archive unreachable" for one in found):
            status["archive"] = "unreachable"
        described = [one._asdict() for one in found]
        return json_response({**status, "conditions": described, "jobs": dict(jobs.runs), "errors": errors})

    async def offload(self, request: Request) -> Response:
        """Run an offload, with progress lines; the last one is a summary or the error."""
        lifecycle = self._archive.lifecycle
        if not isinstance(lifecycle, ArchiveLifecycle):
            return _NO_ARCHIVE
        roll, evict = request.flag("roll"), request.flag("evict")

        def offload(progress: Progress) -> None:
            reports = lifecycle.offload.run(roll, evict, progress)
            progress(_summary(lifecycle, reports))

        return Response(lines=self._lines_of(offload))

    async def compact(self, request: Request) -> Response:
        """Run a compaction, with progress lines; the last one is a summary or the error."""
        lifecycle = self._archive.lifecycle
        if not isinstance(lifecycle, ArchiveLifecycle):
            return _NO_ARCHIVE
        topic, dry_run = request.query.get("topic"), request.flag("dry-run")
        return Response(lines=self._lines_of(functools.partial(lifecycle.compact.now, topic, dry_run=dry_run)))

    async def erase(self, request: Request) -> Response:
        """Erase a key, with progress lines; the last one is the certificate or the error. The key is not logged."""
        lifecycle = self._archive.lifecycle
        if not isinstance(lifecycle, ArchiveLifecycle):
            return _NO_ARCHIVE
        topic, key, grace = (request.query.get(name, "") for name in ("topic", "key", "grace"))
        if not topic or not key:
            return Response(400, b"a topic and a key\n")
        try:
            grace_ms = time_ms(grace, 0, GRACE_MAX_MS) if grace else 0
        except ValueError as error:
            return Response(400, f"grace: {error}\n".encode())
        wanted = EraseRequest(topic, key, retries=not request.flag("no-retries"), grace_ms=grace_ms)
        run, dry_run, evict = request.query.get("id", ""), request.flag("dry-run"), request.flag("evict")
        if run and not is_erase_id(run):
            return Response(400, b"id: not one of an erasure\n")
        work = functools.partial(lifecycle.erase.now, wanted, erase_id=run, dry_run=dry_run, evict=evict)
        return Response(lines=self._lines_of(work))

    def _lines_of(self, work: Callable[..., object]) -> AsyncGenerator[object, None]:
        return progress_lines(self._in_thread, work)

    async def ls(self, request: Request) -> Response:
        journal = self._archive.journal
        if journal is None:
            return _NO_ARCHIVE
        catalog, broker, topic = journal.catalog, journal.broker, request.query.get("topic")

        def read() -> list[dict[str, Any]]:
            return [
                {
                    "topic": one.topic,
                    "broker": broker,
                    "day": one.day,
                    "rows": one.rows,
                    "size": one.size,
                    "wire_bytes": one.wire_bytes,
                    "from": one.min_time,
                    "to": one.max_time,
                    "key": one.key,
                }
                for one in (catalog.each_object() if topic is None else catalog.topic(topic).names())
            ]

        return json_response(await self._in_thread(read))

    async def journal(self, request: Request) -> Response:
        journal = self._archive.journal
        if journal is None:
            return _NO_ARCHIVE
        text = request.query.get("from", "0")
        if not text.isdecimal():
            return Response(400, b"from is the number of an entry\n")
        first = int(text)

        def read() -> list[dict[str, Any]]:
            rows = []
            stored = entries(journal.store, journal.broker, journal.prefix, first)
            for seq, entry in itertools.islice(stored, _PAGE):
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
            return _NO_ARCHIVE
        report = await self._in_thread(lifecycle.verify, request.flag("deep"))
        return json_response({"objects": report.objects, "rows": report.rows, "findings": report.problems})

    async def unexpire(self, request: Request) -> Response:
        return json_response({"event": "unexpired", **await self._in_thread(self._archive.lifecycle.unexpire.run)})

    async def trim(self, request: Request) -> Response:
        """Raise the first offsets of a topic's queues; `offsets` is QUEUE:OFFSET, several separated by commas."""
        topic, pairs = request.query.get("topic", ""), _offsets_of(request.query.get("offsets", ""))
        if not topic or not pairs:
            return Response(400, b"a topic, and offsets as 0:100,1:200\n")
        if self._config.broker_role == "SLAVE":
            return Response(409, b"a slave: ask its master\n")
        try:
            done = await self._in_thread(self._archive.lifecycle.trim.run, topic, pairs)
        except (TrimRefused, StalePlan) as error:
            return Response(409, f"{error}\n".encode())
        except TopicUnreadable as error:
            return Response(500, f"not hidden in the local log, trim again: {error}\n".encode())
        return json_response({"event": "trimmed", **done._asdict()})

    async def sweep(self, request: Request) -> Response:
        lifecycle = self._archive.lifecycle
        if not isinstance(lifecycle, ArchiveLifecycle):
            return _NO_ARCHIVE
        found = await self._in_thread(lifecycle.sweep.run, request.flag("repair"))
        return json_response({"event": "swept", "orphans": found})

    async def confirm_clock(self, request: Request) -> Response:
        before = await self._in_thread(self._archive.safe_clock.confirm)
        return json_response({"event": "confirmed", "before": msgspec.to_builtins(before)})

    async def broker_set(self, request: Request) -> Response:
        """Return this member's view of its broker set."""
        if self._replicas is None:
            return _IN_NO_SET
        return json_response(member_status.status(self._replicas))

    async def hand_over(self, request: Request) -> Response:
        """Switch over to another member: `to`, or the most advanced one."""
        text = request.query.get("to", "")
        if text and not text.isdecimal():
            return Response(400, b"to is the number of a member\n")
        if self._replicas is None:
            return _IN_NO_SET
        try:
            target = await self._replicas.switch_over(int(text) if text else None)
        except SwitchoverRefused as error:
            return Response(504 if isinstance(error, SwitchoverNotDecided) else 409, f"{error}\n".encode())
        return json_response({"event": "handed over", "to": target})

    async def run_job(self, request: Request) -> Response:
        name = request.path.removeprefix("/jobs/").removesuffix("/run")
        try:
            self._archive.jobs.run_now(name)
        except KeyError:
            return Response(404, f"no job {name!r}: {', '.join(self._archive.jobs.names())}\n".encode())
        return json_response({"job": name, "started": True})


async def progress_lines(
    in_thread: Callable[..., asyncio.Future[Any]], work: Callable[..., object]
) -> AsyncGenerator[object, None]:
    """Yield the progress of `work` while it runs; at its end raise its error.

    `work` never waits for the client. If the client reads too slowly, the oldest lines are dropped.
    """
    loop = asyncio.get_running_loop()
    lines: deque[dict[str, Any]] = deque(maxlen=_MAX_LINES)
    changed = asyncio.Event()

    def add(item: dict[str, Any]) -> None:
        lines.append(item)
        changed.set()

    def progress(item: Mapping[str, Any]) -> None:
        loop.call_soon_threadsafe(add, dict(item))

    future = asyncio.ensure_future(in_thread(functools.partial(work, progress=progress)))
    future.add_done_callback(lambda _: changed.set())
    while lines or not future.done():
        changed.clear()
        while lines:
            yield lines.popleft()
        if not future.done():
            await changed.wait()
    future.result()


def _summary(lifecycle: ArchiveLifecycle, reports: Sequence[RoundReport]) -> dict[str, Any]:
    status = lifecycle.status()
    return {
        "event": "done",
        "rounds": len(reports),
        "objects": sum(len(report.committed) for report in reports),
        "failed": sum(len(report.failed) for report in reports),
        "set_aside": lifecycle.set_aside(),
        # Totals, because a background round may have archived everything a moment ago.
        "archived_objects": status["objects"],
        "backlog_bytes": status["backlog_bytes"],
        "last_round": status["last_round"],
    }


def _offsets_of(text: str) -> dict[int, int]:
    """Parse QUEUE:OFFSET pairs; empty if the text is malformed."""
    found = re.fullmatch(r"(\d{1,5}:\d{1,18})(,\d{1,5}:\d{1,18})*", text)
    pairs = [] if found is None else [pair.split(":") for pair in text.split(",")]
    return {int(queue): int(offset) for queue, offset in pairs}


def register_pages(http: AdminHttp, pages: AdminPages) -> None:
    http.on_shutdown(pages.close)
    http.route("GET", "/metrics", pages.metrics, at_once=_CHEAP)
    http.route("GET", "/livez", pages.live)
    http.route("GET", "/readyz", pages.ready)
    http.route("GET", "/archive/status", pages.status, at_once=_CHEAP)
    http.route("GET", "/archive/ls", pages.ls, at_once=_CHEAP)
    http.route("GET", "/archive/journal", pages.journal, at_once=1)
    http.route("POST", "/archive/verify", pages.verify, at_once=1)
    http.route("POST", "/archive/offload", pages.offload, at_once=1)
    http.route("POST", "/archive/compact", pages.compact, at_once=1)
    http.route("POST", "/archive/erase", pages.erase, at_once=1)
    http.route("POST", "/archive/unexpire", pages.unexpire, at_once=1)
    http.route("POST", "/topic/trim", pages.trim, at_once=1)
    http.route("POST", "/archive/sweep", pages.sweep, at_once=1)
    http.route("POST", "/clock/confirm", pages.confirm_clock, at_once=_CHEAP)
    http.route("POST", "/jobs/", pages.run_job)
    http.route("GET", "/set", pages.broker_set)
    http.route("POST", "/set/hand-over", pages.hand_over, at_once=1)
