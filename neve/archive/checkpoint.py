"""A checkpoint: the whole catalog after an entry, so that nobody need read a journal from its first entry.

Content of `<prefix>/_neve/<B>/checkpoint/<seq>.catalog` (in the envelope of `sealed`, kind CATALOG): `CatalogState` as
a msgpack map. Msgpack and not Parquet, because brokers, clients and the command line read it without pyarrow, and
because it nests like the journal. It is never the only truth: what it says follows from entries 0 … seq, which stay.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

import msgspec

from neve.archive.journal import NO_CHECKPOINT, CommittedName, Gap, IntentName, OpenRewrite, Topic
from neve.archive.sealed import Damaged, seal, unseal

if TYPE_CHECKING:
    from typing_extensions import override  # in `typing` from Python 3.12 on
else:
    F = TypeVar("F")

    def override(method: F) -> F:
        return method


CHECKPOINT_VERSION = 1
KIND = "CATALOG"
CONTENT_MAX = 4 << 30


class CatalogState(msgspec.Struct, kw_only=True):
    """Everything that a catalog knows; `through_seq` is the last entry in it."""

    broker: str
    through_seq: int
    epoch: int = 0
    owner: str = ""
    log_uuid: str = ""
    master_epoch: int | msgspec.UnsetType = msgspec.UNSET
    last_round: int = 0
    checkpoint: int = NO_CHECKPOINT  # the one before
    names: list[CommittedName] = []
    expiring: list[tuple[CommittedName, int]] = []
    deleted: list[str] = []  # no longer written; there may be some in an older one
    queues: list[tuple[str, int, int]] = []  # topic, queue, recorded minimum
    through: dict[str, int] = {}
    covered: dict[str, list[tuple[int, int]]] = {}  # topic -> ranges above `through` that have had an object
    open: dict[int, list[IntentName]] = {}
    intent_end: int = 0
    rewrites: dict[int, OpenRewrite] | msgspec.UnsetType = msgspec.UNSET
    last_rewrite: int | msgspec.UnsetType = msgspec.UNSET
    named: dict[str, dict[int, int]] = {}
    topics: list[Topic] = []
    gaps: list[Gap] = []

    def names_by_topic(self) -> Iterator[tuple[str, list[CommittedName]]]:
        """(topic, names), once."""
        found: dict[str, list[CommittedName]] = {}
        for name in self.names:
            found.setdefault(name.topic, []).append(name)
        yield from found.items()

    def expiring_by_topic(self) -> Iterator[tuple[str, int, list[CommittedName]]]:
        """(topic, delete_after_ms, names), once."""
        found: dict[tuple[str, int], list[CommittedName]] = {}
        for name, after in self.expiring:
            found.setdefault((name.topic, after), []).append(name)
        for (topic, after), names in found.items():
            yield topic, after, names


class PackedState(CatalogState, kw_only=True):
    """The same as a start takes it: names are unpacked topic by topic, and gone once they are taken."""

    names: list[msgspec.Raw] = []  # type: ignore[assignment]
    expiring: list[tuple[msgspec.Raw, int]] = []  # type: ignore[assignment]

    @override
    def names_by_topic(self) -> Iterator[tuple[str, list[CommittedName]]]:
        found: dict[str, list[msgspec.Raw]] = {}
        while self.names:
            raw = self.names.pop()
            found.setdefault(_topic_decoder.decode(raw).topic, []).append(raw)
        while found:
            topic, raws = found.popitem()
            yield topic, [_name_decoder.decode(raw) for raw in reversed(raws)]

    @override
    def expiring_by_topic(self) -> Iterator[tuple[str, int, list[CommittedName]]]:
        found: dict[tuple[str, int], list[msgspec.Raw]] = {}
        while self.expiring:
            raw, after = self.expiring.pop()
            found.setdefault((_topic_decoder.decode(raw).topic, after), []).append(raw)
        while found:
            (topic, after), raws = found.popitem()
            yield topic, after, [_name_decoder.decode(raw) for raw in reversed(raws)]


class _OfTopic(msgspec.Struct):
    topic: str


_topic_decoder = msgspec.msgpack.Decoder(_OfTopic)
_name_decoder = msgspec.msgpack.Decoder(CommittedName)


def encode_checkpoint(
    state: CatalogState,
    names: Iterable[CommittedName] | None = None,
    expiring: Iterable[tuple[CommittedName, int]] | None = None,
) -> bytes:
    """The content is encoded name by name: in one call it would keep every other thread waiting.

    `names`, `expiring`: in the place of the state's, where they are too many to hold at once.
    """
    values = {field: getattr(state, field) for field in state.__struct_fields__}
    fields = {field: value for field, value in values.items() if value is not msgspec.UNSET}
    fields["names"] = list(map(_raw, state.names if names is None else names))
    fields["expiring"] = list(map(_raw, state.expiring if expiring is None else expiring))
    return seal(KIND, CHECKPOINT_VERSION, msgspec.msgpack.encode(fields))


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


def decode_checkpoint(
    data: bytes, broker: str | None = None, seq: int | None = None, kind: type[CatalogState] = CatalogState
) -> CatalogState:
    """Raises NewerFormat, or Damaged where it is not a checkpoint (of this broker, after this entry).

    `kind`: PackedState, where names may be too many to hold at once.
    """
    try:
        state = msgspec.msgpack.decode(unseal(KIND, CHECKPOINT_VERSION, data, CONTENT_MAX), type=kind)
    except msgspec.DecodeError as error:
        raise Damaged(f"not a checkpoint: {error}") from error
    if broker not in {None, state.broker} or seq not in {None, state.through_seq}:
        raise Damaged(f"it is the checkpoint {state.through_seq} of broker {state.broker}")
    return state
