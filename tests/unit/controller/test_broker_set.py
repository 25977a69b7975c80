"""Tests of the stored form of a broker set: encoding, and rejection of damaged values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controller.broker_set import BrokerSet, DamagedBrokerSet, Member, decode, encode

VALUE = BrokerSet(
    cluster="c",
    name="broker-a",
    next_broker_id=3,
    members=(
        Member(id=1, address="h1:10911", register_check_code="h1:10911;17"),
        Member(id=2, address="h2:10911", incarnation="9f", starts=4, process="02", min_in_sync_replicas=2),
    ),
    master=2,
    master_epoch=3,
    sync_state_set=(1, 2),
    sync_state_set_epoch=7,
)
FIELDS: dict[str, Any] = json.loads(encode(VALUE))


def test_broker_set_encodes_to_documented_json() -> None:
    assert FIELDS == {
        "version": 1,
        "cluster": "c",
        "name": "broker-a",
        "nextBrokerId": 3,
        "members": [
            {
                "id": 1,
                "address": "h1:10911",
                "registerCheckCode": "h1:10911;17",
                "incarnation": "",
                "starts": 0,
                "process": "",
                "minInSyncReplicas": 1,
            },
            {
                "id": 2,
                "address": "h2:10911",
                "registerCheckCode": "",
                "incarnation": "9f",
                "starts": 4,
                "process": "02",
                "minInSyncReplicas": 2,
            },
        ],
        "master": 2,
        "masterEpoch": 3,
        "syncStateSet": [1, 2],
        "syncStateSetEpoch": 7,
        "eligible": [],
        "unclean": [],
        "altered": None,
        "frozen": None,
    }
    assert decode(encode(VALUE)) == VALUE


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 2},
        {"version": None},
        {"master": 3},
        {"syncStateSet": [2, 1]},
        {"syncStateSet": [1, 2, 3]},
        {"eligible": [1]},
        {"nextBrokerId": 2},
        {"masterEpoch": -1},
        {"masterEpoch": 2**31},
        {"masterEpoch": 0},
        {"members": []},
        {"later": 1},
    ],
)
def test_decode_rejects_invalid_fields_and_other_versions(damage: dict[str, Any]) -> None:
    with pytest.raises(DamagedBrokerSet):
        decode(json.dumps({**FIELDS, **damage}).encode())


@pytest.mark.parametrize("missing", sorted(FIELDS))
def test_decode_rejects_missing_field(missing: str) -> None:
    with pytest.raises(DamagedBrokerSet):
        decode(json.dumps({name: value for name, value in FIELDS.items() if name != missing}).encode())


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b"\xff", b"null", encode(VALUE)[:-1], b"[" * 100_000])
def test_decode_rejects_malformed_bytes(value: bytes) -> None:
    with pytest.raises(DamagedBrokerSet):
        decode(value)
