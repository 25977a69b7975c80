"""Tests of memory that a worker fills and the broker reads: it is reused, but never while referenced."""

import gc
import os
import threading

import numpy as np
import pytest

from tiered.worker import frames
from tiered.worker.client import DecodedGroup
from tiered.worker.group_memory import GroupMemory, MemoryPiece

MIB = 1 << 20


def filled(memory: GroupMemory, letter: bytes, size: int = MIB) -> tuple[MemoryPiece, memoryview]:
    piece = memory.take(size)
    frames.fill(piece.descriptor, [memoryview(letter * size)])
    return piece, memory.lend(piece)


def test_memory_is_reused_after_its_last_slice_is_released() -> None:
    memory = GroupMemory()
    first, content = filled(memory, b"a")
    part = content[10:20]
    del content
    other, _other = filled(memory, b"b")
    assert other is not first, "a slice of it is still held"
    assert bytes(part) == b"a" * 10
    del part
    again, content = filled(memory, b"c", MIB - 5)
    assert again is first and memory.made == 2
    assert bytes(content[: MIB - 5]) == b"c" * (MIB - 5)


def test_row_group_memory_lives_while_a_slice_is_referenced() -> None:
    memory = GroupMemory()
    rows, wire = 3, b"0123456789" * 30
    numbers = np.concatenate([np.arange(rows + 1) * 100, np.arange(rows), np.arange(rows), np.arange(rows)])
    piece = memory.take(frames.size_of_group(rows, len(wire)))
    frames.fill(piece.descriptor, [numbers.astype(np.int64).data, memoryview(wire)])
    group = DecodedGroup(memory.lend(piece), rows, len(wire))
    answer, times, begins = group.wire[100:200], group.times, list(group.begins)
    assert (begins, group.nbytes, group.is_mapped) == ([0, 100, 200, 300], piece.size, True)
    del group
    assert memory.take(piece.size) is not piece
    assert (bytes(answer), times.tolist()) == (wire[100:200], [0, 1, 2])
    del answer
    assert memory.take(piece.size) is not piece
    del times
    assert memory.take(piece.size) is piece


def test_free_memory_is_bounded_and_matched_by_size() -> None:
    memory = GroupMemory(kept=4 * MIB)
    large, content = filled(memory, b"a", 2 * MIB)
    del content
    assert memory.take(MIB) is not large
    lent = [filled(memory, b"b") for _ in range(8)]
    pieces = [piece for piece, _ in lent]
    while lent:
        lent.pop(0)
    taken = memory.take(MIB)
    assert taken is pieces[-1], "the one that was used last"
    free = [piece for piece in (large, *pieces) if piece is not taken and _is_open(piece)]
    assert free == pieces[-4:-1]


def test_closed_memory_keeps_only_referenced_pieces() -> None:
    memory = GroupMemory()
    lent, content = filled(memory, b"a")
    free, other = filled(memory, b"b")
    del other
    memory.close()
    assert not _is_open(free) and _is_open(lent)
    assert bytes(content[:3]) == b"aaa"


def test_slice_can_be_collected_while_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may run at any point, with any lock held."""
    memory = GroupMemory()
    kept = [filled(memory, b"a")]
    collect = memory._collect

    def collected() -> None:
        kept.clear()
        gc.collect()
        collect()

    monkeypatch.setattr(memory, "_collect", collected)
    taking = threading.Thread(target=memory.take, args=(MIB,), daemon=True)
    taking.start()
    taking.join(30)
    assert not taking.is_alive()


def test_memory_referenced_only_by_a_slice_is_reused() -> None:
    """Like a row group in a cache, only a slice references the memory."""
    memory = GroupMemory()
    gc.collect()
    piece, content = filled(memory, b"a")
    descriptor = piece.descriptor
    del piece
    assert gc.collect() == 0, "nothing of it is in a circle"
    del content
    assert (memory.take(MIB).descriptor, memory.made) == (descriptor, 1)


def test_shared_memory_cannot_be_truncated_or_overfilled() -> None:
    memory = GroupMemory()
    piece, content = filled(memory, b"a")
    for size in (0, 2 * piece.size):
        with pytest.raises(PermissionError):
            os.ftruncate(piece.descriptor, size)
    with pytest.raises(OSError, match=r"."):
        frames.fill(piece.descriptor, [memoryview(b"b" * (piece.size + 1))])
    assert len(content) == piece.size


def test_fill_writes_parts_contiguously_after_short_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: written(fd, [parts[0][:7]], at))
    piece = GroupMemory().take(100)
    parts = [memoryview(b"x" * 7), memoryview(b""), np.arange(5, dtype=np.int64).data, memoryview(b"end")]
    frames.fill(piece.descriptor, parts)
    assert piece.content(50) == b"x" * 7 + np.arange(5, dtype=np.int64).tobytes() + b"end"


def _is_open(piece: MemoryPiece) -> bool:
    try:
        return os.fstat(piece.descriptor).st_size == piece.size
    except OSError:
        return False
