"""Tests of the fetch queue: fairness between groups, the byte budget, and the priority of read-ahead."""

import threading

import pytest

from tests.kit.clock.waiting import wait_until
from tiered.read.fetch_queue import LINE_MAX, Fetch, FetchQueue, QueueFull


class GatedFetches:
    """Fetches that record their order. `gate` blocks the running ones."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.gate = threading.Event()

    def fetch(self, name: str, nbytes: int = 1) -> Fetch:
        def run() -> None:
            self.order.append(name)
            assert self.gate.wait(20)

        return Fetch(nbytes, run)

    def begun(self, count: int) -> None:
        wait_until(lambda: len(self.order) >= count)


@pytest.fixture
def work() -> GatedFetches:
    return GatedFetches()


def test_groups_are_served_in_turn(work: GatedFetches) -> None:
    queue = FetchQueue(1, 100)
    for index in range(4):
        queue.put(work.fetch(f"a{index}"), "a")
    for group in "bc":
        queue.put(work.fetch(f"{group}0"), group)
    work.gate.set()
    work.begun(6)
    assert work.order == ["a0", "a1", "b0", "c0", "a2", "a3"]
    queue.close()


def test_single_group_never_occupies_every_thread(work: GatedFetches) -> None:
    queue = FetchQueue(3, 100)
    for index in range(9):
        queue.put(work.fetch(f"a{index}"), "a")
    queue.put(work.fetch("b"), "b")
    work.begun(3)
    assert set(work.order) == {"a0", "a1", "b"}
    work.gate.set()
    queue.close()


def test_byte_budget_holds_and_a_large_fetch_is_served(work: GatedFetches) -> None:
    queue = FetchQueue(4, 10)
    for name, size in (("a", 6), ("b", 50), ("c", 4)):
        queue.put(work.fetch(name, size), name)
    work.begun(1)
    assert (work.order, queue.waiting) == (["a"], 2)
    work.gate.set()
    work.begun(3)
    assert work.order == ["a", "b", "c"]
    queue.close()


def test_read_ahead_waits_behind_reads_and_can_be_promoted(work: GatedFetches) -> None:
    queue = FetchQueue(2, 100)
    queue.put(work.fetch("running"), "a")
    fetches = {name: work.fetch(name) for name in ("ahead1", "ahead2")}
    queue.put(work.fetch("ahead0"), "a", ahead=True)
    for fetch in fetches.values():
        queue.put(fetch, "a", ahead=True)
    work.begun(2)
    queue.put(work.fetch("asked"), "b")
    queue.put(fetches["ahead2"], "b")
    queue.put(fetches["ahead2"], "b")
    work.gate.set()
    work.begun(5)
    assert sorted(work.order) == ["ahead0", "ahead1", "ahead2", "asked", "running"]
    assert work.order.index("ahead1") > work.order.index("asked")
    assert work.order.index("ahead1") > work.order.index("ahead2")
    queue.close()


def test_full_queue_refuses_and_withdrawn_fetches_do_not_run(work: GatedFetches) -> None:
    queue = FetchQueue(1, 100)
    queue.put(work.fetch("running"), "a")
    work.begun(1)
    waiting = [work.fetch(f"w{index}") for index in range(LINE_MAX)]
    for fetch in waiting:
        queue.put(fetch, "a")
    with pytest.raises(QueueFull):
        queue.put(work.fetch("one more"), "a")
    assert all(queue.withdraw(fetch) for fetch in waiting)
    assert queue.waiting == 0
    queue.put(work.fetch("last"), "a")
    work.gate.set()
    work.begun(2)
    assert work.order == ["running", "last"]
    queue.close()
