"""Parts: the topics as a checkpoint stores them. A pack is a sequence of parts.

    pack       <prefix>/_neve/<B>/checkpoint/<seq>-<n>.pack: parts at the places that heads give
    part       msgpack map: topic, blocks, and the non-empty ones of through, covered, queues, named, entry, gaps and
               expiring. A topic has one main part with all of these; a run of blocks has topic and blocks only
    block      array, see `StoredBlock` and `name_blocks`
    queue      [queue, minimum, the highest offset that any entry named or nil]
    expiring   [delete_after_ms, block]

Loading a part unpacks no block. Unchanged parts stay where they are stored, so the blocks of a topic are divided into
runs; the blocks behind the last run are in the main part. An unchanged part is written again in two cases: less than
half of its pack is referenced, or more than SMALL_PACKS small packs are. Many small neighbouring runs are merged.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from neve.archive.catalog.name_blocks import Block, StoredBlock, blocks_from, stored
from neve.archive.catalog.topic_catalog import BlockRun, TopicCatalog
from neve.archive.format.checkpoint import CheckpointHead, PackName, PartPlace, TopicRow, digest
from neve.archive.format.envelope import Damaged
from neve.archive.format.journal import Gap, Topic

RUN_BLOCKS = 2  # blocks of a new run
RUNS_SMALL = 16  # this many small neighbouring runs are merged
RUN_BLOCKS_MAX = 32
PACK_BYTES = 8 << 20  # a pack of this size is complete
SMALL_PACKS = 32  # with more small packs, the smallest are merged

assert RUN_BLOCKS * RUNS_SMALL >= RUN_BLOCKS_MAX, "merged runs are not small"


class Part(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of one topic."""

    topic: str
    blocks: list[StoredBlock]
    through: int | None = None
    covered: list[tuple[int, int]] = []
    queues: list[tuple[int, int, int | None]] = []
    named: bool = False  # whether any entry named an offset
    entry: Topic | None = None
    gaps: list[Gap] = []
    expiring: list[tuple[int, StoredBlock]] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Part)


# ---- writing


class Arranged(NamedTuple):
    """The layout of a topic in a checkpoint: its runs, and the place of its main part if that is stored already."""

    of: TopicCatalog
    runs: list[BlockRun]
    own: PartPlace | None

    @property
    def places(self) -> Iterator[PartPlace | None]:
        yield self.own
        yield from (run.place for run in self.runs)

    def row(self) -> TopicRow:
        of = self.of
        places = tuple(place for place in self.places if place is not None)
        assert len(places) == len(self.runs) + 1, "every part is written"
        return TopicRow(of.topic, of.count, len(of.gaps), of.through is not None or of.entry is not None, places)


class Packed(NamedTuple):
    """The content of a checkpoint whose packs are stored."""

    topics: list[Arranged]
    sizes: dict[PackName, int]  # of the referenced packs

    def adopt(self) -> None:
        """Remember the places for the next checkpoint; call it once the head is stored."""
        for one in self.topics:
            one.of.own, one.of.runs = one.own, tuple(one.runs)


def pack(
    topics: Iterable[TopicCatalog], known: Mapping[PackName, int], seq: int, put: Callable[[int, bytes], None]
) -> Packed:
    """Write the parts that are in no known pack or in a pack to be dropped.

    No topic may change meanwhile.

    Args:
        topics: all topics.
        known: the size in bytes of each pack that may be referenced.
        seq: the last applied entry, which names new packs.
        put: stores a pack, given its number and content.
    """
    arranged = [_arranged(of, known) for of in topics]
    places = [place for one in arranged for place in one.places if place is not None]
    out = _to_go(known, places)
    packs = _Packs(seq, put)
    written = [_written(one, out, packs) for one in arranged]
    sizes = dict(known) | packs.close()
    named = {place.pack for one in written for place in one.places if place is not None}
    return Packed(written, {name: sizes[name] for name in sorted(named)})


