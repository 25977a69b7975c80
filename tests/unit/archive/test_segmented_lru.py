"""Tests of SegmentedLru: bounded in bytes, and scans evict only entries that were not reused."""

import random

from tiered.worker.segmented_lru import SegmentedLru


def test_segmented_lru_keeps_reused_entries_during_a_scan() -> None:
    cache: SegmentedLru[int, str] = SegmentedLru(100)
    for key in range(10):
        assert cache.put(key, str(key), 10) == []
    assert cache.use(3, again=True) == "3"
    assert cache.use(0, again=False) == "0"
    assert cache.put(10, "10", 10) == [(1, "1")]
    for key in range(11, 60):
        cache.put(key, "", 10)
    assert 3 in cache and 0 not in cache
    assert len(cache) == 10


def test_segmented_lru_returns_entries_that_do_not_fit() -> None:
    cache: SegmentedLru[int, str] = SegmentedLru(100)
    assert cache.put(1, "big", 101) == [(1, "big")]
    assert cache.put(2, "a", 60) == []
    assert cache.use(2, again=True) == "a"
    assert cache.put(3, "b", 60) == [(2, "a")]
    assert cache.put(3, "c", 1) == [(3, "c")]
    assert (cache.nbytes, cache.pop(3), cache.pop(3), cache.nbytes) == (60, "b", None, 0)


def test_segmented_lru_counts_bytes_of_random_operations() -> None:
    dice = random.Random(7)
    cache: SegmentedLru[int, int] = SegmentedLru(1000)
    held: dict[int, int] = {}
    for _ in range(5000):
        key, size = dice.randrange(60), dice.randrange(1, 200)
        match dice.randrange(4):
            case 0 | 1:
                for gone, _ in cache.put(key, size, size) if key not in held else ():
                    held.pop(gone, None)
                if key in cache:
                    held.setdefault(key, size)
            case 2:
                assert cache.use(key, again=dice.random() < 0.5) == held.get(key)
            case 3:
                assert cache.pop(key) == held.pop(key, None)
        assert cache.nbytes == sum(held.values()) <= 1000
        assert len(cache) == len(held)
