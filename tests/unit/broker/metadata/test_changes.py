"""Records of the metadata log: decoding returns what was encoded, and unreadable records are refused, never skipped."""

from __future__ import annotations

import json

import pytest

from broker.tables.changes import (
    KINDS,
    ArchiveSettled,
    Change,
    DelayPositions,
    GroupDeleted,
    GroupForbidden,
    GroupPut,
    ModePut,
    OffsetsCopied,
    OffsetsReset,
    PoliciesDeleted,
    PoliciesPut,
    QueuesRaised,
    RowsErased,
    TopicDeleted,
    TopicPut,
    UnreadableChange,
    UserDeleted,
    UserPut,
    decode_change,
    encode_change,
)

STAMP = {"counter": 3, "stateVersion": 0, "timestamp": 5}
POLICY = {"policyType": "Custom", "entries": [{"resource": "Topic:t", "actions": ["Pub"], "decision": "Allow"}]}
EACH: list[Change] = [
    TopicPut(config={"topicName": "t", "perm": 6}, version=STAMP),
    TopicDeleted(topic="t", ends={0: 7, 1: 0}, begins_again=True, version=STAMP),
    GroupPut(config={"groupName": "g"}, version=STAMP),
    GroupDeleted(group="g", with_offsets=True, version=STAMP),
    GroupForbidden(group="g", topic="t", forbidden=True, version=STAMP),
    ModePut(topic="t", group="g", mode="POP", neighbours=3),
    OffsetsReset(group="g", topic="t", offsets={0: 5}),
    OffsetsCopied(group="g", topic="t", offsets={0: 5, 1: 6}),
    UserPut(name="u", user={"password": "secret", "userType": "Normal", "userStatus": "enable"}),
    UserDeleted(name="u"),
    PoliciesPut(subject="User:u", policies=[POLICY]),
    PoliciesDeleted(subject="User:u"),
    DelayPositions(offsets={1: 5, 18: 6}),
    QueuesRaised(queues={"t": {0: 7}}),
    RowsErased(rows={"t": {0: [(3, 3), (5, 9)]}}),
    ArchiveSettled(epoch=3),
]


def test_each_kind_of_change_is_decoded_as_encoded() -> None:
    assert [decode_change(encode_change(change)) for change in EACH] == EACH
    assert {json.loads(encode_change(change))["kind"] for change in EACH} == KINDS, "a kind is not in this test"


def test_layout_of_a_record_is_stable_for_later_versions() -> None:
    assert json.loads(encode_change(EACH[1])) == {
        "v": 1, "kind": "topic gone", "topic": "t", "ends": {"0": 7, "1": 0}, "beginsAgain": True, "version": STAMP,
    }  # fmt: skip


@pytest.mark.parametrize(
    "record",
    [
        b'{"v":2,"kind":"user","name":"u","user":{"password":"hidden"}}',
        b'{"v":1,"kind":"user moved","name":"u","password":"hidden"}',
    ],
)
def test_record_of_a_newer_version_is_refused_by_its_kind(record: bytes) -> None:
    with pytest.raises(UnreadableChange, match="written by a newer neve") as refusal:
        decode_change(record)
    assert "hidden" not in str(refusal.value)


@pytest.mark.parametrize(
    "record",
    [
        b"", b"[]", b"null", b"\xff", b'{"v":1}', b'{"v":"1","kind":"user gone","name":"u"}',
        b'{"v":1,"kind":"user gone"}', b'{"v":1,"kind":"user","name":"u","user":"hidden"}',
        b'{"v":1,"kind":"reset","group":"g","topic":"t","offsets":{"x":1}}',
        b'{"v":1,"kind":"user gone","name":"hidden',
    ],
)  # fmt: skip
def test_damaged_record_is_refused_without_revealing_a_secret(record: bytes) -> None:
    with pytest.raises(UnreadableChange, match="damaged") as refusal:
        decode_change(record)
    assert "hidden" not in str(refusal.value)


def test_unknown_field_of_a_later_version_is_ignored() -> None:
    assert decode_change(b'{"v":1,"kind":"user gone","name":"u","by":"root"}') == UserDeleted(name="u")
