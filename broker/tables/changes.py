"""Changes of the broker's tables, as records of the metadata log: one JSON object for each change.

    topic     rmq_sys_METADATA_LOG; in no table, so that clients neither see nor read it. Only records that a neve
              broker wrote count: preparedTransactionOffset proves that (`broker.intake.internal_records`)
    queue 0   changes, in the order in which they apply
    queue 1   delay offsets; each record contains all of them, the last record counts
    queue 2   of a broker set: the master that has settled its archive; the last record counts. Older versions of neve
              ignore this queue

    {"v":1,"kind":…, …}
    v      format of the record; a higher one, or an unknown kind, was written by a newer neve
    kind   the change, with these fields:

    topic           config, version             created or updated; the row as in topics.json, the new table version
    topic gone      topic, ends, beginsAgain, version     ends: queue → end offset; beginsAgain: offsets restart at 0
    group           config, version             as in subscriptionGroup.json
    group gone      group, withOffsets, version
    forbidden       group, topic, forbidden, version      whether a group is denied to read a topic
    mode            topic, group, mode, neighbours        as in messageRequestMode.json
    reset           group, topic, offsets       new committed offsets; running consumers are notified
    offsets         group, topic, offsets       all offsets of the group in the topic: copied from another group, or
                                                those of queues that leave the pop book
    user            name, user                  as in auth.json, including the stored secret
    user gone       name
    policies        subject, policies           as in auth.json, all of the subject's
    policies gone   subject
    delays          offsets                     delay level → queue offset of the next message to deliver
    raised          queues                      topic → queue → next offset, above all that the archive names
    erased          rows                        topic → queue → [[first, last], …] of internal topics, hidden from all
                                                requests; erased rows of archived topics are in the archive's journal
    settled         epoch                       epoch of a master whose log contains, or resumes above, all that the
                                                archive names

A `settled` record follows the `raised` records that it needs, so a log with it has all that its master settled. A
topic's deletion follows the topic's last record, and its re-creation precedes the first new one. A reader stops at an
unreadable record and reports it, because later records may depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

import msgspec

VERSION = 1
#: Queues of the metadata log.
CHANGES, DELAYS, SETTLED = 0, 1, 2


class UnreadableChange(ValueError):
    """A record of the metadata log that this version of neve can't apply."""


class _Change(msgspec.Struct, rename="camel", tag_field="kind", frozen=True, kw_only=True):
    v: int = VERSION


class TopicPut(_Change, tag="topic", frozen=True):
    """A topic is created or updated."""

    config: dict[str, Any]
    version: dict[str, int]


class TopicDeleted(_Change, tag="topic gone", frozen=True):
    """A topic is deleted; `ends` are the end offsets of its queues."""

    topic: str
    ends: dict[int, int]
    begins_again: bool
    version: dict[str, int]


class GroupPut(_Change, tag="group", frozen=True):
    """A group is created or updated."""

    config: dict[str, Any]
    version: dict[str, int]


class GroupDeleted(_Change, tag="group gone", frozen=True):
    """A group is deleted, on request with its committed offsets."""

    group: str
    with_offsets: bool
    version: dict[str, int]


class GroupForbidden(_Change, tag="forbidden", frozen=True):
    """A group's right to read a topic is revoked or restored."""

    group: str
    topic: str
    forbidden: bool
    version: dict[str, int]


class ModePut(_Change, tag="mode", frozen=True):
    """The request mode (pull or pop) of a topic and group is set."""

    topic: str
    group: str
    mode: str
    neighbours: int


class OffsetsReset(_Change, tag="reset", frozen=True):
    """Committed offsets of a group in a topic are reset, by queue."""

    group: str
    topic: str
    offsets: dict[int, int]


class OffsetsCopied(_Change, tag="offsets", frozen=True):
    """All committed offsets of a group in a topic are replaced, by queue."""

    group: str
    topic: str
    offsets: dict[int, int]


class UserPut(_Change, tag="user", frozen=True):
    """A user is created or updated."""

    name: str
    user: dict[str, Any]


class UserDeleted(_Change, tag="user gone", frozen=True):
    """A user is deleted."""

    name: str


class PoliciesPut(_Change, tag="policies", frozen=True):
    """All policies of a subject are replaced."""

    subject: str
    policies: list[dict[str, Any]]


class PoliciesDeleted(_Change, tag="policies gone", frozen=True):
    """All policies of a subject are deleted."""

    subject: str


class DelayPositions(_Change, tag="delays", frozen=True):
    """Next queue offset of each delay level."""

    offsets: dict[int, int]


class QueuesRaised(_Change, tag="raised", frozen=True):
    """Queues resume above their last record; topic → queue → next offset."""

    queues: dict[str, dict[int, int]]


class RowsErased(_Change, tag="erased", frozen=True):
    """Erased messages of internal topics, by topic and queue."""

    rows: dict[str, dict[int, list[tuple[int, int]]]]


class ArchiveSettled(_Change, tag="settled", frozen=True):
    """The master of this epoch has settled its archive."""

    epoch: int


Change = (
    TopicPut | TopicDeleted | GroupPut | GroupDeleted | GroupForbidden | ModePut | OffsetsReset | OffsetsCopied
    | UserPut | UserDeleted | PoliciesPut | PoliciesDeleted | DelayPositions | QueuesRaised | RowsErased
    | ArchiveSettled
)  # fmt: skip
UserChange = UserPut | UserDeleted | PoliciesPut | PoliciesDeleted
_QUEUES: Mapping[type, int] = {DelayPositions: DELAYS, ArchiveSettled: SETTLED}
KINDS = frozenset(kind.__struct_config__.tag for kind in get_args(Change))
assert len(KINDS) == len(get_args(Change))


class _Head(msgspec.Struct):
    v: int
    kind: str


_head = msgspec.json.Decoder(_Head)
_decoder: msgspec.json.Decoder[Change] = msgspec.json.Decoder(Change)


def queue_of(change: Change) -> int:
    """Return the queue of the metadata log for a change."""
    return _QUEUES.get(type(change), CHANGES)


def encode_change(change: Change) -> bytes:
    """Return the body of the change's record."""
    return msgspec.json.encode(change)


def decode_change(data: bytes | memoryview) -> Change:
    """Decode a change. Raises UnreadableChange, whose text names the kind but contains no data of the record."""
    try:
        head = _head.decode(data)
        if head.v == VERSION and head.kind in KINDS:
            return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnreadableChange(f"a damaged change: {type(error).__name__}") from None
    raise UnreadableChange(
        f"a change of kind {head.kind!r}, format {head.v}: written by a newer neve (this one reads format {VERSION})"
    )


Row = TypeVar("Row")


def row_of(config: Mapping[str, Any] | Sequence[Any], shape: type[Row]) -> Row:
    """Convert a table row of a change, as it is read from the table's file. Raises UnreadableChange."""
    try:
        return msgspec.convert(config, shape, strict=False, str_keys=True)
    except msgspec.ValidationError as error:
        raise UnreadableChange(f"a damaged change: {error}") from error
