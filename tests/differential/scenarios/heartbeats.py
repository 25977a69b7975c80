"""Heartbeats of consumers and producers, as their clients encode them."""

from __future__ import annotations

from tests.differential.steps import Step


def subscription(topic: str, expression: str = "*", kind: str = "TAG") -> dict[str, object]:
    tags = [tag.strip() for tag in expression.split("||")] if kind == "TAG" and expression != "*" else []
    return {
        "topic": topic,
        "subString": expression,
        "expressionType": kind,
        "subVersion": 5,
        "tagsSet": tags,
        "codeSet": [_java_hash(tag) for tag in tags],
        "classFilterMode": False,
    }


def heartbeat(
    name: str,
    group: str,
    topic: str,
    expression: str = "*",
    kind: str = "TAG",
    /,
    *,
    line: str = "main",
    **more: object,
) -> Step:
    """Return a heartbeat of one consumer of one topic, and of a producer group."""
    consumer = {
        "groupName": group,
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
        "subscriptionDataSet": [subscription(topic, expression, kind)],
        "unitMode": False,
        **more,
    }
    body: dict[str, object] = {
        "clientID": f"{group}@{line}",
        "producerDataSet": [{"groupName": f"{group}_producer"}],
        "consumerDataSet": [consumer],
    }
    return Step(name, 34, {}, body, line=line)


def _java_hash(text: str) -> int:
    code = 0
    for letter in text:
        code = (31 * code + ord(letter)) & 0xFFFFFFFF
    return code - (1 << 32) if code >> 31 else code
