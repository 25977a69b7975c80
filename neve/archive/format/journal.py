"""Entries of a broker's journal: one small msgpack object per entry, append-only and dense.

    {"type": "EPOCH" | "INTENT" | …, "version": 1,     what it is, and which format wrote it
     "writer": uuid, "attempt": n, "epoch": e,         who: a lost answer is settled by reading the entry back
     "checkpoint": seq, "time_ms": t,                  the newest checkpoint; the writer's clock, never used for safety
     … the entry's own fields}

Fields that a later minor revision adds are ignored; a higher `version` is refused, because half-understood deletes are
worse than none.

An INTENT and an ABORT with a `kind` are no offload round's but of who makes objects of objects (REWRITES); their
`round` counts apart from the rounds'. They are of version 2: a program that does not know them would build the names of
such an intent from its local log.

Old entries are deleted once a checkpoint has what they say, lowest first; entry 0 gives way to a SHORTENED. So where an
entry is not there, it may be the journal's end, or gone: who goes on from a position looks whether the entry before it
still stands, as it was (`anchor`).
"""

from collections.abc import Iterator
from typing import Self

import msgspec

FORMAT_VERSION = 1
# Of an UNEXPIRE alone: a program that does not know it must not go on with what it believes expired, and delete it.
UNEXPIRE_VERSION = 2
# Of an INTENT and an ABORT with a kind: a program that does not know it would take them for an offload round's.
REWRITE_VERSION = 2
COMPACT = "compact"
ERASE = "erase"
REWRITES = frozenset({COMPACT, ERASE})
# Of an ERASE: a program that does not know it would go on showing, and keep, what has been erased.
ERASE_VERSION = 2
#: A GAP's reason of what was erased begins so; the erase's id follows.
ERASED = "erased "
# Of a FORGET: a program that does not know it would go on with names that nobody else knows.
FORGET_VERSION = 2
# Of a SHORTENED: a program that does not know it would look for the end from entry 0 on, and find an empty journal.
SHORTENED_VERSION = 2
ANCHOR_BYTES = 256
NO_CHECKPOINT = -1


class NewerFormat(ValueError):
    """The entry or object was written by a newer format than this program knows."""


class MalformedEntry(ValueError):
    """The bytes are no journal entry."""


class FellBehind(Exception):
    """Entries from a position on have been deleted meanwhile: a newer checkpoint has what they said."""


class RowGroup(msgspec.Struct, frozen=True):
    """One row group: what a cold read fetches with one range GET."""

    first_row: int
    rows: int
    offset: int  # byte range in the object
    length: int
    newest_ms: int  # over the store timestamps that are known; -1: none is
    oldest_ms: int
    wire_bytes: int
    runs: list[tuple[int, int, int]]  # (queue, first offset, last offset), as the rows lie

    def has_expired(self, ttl_ms: int, now_ms: int) -> bool:
        """It goes with its newest message; one of unknown age is kept."""
        return self.newest_ms >= 0 and self.newest_ms + ttl_ms <= now_ms


class PlannedObject(msgspec.Struct, frozen=True):
    """An object that a round is going to write; its content follows from the sealed log alone."""

    key: str
    topic: str
    day: str
    start: int
    end: int
    queues: dict[int, tuple[int, int]]  # queue -> (first offset, last offset)


class OpenRewrite(msgspec.Struct, frozen=True):
    """What is open of an INTENT with a kind."""

    kind: str
    old: list[str]
    names: list[PlannedObject]


class CommittedObject(msgspec.Struct, frozen=True, kw_only=True):
    """An object that is part of the archive."""

    key: str
    topic: str
    day: str
    start: int
    end: int
    size: int
    footer: int  # length of the Parquet footer with its trailing length and magic
    etag: str
    checksum: tuple[str, str]  # (algorithm, hex) over the object's bytes
    sha256: str  # over the wire bytes of all rows, in order
    rows: int
    wire_bytes: int
    min_time: int
    max_time: int
    queues: dict[int, tuple[int, int, int]]  # queue -> (first offset, last offset, first row)
    row_groups: list[RowGroup]

    @property
    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(queue, first, last) of all that it holds, as its rows lie."""
        return (run for group in self.row_groups for run in group.runs)


class Entry(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What all entries carry."""

    version: int = FORMAT_VERSION
    writer: str = ""
    attempt: int = 0
    epoch: int = 0
    checkpoint: int = NO_CHECKPOINT
    time_ms: int = 0


