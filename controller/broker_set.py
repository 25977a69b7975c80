"""What a controller keeps of one broker set: the one value that a register holds under the set's name.

    {"version": 1, "cluster": "c", "name": "broker-a", "nextBrokerId": 3,
     "members": [{"id": 1, "address": "h1:10911", "registerCheckCode": "h1:10911;1700000000000",
                  "incarnation": "9f..", "starts": 4, "process": "02..", "minInSyncReplicas": 2}, ...],     by id
     "master": 1 | null, "masterEpoch": 3, "syncStateSet": [1, 2], "syncStateSetEpoch": 7,
     "eligible": [], "unclean": [], "altered": {"requestId": "..", "syncStateSetEpoch": 7} | null,
     "frozen": {"why": "..", "masterEpoch": 5, "syncStateSetEpoch": 9} | null}

UTF-8 JSON. A reader refuses another version, a missing field, and a value that breaks an invariant: a register that
was damaged must not elect. Fields that are not known are an error as well, they would be lost by the next write.

Invariants, checked whenever a value is made and thus whenever one is read:

- `syncStateSet`, `eligible` and `unclean` name members, and no member is in two of them.
- A master is in the sync state set. No master was ever elected while `masterEpoch` is 0.
- `masterEpoch` counts each change of the master, to nobody as well: a broker asks for an election when it sees one
  above its own without a master. `syncStateSetEpoch` counts each change of the sync state set.
- `nextBrokerId` lies above every id that was ever given out.

sync state set   has every record that was acknowledged: an acknowledgement waits for all of it
eligible         has left the set by an election and still has every such record: nothing was acknowledged since, the
                 set being smaller than its master's minInSyncReplicas (Kafka's eligible leader replicas)
unclean          was in one of the two, and came back without what it may have acknowledged from memory. It counts
                 again only if nobody else is left, and then not before all of them are there

A member is an id and an incarnation. An incarnation is a data directory with a memory that did not break: a broker
draws a new one where a start finds that it may have lost what it acknowledged. `starts` counts the starts of the
directory, `process` is drawn by each of them. An Apache broker has neither: its incarnation is empty.
"""

from __future__ import annotations

import msgspec

from neve.errors import NeveError

VERSION = 1
FIRST_BROKER_ID = 1
_INT32_MAX = 2**31 - 1  # what epochs are on the wire
_INT64_MAX = 2**63 - 1


class DamagedBrokerSet(NeveError):
    """What the register holds is no broker set, or none that this version reads."""


class Member(msgspec.Struct, frozen=True, rename="camel", kw_only=True, forbid_unknown_fields=True):
    """One broker of a set."""

    id: int
    address: str
    register_check_code: str = ""
    incarnation: str = ""
    starts: int = 0
    process: str = ""
    # As a master it acknowledges nothing while its set is smaller. What an Apache broker does is not known: 1.
    min_in_sync_replicas: int = 1

    def __post_init__(self) -> None:
        _demand(FIRST_BROKER_ID <= self.id < _INT64_MAX, "a member's id")
        _demand(self.starts >= 0, "the count of its starts")
        _demand(self.min_in_sync_replicas >= 1, "its minInSyncReplicas")
        _demand(bool(self.incarnation) or self.min_in_sync_replicas == 1, "minInSyncReplicas without an incarnation")

    @property
    def is_stock(self) -> bool:
        """An Apache broker, which knows no incarnations."""
        return not self.incarnation


class Altered(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The last change of the sync state set by its master: a request that comes again is known by its id."""

    request_id: str
    sync_state_set_epoch: int


class Frozen(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Why nothing about a set is decided until an operator says who has the truth: somebody knows these epochs.

    They are kept, for who told of them may be gone by then, and an epoch is never given twice.
    """

    why: str
    master_epoch: int
    sync_state_set_epoch: int

    @property
    def epochs(self) -> tuple[int, int]:
        return self.master_epoch, self.sync_state_set_epoch


class BrokerSet(msgspec.Struct, frozen=True, rename="camel", kw_only=True, forbid_unknown_fields=True):
    """Members, master and epochs of one broker set. Never changed in place: `msgspec.structs.replace`."""

    cluster: str
    name: str
    next_broker_id: int = FIRST_BROKER_ID
    members: tuple[Member, ...] = ()
    master: int | None = None
    master_epoch: int = 0
    sync_state_set: tuple[int, ...] = ()
    sync_state_set_epoch: int = 0
    eligible: tuple[int, ...] = ()
    unclean: tuple[int, ...] = ()
    altered: Altered | None = None
    frozen: Frozen | None = None

    def __post_init__(self) -> None:
        ids = self.ids
        _demand(ids == tuple(sorted(set(ids))), "the members' order")
        _demand(all(broker_id < self.next_broker_id for broker_id in ids), "the next id")
        named = self.sync_state_set + self.eligible + self.unclean
        _demand(len(named) == len(set(named)), "a member's place")
        _demand(set(named) <= set(ids), "a member that is unknown")
        for group in (self.sync_state_set, self.eligible, self.unclean):
            _demand(list(group) == sorted(group), "the order of a set")
        _demand(0 <= self.master_epoch <= _INT32_MAX, "the master's epoch")
        _demand(0 <= self.sync_state_set_epoch <= _INT32_MAX, "the sync state set's epoch")
        if self.master is not None:
            _demand(self.master in self.sync_state_set, "a master outside its sync state set")
        if not self.master_epoch:
            _demand(not named, "a sync state set before the first master")

    @property
    def ids(self) -> tuple[int, ...]:
        """All members."""
        return tuple(member.id for member in self.members)

    @property
    def epochs(self) -> tuple[int, int]:
        """How new this is: the later of two values has the higher pair."""
        return self.master_epoch, self.sync_state_set_epoch

    def member(self, broker_id: int | None) -> Member | None:
        """Who has this id."""
        return next((member for member in self.members if member.id == broker_id), None)

    def addresses(self) -> dict[int, str]:
        """Where each member listens, by id."""
        return {member.id: member.address for member in self.members}


class _Versioned(msgspec.Struct, frozen=True):
    version: int


_FIELDS = frozenset(field.encode_name for field in msgspec.structs.fields(BrokerSet))


def encode(broker_set: BrokerSet) -> bytes:
    """The register's value."""
    return msgspec.json.encode({"version": VERSION, **msgspec.to_builtins(broker_set)})


def decode(value: bytes) -> BrokerSet:
    """The broker set in a register's value. DamagedBrokerSet if there is none."""
    try:
        version = msgspec.json.decode(value, type=_Versioned).version
        if version != VERSION:
            raise DamagedBrokerSet(None, f"version {version} of a broker set; this controller reads {VERSION}")
        fields = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
        del fields["version"]
        if missing := _FIELDS - fields.keys():
            raise DamagedBrokerSet(None, f"a broker set without {sorted(missing)}")
        return msgspec.json.decode(msgspec.json.encode(fields), type=BrokerSet)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedBrokerSet(None, f"no broker set: {error}") from error


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"broken: {what}")
