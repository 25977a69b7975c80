"""What a journal says of one topic. One thread writes; what a pull asks, any thread may, without a lock.

Live names lie in blocks, in log order; the last block is open and takes what comes. Of an entry in the middle the
blocks that it touches are made anew. What expired lies in blocks too, until it is deleted.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from neve.archive.journal import CommittedName, Gap, Topic
from neve.archive.name_blocks import NEVER, Block, blocks_of, closed, with_names
from neve.archive.queue_runs import NO_SPANS, QueueRuns, spans_of, without

#: Names as entries list them: the key, and where it says that its object begins, if it is of that grammar.
Keys = Mapping[str, int | None]


class TopicCatalog:
    """`through`: below it everything is settled; None: no round has touched the topic."""

    __slots__ = ("blocks", "count", "covered", "entry", "expiring", "gaps", "is_named", "queues", "through", "topic")

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.blocks: tuple[Block, ...] = ()  # in the readers' view
        self.count = 0
        self.expiring: tuple[tuple[int, Block], ...] = ()  # after which time they may be deleted
        self.queues: dict[int, QueueRuns] = {}
        self.through: int | None = None
        # Ranges above `through` that an object covers, or covered: it may expire and be deleted before those below it
        # are committed, and must not be archived again then.
        self.covered: set[tuple[int, int]] | None = None
        self.entry: Topic | None = None
        self.gaps: list[Gap] = []  # grows at its end, any other change is a new list
        self.is_named = False  # an entry spoke of its offsets

    # ---- entries

    def commit(self, names: Sequence[CommittedName], through: int | None, lowest_open: int | None) -> None:
        """`lowest_open`: where the lowest name begins that its round leaves open."""
        self.enter(names)
        if names:
            for name in names:
                self.note_offsets({queue: run[1] for queue, run in name.queues.items()})
            # Of an intent's names a later one may have been committed before this one.
            settled = max((end for _, end in self.covered or ()), default=self.through or 0)
            # A name that stays open holds its topic back, even when a later day's object is already there.
            lowest = settled if lowest_open is None else lowest_open
            self.advance(min(settled, lowest) if through is None else through)
        if through is not None:
            self.advance(through)

    def note_offsets(self, lasts: Mapping[int, int]) -> None:
        self.is_named = True
        for queue, last in lasts.items():
            held = self.queue(queue)
            held.named = last if held.named is None else max(held.named, last)

    def note_gap(self, gap: Gap) -> None:
        for first, last in self.queue(gap.queue).add_gap(gap.first, gap.last):
            is_whole = (first, last) == (gap.first, gap.last)
            told = gap if is_whole else msgspec.structs.replace(gap, first=first, last=last)
            self.gaps.append(told)

    def raise_minimums(self, minimums: Mapping[int, int]) -> None:
        for queue, offset in minimums.items():
            held = self.queue(queue)
            held.minimum = max(held.minimum, offset)
            # of a queue that no round has taken yet, this is all that the archive knows
        self.note_offsets({queue: offset - 1 for queue, offset in minimums.items()})

    def set_minimums(self, minimums: Mapping[int, int]) -> None:
        for queue, offset in minimums.items():
            # What was deleted meanwhile stays so.
            hidden = self.entry.minimums.get(queue, 0) if self.entry is not None else 0
            self.queue(queue).minimum = max(offset, hidden)

    def tell(self, entry: Topic) -> None:
        self.entry = entry
        if entry.minimums:
            self.raise_minimums(entry.minimums)

    def expire(self, keys: Keys, delete_after_ms: int) -> None:
        for name in self.withdraw(keys, delete_after_ms):
            for queue, (_, last, _) in name.queues.items():
                # What was the lowest must not come back as a minimum when everything has gone.
                held = self.queue(queue)
                if not held.spans.blocks:
                    held.minimum = max(held.minimum, last + 1)

    def unexpire(self, keys: Keys) -> None:
        self.enter(self._out_of_expiring(keys))

    def forget(self, keys: Keys) -> None:
        """Their objects are deleted."""
        self._out_of_expiring(keys)

    def advance(self, offset: int) -> None:
        through = self.through = max(self.through or 0, offset)
        if self.covered:
            self.covered = {(start, end) for start, end in self.covered if end > through} or None

    # ---- names that come and go

    def enter(self, names: Sequence[CommittedName]) -> None:
        """Once: a COMMIT whose answer was lost may stand twice, and then nothing stands between the two."""
        top = self.blocks[-1].last_begin if self.blocks else -1
        behind: dict[str, CommittedName] = {}
        between: dict[str, CommittedName] = {}
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

    def restore_expiring(self, names: Sequence[CommittedName], delete_after_ms: int) -> None:
        blocks = blocks_of(self.topic, sorted(names, key=_place))
        self.expiring += tuple((delete_after_ms, block) for block in blocks)
        for name in names:
            self.cover(name)

    def cover(self, name: CommittedName) -> None:
        if name.end > (self.through or 0):
            self.covered = self.covered or set()
            self.covered.add((name.start, name.end))

    def withdraw(self, keys: Keys, delete_after_ms: int) -> list[CommittedName]:
        """Names that leave the readers' view."""
        kept, gone, names = _split(self.blocks, keys, _starts(keys), self.topic)
        if gone:
            self.expiring += tuple((delete_after_ms, block) for block in gone)
            self._place_blocks(kept)
        return names

    def replace(self, keys: Keys, names: Sequence[CommittedName], delete_after_ms: int) -> None:
        """In one step: each offset of a queue is in the old or in the new at every instant."""
        kept, gone, _ = _split(self.blocks, keys, _starts(keys), self.topic)
        self.expiring += tuple((delete_after_ms, block) for block in gone)
        new = {name.key: name for name in names if not self.is_live(name.key, name.start)}
        self._place_blocks(_with_names(self.topic, kept, new.values()))
        for name in new.values():
            self.cover(name)
            self._take_out_of_gaps(name)

    def _out_of_expiring(self, keys: Keys) -> list[CommittedName]:
        out: list[CommittedName] = []
        left: list[tuple[int, Block]] = []
        starts = _starts(keys)
        for after, block in self.expiring:
            kept, _, names = _split((block,), keys, starts, self.topic)
            left += ((after, one) for one in kept)
            out += names
        self.expiring = tuple(left)
        return out

    def _append(self, names: Iterable[CommittedName]) -> None:
        """Names above all that are there."""
        coming = iter(names)
        before = self.blocks[-1] if self.blocks and self.blocks[-1].takes_more else None
        made = [] if before is None else [with_names(before, coming)]
        made += blocks_of(self.topic, coming, open_end=True)
        self.blocks = (*(self.blocks if before is None else self.blocks[:-1]), *made)
        self.count = sum(block.count for block in made) + (self.count if before is None else self.count - before.count)
        more: dict[int, list[tuple[int, int, Block]]] = {}
        for block in made:
            for queue, first, last in block.queues():
                more.setdefault(queue, []).append((first, last, block))
        for queue, spans in more.items():
            held = self.queue(queue)
            held.spans = held.spans.with_more(spans, before)

    def _place_blocks(self, blocks: Sequence[Block]) -> None:
        """These are what is live now; neighbours of few names become one."""
        merged: list[Block] = []
        for block in blocks:
            if merged and merged[-1].may_join(block):
                merged[-1:] = blocks_of(self.topic, [*merged[-1].names(), *block.names()])
            else:
                merged.append(block)
        self.blocks = tuple(merged)
        self.count = sum(block.count for block in merged)
        self._lay_spans()

    def _lay_spans(self) -> None:
        spans: dict[int, list[tuple[int, int, Block]]] = {}
        for block in self.blocks:
            for queue, first, last in block.queues():
                spans.setdefault(queue, []).append((first, last, block))
        for queue, held in self.queues.items():
            held.spans = spans_of(spans[queue]) if queue in spans else NO_SPANS
        for queue in spans.keys() - self.queues.keys():
            self.queue(queue).spans = spans_of(spans[queue])

    def _take_out_of_gaps(self, name: CommittedName) -> None:
        for group in name.row_groups:
            for queue, first, last in group.runs:
                if self.queue(queue).cut_gaps(first, last):
                    self._cut_gaps(queue, first, last)

    def _cut_gaps(self, queue: int, first: int, last: int) -> None:
        """A message that exists beats a gap; for good, also when its time has passed."""
        self.gaps = [rest for gap in self.gaps for rest in (_cut(gap, first, last) if gap.queue == queue else (gap,))]

    def queue(self, number: int) -> QueueRuns:
        """For an entry that names it; who asks takes it out of `queues`."""
        held = self.queues.get(number)
        if held is None:
            held = self.queues[number] = QueueRuns(number)
        return held

    # ---- asking

    @property
    def is_told(self) -> bool:
        """An object in the readers' view, a mark or a tombstone."""
        return bool(self.blocks) or self.through is not None or self.entry is not None

    def names(self) -> Iterator[CommittedName]:
        """In log order, as they are now, for who stops early."""
        return _names(self.blocks)

    def named_offsets(self) -> dict[int, int]:
        return {held.queue: held.named for held in list(self.queues.values()) if held.named is not None}

    def expiring_names(self, until_ms: int = NEVER) -> Iterator[tuple[int, CommittedName]]:
        """(after which time it may be deleted, name), as they are now."""
        blocks = [one for one in self.expiring if one[0] <= until_ms]
        return ((after, name) for after, block in blocks for name in block.names())

    def names_at(self, physical_offset: int) -> Iterator[CommittedName]:
        for block in self.blocks:
            if block.begin <= physical_offset < block.end:
                for name in block.names():
                    if name.start <= physical_offset < name.end:
                        yield name

    def is_live(self, key: str, start: int) -> bool:
        """In the readers' view. `start`: where its object begins."""
        return any(key == name.key for block in _around(self.blocks, start) for name in block.kept_names())

    def has(self, key: str, start: int | None) -> bool:
        """Live or expiring. `start`: where the key says that its object begins."""
        expiring = [block for _, block in self.expiring]
        if start is None:
            return any(key == name.key for block in (*self.blocks, *expiring) for name in block.kept_names())
        there = (block for block in expiring if block.begin <= start <= block.last_begin)
        return self.is_live(key, start) or any(key == name.key for block in there for name in block.kept_names())

    def may_expire(self, newest_ms: int) -> bool:
        """False: no row group of the oldest objects is of that time or older."""
        return bool(self.blocks) and self.blocks[0].soonest_ms <= newest_ms

    def next_uncovered(self, offset: int) -> tuple[int, int | None]:
        offset = max(offset, self.through or 0)
        for start, end in sorted(self.covered or ()):
            if start > offset:
                return offset, start
            offset = max(offset, end)
        return offset, None


