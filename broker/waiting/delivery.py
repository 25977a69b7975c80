"""Delivery target of a waiting message: a delayed message, a timer message, or a committed half message.

The record contains its topic and queue (REAL_TOPIC, REAL_QID). It may have waited for days, or come from another
broker, so both are checked against the current table of topics.

    quarantine/<topic>-<queue>-<offset>.record    the record of a message whose delivery failed with an unexpected error
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from broker.store.errors import InternalTopic, MessageIllegal, StoreError
from broker.store.message_store import MessageStore
from infra.disk.filesystem import Disk
from infra.loop.supervisor import Faults
from neve.record.codec import MalformedRecord
from neve.record.properties import PROPERTY_REAL_QUEUE_ID, PROPERTY_REAL_TOPIC
from neve.remoting.names import is_internal

#: Returns the number of queues that consumers read of a topic, None if the topic does not exist.
ReadQueues = Callable[[str], int | None]
#: A message that can never be delivered, because of its topic or its size.
UNDELIVERABLE = (MessageIllegal,)
_QUEUE_DIGITS = 9
#: Errors of the disk, the log or the machine. The message does not cause them, so it is retried until delivery.
TRANSIENT = (OSError, StoreError, MemoryError)
# Failed deliveries with any other error before the message is quarantined. There are ten rounds per second.
TRIES = 20
_QUARANTINE = "quarantine"

log = logging.getLogger(__name__)


def quarantined(disk: Disk, root: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield the files of quarantined messages and their contents; skips files that an operator deletes meanwhile."""
    directory = root / _QUARANTINE
    for name in sorted(disk.list_dir(directory)) if disk.exists(directory) else ():
        with suppress(FileNotFoundError):
            yield directory / name, disk.read(directory / name)


def remove_unfinished(disk: Disk, root: Path) -> None:
    """Remove quarantine files that a crash left unfinished. Their messages are delivered, or quarantined, again."""
    directory = root / _QUARANTINE
    for name in disk.list_dir(directory) if disk.exists(directory) else ():
        if name.startswith(".") and name.endswith(".tmp"):
            disk.remove(directory / name)


class TopicMissing(MessageIllegal):
    """The topic of a waiting message has been deleted."""


def delivery_target(properties: Mapping[str, str], read_queues: ReadQueues) -> tuple[str, int]:
    """Return the topic and queue of a waiting message.

    Consumers read the queues below the topic's readQueueNums. If the topic has shrunk below the message's queue, the
    message is assigned to one of those.

    Raises MessageIllegal if the message is undeliverable: TopicMissing, InternalTopic, or without a valid target.
    """
    topic, queue = properties.get(PROPERTY_REAL_TOPIC, ""), properties.get(PROPERTY_REAL_QUEUE_ID, "0")
    if not topic or not (queue.isascii() and queue.isdigit() and len(queue) <= _QUEUE_DIGITS):
        raise MessageIllegal(f"the message names no topic and queue: {topic!r}, {queue!r}")
    if is_internal(topic):
        raise InternalTopic(f"the message is for the internal topic {topic}")
    count = read_queues(topic)
    if count is None:
        raise TopicMissing(f"topic {topic} does not exist")
    number = int(queue)
    return topic, number if number < count else number % max(count, 1)


class Quarantine:
    """Quarantines messages whose delivery fails with an unexpected error, so that they do not block others.

    Covers messages of one topic. The number of tries is not stored, so it restarts at 0 with the broker.
    """

    def __init__(self, store: MessageStore, topic: str, faults: Faults) -> None:
        self._store, self._topic, self._faults = store, topic, faults
        self._tries: dict[tuple[int, int], int] = {}

    def delivered(self, queue_id: int, offset: int) -> None:
        """Forget the failed deliveries of a message."""
        if self._tries:
            self._tries.pop((queue_id, offset), None)

    def failed(self, kind: str, queue_id: int, offset: int, error: Exception) -> bool:
        """Count a failed delivery; return whether the message is now quarantined and must not be retried.

        Its file is on disk then. Transient errors, or a disk that refuses the file, never cause a quarantine.
        """
        self._faults.add(kind, error, f"queue={queue_id} offset={offset}")
        if isinstance(error, TRANSIENT):
            return False
        place = queue_id, offset
        tries = self._tries[place] = self._tries.get(place, 0) + 1
        if tries < TRIES and not isinstance(error, MalformedRecord):
            return False
        try:
            self._keep(queue_id, offset, tries, error)
        except TRANSIENT as fault:
            self._faults.add("a quarantine file", fault, f"queue={queue_id} offset={offset}")
            return False
        del self._tries[place]
        return True

    def _keep(self, queue_id: int, offset: int, tries: int, cause: Exception) -> None:
        store, disk = self._store, self._store.disk
        entry = store.reader.entry(self._topic, queue_id, offset)
        if entry is None:  # erased meanwhile
            return
        position, size = entry[0], entry[1]
        _, raw = store.log_bytes(position, position + size, size)  # raw bytes, because the record may be undecodable
        directory = store.config.root / _QUARANTINE
        disk.make_dirs(directory)
        path = directory / f"{self._topic}-{queue_id}-{offset}.record"
        disk.write_atomic(path, bytes(raw))
        disk.fsync_dir(directory.parent)
        log.error("message quarantined: %r; tries=%d file=%s position=%d", cause, tries, path, position)
