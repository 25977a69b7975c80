"""Opening a store: what the files say, checked, and made to agree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from broker.store.checkpoint import Checkpoint
from broker.store.consume_queue import ConsumeQueue
from broker.store.errors import StoreCorrupt
from broker.store.recovery import LogScan, Recovered, RecoveryReport, walk_topics, zero_above
from infra.disk import Disk
from neve.record.codec import MessageRecord
from neve.record.properties import PROPERTY_KEYS, PROPERTY_UNIQUE_KEY

if TYPE_CHECKING:
    from broker.store.appender import Appender


def open_store(store: Appender) -> RecoveryReport:
    """Recover a store whose directory is locked."""
    directory, log = store.directory, store.log
    checkpoint = directory.read_checkpoint()
    store.state = directory.read_queue_state()
    log.open()
    log.sweep_evicted()
    store.log_uuid = directory.log_uuid(log_is_empty=not log.files)
    clean = directory.begin()
    report = RecoveryReport(clean)
    strict = checkpoint is not None
    if checkpoint is None:
        clean = report.clean = not log.files
        checkpoint = Checkpoint(log.files[0].base if log.files else 0)
    unsynced = not clean and directory.begin_recovery()
    _load_queues(store, checkpoint.physical, scrub=not clean, unsynced=unsynced)
    store.index.load(checkpoint.index_base, checkpoint.index_count, scrub=not clean)
    store.last_time = checkpoint.store_time
    store.checkpointed = checkpoint.physical
    report.start = report.end = checkpoint.physical
    if log.files:
        _replay(store, checkpoint, report, strict=strict)
    elif checkpoint.physical:
        raise StoreCorrupt(f"the CommitLog reached {checkpoint.physical} and is gone from {log.directory}")
    _lower_marks(store, report.end)
    store.build_index()
    return report


def _lower_marks(store: Appender, end: int) -> None:
    """A deleted topic's mark may lie above a log that lost its end: what comes next there is a new message."""
    above = [topic for topic, mark in store.state.deleted.items() if mark > end]
    if above:
        store.state.deleted.update(dict.fromkeys(above, end))
        store.directory.write_queue_state(store.state)


def clear_store(root: Path, disk: Disk) -> None:
    """Remove a store's files but its `log_uuid`: for a restore that begins again, into which nothing was stored yet.

    Between its steps such a store may be one that no start can open: a log without its checkpoint.
    """
    for name in ("checkpoint", "queue_state", "abort", "recovering"):
        if disk.exists(root / name):
            disk.remove(root / name)
    queues = root / "consumequeue"
    for topic in _names(disk, queues):
        for queue in _names(disk, queues / topic):
            _clear_directory(disk, queues / topic / queue)
            disk.remove_dir(queues / topic / queue)
        disk.remove_dir(queues / topic)
    for name in ("commitlog", "commitlogcrc", "commitlogtable", "index"):
        _clear_directory(disk, root / name)
    disk.fsync_dir(root)


def _clear_directory(disk: Disk, directory: Path) -> None:
    names = _names(disk, directory)
    for name in names:
        disk.remove(directory / name)
    if names:
        disk.fsync_dir(directory)


def _names(disk: Disk, directory: Path) -> list[str]:
    return disk.list_dir(directory) if disk.exists(directory) else []


def _load_queues(store: Appender, below: int, *, scrub: bool, unsynced: bool) -> None:
    """`unsynced`: files may be other than on the disk, so that the next checkpoint has to bring all of them there."""
    disk, root = store.disk, store.config.root / "consumequeue"
    disk.make_dirs(root)
    for topic in disk.list_dir(root):
        for name in disk.list_dir(root / topic):
            if name.isdigit():
                queue = store.add_queue(topic, int(name))
                queue.load(below, scrub=scrub)
                queue.dirty |= unsynced
                if not queue.files:
                    store.drop_queue(queue)
                elif queue.dirty:
                    store.dirty_queues.append(queue)


def _replay(store: Appender, checkpoint: Checkpoint, report: RecoveryReport, *, strict: bool) -> None:
    log = store.log
    first = log.at(checkpoint.physical)
    if first is None:
        raise StoreCorrupt(f"the CommitLog has no file for the checkpoint at {checkpoint.physical}: is one missing?")
    for topic, (physical_offset, store_time) in checkpoint.topics.items():
        _touch(store, topic, physical_offset, store_time)
    for file in log.files:
        if file.end <= first.base:
            file.sealed = True
            if not file.table_written:
                file.topics, file.newest_store_time = walk_topics(file)
    scan = LogScan(
        log,
        report,
        store_time=checkpoint.store_time,
        queue_of=lambda record: _queue_of(store, record),
        code_of=store.config.code_of,
        strict=strict,
    )

    newest = max((store_time for _, store_time in checkpoint.topics.values()), default=0)
    scan.high_time = newest if newest > checkpoint.store_time else 0

    def sealed(file: object) -> None:
        # `sealed` comes with the file of the scan, whose records have all been accepted
        assert scan.file is not None and scan.file is file
        store.last_time, store.high_time = scan.store_time, scan.high_time
        scan.file.topics = store.topics_since(scan.file.base)
        scan.file.newest_store_time = max(scan.store_time, scan.high_time) if scan.file.topics else 0
        scan.high_time = store.high_time = 0

    scan.run(checkpoint.physical, lambda found: _accept(store, found, strict=strict), sealed)
    end_file = scan.file
    assert end_file is not None
    log.forget_table(end_file)
    if not report.clean:
        report.cut_bytes = zero_above(log, end_file, scan.position)
        # What was read is promised from here on, and after a kill it may be in the page cache only.
        for file in log.files:
            if file.end > first.base:
                store.disk.fdatasync(file.path)
                store.disk.fdatasync(file.crc_path)
    else:
        log.drop_after(end_file)  # at most one, prepared ahead and never used
    store.last_time, store.high_time = scan.store_time, scan.high_time
    store.set_end(end_file, scan.position)
    report.end = end_file.base + scan.position


def _queue_of(store: Appender, record: MessageRecord) -> ConsumeQueue | None:
    if record.physical_offset < store.state.deleted.get(record.topic, 0):
        return None
    return store.table.get((record.topic, record.queue_id))


def _touch(store: Appender, topic: str, physical_offset: int, store_time: int) -> None:
    tail = store.tail_of(topic)
    tail.physical_offset, tail.store_time = physical_offset, store_time


def _accept(store: Appender, found: Recovered, *, strict: bool) -> None:
    record = found.record
    _touch(store, record.topic, record.physical_offset, record.store_timestamp)
    if record.physical_offset < store.state.deleted.get(record.topic, 0):
        return
    queue = store.table.get((record.topic, record.queue_id))
    if queue is None:
        queue = store.add_queue(record.topic, record.queue_id)
        queue.create(record.queue_offset, sync=False)
    elif queue.end != record.queue_offset and not strict:
        queue.settle()
        queue.create(record.queue_offset, sync=False)
    if not queue.dirty:
        store.dirty_queues.append(queue)
    queue.append(record.physical_offset, record.size, found.tags_code)
    properties = record.properties
    keys = f"{properties.get(PROPERTY_UNIQUE_KEY, '')} {properties.get(PROPERTY_KEYS, '')}"
    if not keys.isspace():
        store.pending_index.append((record.topic, keys, record.physical_offset, record.store_timestamp))
