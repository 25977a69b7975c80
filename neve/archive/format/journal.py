"""Entries of a broker's journal: one small msgpack object for each entry, append-only and densely numbered.

    {"type": "EPOCH" | "INTENT" | …, "version": 1,     the kind of entry and the format version
     "writer": uuid, "attempt": n, "epoch": e,         identify the PUT: a lost answer is settled by reading it back
     "checkpoint": seq, "time_ms": t,                  the newest checkpoint; the writer's clock, not used for safety
     … the entry's own fields}

A reader ignores unknown fields. It refuses a higher `version`, because a half-understood deletion is worse than none.

An INTENT or ABORT with a `kind` belongs to a rewrite (compaction or erasure), not to an offload round. Rewrites and
rounds are numbered independently in the field `round`.

Old entries are deleted, lowest first, once checkpoints contain their effects; SHORTENED replaces entry 0. A missing
entry is therefore either beyond the journal's end or already deleted. A reader that resumes from a position checks
that the entry before it still exists unchanged, by its `anchor`.
"""

from collections.abc import Iterator

import msgspec

FORMAT_VERSION = 1
COMPACT = "compact"
ERASE = "erase"
REWRITES = frozenset({COMPACT, ERASE})
#: The `reason` of a GAP that an erasure made: this prefix and the erasure's id.
ERASED = "erased "
ANCHOR_BYTES = 256
NO_CHECKPOINT = -1


class NewerFormat(ValueError):
    """The entry or object has a format version above the one this program knows."""


class MalformedEntry(ValueError):
    """The bytes are not a journal entry."""


class EntriesDeleted(Exception):
    """The entries at a reader's position have been deleted; a newer checkpoint contains their effects."""


class RowGroup(msgspec.Struct, frozen=True):
    """One row group of a data object; a cold read fetches it with one range GET."""

    first_row: int
    rows: int
    offset: int  # byte range in the object
    length: int
    newest_ms: int  # of the known store timestamps; -1 if none is known
    oldest_ms: int
    wire_bytes: int
    runs: list[tuple[int, int, int]]  # (queue, first offset, last offset), in row order

    def has_expired(self, ttl_ms: int, now_ms: int) -> bool:
        """Return whether the newest message has expired; a group of unknown age never expires."""
        return self.newest_ms >= 0 and self.newest_ms + ttl_ms <= now_ms


class PlannedObject(msgspec.Struct, frozen=True):
    """An object that an INTENT allows to be written; its content follows from the sealed log alone."""

    key: str
    topic: str
    day: str
    start: int
    end: int
    queues: dict[int, tuple[int, int]]  # queue -> (first offset, last offset)


class OpenRewrite(msgspec.Struct, frozen=True):
    """The planned objects of a rewrite that are neither published nor aborted."""

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
        """(queue, first offset, last offset) of all row groups, in row order."""
        return (run for group in self.row_groups for run in group.runs)


class Entry(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """The fields of every entry."""

    version: int = FORMAT_VERSION
    writer: str = ""
    attempt: int = 0
    epoch: int = 0
    checkpoint: int = NO_CHECKPOINT
    time_ms: int = 0


class Epoch(Entry, frozen=True, kw_only=True, tag="EPOCH"):
    """A broker process took the archive over; writers of lower epochs stop archiving and deleting."""

    owner: str
    log_uuid: str
    broker: str = ""
    master_epoch: int = 0  # the owner's epoch as master of its broker set; 0 outside a set


class Intent(Entry, frozen=True, kw_only=True, tag="INTENT"):
    """The objects that an offload round or a rewrite may write.

    An object with an INTENT only is not in the archive. A COMMIT publishes objects of a round, a REPLACE or an ERASE
    publishes those of a rewrite.
    """

    round: int
    names: list[PlannedObject]
    format_version: int = FORMAT_VERSION
    options: dict[str, str] = msgspec.field(default_factory=dict)
    kind: str = ""  # one of REWRITES; empty for an offload round
    old: list[str] = msgspec.field(default_factory=list)  # keys of the objects that a rewrite reads

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        if bool(self.kind) != bool(self.old):
            raise ValueError("an INTENT has both a kind and old keys, or neither")


class Commit(Entry, frozen=True, kw_only=True, tag="COMMIT"):
    """Publish objects of an offload round; objects of its INTENT that are not listed stay open."""

    round: int
    names: list[CommittedObject]
    through: dict[str, int] = msgspec.field(default_factory=dict)  # topic -> CommitLog offset


class Abort(Entry, frozen=True, kw_only=True, tag="ABORT"):
    """Close planned objects without publishing them; an empty `keys` closes all that are open."""

    round: int
    keys: list[str] = msgspec.field(default_factory=list)
    reason: str = ""
    kind: str = ""  # as in the INTENT

    def __post_init__(self) -> None:
        _check_kind(self.kind)


class Gap(Entry, frozen=True, kw_only=True, tag="GAP"):
    """Offsets first … last of a queue do not exist; `more` lists further (topic, queue, first, last)."""

    topic: str
    queue: int
    first: int
    last: int
    reason: str
    through: int = -1  # the topic is settled through this CommitLog offset; -1 if the gap does not change that
    more: list[tuple[str, int, int, int]] = msgspec.field(default_factory=list)

    @property
    def is_erased(self) -> bool:
        """Whether an ERASE made the gap."""
        return self.reason.startswith(ERASED)


class Expire(Entry, frozen=True, kw_only=True, tag="EXPIRE"):
    """Remove objects from the readers' view and raise minimums of queues.

    The objects may be deleted after `delete_after_ms`.
    """

    keys: list[str]
    delete_after_ms: int
    minimums: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)
    reason: str = "ttl"


