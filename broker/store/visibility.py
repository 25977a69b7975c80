"""What readers see: a message is appended, then synced, then shown.

    appended   it is in the log and in its queue; readers stop below it
    synced     a flush has brought it to the disk
    shown      it is confirmed: at the append (ASYNC_FLUSH), or once the loop knows that it is synced (SYNC_FLUSH)

Invariant: confirmed <= appended always, flushed <= synced <= appended; under SYNC_FLUSH confirmed <= flushed. What is
confirmed stays so, and who asked to be told hears of each message once, in the order of the log.

`flush` is made for a thread of its own: senders wait for it, and it waits for nothing but the log. The rest runs on the
loop. A broker that waits for replicas would wait here, between synced and shown.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from broker.store.commit_log import CommitLog
from broker.store.config import SYNC_FLUSH, StoreConfig
from broker.store.consume_queue import ConsumeQueue
from broker.store.errors import StoreNotWritable
from broker.store.log_end import LogEnd
from infra import failpoint
from infra.disk import OutOfDescriptors
from infra.locks import NewLock, new_lock

log = logging.getLogger(__name__)

# Queue, queue offset and tags code of a message that readers see from now on.
VisibleEntry = tuple[ConsumeQueue, int, int]
AppendCallback = Callable[[list[VisibleEntry]], None]


class Visibility:
    """See the module."""

    def __init__(self, config: StoreConfig, log: CommitLog, end: LogEnd, new_lock: NewLock = new_lock) -> None:
        self._log, self._end = log, end
        self._waits_for_sync = config.flush_disk_type == SYNC_FLUSH
        self._callbacks: list[AppendCallback] = []
        self._unconfirmed: deque[tuple[int, list[VisibleEntry]]] = deque()
        self._flushing = new_lock()
        self._confirmed = 0
        self.flushed = 0  # the loop knows that what lies below is on the disk
        self.synced = 0  # it is; written by whoever flushes

    def adopt(self, end: int) -> None:
        """All that a start found is promised."""
        self._confirmed = self.flushed = self.synced = end

    def tell(self, callback: AppendCallback) -> None:
        """Call back with all messages that readers see from then on."""
        self._callbacks.append(callback)

    @property
    def confirmed(self) -> int:
        """Readers see what lies below."""
        return self._confirmed if self._waits_for_sync else self._end.appended

    @property
    def is_behind(self) -> bool:
        """Whether something is appended that readers don't see yet."""
        return bool(self._unconfirmed)

    @property
    def is_dirty(self) -> bool:
        """Whether there is something to flush, or a failure to tell."""
        return self._end.appended > self.flushed or self._end.failure is not None

    def appended(self, shown: list[VisibleEntry]) -> None:
        """These end where the log does now."""
        if self._waits_for_sync:
            self._unconfirmed.append((self._end.appended, shown))
        else:
            self._show(shown)

    def _show(self, shown: list[VisibleEntry]) -> None:
        for queue, queue_offset, _ in shown:
            queue.visible = queue_offset + 1
        for callback in self._callbacks:
            callback(shown)

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
        assert offset <= self.synced, "only a flush knows what is on the disk"
        self.flushed = max(self.flushed, offset)
        if self._waits_for_sync:
            self._confirmed = max(self._confirmed, offset)
            waiting = self._unconfirmed
            while waiting and waiting[0][0] <= offset:
                self._show(waiting.popleft()[1])
