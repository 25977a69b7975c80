"""A few rounds on real processes for every commit; `make histories` runs more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.histories.checker import Promise, told
from tests.histories.faults import CONTROLLER, MASTER, OTHER_SLAVE, SLAVE, Fault, Kind, Way
from tests.histories.run import run

pytestmark = [pytest.mark.servers, pytest.mark.timeout(600)]

#: On a machine that is busy with other tests, events have to occur, but not quickly.
PATIENT_MS = 90_000

ROUNDS = [
    [Fault(0.5, 3.0, Kind.KILL, MASTER)],
    [
        Fault(0.3, 4.0, Kind.FREEZE, MASTER),
        Fault(0.5, 2.0, Kind.CUT, SLAVE, CONTROLLER, Way.TO),
        Fault(3.5, 1.0, Kind.KILL, OTHER_SLAVE),
    ],
    [
        Fault(0.3, 3.5, Kind.ISOLATE, MASTER, way=Way.FROM),
        Fault(2.5, 1.0, Kind.KILL, MASTER),
    ],
    [  # No mode loses messages in this round.
        Fault(0.5, 0.0, Kind.HAND_OVER, MASTER),
        Fault(2.0, 0.0, Kind.HAND_OVER, MASTER, SLAVE),
    ],
]


#: Clients read at one member what another has evicted.
DROPPING = [
    [
        Fault(1.5, 0.0, Kind.OFFLOAD, MASTER),
        Fault(3.0, 2.0, Kind.KILL, MASTER),
        Fault(4.0, 0.0, Kind.OFFLOAD, SLAVE),
        Fault(5.5, 0.0, Kind.HAND_OVER, MASTER),
    ],
]


def test_evicted_messages_are_read_from_the_archive_after_a_failover(tmp_path: Path) -> None:
    promise = Promise(keeps_acknowledged=True, rest_within_ms=PATIENT_MS)
    work = run(
        tmp_path, mode="sync", rounds=1, seed=1, java=True, promise=promise, plans=DROPPING, archives=True,
        settings={"flushDiskType": "SYNC_FLUSH"},
    )  # fmt: skip
    (report,) = asyncio.run(work)
    assert not report.violations, told(report.violations)
    assert report.counts["archived"] > 100
    assert report.counts["dropped below"] > 0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_rounds_of_kills_freezes_and_cuts_keep_all_promises(tmp_path: Path, mode: str) -> None:
    promise = Promise(keeps_acknowledged=mode == "sync", rest_within_ms=PATIENT_MS)
    work = run(tmp_path, mode=mode, rounds=len(ROUNDS), seed=1, java=True, promise=promise, plans=ROUNDS)
    for number, report in enumerate(asyncio.run(work)):
        assert not report.violations, f"round {number}: {told(report.violations)}"
        assert report.counts["sent, acknowledged"] > 100
    assert report.counts["handed over, done"] > 0
