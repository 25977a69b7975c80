"""A message store as the hot log of an archive's jobs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from broker.store.erased_rows import at_once, hide
from broker.store.message_store import MessageStore
from infra.clock import SystemClock
from infra.disk.filesystem import RealDisk
from infra.loop import in_steps
from infra.objects.open import open_store
from lifecycle.hot_store import Hidden, LogSegment
from lifecycle.lifecycle import ArchiveLifecycle
from lifecycle.retention import RetentionPolicy
from lifecycle.safe_clock import SafeClock
from tests.kit.archive.one_by_one import OneByOne
from tiered.journal.writer import JournalWriter
from tiered.worker.client import WorkerClient
from tiered.write.entry_run import EntryRun
from tiered.write.offload_plan import TopicUnreadable

HOST = ("127.0.0.1", 10911)


class StoreAdapter(OneByOne):
    """Passes to the lifecycle what a broker would, without the switch to its event loop."""

    def __init__(self, store: MessageStore) -> None:
        self.store = store

    def segments(self) -> Sequence[LogSegment]:
        return self.store.reader.segments()

    def flush(self) -> int:
        self.store.after_flush(self.store.visibility.flush())
        return min(self.store.visibility.flushed, self.store.visibility.confirmed)

    def confirmed_range(self) -> tuple[int, int]:
        return self.store.min_physical_offset, self.store.visibility.confirmed

    def roll(self) -> bool:
        self.store.end.roll()
        return True

    def evict(self, base: int) -> bool:
        return self.store.take_out(base)()

    def topics(self) -> Sequence[str]:
        return sorted(self.store.queues.topics())

    def queues_of(self, topic: str) -> Sequence[int]:
        return self.store.queues.names_of(topic)

    def deleted_topics(self) -> Sequence[str]:
        return self.store.queues.records.deleted()

    def forget_deleted(self, topics: Collection[str]) -> int:
        image = self.store.queue_changes.image_without(topics)
        if image is None:
            return 0
        self.store.queues.records.write(image)
        return self.store.queue_changes.forget_deleted(image)

    def deleted_below(self) -> Mapping[str, Mapping[int, int]]:
        return self.store.queues.records.ended()

    def first_offsets(self, topic: str, start: int) -> Mapping[int, int]:
        return self.store.reader.first_offsets(topic, start)

    def min_offset(self, topic: str, queue: int) -> int:
        return self.store.queues.min_offset(topic, queue)

    def expire_below(
        self, rising: Mapping[str, Mapping[int, int]], before: Mapping[str, int]
    ) -> Mapping[str, TopicUnreadable]:
        for topic, offsets in rising.items():
            in_steps.at_once(self.store.queue_changes.expire_below(topic, offsets, before[topic]))
        self.store.queue_changes.save()
        return {}

    def hide_erased(self, rows: Iterable[tuple[str, int, int, int]]) -> Hidden:
        hidden = hide(self.store, rows, at_once)
        self.store.queue_changes.save()
        return Hidden(hidden.runs, hidden.failed)

    def former_ends(self, topics: Collection[str]) -> Mapping[str, int]:
        return self.store.reader.former_ends(topics)

    def log_erased(self, rows: Sequence[tuple[str, int, int, int]]) -> None:
        raise AssertionError("nothing waits for delivery here")

    def quarantined(self, text: bytes) -> Iterator[tuple[str, bytes]]:
        yield from ()

    def remove_quarantined(self, name: str) -> None:
        raise AssertionError("nothing is quarantined here")

    def search_log(self, ranges: Mapping[str, tuple[int, int]], text: bytes) -> Iterator[bytes | None]:
        raise AssertionError("no topic is deleted here")

    def erased(self, topic: str) -> Mapping[int, Sequence[tuple[int, int]]]:
        return {queue: self.store.queues.records.erased_of(topic, queue) for queue in self.store.queues.names_of(topic)}

    def show_from(self, topic: str, queue: int, offset: int) -> int:
        return self.store.queue_changes.show_from(topic, queue, offset)

    def offset_by_time(self, topic: str, queue: int, time_ms: int, upper: bool) -> int:
        return in_steps.at_once(self.store.reader.offset_by_time(topic, queue, time_ms, upper))

    def store_time(self, topic: str, queue: int, offset: int) -> int:
        return self.store.reader.store_time(topic, queue, offset)

    def entries(self, topic: str, start: int, end: int) -> Mapping[int, EntryRun]:
        return self.store.reader.entries(topic, start, end)

    def files(self, start: int, end: int) -> Sequence[tuple[str, int, int]]:
        return self.store.reader.files(start, end)

    def undelivered_from(self) -> int | None:
        return None

    def reappend_waiting(self, below: int) -> None:
        """Do nothing: no messages wait here."""

    def pinned_from(self) -> int | None:
        return None

    def disk_ratio(self) -> float:
        return 0.1


def put(store: MessageStore, topic: str, queue: int, count: int) -> None:
    for number in range(count):
        body = f"{topic}-{queue}-{number}-".encode() * (number % 50)
        store.put(
            topic,
            queue,
            body,
            b"KEYS\x01k%d\x02TAGS\x01a\x02" % number,
            flag=0,
            sys_flag=0,
            born_timestamp=1,
            born_host=HOST,
        )


def start(
    tmp_path: Path, store_url: str, hot: StoreAdapter, worker: WorkerClient
) -> tuple[JournalWriter, ArchiveLifecycle]:
    store = hot.store
    journal = JournalWriter(
        open_store(store_url), "", "b", store.log_uuid, local=tmp_path / "tier", disk=RealDisk(), clock=SystemClock()
    )
    assert journal.ownership.attach(store.max_physical_offset).resume_at is None
    return journal, ArchiveLifecycle(hot, journal, worker, RetentionPolicy, SystemClock(), SafeClock(SystemClock()))
