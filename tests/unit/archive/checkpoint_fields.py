"""Journal entries whose state a checkpoint stores."""

from __future__ import annotations

from neve.archive.format.journal import (
    COMPACT,
    Abort,
    AnyEntry,
    Commit,
    Deleted,
    Epoch,
    Erase,
    Expire,
    Gap,
    Replace,
    Topic,
)
from tests.kit.archive.journal_entries import committed, intent, to_compact

A, B, C, D = (
    committed(key, [(0, n * 10, n * 10 + 9), (1, n * 5, n * 5 + 4)], start=n * 100, end=n * 100 + 100, newest=n)
    for n, key in enumerate("abcd")
)
ENTRIES: list[AnyEntry] = [
    Epoch(epoch=1, owner="o", log_uuid="u"),
    intent(1, A),
    Commit(round=1, names=[A]),
    intent(2, B, C),
    Commit(round=2, names=[B], through={"t": 200}),
    Topic(topic="gone", deleted=True, minimums={0: 7}),
    Commit(round=2, names=[C]),
    Expire(keys=["a"], delete_after_ms=9, minimums={"t": {0: 10, 1: 5}}),
    Gap(topic="t", queue=0, first=30, last=39, reason="lost", through=350),
    Deleted(keys=["a"]),
    intent(3, D),
    Epoch(epoch=2, owner="p", log_uuid="u"),
    Abort(round=3, keys=["d"]),
    Replace(old=["b"], new=[committed("m", [(0, 10, 19), (1, 5, 9)])], delete_after_ms=5),
    intent(4, D),
]
REWRITES: list[AnyEntry] = [
    *ENTRIES,
    to_compact(1, ["c", "m"], committed("m2", [(0, 10, 29)])),
    to_compact(2, ["x"], committed("y", [(0, 10, 29)]), committed("z", [(0, 30, 39)])),
    Abort(kind=COMPACT, round=2, reason="", keys=["y"]),
    Abort(kind=COMPACT, round=1, reason=""),
]
_C2 = committed("c2", [(0, 20, 22), (0, 25, 29), (1, 10, 14)], start=200, end=300)
#: Two rows of c, then all its other rows.
ERASURES: list[AnyEntry] = [
    Erase(id="e2.20", old=["c"], new=[_C2], rows=[("t", 0, 23, 24)], delete_after_ms=7),
    Erase(
        id="e2.22", old=["c2"], new=[], rows=[("t", 0, 20, 22), ("t", 0, 25, 29), ("t", 1, 10, 14)], delete_after_ms=8
    ),
    Erase(id="e2.22", old=["c"], new=[], rows=[("t", 0, 20, 22)], delete_after_ms=6),
]
