"""Broker set of a controller: the value that the register stores under the name of the set.

    {"version": 1, "cluster": "c", "name": "broker-a", "nextBrokerId": 3,
     "members": [{"id": 1, "address": "h1:10911", "registerCheckCode": "h1:10911;1700000000000",
                  "incarnation": "9f..", "starts": 4, "process": "02..", "minInSyncReplicas": 2}, ...],     by id
     "master": 1 | null, "masterEpoch": 3, "syncStateSet": [1, 2], "syncStateSetEpoch": 7,
     "eligible": [], "unclean": [], "altered": {"requestId": "..", "syncStateSetEpoch": 7} | null,
     "frozen": {"why": "..", "masterEpoch": 5, "syncStateSetEpoch": 9} | null}

The format is UTF-8 JSON. A reader rejects another version, a missing field, and a value that breaks an invariant: a
damaged register must not elect a master. It rejects unknown fields as well, because the next write would lose them.

Invariants, checked when a value is created or decoded:

- `syncStateSet`, `eligible` and `unclean` name members, and no member is in two of them.
- The master is in the SyncStateSet. While `masterEpoch` is 0, no master has been elected.
- `masterEpoch` increases with each change of the master, including a change to none: a broker asks for an election
  when it sees a higher epoch than its own without a master. `syncStateSetEpoch` increases with each change of the
  SyncStateSet.
- `nextBrokerId` is above every id that was ever assigned.

syncStateSet     The members that have all acknowledged records: an acknowledgement waits for all of them.
eligible         Members that an election removed from the SyncStateSet and that still have all acknowledged records.
                 Nothing was acknowledged since, because the set is smaller than its master's minInSyncReplicas.
                 Kafka calls them eligible leader replicas.
unclean          Members of one of the two that restarted after they may have lost acknowledged records from memory.
                 They are candidates only if both others are empty, and only when all of them are alive.

A member is identified by its id and its incarnation. An incarnation is a data directory that has lost no acknowledged
record: a broker chooses a new incarnation if a start finds that it may have lost one. `starts` counts the starts of
the directory, and each start chooses a new `process`. An Apache broker has neither: its incarnation is empty.
"""

from __future__ import annotations

import msgspec

from neve.errors import NeveError

VERSION = 1
FIRST_BROKER_ID = 1
_INT32_MAX = 2**31 - 1  # epochs are int32 on the wire
_INT64_MAX = 2**63 - 1


class DamagedBrokerSet(NeveError):
    """The register's value is not a broker set, or has a version that this code can't read."""


class Member(msgspec.Struct, frozen=True, rename="camel", kw_only=True, forbid_unknown_fields=True):
    """One broker of a set."""

    id: int
    address: str
    register_check_code: str = ""
    incarnation: str = ""
    starts: int = 0
    process: str = ""
    # The master acknowledges nothing while its SyncStateSet is smaller. Apache brokers do not report theirs: 1.
    min_in_sync_replicas: int = 1

    def __post_init__(self) -> None:
        _demand(FIRST_BROKER_ID <= self.id < _INT64_MAX, "a member's id")
        _demand(self.starts >= 0, "the count of its starts")
        _demand(self.min_in_sync_replicas >= 1, "its minInSyncReplicas")
        _demand(bool(self.incarnation) or self.min_in_sync_replicas == 1, "minInSyncReplicas without an incarnation")

    @property
    def is_stock(self) -> bool:
        """Whether it is an Apache broker, which has no incarnation."""
        return not self.incarnation


class Altered(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The last change of the SyncStateSet by its master; its id identifies a repeated request."""

    request_id: str
    sync_state_set_epoch: int


class Frozen(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The reason why a set is frozen, and the epochs that a broker reported above the stored ones.

    A frozen set is not changed until an operator designates a master with the current state. The epochs are stored,
    because the reporter may be gone by then, and an epoch must never be used twice.
    """

    why: str
    master_epoch: int
    sync_state_set_epoch: int

    @property
    def epochs(self) -> tuple[int, int]:
        return self.master_epoch, self.sync_state_set_epoch


class BrokerSet(msgspec.Struct, frozen=True, rename="camel", kw_only=True, forbid_unknown_fields=True):
    """Members, master and epochs of one broker set. Immutable; use `msgspec.structs.replace`."""

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
        """The ids of all members."""
        return tuple(member.id for member in self.members)

    @property
    def epochs(self) -> tuple[int, int]:
        """(masterEpoch, syncStateSetEpoch): the later of two values has the higher pair."""
        return self.master_epoch, self.sync_state_set_epoch

    def member(self, broker_id: int | None) -> Member | None:
        """Return the member with an id; None if there is none."""
        return next((member for member in self.members if member.id == broker_id), None)

    def addresses(self) -> dict[int, str]:
        """Return the address of each member by id."""
        return {member.id: member.address for member in self.members}


class _Versioned(msgspec.Struct, frozen=True):
    version: int


_FIELDS = frozenset(field.encode_name for field in msgspec.structs.fields(BrokerSet))


def encode(broker_set: BrokerSet) -> bytes:
    """Encode a broker set as the register's value."""
    return msgspec.json.encode({"version": VERSION, **msgspec.to_builtins(broker_set)})


def decode(value: bytes) -> BrokerSet:
    """Decode a register's value. Raises DamagedBrokerSet if it is not a valid broker set."""
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
