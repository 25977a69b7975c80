"""A checkpoint: the catalog after an entry, so that nobody need read a journal from its first entry.

`<prefix>/_neve/<B>/checkpoint/<seq>.catalog`, in the envelope of `sealed`, kind CATALOG. Of version 3 its content is a
`CheckpointHead` as a msgpack map: where the journal stood, and of each topic where its parts lie (`topic_parts`), in
the packs that this checkpoint or earlier ones wrote. Those of older versions are read and no longer written: of version
2 it lacks `entry`, of version 1 it is `CatalogState`, everything.

Msgpack and not Parquet, because brokers, clients and the command line read it without pyarrow, and because it nests
like the journal. What it says follows from entries 0 … seq. Those go in time, but for what is above the oldest of the
checkpoints that are kept.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from neve.archive.format.envelope import Damaged, seal, unseal_any
from neve.archive.format.journal import NO_CHECKPOINT, CommittedObject, Gap, OpenRewrite, PlannedObject, Topic

CHECKPOINT_VERSION = 3
KIND = "CATALOG"
CONTENT_MAX = 4 << 30

_DIGEST_BYTES = 16


class PackName(NamedTuple):
    """Which checkpoint wrote it, and the how manyeth of its packs it is."""

    seq: int
    number: int


class Place(NamedTuple):
    """Where a part lies; its digest is the first bytes of the SHA-256 of it."""

    pack: PackName
    offset: int
    length: int
    digest: bytes

    def taken_from(self, data: bytes) -> bytes:
        """The part out of the whole pack. Raises Damaged."""
        return self.checked(data[self.offset : self.offset + self.length])

    def checked(self, part: bytes) -> bytes:
        """Raises Damaged."""
        if len(part) != self.length or digest(part) != self.digest:
            raise Damaged(f"pack {self.pack.seq}-{self.pack.number}: the part at {self.offset} is not what was written")
        return part


class TopicRow(NamedTuple):
    """What a head says of a topic."""

    topic: str
    objects: int  # in the readers' view
    gaps: int
    is_told: bool  # it has a mark or a TOPIC entry, and so is told of whatever becomes of its objects
    places: tuple[Place, ...]  # its own part; then its runs of blocks, which come before the part's, in log order


class Marks(msgspec.Struct, kw_only=True):
    """Where a journal stood; `through_seq` is the last entry in it."""

    broker: str
    through_seq: int
    epoch: int = 0
    owner: str = ""
    log_uuid: str = ""
    master_epoch: int | msgspec.UnsetType = msgspec.UNSET
    last_round: int = 0
    checkpoint: int = NO_CHECKPOINT  # the one before
    open: dict[int, list[PlannedObject]] = {}
    intent_end: int = 0
    rewrites: dict[int, OpenRewrite] | msgspec.UnsetType = msgspec.UNSET
    last_rewrite: int | msgspec.UnsetType = msgspec.UNSET


class _Row(msgspec.Struct, array_like=True, frozen=True):
    topic: str
    objects: int
    gaps: int
    told: bool
    parts: list[tuple[int, int, int, bytes]]


class CheckpointHead(Marks, kw_only=True):
    """Of version 2 or 3. A row: [topic, objects, gaps, told, [[index of the pack, offset, length, digest], …]]."""

    packs: list[tuple[int, int, int]] = []  # seq, number, size
    topics: list[msgspec.Raw] = []  # decoded row by row: in one call they would keep every other thread waiting
    entry: bytes = b""  # the `anchor` of entry `through_seq`; not there before version 3

    def sizes(self) -> dict[PackName, int]:
        """Of each pack that a part lies in, its bytes."""
        return {PackName(seq, number): size for seq, number, size in self.packs}

    def rows(self) -> Iterator[TopicRow]:
        """Raises Damaged."""
        packs = list(self.sizes())
        for raw in self.topics:
            try:
                row = _row_decoder.decode(raw)
                places = tuple(Place(packs[pack], at, length, told) for pack, at, length, told in row.parts)
            except (msgspec.DecodeError, IndexError) as error:
                raise Damaged(f"a row of checkpoint {self.through_seq}: {error}") from error
            yield TopicRow(row.topic, row.objects, row.gaps, row.told, places)


class CatalogState(Marks, kw_only=True):
    """Everything that a catalog knows. What a checkpoint of version 1 holds."""

    names: list[CommittedObject] = []
    expiring: list[tuple[CommittedObject, int]] = []
    deleted: list[str] = []  # no longer written; there may be some in an older one
    queues: list[tuple[str, int, int]] = []  # topic, queue, recorded minimum
    through: dict[str, int] = {}
    covered: dict[str, list[tuple[int, int]]] = {}  # topic -> ranges above `through` that have had an object
    named: dict[str, dict[int, int]] = {}
    topics: list[Topic] = []
    gaps: list[Gap] = []


class PackedState(CatalogState, kw_only=True):
    """The same as a start takes it: names are unpacked topic by topic, and gone once they are taken.

    Both raise Damaged where a name is none.
    """

    names: list[msgspec.Raw] = []  # type: ignore[assignment]
    expiring: list[tuple[msgspec.Raw, int]] = []  # type: ignore[assignment]

    def names_by_topic(self) -> Iterator[tuple[str, list[CommittedObject]]]:
        """(topic, names), once."""
        found: dict[str, list[msgspec.Raw]] = {}
        while self.names:
            raw = self.names.pop()
            found.setdefault(_topic_of(raw), []).append(raw)
        while found:
            topic, raws = found.popitem()
            yield topic, _names(raws)

    def expiring_by_topic(self) -> Iterator[tuple[str, int, list[CommittedObject]]]:
        """(topic, delete_after_ms, names), once."""
        found: dict[tuple[str, int], list[msgspec.Raw]] = {}
        while self.expiring:
            raw, after = self.expiring.pop()
            found.setdefault((_topic_of(raw), after), []).append(raw)
        while found:
            (topic, after), raws = found.popitem()
            yield topic, after, _names(raws)


class _OfTopic(msgspec.Struct):
    topic: str


_row_decoder = msgspec.msgpack.Decoder(_Row)
_topic_decoder = msgspec.msgpack.Decoder(_OfTopic)
_name_decoder = msgspec.msgpack.Decoder(CommittedObject)


def _topic_of(raw: msgspec.Raw) -> str:
    try:
        return _topic_decoder.decode(raw).topic
    except msgspec.DecodeError as error:
        raise Damaged(f"a name in a checkpoint: {error}") from error


def _names(reversed_raws: list[msgspec.Raw]) -> list[CommittedObject]:
    try:
        return [_name_decoder.decode(raw) for raw in reversed(reversed_raws)]
    except msgspec.DecodeError as error:
        raise Damaged(f"a name in a checkpoint: {error}") from error


def digest(part: bytes) -> bytes:
    """By which a part is known again."""
    return hashlib.sha256(part).digest()[:_DIGEST_BYTES]


def encode_head(
    marks: Marks, packs: Iterable[tuple[PackName, int]], rows: Iterable[TopicRow], entry: bytes = b""
) -> bytes:
    """Row by row: in one call it would keep others waiting. `packs`: each that a row names, and its size.

    `entry`: the anchor of the last entry, where it is known.
    """
    sizes = dict(packs)
    index = {name: at for at, name in enumerate(sizes)}
    values = {field: getattr(marks, field) for field in Marks.__struct_fields__}
    fields: dict[str, object] = {field: value for field, value in values.items() if value is not msgspec.UNSET}
    fields["packs"] = [(*name, size) for name, size in sizes.items()]
    fields["topics"] = [_raw(_Row(*row[:4], [(index[place.pack], *place[1:]) for place in row.places])) for row in rows]
    if entry:
        fields["entry"] = entry
    return seal(KIND, CHECKPOINT_VERSION, msgspec.msgpack.encode(fields))


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


def decode_checkpoint(data: bytes, broker: str | None = None, seq: int | None = None) -> CheckpointHead | PackedState:
    """Raises NewerFormat, or Damaged where it is not a checkpoint (of this broker, after this entry)."""
    version, content = unseal_any(KIND, CHECKPOINT_VERSION, data, CONTENT_MAX)
    kind: type[CheckpointHead | PackedState] = PackedState if version == 1 else CheckpointHead
    try:
        state = msgspec.msgpack.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise Damaged(f"not a checkpoint: {error}") from error
    if broker not in {None, state.broker} or seq not in {None, state.through_seq}:
        raise Damaged(f"it is the checkpoint {state.through_seq} of broker {state.broker}")
    return state
