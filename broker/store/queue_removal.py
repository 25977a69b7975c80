"""Removal of the files of deleted queues, on a thread.

The event loop decides: it drops the queues from the table, and creates a queue state (`queue_state`) in which their
records no longer belong to the topic. Once that state is durable, the thread removes the files:

    moved      the directory of the topic, or of a single queue, is renamed into consumequeue.removed/
    unlinked   its files, then its directories

A queue of the same name may be created at any time: `make_way` first moves the old directory. A crash at any point
leaves directories whose records lie below the topic's mark. A start passes them to this module again, and never loads
queues from consumequeue.removed/.
"""

from __future__ import annotations

import errno
import itertools
import logging
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from broker.store.config import StoreConfig
from infra import failpoint
from infra.disk.filesystem import Disk, OutOfDescriptors
from infra.loop.locks import Lock, NewLock, new_lock

log = logging.getLogger(__name__)

# Queue directories that one `run` removes, because the next checkpoint waits for the end of the run.
_QUEUES_AT_ONCE = 1024
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Open(Protocol):
    """A deleted queue whose files may still be mapped."""

    def close(self) -> None:
        """Unmap its files."""


class _Topic:
    """Deleted queues of one topic whose files still exist."""

    __slots__ = ("open", "queues", "state")

    def __init__(self, queues: set[str] | None, state: int, open_queues: list[Open]) -> None:
        self.queues = queues  # None: the whole directory of the topic
        self.state = state  # number of the state image that must be durable first
        self.open = open_queues  # closed by the thread one by one, because thousands of them take time


