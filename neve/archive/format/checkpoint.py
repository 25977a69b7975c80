"""Checkpoints: the catalog after an entry, so that a reader need not apply the journal from its first entry.

`<prefix>/_neve/<B>/checkpoint/<seq>.catalog` is an envelope (`envelope`) of kind CATALOG. Its content is a
`CheckpointHead` as a msgpack map: the journal's own state, and for each topic the places of its parts (`topic_parts`)
in the packs that this checkpoint or earlier ones wrote.

The format is msgpack, not Parquet: brokers, clients and the command line read it without pyarrow, and it nests like
the journal. The content follows from entries 0 … seq; entries are deleted in time, except those above the oldest kept
checkpoint.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from neve.archive.format.envelope import Damaged, seal, unseal
from neve.archive.format.journal import NO_CHECKPOINT, OpenRewrite, PlannedObject

CHECKPOINT_VERSION = 1
KIND = "CATALOG"
CONTENT_MAX = 4 << 30

_DIGEST_BYTES = 16


class PackName(NamedTuple):
    """A pack: the checkpoint that wrote it, and its index among the packs of that checkpoint."""

    seq: int
    number: int


class PartPlace(NamedTuple):
    """The place of a part in a pack; `digest` is the beginning of the part's SHA-256."""

    pack: PackName
    offset: int
    length: int
    digest: bytes

    def taken_from(self, data: bytes) -> bytes:
        """Return the verified part from the content of the pack. Raises Damaged."""
        return self.checked(data[self.offset : self.offset + self.length])

    def checked(self, part: bytes) -> bytes:
        """Return the part if its length and digest are right. Raises Damaged."""
        if len(part) != self.length or digest(part) != self.digest:
            raise Damaged(f"pack {self.pack.seq}-{self.pack.number}: the part at {self.offset} is damaged")
        return part


class TopicRow(NamedTuple):
    """A topic in a checkpoint's head."""

    topic: str
    objects: int  # in the readers' view
    gaps: int
    is_listed: bool  # the topic has a `through` or a TOPIC entry, so it is listed even without objects
    places: tuple[PartPlace, ...]  # its main part, then its runs of blocks, which precede the main part in log order


class JournalMarks(msgspec.Struct, kw_only=True):
    """The state of a journal beside its topics; `through_seq` is the last applied entry."""

    broker: str
    through_seq: int
    epoch: int = 0
    owner: str = ""
    log_uuid: str = ""
    master_epoch: int = 0
    last_round: int = 0
    checkpoint: int = NO_CHECKPOINT  # the one before
    open: dict[int, list[PlannedObject]] = {}
    intent_end: int = 0
    rewrites: dict[int, OpenRewrite] = {}
    last_rewrite: int = 0


class _Row(msgspec.Struct, array_like=True, frozen=True):
    topic: str
    objects: int
    gaps: int
    listed: bool
    parts: list[tuple[int, int, int, bytes]]


class CheckpointHead(JournalMarks, kw_only=True):
    """The content of a checkpoint.

    A row of `topics` is [topic, objects, gaps, listed, [[index of the pack, offset, length, digest], …]].
    """

    packs: list[tuple[int, int, int]] = []  # seq, number, size
    topics: list[msgspec.Raw] = []  # decoded row by row: one call for all would block other threads
    entry: bytes = b""  # the `anchor` of entry `through_seq`

    def sizes(self) -> dict[PackName, int]:
        """Return the size in bytes of each referenced pack."""
        return {PackName(seq, number): size for seq, number, size in self.packs}

    def rows(self) -> Iterator[TopicRow]:
        """Decode the rows of all topics. Raises Damaged."""
        packs = list(self.sizes())
        for raw in self.topics:
            try:
                row = _row_decoder.decode(raw)
                places = tuple(PartPlace(packs[pack], at, length, hashed) for pack, at, length, hashed in row.parts)
            except (msgspec.DecodeError, IndexError) as error:
                raise Damaged(f"a row of checkpoint {self.through_seq}: {error}") from error
            yield TopicRow(row.topic, row.objects, row.gaps, row.listed, places)


_row_decoder = msgspec.msgpack.Decoder(_Row)


def digest(part: bytes) -> bytes:
    """Return the digest that verifies a part."""
    return hashlib.sha256(part).digest()[:_DIGEST_BYTES]


def encode_head(
    marks: JournalMarks, packs: Iterable[tuple[PackName, int]], rows: Iterable[TopicRow], entry: bytes
) -> bytes:
    """Encode a checkpoint row by row, because one call for all rows would block other threads.

    Args:
        marks: the state of the journal.
        packs: each pack that a row references, and its size in bytes.
        rows: one for each topic.
        entry: the anchor of the last applied entry.
    """
    sizes = dict(packs)
    index = {name: at for at, name in enumerate(sizes)}
    fields: dict[str, object] = {field: getattr(marks, field) for field in JournalMarks.__struct_fields__}
    fields["packs"] = [(*name, size) for name, size in sizes.items()]
    fields["topics"] = [_raw(_Row(*row[:4], [(index[place.pack], *place[1:]) for place in row.places])) for row in rows]
    fields["entry"] = entry
    return seal(KIND, CHECKPOINT_VERSION, msgspec.msgpack.encode(fields))


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


def decode_checkpoint(data: bytes, broker: str | None = None, seq: int | None = None) -> CheckpointHead:
    """Decode a checkpoint.

    Args:
        data: the content of the object.
        broker: the expected broker, if any.
        seq: the expected last entry, if any.

    Raises:
        NewerFormat: it has a higher format version.
        Damaged: it is not a checkpoint, or not that of this broker and entry.
    """
    content = unseal(KIND, CHECKPOINT_VERSION, data, CONTENT_MAX)
    try:
        head = msgspec.msgpack.decode(content, type=CheckpointHead)
    except msgspec.DecodeError as error:
        raise Damaged(f"not a checkpoint: {error}") from error
    if broker not in {None, head.broker} or seq not in {None, head.through_seq}:
        raise Damaged(f"it is the checkpoint {head.through_seq} of broker {head.broker}")
    return head
