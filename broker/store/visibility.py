"""Visibility of messages: a message is appended, then synced, then confirmed by its broker set, then visible.

    appended    in the log and in its queue; readers stop below it
    synced      durable after a flush; under SYNC_FLUSH nothing is visible earlier
    confirmed   enough members of the set have it, if there is a set; reported by `confirm`
    shown       visible to readers; at the append if neither wait applies (ASYNC_FLUSH, no set)

Invariant: shown <= appended always, and flushed <= synced <= appended. Under SYNC_FLUSH, shown <= flushed; in a set,
shown <= the confirmed offset. Visible messages stay visible. Callbacks get each message once, in the order of the log.

`flush` runs on its own thread: sends wait for it, and it waits for nothing but the log. Everything else runs on the
event loop.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from broker.store.commit_log import CommitLog
from broker.store.config import SYNC_FLUSH, StoreConfig
from broker.store.consume_queue import ConsumeQueue
from broker.store.errors import StoreNotWritable
from broker.store.log_end import LogEnd
from infra import failpoint
from infra.disk.filesystem import OutOfDescriptors
from infra.loop.locks import Lock, NewLock, new_lock

log = logging.getLogger(__name__)

# Queue, queue offset and tags code of a message that has become visible.
VisibleEntry = tuple[ConsumeQueue, int, int]
AppendCallback = Callable[[list[VisibleEntry]], None]


# Confirmed offset of a broker outside a set.
_ALONE = 1 << 62
# Messages that become visible together: their end in the log, their entries, and the end of each. Without the list of
# ends, which applies to an append of one sender, they become visible only as a whole.
Run = tuple[int, list[VisibleEntry], Sequence[int]]


class Visibility:
    """State of visibility and flushes of one store."""

    def __init__(self, config: StoreConfig, log: CommitLog, end: LogEnd, new_lock: NewLock = new_lock) -> None:
        self._log, self._end = log, end
        self.waits_for_sync = config.flush_disk_type == SYNC_FLUSH
        self._set_has = _ALONE
        self._waits = self.waits_for_sync
        self._callbacks: list[AppendCallback] = []
        self._hidden: deque[Run] = deque()
        self._flushing = new_lock()
        self._shown = 0
        self.flushed = 0  # durable below this offset, as reported to the event loop
        self.synced = 0  # durable below this offset; set by the flushing thread

    def adopt(self, end: int) -> None:
        """Set the recovered end: everything that a start found is durable."""
        self._shown = self.flushed = self.synced = end
        self._hidden.clear()
        if self._set_has != _ALONE:
            self._set_has = min(self._set_has, end)

    def take_over(self, other: Visibility) -> None:
        """Adopt the visibility of another object, whose log and queues now belong to this store.

        Messages that were confirmed meanwhile become visible. The caller holds `pause_lock`.
        """
        confirmed = min(self._set_has, other.synced)
        self._hidden, self._shown, self._set_has = other._hidden, other._shown, other._set_has
        self.flushed, self.synced = other.flushed, other.synced
        if confirmed > self._set_has:
            self.confirm(confirmed)

    def hide_above(self, offset: int) -> None:
        """Hide the records of the log above an offset, because its tail is truncated."""
        self._shown = min(self._shown, offset)

    def hide(self, confirmed: int, runs: Iterable[Run]) -> None:
        """Hide recovered records above the confirmed offset; `runs` are the entries above it."""
        assert not self._hidden and self._set_has in {_ALONE, confirmed}
        self._set_has, self._waits = confirmed, True
        self._shown = min(self._shown, confirmed)
        for run in runs:
            for queue, queue_offset, _ in run[1]:
                queue.visible = min(queue.visible, queue_offset)
            self._hidden.append(run)

    def pause_lock(self) -> Lock:
        """Return a lock; while it is held, no thread syncs the log."""
        return self._flushing

    @property
    def set_has(self) -> int | None:
        """The offset that the set has confirmed; None without a set."""
        return None if self._set_has == _ALONE else self._set_has

    def subscribe(self, callback: AppendCallback) -> None:
        """Call back with all messages that become visible from now on."""
        self._callbacks.append(callback)

    @property
    def confirmed(self) -> int:
        """The physical offset below which records are visible."""
        return self._shown if self._waits else self._end.appended

    @property
    def is_behind(self) -> bool:
        """Whether appended records are not visible yet."""
        return bool(self._hidden)

    @property
    def is_dirty(self) -> bool:
        """Whether there is something to flush, or a failure to report."""
        return self._end.appended > self.flushed or self._end.failure is not None

    # -- broker set

    def join_set(self, confirmed: int) -> None:
        """From now on make only confirmed records visible. Visible ones stay visible."""
        assert self._set_has == _ALONE
        self._shown = self.confirmed
        self._set_has, self._waits = max(confirmed, self._shown), True
        self._show_more()

    def confirm(self, offset: int) -> None:
        """Set the confirmed offset. It never decreases: a lower offset is ignored."""
        assert self._set_has != _ALONE, "a broker outside a set has no confirmed offset"
        if offset > self._set_has:
            self._set_has = offset
            self._show_more()

    def leave_set(self) -> None:
        """From now on make records visible without a set's confirmation."""
        self._set_has = _ALONE
        self._show_more()
        self._waits = self.waits_for_sync

    # -- messages

    def appended(self, messages: list[VisibleEntry], ends: Sequence[int] = ()) -> None:
        """Register messages that were just appended, up to the end of the log."""
        if not self._waits:
            self._show(messages)
            return
        self._hidden.append((self._end.appended, messages, ends))
        if self._set_has >= self._end.appended and not self.waits_for_sync:
            self._show_more()  # a slave that is behind: everything it receives was confirmed before

    def _show_more(self) -> None:
        reached = min(self.flushed if self.waits_for_sync else self._end.appended, self._set_has)
        self._shown, hidden = max(self._shown, reached), self._hidden
        while hidden and hidden[0][0] <= reached:
            self._show(hidden.popleft()[1])
        if hidden and hidden[0][2] and hidden[0][2][0] <= reached:
            end, messages, ends = hidden.popleft()
            count = bisect_right(ends, reached)
            hidden.appendleft((end, messages[count:], ends[count:]))
            self._show(messages[:count])

    def _show(self, shown: list[VisibleEntry]) -> None:
        for queue, queue_offset, _ in shown:
            queue.visible = queue_offset + 1
        for callback in self._callbacks:
            callback(shown)

    # -- the disk

    def flush(self) -> int:
        """Sync the log on a thread; return the offset to pass to `after_flush`.

        After a failed sync, every call raises StoreNotWritable, because the kernel may have dropped the pages.
        """
        with self._flushing:
            if self._end.failure is not None:
                raise StoreNotWritable(f"the disk failed: {self._end.failure}")
            target = self._end.appended
            try:
                failpoint.hit("store.flush")
                for file in list(self._log.files):
                    if file.end > self.synced and file.base < target:
                        self._log.sync(file)
                        if file.sealed and file.end <= target:
                            self._log.release_writers(file)
                self.synced = target
            except OutOfDescriptors as error:  # no sync has failed: the rest is synced by the next flush
                log.warning("the log is not synced until files can be opened again: %s", error)
                return self.synced
            except OSError as error:
                self._end.fail(error)
                raise StoreNotWritable(f"a sync to the disk failed: {error}") from error
        return target

    def after_flush(self, offset: int) -> None:
        """Make messages visible that are durable below `offset`, the result of `flush`; on the event loop."""
        # A result of a flush from before a truncation proves nothing about records that were appended after it.
        self.flushed = max(self.flushed, min(offset, self.synced))
        if self._waits:
            self._show_more()
