"""Conditions for replication between two members, and the reasons of refusals. Pure."""

from __future__ import annotations

from enum import Enum

from msgspec.structs import replace

from broker.ha.frames import Hello, StreamRefusal
from broker.ha.member_events import Life


class Reason(Enum):
    """Reason why a member follows no master, or refuses a slave. The values are on the wire and in metrics."""

    CLUSTER = "another-cluster"
    BROKER_SET = "another-broker-set"
    FORMAT = "another-format"
    MEMBER = "no-member"  # not of this set, or it has the id of its peer
    FILE_SIZE = "unequal-file-size"
    STRANGER = "not-proven"  # it does not know the secret of the set
    DELAY_LEVELS = "unequal-delay-levels"
    MASTER_EPOCH = "another-master-epoch"
    NOT_MASTER = "not-master"
    STOCK = "stock-members-not-admitted"
    NO_EPOCHS = "log-without-epochs"
    NOTHING_IN_COMMON = "nothing-in-common"
    GONE = "begins-below-the-log"  # the next bytes are evicted at the master: a resync is needed
    AHEAD = "ends-above-the-log"
    MISMATCH = "log-mismatch"
    CUT = "cut-needs-an-operator"


def refusal(reason: Reason, text: str) -> StreamRefusal:
    """Return a refusal as it is sent."""
    return StreamRefusal(reason.value, text)


def identified(hello: Hello, life: Life, master_epoch: int) -> Hello:
    """Return a HELLO with the id and the life of a member, for a term."""
    return replace(
        hello,
        member_id=life.broker_id,
        incarnation=life.incarnation,
        starts=life.starts,
        process=life.process,
        master_epoch=master_epoch,
    )


def unlike(own: Hello, other: Hello) -> StreamRefusal | None:
    """Return why two members may not replicate from each other, in either direction; None: they may."""
    if abs(own.format - other.format) > 1:
        return refusal(
            Reason.FORMAT, f"format {other.format} meets {own.format}: upgrade one step at a time, slaves first"
        )
    if own.cluster != other.cluster:
        return refusal(Reason.CLUSTER, f"a member of cluster {other.cluster!r} meets one of {own.cluster!r}")
    if own.broker_set != other.broker_set:
        return refusal(Reason.BROKER_SET, f"a member of {other.broker_set!r} meets one of {own.broker_set!r}")
    if own.member_id == other.member_id:
        return refusal(Reason.MEMBER, f"both report the member id {own.member_id}: is one a copy of the other?")
    if own.mapped_file_size_commit_log != other.mapped_file_size_commit_log:
        sizes = f"{other.mapped_file_size_commit_log} and {own.mapped_file_size_commit_log}"
        return refusal(Reason.FILE_SIZE, f"mappedFileSizeCommitLog {sizes}: a log's files are equal on all members")
    if own.message_delay_level != other.message_delay_level:
        levels = f"{other.message_delay_level!r} and {own.message_delay_level!r}"
        return refusal(
            Reason.DELAY_LEVELS, f"messageDelayLevel {levels}: delayed messages would be delivered at other times"
        )
    return None
