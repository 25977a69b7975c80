"""Shortcuts for common requests; every field can be replaced, or left out with None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.differential.steps import Body, Step

BORN_MS = 1_700_000_000_000
SEND, SEND_V2, SEND_BATCH = 10, 310, 320
#: Codes whose fields have long names.
_SPELT_OUT = (SEND, 324)
_LETTERS = {
    "producerGroup": "a",
    "topic": "b",
    "defaultTopic": "c",
    "defaultTopicQueueNums": "d",
    "queueId": "e",
    "sysFlag": "f",
    "bornTimestamp": "g",
    "flag": "h",
    "properties": "i",
    "reconsumeTimes": "j",
    "unitMode": "k",
    "maxReconsumeTimes": "l",
    "batch": "m",
    "brokerName": "n",
}


def _fields(defaults: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in {**defaults, **given}.items() if value is not None}


def properties(**pairs: str) -> str:
    return "".join(f"{name}\x01{value}\x02" for name, value in pairs.items())


def send_fields(topic: str, /, **given: object) -> dict[str, object]:
    defaults = {
        "producerGroup": "diff_producer",
        "topic": topic,
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": 4,
        "queueId": 0,
        "sysFlag": 0,
        "bornTimestamp": BORN_MS,
        "flag": 0,
        "properties": "",
        "reconsumeTimes": 0,
        "unitMode": False,
        "batch": False,
    }
    return _fields(defaults, given)


def send(
    name: str,
    topic: str,
    body: Body = b"body",
    /,
    *,
    code: int = SEND_V2,
    step: Mapping[str, Any] | None = None,
    **given: object,
) -> Step:
    """Return a send with the field names that its code requires."""
    fields = send_fields(topic, **{"batch": code == SEND_BATCH, **given})
    ext = fields if code in _SPELT_OUT else {_LETTERS[field]: value for field, value in fields.items()}
    return Step(name, code, ext, body, **(step or {}))


def create_topic(name: str, topic: str, /, *, step: Mapping[str, Any] | None = None, **given: object) -> Step:
    defaults = {
        "topic": topic,
        "defaultTopic": "TBW102",
        "readQueueNums": 2,
        "writeQueueNums": 2,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": False,
    }
    return Step(name, 17, _fields(defaults, given), **(step or {}))


def create_group(name: str, group: str, /, **given: object) -> Step:
    body = {
        "groupName": group,
        "consumeEnable": True,
        "consumeFromMinEnable": True,
        "consumeBroadcastEnable": True,
        "consumeMessageOrderly": False,
        "retryQueueNums": 1,
        "retryMaxTimes": 16,
        "brokerId": 0,
        "whichBrokerWhenConsumeSlowly": 1,
        "notifyConsumerIdsChangedEnable": True,
        **given,
    }
    return Step(name, 200, {}, {key: value for key, value in body.items() if value is not None})


def pull(
    name: str,
    topic: str,
    offset: object = 0,
    /,
    *,
    code: int = 11,
    step: Mapping[str, Any] | None = None,
    **given: object,
) -> Step:
    """Return a pull that carries its subscription and does not wait: sysFlag 4."""
    defaults = {
        "consumerGroup": "diff_group",
        "topic": topic,
        "queueId": 0,
        "queueOffset": offset,
        "maxMsgNums": 32,
        "sysFlag": 4,
        "commitOffset": 0,
        "suspendTimeoutMillis": 0,
        "subVersion": 0,
        "subscription": "*",
        "expressionType": "TAG",
    }
    return Step(name, code, _fields(defaults, given), **(step or {}))


def max_offset(name: str, topic: str, until: int, queue_id: int = 0) -> Step:
    """Repeat until the queue has this length: Apache's broker fills its queues after the append."""
    return Step(name, 30, {"topic": topic, "queueId": queue_id}, until={"ext.offset": str(until)})
