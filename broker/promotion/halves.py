"""Half messages: neve uses RocketMQ's two queues, and reads its marks of ended transactions.

    waiting    at or above the master's committed offset in RMQ_SYS_TRANS_HALF_TOPIC (CID_RMQ_SYS_TRANS), not committed,
               and without a mark

A commit is stored first, and its mark up to three seconds later. Therefore the committed message counts, too. A half
message is appended again when its producer is queried: of one transaction only the newest waits, and contains the
number of queries.
"""

from __future__ import annotations

from typing import NamedTuple

from broker.metadata.last_poll import LastPoll
from broker.promotion.stored import Delivered
from broker.store.message_store import MessageStore
from broker.waiting.queue_records import of_queue
from neve.record.codec import MessageRecord
from neve.record.properties import PROPERTY_UNIQUE_KEY
from neve.remoting.names import HALF_TOPIC, OP_HALF_TOPIC

GROUP = "CID_RMQ_SYS_TRANS"
_CHECKS, _PREPARED_QUEUE_OFFSET = "TRANSACTION_CHECK_TIMES", "TRAN_PREPARED_QUEUE_OFFSET"


class Halves(NamedTuple):
    """Waiting half messages, each with its number of queries, and the offsets of all others above the first of them."""

    waiting: list[tuple[MessageRecord, int]]
    ended: list[int]


class Prepared(NamedTuple):
    """Half messages above the master's committed offset: those without a mark, and the queue offsets of the others."""

    unmarked: list[MessageRecord]
    marked: list[int]


def prepared(store: MessageStore, poll: LastPoll) -> Prepared:
    """Return the half messages that the marks above the master's committed offset leave."""
    marked = set[int]()
    for mark in of_queue(store, OP_HALF_TOPIC, 0, poll.position(OP_HALF_TOPIC, GROUP, 0)):
        marked.update(int(part) for part in mark.body.split(b",") if part.isdigit())
    found = Prepared([], [])
    for record in of_queue(store, HALF_TOPIC, 0, poll.position(HALF_TOPIC, GROUP, 0)):
        if record.queue_offset in marked or _number(record, _PREPARED_QUEUE_OFFSET) in marked:
            found.marked.append(record.queue_offset)
        else:
            found.unmarked.append(record)
    return found


def sort_out(found: Prepared, delivered: Delivered) -> Halves:
    """Return which of them wait."""
    candidates = found.unmarked
    newest = {_id(record) or ("", str(record.queue_offset)): record for record in candidates}
    waiting = [
        (record, max(_number(record, _CHECKS), 0))
        for record in newest.values()
        if record.physical_offset not in delivered.committed_places and _id(record) not in delivered.ended_ids
    ]
    waiting.sort(key=lambda one: one[0].queue_offset)
    kept = [record.queue_offset for record, _ in waiting]
    ended = {*found.marked, *(one.queue_offset for one in candidates)}.difference(kept)
    return Halves(waiting, sorted(offset for offset in ended if kept and offset > kept[0]))


def _id(record: MessageRecord) -> tuple[str, str] | None:
    properties = record.properties
    unique = properties.get(PROPERTY_UNIQUE_KEY)
    return (properties.get("REAL_TOPIC", ""), unique) if unique else None


def _number(record: MessageRecord, name: str) -> int:
    text = record.properties.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else -1
