"""The archivable limit of an Apache master's log. Each rule alone; unknown bytes are not archived."""

from __future__ import annotations

import json

import pytest

from broker.ha.stock_archivable_limit import UNKNOWN, WRITTEN_BACK_S, Observation, StockArchivableLimit, flush_takes_s
from broker.ha.stock_master import read_observation
from neve.errors import NeveError

FILE = 1000
FLUSH_S = 10.5
BOOT = 7


def reach(*, end_at_start: int = 0, flush_s: float | None = FLUSH_S) -> StockArchivableLimit:
    begun = StockArchivableLimit(FILE)
    begun.attached(BOOT, end_at_start, flush_s, 0.0)
    return begun


def look(end: int, *, flushed: int | None = None, in_sync: tuple[int, ...] | None = None) -> Observation:
    return Observation(
        begin=0, end=end, flushed=end if flushed is None else flushed, in_sync=(end,) if in_sync is None else in_sync
    )


def looked(begun: StockArchivableLimit, seen: Observation, *times: float) -> int:
    for at in times:
        begun.observe(seen, at)
    return begun.offset


def test_only_full_files_are_archivable() -> None:
    assert looked(reach(), look(3999), 0, FLUSH_S) == 3000
    assert looked(reach(), look(4000), 0, FLUSH_S) == 4000
    assert looked(reach(), look(999), 0, FLUSH_S) == 0


def test_full_file_is_archivable_after_a_thorough_flush_interval() -> None:
    begun = reach()
    assert looked(begun, look(1500), 0, FLUSH_S - 0.1) == UNKNOWN
    assert looked(begun, look(2500), FLUSH_S) == 1000, "the first file"
    assert looked(begun, look(2500), 2 * FLUSH_S - 0.1) == 1000
    assert looked(begun, look(9500), 2 * FLUSH_S) == 2000, "and then the second; what came since has to wait"


def test_archivable_limit_is_at_most_the_masters_flushed_offset() -> None:
    begun = reach()
    assert looked(begun, look(3500, flushed=1999), 0, FLUSH_S, 100) == 1000
    assert looked(begun, look(3500, flushed=2000), 101) == 2000


def test_archivable_limit_is_at_most_each_in_sync_slaves_end() -> None:
    begun = reach()
    assert looked(begun, look(3500, in_sync=(3500, 1200)), 0, FLUSH_S) == 1000
    assert looked(begun, look(3500, in_sync=(3500, 3400)), 20) == 3000
    assert looked(begun, look(3500, in_sync=(3500, 500)), 21) == 0, "a slave that comes anew has less"
    assert looked(begun, look(3500, in_sync=()), 22) == 3000


def test_killed_masters_writes_are_archivable_after_the_kernel_writeback() -> None:
    begun = reach(end_at_start=1700)
    assert looked(begun, look(3500), 0, FLUSH_S, WRITTEN_BACK_S - 0.1) == UNKNOWN
    assert looked(begun, look(3500), WRITTEN_BACK_S) == 3000


def test_observations_outlive_connections_but_not_the_masters_process() -> None:
    begun = reach()
    begun.observe(look(2500), 0)
    begun.attached(BOOT, 0, FLUSH_S, 5.0)
    assert looked(begun, look(2500), FLUSH_S) == 2000
    begun.attached(BOOT + 1, 0, FLUSH_S, 20.0)
    assert begun.offset == UNKNOWN
    assert looked(begun, look(2500), 20.0, 20.0 + FLUSH_S - 0.1) == UNKNOWN
    assert looked(begun, look(2500), 20.0 + FLUSH_S) == 2000
    begun.forget()
    assert begun.offset == UNKNOWN


def test_master_without_flush_intervals_archives_nothing() -> None:
    assert looked(reach(flush_s=None), look(5000), 0, 1e6) == UNKNOWN
    whole = {"flushCommitLogThoroughInterval": "10000", "flushIntervalCommitLog": "500"}
    assert flush_takes_s(whole) == FLUSH_S
    assert flush_takes_s(whole | {"flushIntervalCommitLog": "soon"}) is None
    assert flush_takes_s({"flushIntervalCommitLog": "500"}) is None


def runtime(boot_ms: int = BOOT, behind: str = "0 B") -> bytes:
    table = {"bootTimestamp": str(boot_ms), "remainHowManyDataToFlush": behind, "commitLogMinOffset": "-1"}
    return json.dumps({"table": table}).encode()


def ha_status(*slaves: tuple[int, bool], end: int = 1 << 40, master: bool = True) -> bytes:
    connections = [{"addr": "s:1", "slaveAckOffset": ack, "diff": end - ack, "inSync": sync} for ack, sync in slaves]
    return json.dumps(
        {"master": master, "masterCommitLogMaxOffset": end, "inSyncSlaveNums": 1, "haConnectionInfo": connections}
    ).encode()


@pytest.mark.parametrize(
    ("behind", "most"),
    [
        ("0 B", 0),
        ("1023 B", 1023),
        ("1.0 KiB", 1127),
        ("12.3 MiB", 13002343),
        ("12,3 MiB", 13002343),
        ("1024.0 KiB", 1048679),
        ("3.5 GiB", 3865470567),
    ],
)
def test_unflushed_bytes_are_the_upper_bound_of_the_printed_size(behind: str, most: int) -> None:
    seen = read_observation(runtime(), ha_status((5, True)), runtime(behind=behind), BOOT)
    assert seen == Observation(begin=0, end=1 << 40, flushed=(1 << 40) - most, in_sync=(5,))


def test_slave_out_of_sync_does_not_limit_the_archivable_offset() -> None:
    seen = read_observation(runtime(), ha_status((5, False), (900, True), (800, True), end=900), runtime(), BOOT)
    assert seen == Observation(begin=0, end=900, flushed=900, in_sync=(900, 800))


@pytest.mark.parametrize(
    ("before", "status", "after"),
    [
        (runtime(BOOT - 1), ha_status((5, True)), runtime()),
        (runtime(), ha_status((5, True)), runtime(BOOT + 1)),
        (runtime(), ha_status((5, True), master=False), runtime()),
        (runtime(), ha_status(), runtime()),
    ],
    ids=["another life before", "another life after", "no master", "without the slave that asks"],
)
def test_answers_of_several_processes_or_of_no_master_are_ignored(before: bytes, status: bytes, after: bytes) -> None:
    assert read_observation(before, status, after, BOOT) is None


@pytest.mark.parametrize(
    ("status", "after"),
    [
        (b"{}", runtime()),
        (b"[]", runtime()),
        (ha_status((5, True)), b'{"table":{"bootTimestamp":"7"}}'),
        (ha_status((5, True)), runtime(behind="-5 B")),
        (ha_status((5, True)), runtime(behind="much")),
        (ha_status((5, True)), runtime(behind="1.25 KiB")),
    ],
)
def test_unreadable_answer_is_an_error(status: bytes, after: bytes) -> None:
    with pytest.raises(NeveError, match="does not report its flushed offset"):
        read_observation(runtime(), status, after, BOOT)