def packed_already(topics: Iterable[TopicCatalog], sizes: Mapping[PackName, int]) -> Packed:
    """Return the content of the newest checkpoint again, after which nothing has changed."""
    return Packed([Arranged(of, list(of.runs), of.own) for of in topics], dict(sizes))


def _arranged(of: TopicCatalog, known: Mapping[PackName, int]) -> Arranged:
    runs = [run for run in of.runs if run.place is not None and run.place.pack in known]
    if of.own is not None and of.own.pack in known and len(runs) == len(of.runs):
        return Arranged(of, runs, of.own)
    return Arranged(of, _joined(_cut(of.blocks, runs)), None)


def _cut(blocks: Sequence[Block], runs: Iterable[BlockRun]) -> list[BlockRun]:
    """Divide the blocks into runs: the stored ones, and new ones between and behind them."""
    by_first_block = {id(run.blocks[0]): run for run in runs}
    found: list[BlockRun] = []
    loose: list[Block] = []
    end = len(blocks) - (1 if blocks and blocks[-1].takes_more else 0)
    at = 0
    while at < end:
        run = by_first_block.get(id(blocks[at]))
        if run is not None and _is_at(run.blocks, blocks, at, end):
            if loose:
                found.append(BlockRun(tuple(loose), None))
            loose = []
            found.append(run)
            at += len(run.blocks)
            continue
        loose.append(blocks[at])
        at += 1
        if len(loose) == RUN_BLOCKS:
            found.append(BlockRun(tuple(loose), None))
            loose = []
    return found


def _is_at(run: Sequence[Block], blocks: Sequence[Block], at: int, end: int) -> bool:
    return at + len(run) <= end and all(one is blocks[at + index] for index, one in enumerate(run))


def _joined(runs: Iterable[BlockRun]) -> list[BlockRun]:
    """Merge many small neighbouring runs, so that a topic of many objects is read with few requests."""
    found: list[BlockRun] = []
    small: list[BlockRun] = []
    for run in (*runs, None):
        if run is not None and len(run.blocks) < RUN_BLOCKS_MAX:
            small.append(run)
            continue
        if len(small) >= RUNS_SMALL:
            blocks = [block for one in small for block in one.blocks]
            cuts = range(0, len(blocks), RUN_BLOCKS_MAX)
            small = [BlockRun(tuple(blocks[at : at + RUN_BLOCKS_MAX]), None) for at in cuts]
        found += small
        small = []
        if run is not None:
            found.append(run)
    return found


