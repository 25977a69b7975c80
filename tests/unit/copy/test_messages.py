"""Tests of the messages that a replay selects and of their copies."""

from __future__ import annotations

import pytest

from neve.client.model import Message, MessageQueue
from neve.copy.messages import IDENTITY, NoOrigin, copy_of, is_selected
from neve.copy.task import ORIGIN, RETRY, CopyTarget, Filters

DEAD = Message(
    "orders",
    b"body",
    tags="A",
    keys=("k", "l"),
    properties={
        "TAGS": "A",
        "KEYS": "k l",
        "UNIQ_KEY": "7F",
        "WAIT": "true",
        "RETRY_TOPIC": "orders",
        "ORIGIN_MESSAGE_ID": "0A",
        "RECONSUME_TIME": "16",
        "DLQ_ORIGIN_TOPIC": "orders",
        "colour": "red",
    },
    flag=3,
    queue=MessageQueue("%DLQ%g", "broker-a", 0),
    queue_offset=7,
    store_timestamp=1000,
    reconsume_times=16,
)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (Filters(), True),
        (Filters(tags=("B", "A")), True),
        (Filters(tags=("B",)), False),
        (Filters(key="l"), True),
        (Filters(key="k l"), False),
        (Filters(since=1000, until=1001), True),
        (Filters(since=1001), False),
        (Filters(until=1000), False),
        (Filters(origin="orders"), True),
        (Filters(origin="other"), False),
        (Filters(tags=("A",), key="none"), False),
    ],
)
def test_filters_are_combined(filters: Filters, expected: bool) -> None:
    assert is_selected(DEAD, filters) is expected


def test_copy_omits_reserved_properties_and_has_its_identity() -> None:
    into = MessageQueue("other", "c", 0)
    one = copy_of(DEAD, "r1", CopyTarget(topic="other", keeps_queues=True), into)
    sent = one.message
    assert (sent.topic, sent.body, sent.tags, sent.keys, sent.flag) == ("other", b"body", "A", ("k", "l"), 3)
    assert sent.properties == {"colour": "red", IDENTITY: "r1/broker-a/%DLQ%g/0/7"}
    assert one.queue == into
    assert copy_of(DEAD, "r1", CopyTarget(topic="other")).queue is None


def test_dead_letter_goes_to_its_origin_or_its_group() -> None:
    to_origin, to_group = (copy_of(DEAD, "r", CopyTarget(back=back, group="g")).message for back in (ORIGIN, RETRY))
    assert (to_origin.topic, "RETRY_TOPIC" in to_origin.properties) == ("orders", False)
    assert (to_group.topic, to_group.properties["RETRY_TOPIC"]) == ("%RETRY%g", "orders")
    nowhere = Message("%DLQ%g", b"x", queue=DEAD.queue, queue_offset=9)
    with pytest.raises(NoOrigin, match="offset 9 of %DLQ%g"):
        copy_of(nowhere, "r", CopyTarget(back=RETRY, group="g"))
