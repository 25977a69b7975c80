"""What readers see: a message is appended, then synced, then confirmed by its broker set, then shown.

    appended    it is in the log and in its queue; readers stop below it
    synced      a flush has brought it to the disk: under SYNC_FLUSH nothing is shown before
    confirmed   enough members of the set have it, where there is a set: who knows how far, tells by `confirm`
    shown       at the append already, where neither has to be waited for (ASYNC_FLUSH, no set)

Invariant: shown <= appended always, flushed <= synced <= appended; under SYNC_FLUSH shown <= flushed, in a set
shown <= what it has confirmed. What is shown stays so, and who asked to be told hears of each message once, in the
order of the log.

`flush` is made for a thread of its own: senders wait for it, and it waits for nothing but the log. The rest runs on the
loop.
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

# Queue, queue offset and tags code of a message that readers see from now on.
VisibleEntry = tuple[ConsumeQueue, int, int]
AppendCallback = Callable[[list[VisibleEntry]], None]


# No set has to confirm anything.
_ALONE = 1 << 62
# What becomes visible together: where it ends in the log, the messages, and where each of them ends. A sender's have no
# ends of their own: nobody else would see a part of them.
Run = tuple[int, list[VisibleEntry], Sequence[int]]


class Visibility:
    """See the module."""

    def __init__(self, config: StoreConfig, log: CommitLog, end: LogEnd, new_lock: NewLock = new_lock) -> None:
        self._log, self._end = log, end
        self.waits_for_sync = config.flush_disk_type == SYNC_FLUSH
        self._set_has = _ALONE
        self._waits = self.waits_for_sync
        self._callbacks: list[AppendCallback] = []
        self._hidden: deque[Run] = deque()
        self._flushing = new_lock()
        self._shown = 0
        self.flushed = 0  # the loop knows that what lies below is on the disk
        self.synced = 0  # it is; written by whoever flushes

    def adopt(self, end: int) -> None:
        """All that a start found is promised."""
        self._shown = self.flushed = self.synced = end
        self._hidden.clear()
        if self._set_has != _ALONE:
            self._set_has = min(self._set_has, end)

    def take_over(self, other: Visibility) -> None:
        """Show what another one does, whose log and queues are this one's from here on.

        Also show messages that were confirmed meanwhile. For the holder of `standing_still`.
        """
        confirmed = min(self._set_has, other.synced)
        self._hidden, self._shown, self._set_has = other._hidden, other._shown, other._set_has
        self.flushed, self.synced = other.flushed, other.synced
        if confirmed > self._set_has:
            self.confirm(confirmed)

    def hide_above(self, offset: int) -> None:
        """Read no record of the log above an offset: its tail is cut off."""
        self._shown = min(self._shown, offset)

    def hide(self, confirmed: int, runs: Iterable[Run]) -> None:
        """Of what a start found the set has confirmed so much; `runs` are what lies above."""
        assert not self._hidden and self._set_has in {_ALONE, confirmed}
        self._set_has, self._waits = confirmed, True
        self._shown = min(self._shown, confirmed)
        for run in runs:
            for queue, queue_offset, _ in run[1]:
                queue.visible = min(queue.visible, queue_offset)
            self._hidden.append(run)

    def standing_still(self) -> Lock:
        """While it is held, no thread syncs the log."""
        return self._flushing

    @property
    def set_has(self) -> int | None:
        """How far the set has confirmed; None: there is none."""
        return None if self._set_has == _ALONE else self._set_has

    def tell(self, callback: AppendCallback) -> None:
        """Call back with all messages that readers see from then on."""
        self._callbacks.append(callback)

    @property
    def confirmed(self) -> int:
        """Readers see what lies below."""
        return self._shown if self._waits else self._end.appended

    @property
    def is_behind(self) -> bool:
        """Whether something is appended that readers don't see yet."""
        return bool(self._hidden)

    @property
    def is_dirty(self) -> bool:
        """Whether there is something to flush, or a failure to tell."""
        return self._end.appended > self.flushed or self._end.failure is not None

    # -- a set's

    def join_set(self, confirmed: int) -> None:
        """From now on readers see no further than the set has confirmed. What they see already stays."""
        assert self._set_has == _ALONE
        self._shown = self.confirmed
        self._set_has, self._waits = max(confirmed, self._shown), True
        self._show_more()

    def confirm(self, offset: int) -> None:
        """The set has what lies below; it never takes that back, and a lower offset says nothing new."""
        assert self._set_has != _ALONE, "who is in no set has nothing confirmed"
        if offset > self._set_has:
            self._set_has = offset
            self._show_more()

    def leave_set(self) -> None:
        """From now on readers see what this broker alone would show."""
        self._set_has = _ALONE
        self._show_more()
        self._waits = self.waits_for_sync

    # -- messages

    def appended(self, messages: list[VisibleEntry], ends: Sequence[int] = ()) -> None:
        """These end where the log does now."""
        if not self._waits:
            self._show(messages)
            return
        self._hidden.append((self._end.appended, messages, ends))
        if self._set_has >= self._end.appended and not self.waits_for_sync:
            self._show_more()  # a slave that is behind: all that comes is confirmed long since

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
        """Bring the log to the disk; returns the offset to hand to `after_flush`. For a thread.

        A sync that failed is never tried again: the kernel may have dropped the pages. Raises `StoreNotWritable`.
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
            except OutOfDescriptors as error:  # no sync has failed: what was not begun comes with the next flush
                log.warning("the log is not synced until files can be opened again: %s", error)
                return self.synced
            except OSError as error:
                self._end.fail(error)
                raise StoreNotWritable(f"a sync to the disk failed: {error}") from error
        return target

    def after_flush(self, offset: int) -> None:
        """On the loop, after `flush` returned `offset`: show what is confirmed by it."""
        # What a flush returned before the log was cut says nothing of what has been appended there since.
        self.flushed = max(self.flushed, min(offset, self.synced))
        if self._waits:
            self._show_more()