def _to_go(known: Mapping[PackName, int], places: Iterable[PartPlace]) -> set[PackName]:
    """Return the packs to drop: those referenced by less than half, and the smallest if there are many."""
    named: Counter[PackName] = Counter()
    for place in places:
        named[place.pack] += place.length
    out = {name for name, size in named.items() if 2 * size < known[name]}
    small = sorted((size, name) for name, size in named.items() if name not in out and 2 * size < PACK_BYTES)
    if len(small) > SMALL_PACKS:
        out.update(name for _, name in small[: -SMALL_PACKS // 2])
    return out


def _written(one: Arranged, out: set[PackName], packs: "_Packs") -> Arranged:
    of = one.of
    runs = [
        run
        if run.place is not None and run.place.pack not in out
        else BlockRun(run.blocks, packs.add(_run_part(of, run)))
        for run in one.runs
    ]
    own = one.own
    if own is None or own.pack in out:
        own = packs.add(_own_part(of, of.blocks[sum(len(run.blocks) for run in runs) :]))
    return Arranged(of, runs, own)


def _run_part(of: TopicCatalog, run: BlockRun) -> bytes:
    return _encoder.encode(Part(topic=of.topic, blocks=[stored(block) for block in run.blocks]))


def _own_part(of: TopicCatalog, blocks: Iterable[Block]) -> bytes:
    part = Part(
        topic=of.topic,
        blocks=[stored(block) for block in blocks],
        through=of.through,
        covered=sorted(of.covered or ()),
        queues=[(queue, held.minimum, held.named) for queue, held in sorted(of.queues.items())],
        named=of.is_named,
        entry=of.entry,
        gaps=of.gaps,
        expiring=[(after, stored(block)) for after, block in of.expiring],
    )
    return _encoder.encode(part)


class _Packs:
    """Writes packs one after another."""

    def __init__(self, seq: int, put: Callable[[int, bytes], None]) -> None:
        self._seq, self._put = seq, put
        self._parts: list[bytes] = []
        self._size = 0
        self._sizes: dict[PackName, int] = {}

    def add(self, part: bytes) -> PartPlace:
        if self._size >= PACK_BYTES:
            self.close()
        place = PartPlace(PackName(self._seq, len(self._sizes)), self._size, len(part), digest(part))
        self._parts.append(part)
        self._size += len(part)
        return place

    def close(self) -> dict[PackName, int]:
        """Complete the current pack; return the sizes of all written packs."""
        if self._parts:
            number = len(self._sizes)
            self._put(number, b"".join(self._parts))
            self._sizes[PackName(self._seq, number)] = self._size
            self._parts, self._size = [], 0
        return self._sizes


# ---- reading


def topics_in(head: CheckpointHead, read_pack: Callable[[PackName], bytes]) -> Iterator[TopicCatalog]:
    """Yield all topics of a checkpoint, in no particular order; one pack is in memory at a time.

    Raises Damaged, and the errors of `read_pack`.
    """
    rows = {row.topic: row for row in head.rows()}
    inside: dict[PackName, list[tuple[str, int]]] = {}
    for row in rows.values():
        for index, place in enumerate(row.places):
            inside.setdefault(place.pack, []).append((row.topic, index))
    found: dict[str, dict[int, Part]] = {}
    for name in head.sizes():
        data = read_pack(name)
        for topic, index in inside.get(name, ()):
            row = rows[topic]
            parts = found.setdefault(topic, {})
            parts[index] = decode_part(topic, row.places[index].taken_from(data))
            if len(parts) == len(row.places):
                yield topic_of(row, [parts[number] for number in range(len(parts))])
                del found[topic], rows[topic]
    if rows:
        raise Damaged(f"checkpoint {head.through_seq} has no part of {len(rows)} topics")


def decode_part(topic: str, data: bytes) -> Part:
    """Decode a part of a topic. Raises Damaged."""
    try:
        part = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise Damaged(f"topic {topic}: not a part of a checkpoint: {error}") from error
    if part.topic != topic:
        raise Damaged(f"topic {topic}: its part is of topic {part.topic}")
    return part


def topic_of(row: TopicRow, parts: Sequence[Part]) -> TopicCatalog:
    """Make a topic from its main part and its runs, in the order of the row. Raises Damaged."""
    if not parts:
        raise Damaged(f"topic {row.topic} has no part")
    own, *rest = parts
    of = TopicCatalog(row.topic)
    try:
        blocks = [tuple(blocks_from(row.topic, part.blocks)) for part in (*rest, own)]
        expiring = list(blocks_from(row.topic, (block for _, block in own.expiring)))
    except (ValueError, OverflowError) as error:
        raise Damaged(f"topic {row.topic}: a block of a checkpoint: {error}") from error
    of.through, of.entry, of.is_named = own.through, own.entry, own.named
    of.covered = set(own.covered) or None
    of.expiring = tuple((after, block) for (after, _), block in zip(own.expiring, expiring, strict=True))
    for queue, minimum, named in own.queues:
        held = of.queue(queue)
        held.minimum, held.named = minimum, named
    of.take_gaps(own.gaps)
    of.take_blocks([block for run in blocks for block in run])
    if (of.count, len(of.gaps)) != (row.objects, row.gaps):
        raise Damaged(f"topic {row.topic}: its parts differ from the row of the checkpoint")
    of.own = row.places[0]
    of.runs = tuple(BlockRun(run, place) for run, place in zip(blocks, row.places[1:], strict=False))
    return of
