"""The catalog of one topic. One thread writes; any thread makes the queries of a pull without a lock.

Live objects are packed in blocks in log order; the last block is open and takes new objects. An entry that concerns
older objects rebuilds the blocks it touches. Expired objects stay in blocks of their own until they are deleted.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from neve.archive.catalog.name_blocks import Block, blocks_of, closed, with_names
from neve.archive.catalog.queue_runs import NO_SPANS, QueueRuns, spans_of, touching, united, without
from neve.archive.format.checkpoint import PartPlace
from neve.archive.format.journal import CommittedObject, Gap, Topic

#: Object keys of an entry, each with the CommitLog offset at which its object starts; None if the key does not tell.
Keys = Mapping[str, int | None]


#: A topic with at most this many ranges (one for each queue of a block) finds the blocks of a queue when a reader asks.
#: With more ranges the search would delay a broker's loop, which asks for each of its queues after each entry.
LAID_WHEN_ASKED = 256


class BlockRun(NamedTuple):
    """Neighbouring blocks, and their place in a checkpoint if they are stored there as one part."""

    blocks: tuple[Block, ...]
    place: PartPlace | None


class TopicView:
    """The objects, gaps and queues of a topic, for readers."""

    __slots__ = (
        "_is_laid", "blocks", "count", "covered", "entry", "expiring", "gaps", "is_named", "own", "queues",
        "runs", "through", "topic",
    )  # fmt: skip

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.blocks: tuple[Block, ...] = ()  # objects in the readers' view
        self.count = 0
        self.expiring: tuple[tuple[int, Block], ...] = ()  # (deletion time in ms, expired objects)
        self.queues: dict[int, QueueRuns] = {}
        # The CommitLog offset below which everything is archived or recorded as a gap; None before the first round.
        self.through: int | None = None
        # Ranges above `through` that an object covers or covered. Such an object may expire and be deleted before the
        # objects below it are committed, and its range must not be archived again.
        self.covered: set[tuple[int, int]] | None = None
        self.entry: Topic | None = None
        self.gaps: list[Gap] = []  # appended to in place; any other change makes a new list
        self.is_named = False  # whether an entry named an offset
        self._is_laid = False  # whether the queues hold their spans, instead of searching the blocks
        self.own: PartPlace | None = None  # its main part in the checkpoint; None once it has changed
        self.runs: tuple[BlockRun, ...] = ()  # from the first block on, as in that checkpoint

    @property
    def is_listed(self) -> bool:
        """Whether the topic has an object in view, a `through` or a TOPIC entry."""
        return bool(self.blocks) or self.through is not None or self.entry is not None

    def names(self) -> Iterator[CommittedObject]:
        """Yield the live objects of this instant in log order; blocks are unpacked one after another."""
        return _names(self.blocks)

    def blocks_within(self, begin: int, end: int) -> list[Block]:
        """Return the blocks that may contain an object with its CommitLog range in [begin, end)."""
        return [block for block in self.blocks if block.last_begin >= begin and block.begin < end]

    def names_since(self, time_ms: int) -> Iterator[CommittedObject]:
        """Yield, in log order, the live objects of blocks that contain a row group stored at or after a time."""
        return _names([block for block in self.blocks if block.newest_ms >= time_ms])

    def names_within(self, start: int | None, end: int | None) -> Iterator[CommittedObject]:
        """Yield, in log order, the live objects of blocks that may contain a row group of [start, end)."""
        return _names([block for block in self.blocks if block.may_be_of(start, end)])

    def named_offsets(self) -> dict[int, int]:
        """Return for each queue the highest named offset."""
        return {held.queue: held.named for held in list(self.queues.values()) if held.named is not None}

    def expiring_names(self) -> Iterator[tuple[int, CommittedObject]]:
        """Yield (deletion time in ms, object) of the expired objects of this instant."""
        blocks = self.expiring
        return ((after, name) for after, block in blocks for name in block.names())

    def expiring_near(self, spans: Mapping[int, Sequence[tuple[int, int]]]) -> Iterator[tuple[int, CommittedObject]]:
        """Yield as `expiring_names`, but only from blocks that may contain a row of these ordered, disjoint spans."""
        blocks = [one for one in self.expiring if _may_hold(one[1], spans)]
        return ((after, name) for after, block in blocks for name in block.names())

    def due(self, now_ms: int) -> list[str]:
        """Return the keys of expired objects that may be deleted by now, sorted."""
        return sorted(key for after, block in self.expiring if after <= now_ms for key in block.name_keys())

    def due_of(self, keys: Keys, now_ms: int) -> list[str]:
        """Return those of these keys whose objects may be deleted by now; other blocks are not read."""
        starts = _starts(keys)
        due = (block for after, block in self.expiring if after <= now_ms and _may_have(block, starts))
        return [key for block in due for key in block.name_keys() if key in keys]

    def stays_until(self, name: CommittedObject) -> int | None:
        """Return the time after which an expired object may be deleted; None if it is live or deleted."""
        there = (one for one in self.expiring if one[1].begin <= name.start <= one[1].last_begin)
        return next((after for after, block in there if any(name.key == one.key for one in block.kept_names())), None)

    def names_at(self, physical_offset: int) -> Iterator[CommittedObject]:
        """Yield the live objects whose CommitLog range contains an offset."""
        return _names_at(self.blocks, physical_offset)

    def around(self, name: CommittedObject) -> list[CommittedObject]:
        """Return the live and expired objects whose CommitLog range contains the start of an object."""
        expired = _names_at((block for _, block in self.expiring), name.start)
        return [*self.names_at(name.start), *expired]

    def is_live(self, key: str, start: int) -> bool:
        """Return whether the object with this key, which starts at `start`, is in view."""
        return any(key == name.key for block in _around(self.blocks, start) for name in block.kept_names())

    def has(self, key: str, start: int | None) -> bool:
        """Return whether an object is live or expired and not deleted; `start` is None if the key does not tell."""
        expiring = [block for _, block in self.expiring]
        if start is None:
            return any(key == name.key for block in (*self.blocks, *expiring) for name in block.kept_names())
        there = (block for block in expiring if block.begin <= start <= block.last_begin)
        return self.is_live(key, start) or any(key == name.key for block in there for name in block.kept_names())

    def may_expire(self, newest_ms: int) -> bool:
        """Return False if no row group of the oldest block is of that time or older; nothing is unpacked."""
        return bool(self.blocks) and self.blocks[0].soonest_ms <= newest_ms

    def next_uncovered(self, offset: int) -> tuple[int, int | None]:
        """Return the first uncovered CommitLog offset from `offset` on, and the start of the next covered range."""
        offset = max(offset, self.through or 0)
        for start, end in sorted(self.covered or ()):
            if start > offset:
                return offset, start
            offset = max(offset, end)
        return offset, None

    def nothing_below(self) -> dict[int, int]:
        """Return for each queue the offset below which it has expired and no live or expiring object remains."""
        lowest: dict[int, int] = {}
        for block in (*self.blocks, *(block for _, block in self.expiring)):
            for queue, first, _ in block.queues():
                lowest[queue] = min(first, lowest.get(queue, first))
        return {queue: min(held.minimum, lowest.get(queue, held.minimum)) for queue, held in list(self.queues.items())}


class TopicCatalog(TopicView):
    """A topic that one thread changes."""

    __slots__ = ()

    # ---- entries

    def commit(self, names: Sequence[CommittedObject], through: int | None, lowest_open: int | None) -> None:
        """Publish objects.

        Args:
            names: the objects.
            through: the settled CommitLog offset that the entry states, if any.
            lowest_open: the lowest start of the objects that the round leaves open, if any.
        """
        self.enter(names)
        if names:
            for name in names:
                self.note_offsets({queue: run[1] for queue, run in name.queues.items()})
            # A later object of the same INTENT may have been committed before.
            settled = max((end for _, end in self.covered or ()), default=self.through or 0)
            # An open object keeps `through` below it, even if an object of a later day is committed.
            lowest = settled if lowest_open is None else lowest_open
            self.advance(min(settled, lowest) if through is None else through)
        if through is not None:
            self.advance(through)

    def note_offsets(self, lasts: Mapping[int, int]) -> None:
        """Record the highest named offset of queues."""
        self.is_named = True
        for queue, last in lasts.items():
            held = self.queue(queue)
            held.named = last if held.named is None else max(held.named, last)

    def note_gap(self, gap: Gap) -> None:
        """Add a gap; one that continues a gap of the same reason extends it, so repeated restores add no gaps."""
        before = self.queue(gap.queue).gaps[-1:]
        for first, last in self.queue(gap.queue).add_gap(gap.first, gap.last):
            is_whole = (first, last) == (gap.first, gap.last)
            added = gap if is_whole else msgspec.structs.replace(gap, first=first, last=last)
            if any(held[1] == first - 1 for held in before):
                added = self._joined_with_the_last(added)
            self.gaps.append(added)

    def _joined_with_the_last(self, gap: Gap) -> Gap:
        for index in range(len(self.gaps) - 1, -1, -1):
            held = self.gaps[index]
            if (held.queue, held.last, held.reason) == (gap.queue, gap.first - 1, gap.reason):
                self.gaps = [*self.gaps[:index], *self.gaps[index + 1 :]]
                self.queue(gap.queue).join_gaps_at(gap.first)
                return msgspec.structs.replace(gap, first=held.first)
        return gap

    def _forget_gaps(self) -> None:
        """Drop the gaps below every live or expiring object: no reader can ask for their offsets."""
        if not any(gap.last < self.queues[gap.queue].minimum for gap in self.gaps):
            return  # avoids the search through all blocks
        below = self.nothing_below()
        if any(gap.last < below[gap.queue] for gap in self.gaps):
            self.gaps = [gap for gap in self.gaps if gap.last >= below[gap.queue]]
            for queue, held in self.queues.items():
                held.forget_gaps(below[queue])

    def raise_minimums(self, minimums: Mapping[int, int]) -> None:
        """Raise the minimums of queues; a lower one is ignored."""
        for queue, offset in minimums.items():
            held = self.queue(queue)
            held.minimum = max(held.minimum, offset)
        # For a queue that no round has archived, the minimum is all that the archive knows.
        self.note_offsets({queue: offset - 1 for queue, offset in minimums.items()})

    def set_minimums(self, minimums: Mapping[int, int]) -> None:
        """Set the minimums of queues, but not below those of the newest TOPIC entry."""
        for queue, offset in minimums.items():
            hidden = self.entry.minimums.get(queue, 0) if self.entry is not None else 0
            self.queue(queue).minimum = max(offset, hidden)

    def set_entry(self, entry: Topic) -> None:
        """Take a TOPIC entry and its minimums."""
        self.entry = entry
        if entry.minimums:
            self.raise_minimums(entry.minimums)

    def expire(self, keys: Keys, delete_after_ms: int) -> None:
        """Remove live objects from view; a queue that loses its last object keeps its end as its minimum."""
        ends: dict[int, int] = {}
        for block in self.withdraw(keys, delete_after_ms):
            for queue, end in block.ends().items():
                ends[queue] = max(ends.get(queue, 0), end)
        for queue in self._lost(ends):
            held = self.queue(queue)
            held.minimum = max(held.minimum, ends[queue])

    def _lost(self, queues: Iterable[int]) -> Iterable[int]:
        """Return the queues that no block has."""
        if self._is_laid:
            return [queue for queue in queues if not self.queue(queue).spans.blocks]
        lost = set(queues)
        for block in self.blocks:
            if not lost:
                break
            lost.difference_update(block.bounds[::3])
        return lost

    def unexpire(self, keys: Keys) -> None:
        """Return expired objects to the view."""
        self.enter(list(_names(self._out_of_expiring(keys))))

    def forget(self, keys: Keys) -> None:
        """Drop expired objects, which are deleted from the store."""
        self._out_of_expiring(keys)
        self._forget_gaps()

    def advance(self, offset: int) -> None:
        """Raise `through`."""
        through = self.through = max(self.through or 0, offset)
        if self.covered:
            self.covered = {(start, end) for start, end in self.covered if end > through} or None

    # ---- from a checkpoint

    def take_blocks(self, blocks: Sequence[Block]) -> None:
        """Set the live objects."""
        self.blocks = tuple(blocks)
        self.count = sum(block.count for block in blocks)
        for queue in {queue for block in blocks for queue in block.bounds[::3]}:
            self.queue(queue)
        self._lay_spans()

    def take_gaps(self, gaps: Sequence[Gap]) -> None:
        """Set the gaps, which are disjoint and contain no offset of a run."""
        self.gaps = list(gaps)
        spans: dict[int, list[tuple[int, int]]] = {}
        for gap in gaps:
            spans.setdefault(gap.queue, []).append((gap.first, gap.last))
        for queue, of_queue in spans.items():
            self.queue(queue).gaps = sorted(of_queue)

    def copy(self) -> "TopicCatalog":
        """Return an independent copy."""
        made = TopicCatalog(self.topic)
        made.blocks, made.count, made.expiring = self.blocks, self.count, self.expiring
        made.through, made.entry, made.is_named = self.through, self.entry, self.is_named
        made.covered = None if self.covered is None else set(self.covered)
        made.gaps = list(self.gaps)
        made.queues = {queue: held.copy(made) for queue, held in self.queues.items()}
        made._lay_spans()
        return made

    # ---- objects that enter and leave the view

    def enter(self, names: Sequence[CommittedObject]) -> None:
        """Add live objects; one that is live already is ignored, since a COMMIT may be in the journal twice."""
        top = self.blocks[-1].last_begin if self.blocks else -1
        behind: dict[str, CommittedObject] = {}
        between: dict[str, CommittedObject] = {}
        for name in sorted(names, key=_place):
            if name.start > top:
                behind.setdefault(name.key, name)
            elif not self.is_live(name.key, name.start):
                between.setdefault(name.key, name)
        if between:
            self._place_blocks(_with_names(self.topic, self.blocks, between.values()))
        if behind:
            self._append(behind.values())
        for name in (*between.values(), *behind.values()):
            self.cover(name)
            self._take_out_of_gaps(name)

    def cover(self, name: CommittedObject) -> None:
        """Record the range of an object above `through`."""
        if name.end > (self.through or 0):
            self.covered = self.covered or set()
            self.covered.add((name.start, name.end))

    def withdraw(self, keys: Keys, delete_after_ms: int) -> list[Block]:
        """Remove live objects from the view; return blocks that contain exactly these."""
        kept, removed = _split(self.blocks, keys, _starts(keys), self.topic)
        if removed:
            self.expiring += tuple((delete_after_ms, block) for block in removed)
            self._place_blocks(kept)
        return removed

    def replace(self, keys: Keys, names: Sequence[CommittedObject], delete_after_ms: int) -> None:
        """Replace live objects in one step: at every instant each offset is in an old or a new object."""
        kept, removed = _split(self.blocks, keys, _starts(keys), self.topic)
        self.expiring += tuple((delete_after_ms, block) for block in removed)
        new = {name.key: name for name in names if not self.is_live(name.key, name.start)}
        self._place_blocks(_with_names(self.topic, kept, new.values()))
        for name in new.values():
            self.cover(name)
            self._take_out_of_gaps(name)

    def erase(self, keys: Keys, names: Sequence[CommittedObject], gaps: Sequence[Gap], delete_after_ms: int) -> None:
        """Replace live objects as `replace` does, and add gaps for the rows that the new objects lack.

        An old object that has expired already has no row in view; its deletion time only moves forward.
        """
        by_queue: dict[int, list[tuple[int, int]]] = {}
        for gap in gaps:
            by_queue.setdefault(gap.queue, []).append((gap.first, gap.last))
        kept, removed = _split(self.blocks, keys, _starts(keys), self.topic)
        sooner, rest = self._expiring_of(keys, delete_after_ms)
        self.expiring = (*rest, *sooner, *((delete_after_ms, block) for block in removed))
        new = {name.key: name for name in names if not self.is_live(name.key, name.start)}
        blocks = _with_names(self.topic, kept, new.values())
        live = _runs_of(blocks, {queue: united(spans) for queue, spans in by_queue.items()})
        # The gaps come before the rows leave: a reader that finds no run looks at the gaps again.
        for queue, spans in by_queue.items():
            added = self.queue(queue).add_gaps(spans, live.get(queue, ()))
            reason = gaps[0].reason
            self.gaps += (
                Gap(topic=self.topic, queue=queue, first=first, last=last, reason=reason) for first, last in added
            )
            self.note_offsets({queue: max(last for _, last in spans)})
        self._place_blocks(blocks)
        for name in new.values():
            self.cover(name)

    def lost_by(
        self, keys: Keys, names: Iterable[CommittedObject], rows: Iterable[tuple[str, int, int, int]]
    ) -> list[str]:
        """Return the keys of live objects with a visible row that is in none of `names`, `rows` and the gaps."""
        held: dict[int, list[tuple[int, int]]] = {}
        for topic, queue, first, last in rows:
            if topic == self.topic:
                held.setdefault(queue, []).append((first, last))
        for queue, first, last in (run for one in names if one.topic == self.topic for run in one.runs):
            held.setdefault(queue, []).append((first, last))
        kept = {queue: united(spans) for queue, spans in held.items()}
        return [
            name.key
            for name in _names(_split(self.blocks, keys, _starts(keys), self.topic)[1])
            if any(
                of.uncovered(max(first, of.minimum), last, kept.get(queue, ()))
                for queue, first, last in name.runs
                if last >= (of := self.queues[queue]).minimum
            )
        ]

    def _expiring_of(self, keys: Keys, most_ms: int) -> tuple[list[tuple[int, Block]], list[tuple[int, Block]]]:
        """Split the expired objects into those with these keys, with times of at most `most_ms`, and the others."""
        sooner: list[tuple[int, Block]] = []
        rest: list[tuple[int, Block]] = []
        starts = _starts(keys)
        for after, block in self.expiring:
            kept, removed = _split((block,), keys, starts, self.topic)
            rest += ((after, one) for one in kept)
            sooner += ((min(after, most_ms), one) for one in removed)
        return sooner, rest

    def _out_of_expiring(self, keys: Keys) -> list[Block]:
        """Remove expired objects; return blocks that contain exactly these."""
        out: list[Block] = []
        left: list[tuple[int, Block]] = []
        starts = _starts(keys)
        for after, block in self.expiring:
            kept, removed = _split((block,), keys, starts, self.topic)
            left += ((after, one) for one in kept)
            out += removed
        self.expiring = tuple(left)
        return out

    def _append(self, names: Iterable[CommittedObject]) -> None:
        """Add objects that start above all live ones."""
        following = iter(names)
        before = self.blocks[-1] if self.blocks and self.blocks[-1].takes_more else None
        made = [] if before is None else [with_names(before, following)]
        made += blocks_of(self.topic, following, open_end=True)
        self.blocks = (*(self.blocks if before is None else self.blocks[:-1]), *made)
        self.count = sum(block.count for block in made) + (self.count if before is None else self.count - before.count)
        if not self._is_laid:
            self._lay_spans()
            return
        more = _spans_by_queue(made)
        had = frozenset(() if before is None else before.bounds[::3])
        for queue, spans in more.items():
            held = self.queue(queue)
            held.spans = held.spans.with_more(spans, before if queue in had else None)

    def _place_blocks(self, blocks: Sequence[Block]) -> None:
        """Set the live blocks; small neighbours are merged."""
        merged: list[Block] = []
        for block in blocks:
            if merged and merged[-1].may_join(block):
                merged[-1:] = blocks_of(self.topic, [*merged[-1].names(), *block.names()])
            else:
                merged.append(block)
        before, self.blocks = self.blocks, tuple(merged)
        self.count = sum(block.count for block in merged)
        if self._is_laid:
            self._change_spans(before)
        else:
            self._lay_spans()

    def _change_spans(self, before: Sequence[Block]) -> None:
        """Update the spans of the queues whose blocks changed."""
        removed, inserted = _exchanged(before, self.blocks)
        out, into = _spans_by_queue(removed), _spans_by_queue(inserted)
        for queue in out.keys() | into.keys():
            held = self.queue(queue)
            held.spans = held.spans.exchanged(out.get(queue, ()), into.get(queue, ()))

    def _lay_spans(self) -> None:
        """Give each queue its spans, if a search on demand would be slow because of many ranges."""
        if not self._is_laid and _ranges_of(self.blocks) <= LAID_WHEN_ASKED:
            return
        self._is_laid = True
        spans = _spans_by_queue(self.blocks)
        for queue, held in self.queues.items():
            held.spans = spans_of(spans[queue]) if queue in spans else NO_SPANS
        for queue in spans.keys() - self.queues.keys():
            self.queue(queue).spans = spans_of(spans[queue])

    def _take_out_of_gaps(self, name: CommittedObject) -> None:
        for queue in name.queues:
            self.queue(queue)
        if not self.gaps:
            return
        for queue, first, last in name.runs:
            if self.queue(queue).cut_gaps(first, last):
                self._cut_gaps(queue, first, last)

    def _cut_gaps(self, queue: int, first: int, last: int) -> None:
        """Remove an existing range from the gaps for good, even if it expires later."""
        self.gaps = [rest for gap in self.gaps for rest in (_cut(gap, first, last) if gap.queue == queue else (gap,))]

    def queue(self, number: int) -> QueueRuns:
        """Return a queue to write to, created if it is new. Readers use `queues`."""
        held = self.queues.get(number)
        if held is None:
            held = self.queues[number] = QueueRuns(number, None if self._is_laid else self)
        return held


def _ranges_of(blocks: Iterable[Block]) -> int:
    """Return the number of (queue, block) ranges."""
    return sum(len(block.bounds) for block in blocks) // 3


def _spans_by_queue(blocks: Iterable[Block]) -> dict[int, list[tuple[int, int, Block]]]:
    """Return queue -> (first, last, block)."""
    spans: dict[int, list[tuple[int, int, Block]]] = {}
    for block in blocks:
        for queue, first, last in block.queues():
            spans.setdefault(queue, []).append((first, last, block))
    return spans


def _exchanged(before: Sequence[Block], after: Sequence[Block]) -> tuple[Sequence[Block], Sequence[Block]]:
    """Return the removed and the added blocks between the unchanged ends; a block may be in both."""
    fewest = min(len(before), len(after))
    begin = next((at for at in range(fewest) if before[at] is not after[at]), fewest)
    behind = next((at for at in range(fewest - begin) if before[-1 - at] is not after[-1 - at]), fewest - begin)
    return before[begin : len(before) - behind], after[begin : len(after) - behind]


def _names(blocks: Iterable[Block]) -> Iterator[CommittedObject]:
    for block in blocks:
        yield from block.names()


def _may_hold(block: Block, spans: Mapping[int, Sequence[tuple[int, int]]]) -> bool:
    return any(touching(spans.get(queue, ()), first, last) for queue, first, last in block.queues())


def _names_at(blocks: Iterable[Block], physical_offset: int) -> Iterator[CommittedObject]:
    for block in blocks:
        if block.begin <= physical_offset < block.end:
            for name in block.names():
                if name.start <= physical_offset < name.end:
                    yield name


def _runs_of(blocks: Sequence[Block], spans: Mapping[int, list[tuple[int, int]]]) -> dict[int, list[tuple[int, int]]]:
    """Return queue -> (first, last) of the runs in blocks that may contain an offset of these ordered spans."""
    found: dict[int, list[tuple[int, int]]] = {}
    for block in blocks:
        for queue, first, last in block.queues():
            if touching(spans.get(queue, ()), first, last):
                found.setdefault(queue, []).extend((run[0], run[1]) for run in block.runs(queue))
    return found


def _starts(keys: Keys) -> list[int] | None:
    """Return the sorted starts of the objects; None if one is unknown."""
    known = sorted(start for start in keys.values() if start is not None)
    return known if len(known) == len(keys) else None


def _may_have(block: Block, starts: Sequence[int] | None) -> bool:
    """Return whether an object with one of these sorted starts may be in the block."""
    if starts is None:
        return True
    at = bisect_left(starts, block.begin)
    return at < len(starts) and starts[at] <= block.last_begin


def _split(
    blocks: Sequence[Block], keys: Keys, starts: Sequence[int] | None, topic: str
) -> tuple[list[Block], list[Block]]:
    """Split into blocks without these objects and blocks of exactly these; only mixed blocks are unpacked."""
    kept: list[Block] = []
    removed: list[Block] = []
    for block in blocks:
        count = sum(key in keys for key in block.name_keys()) if _may_have(block, starts) else 0
        if not count:
            kept.append(block)
        elif count == block.count:
            removed.append(closed(block))
        else:
            names = block.names()
            kept += blocks_of(topic, [name for name in names if name.key not in keys])
            removed += blocks_of(topic, [name for name in names if name.key in keys])
    return kept, removed


def _with_names(topic: str, blocks: Sequence[Block], names: Iterable[CommittedObject]) -> list[Block]:
    """Insert objects; the blocks that receive one are rebuilt."""
    following: dict[int, list[CommittedObject]] = {}
    for name in names:
        following.setdefault(max(bisect_right(blocks, name.start, key=_begin) - 1, 0), []).append(name)
    if not blocks:
        return blocks_of(topic, sorted(following.get(0, ()), key=_place))
    made: list[Block] = []
    for index, block in enumerate(blocks):
        if index in following:
            made += blocks_of(topic, sorted([*block.names(), *following[index]], key=_place))
        else:
            made.append(block)
    return made


def _around(blocks: Sequence[Block], start: int) -> Iterator[Block]:
    """Yield the blocks that may contain an object with this start."""
    index = bisect_right(blocks, start, key=_begin) - 1
    while index >= 0 and blocks[index].last_begin >= start:
        yield blocks[index]
        index -= 1


def _begin(block: Block) -> int:
    return block.begin


def _place(name: CommittedObject) -> tuple[int, str]:
    return name.start, name.key


def _cut(gap: Gap, first: int, last: int) -> list[Gap]:
    rest = without(gap.first, gap.last, [(first, last)])
    return [msgspec.structs.replace(gap, first=low, last=high) for low, high in rest]