class Unexpire(Entry, frozen=True, kw_only=True, tag="UNEXPIRE"):
    """Return expired objects to the readers' view and set minimums; no other entry lowers a minimum."""

    keys: list[str]
    minimums: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)


class Deleted(Entry, frozen=True, kw_only=True, tag="DELETED"):
    """Expired objects were deleted from the store; they leave the catalog."""

    keys: list[str]


class Topic(Entry, frozen=True, kw_only=True, tag="TOPIC"):
    """A topic's configuration, or its tombstone with the next offset of each queue."""

    topic: str
    config: dict[str, str] = msgspec.field(default_factory=dict)
    deleted: bool = False
    minimums: dict[int, int] = msgspec.field(default_factory=dict)


class Checkpoint(Entry, frozen=True, kw_only=True, tag="CHECKPOINT"):
    """A checkpoint object contains the effects of all entries up to `through_seq`."""

    key: str
    through_seq: int
    sha256: str = ""


class Replace(Entry, frozen=True, kw_only=True, tag="REPLACE"):
    """Publish the result of a compaction: the new objects replace the old ones in one step."""

    old: list[str]
    new: list[CommittedObject]
    delete_after_ms: int


class Erase(Entry, frozen=True, kw_only=True, tag="ERASE"):
    """Publish the result of an erasure: the new objects replace the old ones, and `rows` become gaps, in one step.

    `rows` are (topic, queue, first offset, last offset). The key that was erased is not recorded.
    """

    id: str
    old: list[str]
    new: list[CommittedObject]
    rows: list[tuple[str, int, int, int]]
    delete_after_ms: int

    @property
    def reason(self) -> str:
        """The reason of its gaps."""
        return f"{ERASED}{self.id}"


class Forget(Entry, frozen=True, kw_only=True, tag="FORGET"):
    """Remove deleted topics from the catalog, because neither the bucket nor the broker's log has anything of them."""

    topics: list[str]


class Shortened(Entry, frozen=True, kw_only=True, tag="SHORTENED"):
    """The object that replaces entry 0 before the first deletion. It is not an entry and is never applied."""


def _check_kind(kind: str) -> None:
    if kind and kind not in REWRITES:
        raise ValueError(f"unknown kind of rewrite {kind!r}: expected one of {', '.join(sorted(REWRITES))}")


AnyEntry = (
    Epoch | Intent | Commit | Abort | Gap | Expire | Unexpire | Deleted | Topic | Checkpoint | Replace | Erase | Forget
)


class _Version(msgspec.Struct):
    version: int


_encoder = msgspec.msgpack.Encoder()
_version_decoder = msgspec.msgpack.Decoder(_Version)
_entry_decoder: msgspec.msgpack.Decoder[AnyEntry | Shortened] = msgspec.msgpack.Decoder(AnyEntry | Shortened)


def encode_entry(entry: AnyEntry | Shortened) -> bytes:
    """Return the content of an entry's object."""
    return _encoder.encode(entry)


def decode_entry(data: bytes) -> AnyEntry:
    """Decode the content of an entry's object.

    Raises:
        NewerFormat: the entry has a higher format version.
        MalformedEntry: the bytes are not an entry.
        EntriesDeleted: the object is the SHORTENED that replaced entry 0.
    """
    try:
        version = _version_decoder.decode(data).version
        if version > FORMAT_VERSION:
            raise NewerFormat(f"journal entry of format {version}: this program knows formats up to {FORMAT_VERSION}")
        entry = _entry_decoder.decode(data)
    except msgspec.DecodeError as error:
        raise MalformedEntry(f"not a journal entry: {error}") from error
    if isinstance(entry, Shortened):
        raise EntriesDeleted("the first entries of the journal have been deleted")
    return entry


def anchor(entry: bytes) -> bytes:
    """Return the first bytes of an entry's object, which identify its writer and attempt."""
    return entry[:ANCHOR_BYTES]
