"""Epochs of a log: the list, where two logs diverge, and the file that RocketMQ reads as well."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.ha.epoch_file import FILE_NAME, EpochFile, EpochFileDamaged, decode_entries, encode_entries
from broker.ha.epochs import EpochCache, EpochConflict, consistent_point, truncation_point
from tests.kit.store.sim_disk import SimDisk

DIRECTORY = Path("/store")
# As an Apache broker in controller mode left it.
STOCK = b"2\n522188333\n1-0\n2-223129\n"


def test_new_epoch_at_the_start_of_the_last_one_replaces_it() -> None:
    """A master that wrote nothing must leave no epoch that the next one's bytes could be assigned to."""
    cache = EpochCache([(1, 0), (2, 500)])
    assert cache.assign(3, 500)
    assert cache.entries() == ((1, 0), (3, 500))


def test_assigning_the_same_epoch_again_changes_nothing() -> None:
    cache = EpochCache([(1, 0)])
    assert not cache.assign(1, 0)
    assert cache.entries() == ((1, 0),)


@pytest.mark.parametrize("entry", [(1, 500), (2, 600), (1, 700), (3, 400), (-1, 900), (4, -1)])
def test_epoch_or_start_below_the_last_one_is_refused(entry: tuple[int, int]) -> None:
    cache = EpochCache([(1, 0), (2, 500)])
    with pytest.raises(EpochConflict):
        cache.assign(*entry)
    assert cache.entries() == ((1, 0), (2, 500))


def test_lookup_returns_the_epoch_in_which_an_offset_was_written() -> None:
    cache = EpochCache([(1, 100), (4, 500)])
    assert cache.at(99) is None
    assert cache.at(100) == (1, 100, 500)
    assert cache.at(499) == (1, 100, 500)
    assert cache.at(500) == (4, 500, None)
    assert cache.at(10_000) == (4, 500, None)
    assert (cache.last_epoch, cache.last_start, EpochCache().last_epoch) == (4, 500, -1)
    assert (cache.start_of(4), cache.start_of(2)) == (500, None)


def test_truncation_removes_the_epochs_without_a_byte() -> None:
    cache = EpochCache([(1, 0), (2, 500), (3, 900)])
    assert cache.truncate(900)
    assert cache.entries() == ((1, 0), (2, 500))
    assert not cache.truncate(501)
    assert cache.truncate(0)
    assert cache.entries() == ()


def test_load_drops_epochs_that_begin_above_the_log_end() -> None:
    cache = EpochCache([(1, 0), (2, 500), (3, 900)])
    assert not cache.drop_above(900)
    assert cache.drop_above(899)
    assert cache.entries() == ((1, 0), (2, 500))


def test_eviction_removes_whole_epochs_and_keeps_a_partial_ones_start() -> None:
    cache = EpochCache([(1, 0), (2, 500), (3, 900)])
    assert not cache.forget_below(499)
    assert cache.forget_below(500)
    assert cache.entries() == ((2, 500), (3, 900))
    assert not cache.forget_below(700)
    assert cache.entries() == ((2, 500), (3, 900))


# -- where two logs diverge


@pytest.mark.parametrize(
    ("local", "local_end", "master", "master_end", "point"),
    [
        ([(1, 0)], 300, [(1, 0)], 500, 300),  # a slave that is behind
        ([(1, 0)], 700, [(1, 0), (2, 500)], 600, 500),  # a former master with unreplicated bytes
        ([(1, 0), (2, 500)], 700, [(1, 0), (3, 600)], 900, 500),  # followed a master that the others did not follow
        ([(1, 0), (2, 500)], 500, [(1, 0), (2, 500)], 900, 500),  # knows the epoch but has none of its bytes
        ([(1, 0), (2, 300)], 700, [(1, 0), (2, 500)], 900, 300),  # the same epoch from another start
        ([(4, 800)], 900, [(1, 0), (4, 800)], 1000, 900),  # begins later
        ([(1, 0)], 300, [(2, 0)], 500, 0),  # no slave has the first master's bytes, the second began with an empty log
        ([(1, 90)], 300, [(2, 90)], 500, None),
        ([(1, 0)], 300, [(2, 90)], 500, None),
        ([(1, 0)], 300, [], 0, None),
    ],
)
def test_logs_are_consistent_up_to_the_lower_end_of_a_common_epoch(
    local: list[tuple[int, int]], local_end: int, master: list[tuple[int, int]], master_end: int, point: int | None
) -> None:
    assert consistent_point(local, local_end, master, master_end) == point


def test_former_master_truncates_to_confirm_if_the_epoch_is_reused() -> None:
    """A wrote 900 to 1000 alone as epoch 2. C was elected for epoch 3 but, without a write, still uses epoch 2."""
    epochs = [(1, 0), (2, 500)]
    assert consistent_point(epochs, 1000, epochs, 1200) == 1000  # the epochs are equal, the bytes are not
    assert truncation_point(epochs, 1000, epochs, 1200, master_epoch=3, followed_epoch=2, last_confirm=900) == 900