class QueueRemoval:
    """Pending removals. The event loop adds them; one thread at a time calls `run`."""

    def __init__(self, config: StoreConfig, disk: Disk, new_lock: NewLock = new_lock) -> None:
        self._disk = disk
        self._root = config.root / "consumequeue"
        self._removed = config.root / "consumequeue.removed"
        self._lock = new_lock()  # held only for single renames and unlinks, so that the event loop may wait for it
        self._running = new_lock()
        self._is_left = False
        self._topics: dict[str, _Topic] = {}
        self._files: deque[Path] = deque()
        self._moved: deque[Path] = deque()
        self._numbers = itertools.count(1)
        self._listed: Path | None = None  # the directory that is being emptied, and the rest of its content
        self._queues: list[str] = []

    # -- on the loop

    def load(self) -> None:
        """Find the remains of the last run in consumequeue.removed/. The table adds those it finds among the queues."""
        self._topics.clear()
        self._files.clear()
        self._disk.make_dirs(self._removed)
        names = sorted(int(name) for name in self._disk.list_dir(self._removed) if name.isdigit())
        self._moved = deque(self._removed / str(number) for number in names)
        self._listed = None
        self._numbers = itertools.count(max(names, default=0) + 1)

    def add(self, topic: str, queues: set[str] | None, *, state: int, open_queues: Iterable[Open] = ()) -> None:
        """Remove queues of a topic, or its whole directory if `queues` is None, once state image `state` is durable."""
        with self._lock:
            before = self._topics.get(topic)
            kept = [] if before is None else before.open
            if before is not None:
                queues = None if before.queues is None or queues is None else before.queues | queues
            self._topics[topic] = _Topic(queues, state, [*kept, *open_queues])
            self._files = deque(file for file in self._files if not self._includes(file, topic, queues))

    def _includes(self, file: Path, topic: str, queues: set[str] | None) -> bool:
        directory = file.parent
        return directory.parent.name == topic and (queues is None or directory.name in queues)

    def add_file(self, path: Path) -> None:
        """Remove a file of an existing queue: all its records are below the first offset of the log."""
        with self._lock:
            self._files.append(path)

    def state_needed(self, topic: str) -> int:
        """Return the number of the state image that must be durable before a queue of the topic is created, or 0."""
        found = self._topics.get(topic)
        return 0 if found is None else found.state

    def make_way(self, topic: str, queue_id: int) -> None:
        """Move the directory of an earlier queue of this name, before a new one is created. Raises OSError."""
        if topic not in self._topics:
            return
        with self._lock:
            found, name = self._topics.get(topic), str(queue_id)
            if found is None:
                return
            if found.queues is None:
                self._move_topic(topic)
            elif name in found.queues:
                self._move_queue(topic, name, found.queues)

    @property
    def is_pending(self) -> bool:
        """Whether `run` has work to do."""
        return bool(self._topics or self._files or self._moved)

    def is_pending_of(self, topic: str) -> bool:
        """Return whether deleted queues of this topic are still in its directory."""
        return topic in self._topics

    def pause_lock(self) -> Lock:
        """Return a lock; while it is held, no thread removes anything."""
        return self._running

    def leave(self) -> None:
        """Stop removing, because another object continues with the same directory.

        The caller holds `pause_lock`.
        """
        self._is_left = True

    # -- on a thread

    def run(self, written: int) -> None:
        """Remove a bounded number of queues. `written` is the number of the newest durable state image.

        Raises OSError. A lack of descriptors or disk space raises nothing: the next call tries again.
        """
        with self._running:
            if self._is_left:
                return
            try:
                self._remove_files()
                self._move_deleted(written)
                for _ in range(_QUEUES_AT_ONCE):
                    try:
                        if not self._remove_moved():
                            break
                    except FileNotFoundError as error:  # an operator removed it
                        log.warning("files of a deleted queue do not exist: error=%s", error)
                        self._moved.popleft()
                        self._listed = None
            except OSError as error:
                if not isinstance(error, OutOfDescriptors) and error.errno not in _FULL:
                    raise
                log.warning("deleted queues can't be removed now, they are removed later: error=%s", error)

    def _remove_files(self) -> None:
        while True:
            with self._lock:
                if not self._files:
                    return
                with suppress(FileNotFoundError):  # its directory was moved meanwhile
                    self._disk.remove(self._files[0])
                self._files.popleft()

    def _move_deleted(self, written: int) -> None:
        """Free the names, and make that durable with one sync for each affected directory."""
        changed: set[Path] = set()
        ready = [topic for topic, found in list(self._topics.items()) if found.state <= written]
        for topic in ready:
            for _ in range(_QUEUES_AT_ONCE):
                with self._lock:
                    found = self._topics.get(topic)
                    if found is None or found.state > written:
                        break
                    open_queues, found.open = found.open, []
                    if found.queues is None:
                        changed.add(self._root)
                        self._move_topic(topic)
                    else:
                        changed.add(self._root / topic)
                        self._move_queue(topic, next(iter(found.queues), ""), found.queues)
                while open_queues:
                    open_queues.pop().close()
        failpoint.hit("store.queues_moved")
        for directory in changed:
            with suppress(FileNotFoundError):
                self._disk.fsync_dir(directory)

    def _move_topic(self, topic: str) -> None:
        self._move(self._root / topic, self._removed / str(next(self._numbers)))
        del self._topics[topic]

    def _move_queue(self, topic: str, name: str, queues: set[str]) -> None:
        if name:
            target = self._removed / str(next(self._numbers))
            self._disk.make_dirs(target)
            self._move(self._root / topic / name, target / name, listed=target)
            queues.discard(name)
        if not queues:
            del self._topics[topic]

    def _move(self, source: Path, target: Path, listed: Path | None = None) -> None:
        if self._disk.exists(source):
            self._disk.rename(source, target)
        if self._disk.exists(listed or target):
            self._moved.append(listed or target)

    def _remove_moved(self) -> bool:
        """Remove one moved queue directory; return False if there is none."""
        if not self._moved:
            return False
        directory = self._moved[0]
        if self._listed != directory:
            self._listed, self._queues = directory, self._disk.list_dir(directory)
        if not self._queues:
            self._disk.remove_dir(directory)
            self._moved.popleft()
            self._listed = None
            return True
        queue = directory / self._queues[-1]
        for name in self._disk.list_dir(queue):
            self._disk.remove(queue / name)
        failpoint.hit("store.queue_unlinked")
        self._disk.remove_dir(queue)
        self._queues.pop()
        return True
