"""Preparation of messages to send: names, properties, order keys, delays, compression."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from neve.client import ClientOptions, Message, MessageQueue
from neve.client.send.compression import compress
from neve.client.send.draft import Drafts, message_to_send, timing
from neve.client.send.queue_selector import java_hash, select_by_hash
from neve.client.validators import check_group, check_topic
from neve.errors import ClientError
from neve.record.bodies import inflate
from neve.record.properties import bytes_to_properties

# Generated with the classes of RocketMQ 5.3.3.
VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "java_vectors.json").read_text())
MESSAGE = Message("t", b"x")


def drafts(**changes: Any) -> Drafts:
    return Drafts(ClientOptions(**changes), lambda: "ID")


@pytest.mark.parametrize("vector", VECTORS["hashes"], ids=lambda vector: repr(vector["key"]))
def test_select_by_hash_chooses_the_queue_of_the_java_client(vector: dict[str, Any]) -> None:
    assert java_hash(vector["key"]) == vector["hash"]
    select = select_by_hash(vector["key"])
    chosen = [select([MessageQueue("t", "b", at) for at in range(n)], MESSAGE).queue_id for n in (1, 4, 7, 8, 16)]
    assert chosen == vector["of_1_4_7_8_16"]


@pytest.mark.parametrize("topic", ["", " ", "a b", "t" * 128, "ä", "a/b", "SCHEDULE_TOPIC_XXXX", "OFFSET_MOVED_EVENT"])
def test_topic_that_accepts_no_messages_is_refused(topic: str) -> None:
    with pytest.raises(ClientError):
        check_topic(topic)
    with pytest.raises(ClientError):
        drafts().single(message_to_send(topic, b"x"))
    with pytest.raises(ClientError):
        drafts().batch(topic, [b"x"])


def test_topic_and_group_names_follow_rocketmq_rules() -> None:
    check_topic("%RETRY%a|b_c-D9" + "t" * 112)
    check_group("g" * 255)
    for group in ("", "g" * 256, "a.b"):
        with pytest.raises(ClientError):
            check_group(group)


@pytest.mark.parametrize("name", ["KEYS", "DELAY", "UNIQ_KEY", "PGROUP", "TIMER_DELIVER_MS", "", " ", "a\x01"])
def test_reserved_property_is_refused(name: str) -> None:
    with pytest.raises(ClientError):
        message_to_send("t", b"x", properties={name: "v"})


@pytest.mark.parametrize("value", ["", " ", "a\x02b"])
def test_property_value_must_not_have_separators(value: str) -> None:
    with pytest.raises(ClientError):
        message_to_send("t", b"x", properties={"n": value})


def test_empty_and_too_long_bodies_are_refused() -> None:
    small = drafts(max_message_size=10)
    small.single(message_to_send("t", b"x" * 10))
    for body in (b"", b"x" * 11):
        with pytest.raises(ClientError) as caught:
            small.single(message_to_send("t", body))
        assert caught.value.code == 13
    with pytest.raises(ClientError):
        small.batch("t", [b"x"])  # with its lengths and properties the batch is longer


def test_only_one_kind_of_delay_is_accepted() -> None:
    assert timing() == {}
    assert timing(delay_level=3) == {"DELAY": "3"}
    assert timing(delay=1.5) == {"TIMER_DELAY_MS": "1500"}
    assert timing(deliver_at=7) == {"TIMER_DELIVER_MS": "7"}
    for wrong in ({"delay_level": 1, "delay": 1.0}, {"delay": 1.0, "deliver_at": 1}, {"delay": -1.0}):
        with pytest.raises(ClientError):
            timing(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ClientError):
        drafts().batch("t", [Message("t", b"x", properties={"TIMER_DELAY_SEC": "1"})])


@pytest.mark.parametrize(("kind", "flag"), [("zlib", 0x301), ("lz4", 0x101), ("zstd", 0x201)])
def test_large_body_is_compressed_and_flagged(kind: str, flag: int) -> None:
    making = drafts(compress_type=kind)
    large = making.single(message_to_send("t", b"z" * 4096))
    assert (large.sys_flag, len(large.body) < 200) == (flag, True)
    assert inflate(large.body, large.sys_flag) == b"z" * 4096
    small = making.single(message_to_send("t", b"z" * 4095, properties={"a": "b"}))
    assert (small.sys_flag, small.body) == (0, b"z" * 4095)
    assert bytes_to_properties(small.properties.encode()) == {"a": "b", "UNIQ_KEY": "ID", "WAIT": "true"}


def test_unknown_compression_is_refused() -> None:
    with pytest.raises(ClientError, match="zlib, lz4, zstd"):
        compress(b"x", "rar", 5)