def _names(blocks: Sequence[Block]) -> Iterator[CommittedName]:
    for block in blocks:
        yield from block.names()


def _starts(keys: Keys) -> list[int] | None:
    """Where their objects begin, in order; None: they may be anywhere."""
    known = sorted(start for start in keys.values() if start is not None)
    return known if len(known) == len(keys) else None


def _split(
    blocks: Sequence[Block], keys: Keys, starts: Sequence[int] | None, topic: str
) -> tuple[list[Block], list[Block], list[CommittedName]]:
    """(blocks without these names, blocks of them, they themselves); what has none of them is not unpacked."""
    kept: list[Block] = []
    gone: list[Block] = []
    found: list[CommittedName] = []
    for block in blocks:
        if starts is not None:
            at = bisect_left(starts, block.begin)
            if at == len(starts) or starts[at] > block.last_begin:
                kept.append(block)
                continue
        names = block.names()
        out = [name for name in names if name.key in keys]
        found += out
        if not out:
            kept.append(block)
        elif len(out) == len(names):
            gone.append(closed(block))
        else:
            kept += blocks_of(topic, [name for name in names if name.key not in keys])
            gone += blocks_of(topic, out)
    return kept, gone, found


def _with_names(topic: str, blocks: Sequence[Block], names: Iterable[CommittedName]) -> list[Block]:
    """Those in which one of the names comes to lie are made anew."""
    coming: dict[int, list[CommittedName]] = {}
    for name in names:
        coming.setdefault(max(bisect_right(blocks, name.start, key=_begin) - 1, 0), []).append(name)
    if not blocks:
        return blocks_of(topic, sorted(coming.get(0, ()), key=_place))
    made: list[Block] = []
    for index, block in enumerate(blocks):
        if index in coming:
            made += blocks_of(topic, sorted([*block.names(), *coming[index]], key=_place))
        else:
            made.append(block)
    return made


def _around(blocks: Sequence[Block], start: int) -> Iterator[Block]:
    """Those in which a name that begins there may be."""
    index = bisect_right(blocks, start, key=_begin) - 1
    while index >= 0 and blocks[index].last_begin >= start:
        yield blocks[index]
        index -= 1


def _begin(block: Block) -> int:
    return block.begin


def _place(name: CommittedName) -> tuple[int, str]:
    return name.start, name.key


def _cut(gap: Gap, first: int, last: int) -> list[Gap]:
    rest = without(gap.first, gap.last, [(first, last)])
    return [msgspec.structs.replace(gap, first=low, last=high) for low, high in rest]