class Epoch(Entry, frozen=True, kw_only=True, tag="EPOCH"):
    """A take-over: whoever has a lower epoch stops archiving and deleting."""

    owner: str
    log_uuid: str
    broker: str = ""
    master_epoch: int | msgspec.UnsetType = msgspec.UNSET  # of the owner in its broker set; absent: it is in none


class Intent(Entry, frozen=True, kw_only=True, tag="INTENT"):
    """A round's promise: the names of the objects that it may write.

    What has a name here and no COMMIT is not in the archive. With a kind: what may be written of the `old`, and is in
    the archive with its REPLACE.
    """

    round: int
    names: list[PlannedObject]
    format_version: int = FORMAT_VERSION
    options: dict[str, str] = msgspec.field(default_factory=dict)
    kind: str | msgspec.UnsetType = msgspec.UNSET  # absent: an offload round's
    old: list[str] | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of_rewrite(cls, kind: str, number: int, *, old: list[str], names: list[PlannedObject]) -> Self:
        return cls(version=REWRITE_VERSION, round=number, names=names, kind=kind, old=old)

    def __post_init__(self) -> None:
        _check_kind(self.kind, self.version)
        if (self.kind is msgspec.UNSET) != (self.old is msgspec.UNSET):
            raise ValueError("an INTENT has a kind and old names, or neither")


class Commit(Entry, frozen=True, kw_only=True, tag="COMMIT"):
    """Publishes names of an intent; those it leaves out stay open."""

    round: int
    names: list[CommittedObject]
    through: dict[str, int] = msgspec.field(default_factory=dict)  # topic -> CommitLog offset


class Abort(Entry, frozen=True, kw_only=True, tag="ABORT"):
    """Closes names of an intent (of this kind) without an object; no keys: all that are open."""

    round: int
    keys: list[str] = msgspec.field(default_factory=list)
    reason: str = ""
    kind: str | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of_rewrite(cls, kind: str, number: int, *, reason: str, keys: list[str] | None = None) -> Self:
        return cls(version=REWRITE_VERSION, round=number, keys=keys or [], reason=reason, kind=kind)

    def __post_init__(self) -> None:
        _check_kind(self.kind, self.version)


class Gap(Entry, frozen=True, kw_only=True, tag="GAP"):
    """Offsets first … last of a queue exist nowhere; `more` says the same of further (topic, queue, first, last)."""

    topic: str
    queue: int
    first: int
    last: int
    reason: str
    through: int = -1  # CommitLog offset that the topic is settled through, where the gap moves it
    more: list[tuple[str, int, int, int]] = msgspec.field(default_factory=list)

    @property
    def is_erased(self) -> bool:
        """Told by an ERASE."""
        return self.reason.startswith(ERASED)


class Expire(Entry, frozen=True, kw_only=True, tag="EXPIRE"):
    """Names leave the readers' view at once and may be deleted after a time; minimums of queues move up."""

    keys: list[str]
    delete_after_ms: int
    minimums: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)
    reason: str = "ttl"


class Unexpire(Entry, frozen=True, kw_only=True, tag="UNEXPIRE"):
    """Expired names come back into the readers' view; minimums of queues are set, the only time that they move down."""

    keys: list[str]
    minimums: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)
    version: int = UNEXPIRE_VERSION


class Deleted(Entry, frozen=True, kw_only=True, tag="DELETED"):
    """Expired names whose objects were deleted; they leave the catalog."""

    keys: list[str]


