"""A checkpoint: the whole catalog after an entry, so that nobody need read a journal from its first entry.

Content of `<prefix>/_neve/<B>/checkpoint/<seq>.catalog` (in the envelope of `sealed`, kind CATALOG): `CatalogState` as
a msgpack map. Msgpack and not Parquet, because brokers, clients and the command line read it without pyarrow, and
because it nests like the journal. It is never the only truth: what it says follows from entries 0 … seq, which stay.
"""

from collections.abc import Iterable

import msgspec

from neve.archive.journal import NO_CHECKPOINT, CommittedName, Gap, IntentName, OpenRewrite, Topic
from neve.archive.sealed import Damaged, seal, unseal

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


def decode_checkpoint(data: bytes, broker: str | None = None, seq: int | None = None) -> CatalogState:
    """Raises NewerFormat, or Damaged where it is not a checkpoint (of this broker, after this entry)."""
    try:
        state = msgspec.msgpack.decode(unseal(KIND, CHECKPOINT_VERSION, data, CONTENT_MAX), type=CatalogState)
    except msgspec.DecodeError as error:
        raise Damaged(f"not a checkpoint: {error}") from error
    if broker not in {None, state.broker} or seq not in {None, state.through_seq}:
        raise Damaged(f"it is the checkpoint {state.through_seq} of broker {state.broker}")
    return state
