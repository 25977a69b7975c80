"""`python -m tests.histories.run --rounds 200 --mode sync --seed 1`: rounds of faults on a real broker set.

Each round's faults follow from the seed and the round's number. The verdict on a round is printed at once: held, broken
or void. The history of a round that did not hold is kept in the directory, beside the members' data and logs. The exit
code is 1 if a promise was broken, if there were fewer rounds than requested, or if most of them are void.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.histories import history
from tests.histories.checker import Promise, Report, Verdict, check, told
from tests.histories.clients import DELAY_LEVELS
from tests.histories.faults import Fault, Kind, plan
from tests.histories.history import ReportedStep
from tests.histories.java_workers import JavaWorkers
from tests.histories.links import Links
from tests.histories.round import Place, run_round
from tests.histories.servers import JAVA_CLIENTS, NEVE_CLIENTS, FaultySet
from tests.histories.summary import is_enough, summary

MODES = {
    "sync": Promise(keeps_acknowledged=True),
    "sync-available": Promise(keeps_acknowledged=True),
    "async": Promise(keeps_acknowledged=False),
}
#: A set that detects failures in a second or two instead of the default ten, because rounds are short.
SETTINGS: dict[str, object] = {
    "mappedFileSizeCommitLog": "4m",
    "brokerHeartbeatInterval": "300",
    "controllerHeartBeatTimeoutMills": "2000",
    "haMaxTimeSlaveNotCatchup": "1000",
    "slaveTimeout": "1500",
    "registerNameServerPeriod": "10s",
    "messageDelayLevel": DELAY_LEVELS,
    "transactionTimeOut": "1000",
    "transactionCheckInterval": "1000",
    "transactionCheckMax": "100000",
}
#: Archive and evict much within a round.
ARCHIVE: dict[str, object] = {
    "mappedFileSizeCommitLog": "256k",
    "archiveMinBytes": "1",
    "archivePeriod": "1s",
    "statePeriod": "1s",
}
_PATIENCE = 2.0  # The multiple of the promised time after which a missing event is recorded.


async def run(
    directory: Path, *, mode: str, rounds: int, seed: int, java: bool, seconds: float = 8.0,
    promise: Promise | None = None, plans: list[list[Fault]] | None = None, settings: dict[str, object] | None = None,
    kinds: Sequence[Kind] = tuple(Kind), archives: bool = False, reports: list[Report] | None = None,
) -> list[Report]:  # fmt: skip
    """Return the reports of all rounds.

    `plans` replaces the plans that the seed generates, which have these `kinds`. `reports` collects the reports as they
    are completed, for a caller that stops early.
    """
    promised = promise or MODES[mode]
    reports = reports if reports is not None else []
    own = dict(settings or {})
    if not archives:
        kinds = [kind for kind in kinds if kind is not Kind.OFFLOAD]
    async with AsyncExitStack() as stack:
        owners: list[tuple[str, int]] = [(NEVE_CLIENTS, os.getpid())]
        links = Links(lambda: [*brokers.owners(), *owners], random.Random(seed))
        stack.push_async_callback(links.close)
        if archives:
            own = ARCHIVE | {"storeUrl": f"dir:{directory / 'bucket'}"} | own
        brokers = FaultySet(directory, links, SETTINGS | {"replication": mode} | own)
        stack.callback(brokers.stop)
        await brokers.start()
        workers: JavaWorkers | None = None
        if java:
            workers = JavaWorkers(brokers.name_servers[JAVA_CLIENTS], directory / "java")
            await stack.enter_async_context(workers)
            owners.append((JAVA_CLIENTS, workers.pid))
        place = Place(brokers, links, workers, patience=_PATIENCE * promised.rest_within_ms / 1000)
        for number in range(rounds):
            name = f"r{number}"
            chance = random.Random(f"{seed}-{number}")
            faults = plans[number] if plans is not None else plan(chance, seconds, kinds)
            began = time.monotonic()
            events = await run_round(place, name, faults, seed + number, promised)
            report = check(events, promised)
            reports.append(report)
            history.write(directory / f"{name}.jsonl", events)
            steps = [event for event in events if isinstance(event, ReportedStep)]
            _say(name, report, steps, time.monotonic() - began)
            if report.verdict is Verdict.HELD:
                (directory / f"{name}.jsonl").unlink()
        if links.unknown:
            print(f"{links.unknown} connections of nobody", flush=True)
    return reports


async def _until_stopped(work: Coroutine[Any, Any, list[Report]]) -> None:
    """Run until SIGTERM, which ends all processes in order; the results so far are printed."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with suppress(asyncio.CancelledError):
        await task


def _say(name: str, report: Report, steps: list[ReportedStep], took: float) -> None:
    counts = ", ".join(f"{what} {count}" for what, count in report.counts.items())
    print(f"{name}: {report.verdict}; {took:.1f} s; {counts}", flush=True)
    for step in steps:
        print(f"    {step.at % 1_000_000 / 1000:8.3f} {step.what}", flush=True)
    if report.violations:
        print(told(report.violations), flush=True)


def main() -> int:
    options = _arguments()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="neve-histories-"))
    directory.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=directory / "clients.log", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    reports: list[Report] = []
    work = run(
        directory, reports=reports, mode=options.mode, rounds=options.rounds, seed=options.seed,
        seconds=options.seconds,
        java=not options.without_java, kinds=options.kinds or tuple(Kind),
        promise=replace(MODES[options.mode], rest_within_ms=int(options.rest_within * 1000)),
        archives=options.archive, settings=dict(pair.partition("=")[::2] for pair in options.set),
    )  # fmt: skip
    try:
        asyncio.run(_until_stopped(work))
    finally:  # An early end must not hide results.
        print(f"{options.mode}, seed {options.seed}: {summary(reports, options.rounds)}", flush=True)
    has_held = all(report.verdict is Verdict.HELD for report in reports) and len(reports) == options.rounds
    if options.directory is None and has_held:
        shutil.rmtree(directory)
    else:
        print(f"histories, data and logs: {directory}")
    return 0 if is_enough(reports, options.rounds) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.histories.run", description=__doc__)
    parser.add_argument("--mode", choices=list(MODES), default="sync")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=8.0, help="of faults in a round")
    parser.add_argument("--rest-within", type=float, default=30.0, help="seconds; more on a machine that is busy")
    parser.add_argument("--archive", action="store_true", help="the set has one, and drops what is in it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all members")
    parser.add_argument("--kinds", type=Kind, nargs="*", help=f"of faults: {', '.join(map(str, Kind))}; else all")
    parser.add_argument("--without-java", action="store_true", help="neve's clients alone")
    parser.add_argument("--directory", type=Path, help="for data, logs and histories; else a temporary one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
