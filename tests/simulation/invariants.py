"""Invariants that hold after each start and at the end of every history.

1. Every message that was acknowledged as durable, has not expired and was not deleted is in at least one tier.
2. Both tiers have it byte for byte.
3. No (topic, queue, offset) holds two messages, no CommitLog offset is assigned twice (`StorageModel.put`).
4. The archive tiles each queue: no overlap, and each hole is recorded as a gap (`JournalModel.check_tiles`).
   No offset is both in an object and in a gap.
5. A queue's minimum never decreases, except to a message restored from an older copy (`StorageModel.tell_minimum`).
6. Nothing is deleted before its time (`JournalModel.may_delete`).
7. A fenced writer changes nothing (`JournalModel.follow`, `StorageWorld._fork`).
8. Entry 0 and each checkpoint lead to the same catalog.
9. Eviction removes only archived or expired messages (`StorageModel.evicted`).
10. A superseded process or a reader at any position of the journal has applied all entries below that position
    (`check_position`), even if they were deleted since. At the end an independent `verify` finds nothing.
11. A name is forgotten once no remaining data has one of its offsets (`JournalModel._forget`, `StorageModel.forget`).
12. Neither tier returns messages that a certificate names as erased, for any request (`check_erased`,
    `StorageModel.saw`). A reader of the local log skips no other messages.
13. No start executes a change of the metadata log that a foreign master wrote.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from neve.archive.catalog.catalog import Catalog, Location
from neve.archive.catalog.journal_reader import read_catalog
from neve.archive.catalog.topic_parts import topics_in
from neve.archive.format.checkpoint import CheckpointHead, decode_checkpoint
from neve.archive.format.journal import Checkpoint
from neve.archive.format.keys import checkpoint_key, pack_key, parse_checkpoint_key
from neve.archive.read.verify import verify
from neve.record.codec import decode_record, iter_records
from tests.kit.archive.catalog_state import CatalogState, state_of
from tests.kit.store.by_key import by_key
from tests.simulation.messaging import foreign
from tests.simulation.model import Message, joined
from tests.simulation.process import BROKER, queues_of
from tests.simulation.traffic import ERASED_KEY
from tiered.journal.checkpoints import CHECKPOINTS_KEPT

if TYPE_CHECKING:
    from tests.simulation.world import StorageWorld


def check(world: StorageWorld) -> None:
    """Check that exactly the live messages can be read."""
    foreign.check_tables(world.process.broker)
    model, bucket = world.model, world.bucket
    hot = {place: _read_hot(world, *place) for place in queues_of(world.process.store)}
    for place, held in model.live.items():
        exists = world.process.broker.topics.select(place[0]) is not None
        # Only a restore considers a deletion that may have been recorded.
        sure = {offset: message for offset, message in held.items() if offset >= model.uncertain.get(place, 0)}
        assert exists or not sure or place[0] in world.missing, f"topic {place[0]} is gone"
        for offset, message in (held if exists else sure).items():
            if message.end <= model.promised_end and offset not in hot.get(place, ()):
                _check_cold(world, message)
    for key, name in bucket.live.items():
        for queue, offset, record in world.rows(key):
            if offset >= bucket.minimums.get((name.topic, queue), 0):
                model.saw(name.topic, queue, offset, record)
    bucket.check_tiles()
    check_erased(world)
    _check_catalogs(world)


def check_erased(world: StorageWorld) -> None:
    """Check that no read of the local log returns an erased message: by physical offset, by key or by queue offset."""
    store, given, by_number = world.process.store, world.model.given, world.model.by_number
    for place in world.model.certified:
        is_deleted = place[2] < store.queues.min_offset(*place[:2])  # A queue's file may still have its entry.
        assert is_deleted or store.reader.entry(*place) is None, f"{place} was erased, and its entry is returned"
        message = by_number[given[place]]
        raw = store.reader.shown_record_at(message.physical)
        assert raw != message.record, f"{place} was erased, and is returned by its place, {message.physical}"
    _check_covered(world)
    for topic in {place[0] for place in world.model.certified}:
        for raw in by_key(store, topic, ERASED_KEY, 64, 0, 1 << 62):
            record = decode_record(raw)
            place = record.topic, record.queue_id, record.queue_offset
            is_it = place in world.model.certified and by_number[given[place]].record == raw
            assert not is_it, f"{place} was erased, and is returned by its key"


def _check_covered(world: StorageWorld) -> None:
    """Check that a complete certificate covers all messages with the key, also unarchived ones of deleted topics."""
    store, model = world.process.store, world.model
    covered = [model.by_number[number] for number in sorted(model.unreadable)]
    for message in covered:
        raw = store.reader.shown_record_at(message.physical)
        assert raw != message.record, f"a complete certificate covers message {message.number}, returned by its place"
    records = {message.record for message in covered}
    for topic in sorted({message.topic for message in covered}):
        found = [raw for raw in by_key(store, topic, ERASED_KEY, 64, 0, 1 << 62) if raw in records]
        assert not found, f"{topic}: a complete certificate covers {len(found)} messages that are returned by their key"


def _read_hot(world: StorageWorld, topic: str, queue: int) -> set[int]:
    store = world.process.store
    found: set[int] = set()
    offset, end = store.queues.min_offset(topic, queue), store.queues.max_offset(topic, queue)
    while offset < end:
        result = store.reader.get(topic, queue, offset, 32, 1 << 20)
        where = f"{topic}/{queue}/{offset}: {result.status}"
        assert result.status in {"FOUND", "NO_MATCHED_MESSAGE"}, f"{where}, the queue ends at {end}"
        assert offset < result.next_offset <= end, f"{where}, it goes on at {result.next_offset}"
        seen: set[int] = set()
        for buffer in result.buffers:
            begin = 0
            for record in iter_records(buffer):
                at = record.queue_offset
                world.model.saw(topic, queue, at, bytes(buffer[begin : begin + record.size]))
                assert offset <= at < result.next_offset and at not in seen, f"{where}: {at}"
                seen.add(at)
                begin += record.size
        passed = set(range(offset, result.next_offset)) - seen
        wrong = [at for at in passed if (topic, queue, at) not in world.bucket.erased]
        assert not wrong, f"{where}: of {wrong} nothing was returned, and nobody erased it"
        found |= seen
        offset = result.next_offset
    return found


def _check_cold(world: StorageWorld, message: Message) -> None:
    where = f"{message.topic}/{message.queue}/{message.offset}, message {message.number}"
    found = world.process.journal.catalog.find(message.topic, message.queue, message.offset)
    assert isinstance(found, Location), f"{where} is in neither tier: {found}"
    rows = {(queue, offset): record for queue, offset, record in world.rows(found.name.key)}
    assert rows[message.queue, message.offset] == message.record, f"{where} is not what was sent"


def _check_catalogs(world: StorageWorld) -> None:
    """Compare the catalogs, including the broker's own if it has read the whole journal."""
    entries, objects = world.bucket.entries, world.bucket_store.objects
    whole = Catalog()
    for seq, entry in enumerate(entries):
        whole.apply(seq, entry)
    expected = _in_order(state_of(whole, BROKER))
    for place in {*world.bucket.gaps, *world.bucket.spans}:
        told, nowhere = whole.queue(*place).gap_spans(), world.bucket.nowhere(place)
        asked = world.bucket.lowest(place)
        shown = joined((max(first, asked), last) for first, last in told if last >= asked)
        wanted = joined((max(first, asked), last) for first, last in nowhere if last >= asked)
        assert shown == wanted, f"{place}: the catalog's gaps are {told}, not {nowhere}, from {asked} on"
        assert joined([*told, *nowhere]) == nowhere, f"{place}: {told} has more than {nowhere}"
        apart = all(before[1] < after[0] for before, after in pairwise(told))
        assert apart, f"{place}: an offset is in two gaps: {told}"
    heads = [seq for seq, number in filter(None, map(parse_checkpoint_key, objects)) if number is None]
    for entry in entries:
        key = checkpoint_key("", BROKER, entry.through_seq) if isinstance(entry, Checkpoint) else ""
        if isinstance(entry, Checkpoint) and key in objects:
            short = Catalog()
            head = decode_checkpoint(objects[key][0], BROKER, entry.through_seq)
            assert isinstance(head, CheckpointHead)
            if not all(pack_key("", BROKER, *name) in objects for name in head.sizes()):
                # A dropped checkpoint is deleted pack by pack before its head; a reader that misses a pack uses the
                # previous checkpoint.
                newer = sum(seq > entry.through_seq for seq in heads)
                assert newer >= CHECKPOINTS_KEPT, f"{key} lacks packs, and is one of the newest"
                continue
            short.restore(head, topics_in(head, lambda name: objects[pack_key("", BROKER, *name)][0]))
            for later in range(entry.through_seq + 1, len(entries)):
                short.apply(later, entries[later])
            assert _in_order(state_of(short, BROKER)) == expected, f"{key} leads elsewhere"
    mine = world.process.journal.catalog
    if mine.next_seq == whole.next_seq:
        assert _in_order(state_of(mine, BROKER)) == expected, "the broker's catalog is another one"


def check_position(world: StorageWorld, catalog: Catalog) -> None:
    """Check that the state equals the sum of the entries below its position."""
    entries = world.bucket.entries
    assert catalog.next_seq <= len(entries), f"entry {catalog.next_seq - 1} was never appended"
    then = Catalog()
    for seq, entry in enumerate(entries[: catalog.next_seq]):
        then.apply(seq, entry)
    expected = _in_order(state_of(then, BROKER))
    assert _in_order(state_of(catalog, BROKER)) == expected, f"entries before {catalog.next_seq} give another state"


def check_as_a_stranger(world: StorageWorld) -> None:
    """Check the view of a reader that knows only the bucket."""
    source = world.quiet_store()
    catalog = read_catalog(source, BROKER)
    assert catalog.next_seq == len(world.bucket.entries), "a reader finds another end of the journal"
    check_position(world, catalog)
    report = verify(catalog, source)
    assert report.ok, f"verify finds {report}"


def _in_order(state: CatalogState) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(value[key]) for key in sorted(value) if value[key] not in ({}, [])}
        return sorted(map(repr, value)) if isinstance(value, list) else value

    return {name: plain(getattr(state, name)) for name in vars(state)}