def test_reconnecting_to_the_same_master_truncates_nothing() -> None:
    epochs = [(1, 0), (2, 500)]
    assert truncation_point(epochs, 1000, epochs, 1200, master_epoch=3, followed_epoch=3, last_confirm=900) == 1000


def test_slave_keeps_unconfirmed_bytes_that_the_epochs_prove() -> None:
    """B acknowledged 1000 and knows 900 as confirmed. The epochs of C, elected next, show that C has 1000 as well."""
    local, master = [(1, 0)], [(1, 0), (2, 1000)]
    assert truncation_point(local, 1000, master, 1200, master_epoch=2, followed_epoch=1, last_confirm=900) == 1000


def test_logs_without_a_common_epoch_have_no_truncation_point() -> None:
    assert truncation_point([(1, 0)], 10, [(2, 5)], 10, master_epoch=2, followed_epoch=1, last_confirm=5) is None


class _Logs:
    """Logs as lists of the writer of each byte: the truth that epochs have to reproduce."""

    def __init__(self, members: int) -> None:
        self.bytes: list[list[tuple[int, int]]] = [[] for _ in range(members)]
        self.epochs = [EpochCache() for _ in range(members)]

    def elect(self, member: int, epoch: int) -> None:
        self.epochs[member].assign(epoch, len(self.bytes[member]))

    def write(self, member: int, epoch: int, count: int) -> None:
        base = len(self.bytes[member])
        self.bytes[member] += [(epoch, base + number) for number in range(count)]

    def follow(self, slave: int, master: int, epoch: int, count: int) -> None:
        theirs, own = self.epochs[master], self.epochs[slave]
        if self.bytes[slave]:
            ends = len(self.bytes[slave]), len(self.bytes[master])
            point = truncation_point(
                own.entries(), ends[0], theirs.entries(), ends[1], master_epoch=epoch, followed_epoch=-1, last_confirm=0
            )
            assert point is not None, "the first epoch is common to all"
            del self.bytes[slave][point:]
            own.truncate(point)
        begin = len(self.bytes[slave])
        self.bytes[slave] += self.bytes[master][begin : begin + count]
        for name, start in theirs.entries():
            if start <= len(self.bytes[slave]) and name > own.last_epoch:
                own.assign(name, start)


@settings(deadline=None)
@given(st.data())
def test_slave_log_is_a_prefix_of_the_masters_after_any_elections(data: st.DataObject) -> None:
    """Compare the bytes themselves after each handshake."""
    logs = _Logs(3)
    logs.elect(0, 1)
    logs.write(0, 1, 3)
    for member in (1, 2):
        logs.follow(member, 0, 1, 3)
    for epoch in range(2, data.draw(st.integers(3, 9))):
        master = data.draw(st.integers(0, 2))
        logs.elect(master, epoch)
        logs.write(master, epoch, data.draw(st.integers(0, 4)))
        for slave in data.draw(st.lists(st.integers(0, 2), max_size=4)):
            if slave != master:
                logs.follow(slave, master, epoch, data.draw(st.integers(0, 8)))
                assert logs.bytes[slave] == logs.bytes[master][: len(logs.bytes[slave])]
        logs.write(master, epoch, data.draw(st.integers(0, 4)))


# -- the file


def test_apache_epoch_file_is_read() -> None:
    assert decode_entries(STOCK) == [(1, 0), (2, 223129)]


def test_epoch_file_equals_apaches_byte_for_byte() -> None:
    assert encode_entries([(1, 0), (2, 223129)]) == STOCK


def test_checksum_of_zero_is_not_checked_as_in_rocketmq() -> None:
    assert decode_entries(b"1\n0\n7-9\n") == [(7, 9)]


def saved(entries: list[tuple[int, int]]) -> SimDisk:
    disk = SimDisk()
    disk.make_dirs(DIRECTORY)
    EpochFile(disk, DIRECTORY).save(entries)
    return disk


def test_epochs_survive_a_power_cut() -> None:
    disk = saved([(1, 0), (2, 500)])
    disk.power_cut()
    assert EpochFile(disk, DIRECTORY).load().entries() == ((1, 0), (2, 500))
    assert EpochFile(SimDisk(), DIRECTORY).load().entries() == ()


DAMAGED = [b"", b"x", b"1\n5\n1-0\n", b"2\n0\n1-0\n", b"1\n0\n1_0\n", b"2\n0\n2-0\n1-5\n", STOCK[:-1], STOCK + b"3-4\n"]


@pytest.mark.parametrize("data", DAMAGED)
def test_damaged_epoch_file_is_read_from_its_backup(data: bytes) -> None:
    disk = saved([(1, 0), (2, 500)])
    disk.write_atomic(DIRECTORY / FILE_NAME, data)
    assert EpochFile(disk, DIRECTORY).load().entries() == ((1, 0), (2, 500))


@pytest.mark.parametrize("data", DAMAGED)
def test_unreadable_epoch_file_raises_instead_of_an_empty_list(data: bytes) -> None:
    disk = SimDisk()
    disk.make_dirs(DIRECTORY)
    disk.write_atomic(DIRECTORY / FILE_NAME, data)
    with pytest.raises(EpochFileDamaged, match=FILE_NAME):
        EpochFile(disk, DIRECTORY).load()