class Topic(Entry, frozen=True, kw_only=True, tag="TOPIC"):
    """A topic's configuration, or its tombstone with the offsets at which its queues go on."""

    topic: str
    config: dict[str, str] = msgspec.field(default_factory=dict)
    deleted: bool = False
    minimums: dict[int, int] = msgspec.field(default_factory=dict)


class Checkpoint(Entry, frozen=True, kw_only=True, tag="CHECKPOINT"):
    """Where a checkpoint object lies and which entries it stands for: a reader starts there instead of at entry 1."""

    key: str
    through_seq: int
    sha256: str = ""


class Replace(Entry, frozen=True, kw_only=True, tag="REPLACE"):
    """Compaction: the old names leave the view in the same step in which the new ones enter it."""

    old: list[str]
    new: list[CommittedObject]
    delete_after_ms: int


class Erase(Entry, frozen=True, kw_only=True, tag="ERASE"):
    """Rows of the old names are nowhere any more; the new names, which have the others, take their place in one step.

    `rows` (topic, queue, first, last) become gaps of a reason of their own. What they had in common is not told.
    """

    id: str
    old: list[str]
    new: list[CommittedObject]
    rows: list[tuple[str, int, int, int]]
    delete_after_ms: int
    version: int = ERASE_VERSION

    @property
    def reason(self) -> str:
        return f"{ERASED}{self.id}"


class Forget(Entry, frozen=True, kw_only=True, tag="FORGET"):
    """Deleted topics of which nothing is left, in the bucket or in the broker's log: as if no entry had named them."""

    topics: list[str]
    version: int = FORGET_VERSION


class Shortened(Entry, frozen=True, kw_only=True, tag="SHORTENED"):
    """What stands in the place of entry 0 from the first deletion on: no entry, and never applied."""

    version: int = SHORTENED_VERSION


def _check_kind(kind: str | msgspec.UnsetType, version: int) -> None:
    if kind is not msgspec.UNSET and version < REWRITE_VERSION:
        raise ValueError(f"an entry with a kind is of version {REWRITE_VERSION}")


AnyEntry = (
    Epoch | Intent | Commit | Abort | Gap | Expire | Unexpire | Deleted | Topic | Checkpoint | Replace | Erase | Forget
)


_NEWEST = {
    "UNEXPIRE": UNEXPIRE_VERSION,
    "INTENT": REWRITE_VERSION,
    "ABORT": REWRITE_VERSION,
    "ERASE": ERASE_VERSION,
    "FORGET": FORGET_VERSION,
    "SHORTENED": SHORTENED_VERSION,
}


class _Version(msgspec.Struct):
    version: int
    type: str = ""
    kind: str | None = None

    def check(self) -> None:
        newest = _NEWEST.get(self.type, FORMAT_VERSION)
        if self.version > newest:
            raise NewerFormat(
                f"the journal's {self.type} is of format {self.version}, this program knows up to {newest}"
            )
        if self.type in {"INTENT", "ABORT"} and self.kind is not None and self.kind not in REWRITES:
            raise NewerFormat(f"the journal has an {self.type} of kind {self.kind}, which this program does not know")


_encoder = msgspec.msgpack.Encoder()
_version_decoder = msgspec.msgpack.Decoder(_Version)
_entry_decoder: msgspec.msgpack.Decoder[AnyEntry] = msgspec.msgpack.Decoder(AnyEntry)


def encode_entry(entry: AnyEntry | Shortened) -> bytes:
    """An entry as the bytes of its object."""
    return _encoder.encode(entry)


def decode_entry(data: bytes) -> AnyEntry:
    """Raises NewerFormat or MalformedEntry; FellBehind of a SHORTENED: the journal begins later."""
    try:
        found = _version_decoder.decode(data)
        found.check()
        if found.type == "SHORTENED":
            raise FellBehind("the first entries of the journal have been deleted")
        return _entry_decoder.decode(data)
    except msgspec.DecodeError as error:
        raise MalformedEntry(f"not a journal entry: {error}") from error


def anchor(entry: bytes) -> bytes:
    """By which an entry is known again: who wrote it, and in which attempt, is in these bytes."""
    return entry[:ANCHOR_BYTES]
