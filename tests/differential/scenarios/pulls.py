"""PULL_MESSAGE 11 and LITE_PULL_MESSAGE 361: every status, and refused pulls."""

from __future__ import annotations

from typing import Any

from tests.differential.scenarios.heartbeats import heartbeat
from tests.differential.scenarios.requests import create_group, create_topic, max_offset, properties, pull, send
from tests.differential.steps import Scenario, Step

T = "diff_pull"
_COMMIT, _SUSPEND, _SUBSCRIPTION = 1, 2, 4


_FILLED = (
    create_topic("topic", T),
    create_group("group", "diff_group"),
    *(
        send(f"message {i}", T, f"m{i}", properties=properties(TAGS="red" if i % 2 else "blue", size=str(i)))
        for i in range(6)
    ),
    send("message of the other queue", T, "other", queueId=1),
    max_offset("all there", T, 6),
)

STATUSES = Scenario(
    "pull",
    (
        *_FILLED,
        pull("found", T),
        pull("lite", T, code=361),
        pull("from the middle", T, 3),
        pull("two of them", T, maxMsgNums=2),
        pull("none of them", T, maxMsgNums=0),
        pull("fewer than none", T, maxMsgNums=-1),
        pull("at the end", T, 6),
        pull("behind the end", T, 7),
        pull("far behind the end", T, 1000),
        pull("negative", T, -1),
        pull("beyond 32 bits", T, 1 << 40),
        pull("empty queue", "diff_pull_empty_none"),
        create_topic("empty topic", T + "_e"),
        pull("empty at 0", T + "_e"),
        pull("empty at 5", T + "_e", 5),
        pull("bytes are limited", T, maxMsgBytes=300),
        pull("one byte", T, maxMsgBytes=1),
        pull("tag", T, subscription="red"),
        pull("two tags", T, subscription="red || blue"),
        pull("no such tag", T, subscription="green"),
        pull("tag from the middle, two", T, 1, subscription="blue", maxMsgNums=2),
        pull("empty expression", T, subscription=""),
        pull("blank expression", T, subscription=" "),
        pull("bars only", T, subscription="||"),
        pull("no expression", T, subscription=None),
        pull("no expression type", T, expressionType=None),
        pull("sql", T, subscription="size > 2 AND TAGS = 'red'", expressionType="SQL92"),
        pull("sql of nothing", T, subscription="size > 100", expressionType="SQL92"),
        pull("sql that is none", T, subscription="size >", expressionType="SQL92"),
        pull("unknown expression type", T, expressionType="XPATH"),
        pull("unknown flag", T, sysFlag=4 | 64),
        pull("class filter flag", T, sysFlag=4 | 8),
        pull("suspend without time", T, 6, sysFlag=_SUSPEND | _SUBSCRIPTION, suspendTimeoutMillis=1),
        pull("commits an offset", T, sysFlag=_COMMIT | _SUBSCRIPTION, commitOffset=4),
        Step("the committed offset", 14, {"consumerGroup": "diff_group", "topic": T, "queueId": 0}),
    ),
)


def without(field: str) -> dict[str, Any]:
    return {field: None}


REFUSED = Scenario(
    "pull refused",
    (
        create_topic("topic", T + "_r"),
        create_topic("write only", T + "_wo", perm=2),
        create_group("no consumption", "diff_no_consume", consumeEnable=False),
        send("message", T + "_r"),
        max_offset("there", T + "_r", 1),
        pull("unknown topic", "diff_pull_none"),
        pull("unknown group", T + "_r", consumerGroup="diff_pull_nobody"),
        pull("bad group", T + "_r", consumerGroup="bad group"),
        pull("bad topic", "bad topic"),
        pull("write only topic", T + "_wo"),
        pull("group must not consume", T + "_r", consumerGroup="diff_no_consume"),
        pull("queue beyond", T + "_r", queueId=2),
        pull("queue negative", T + "_r", queueId=-1),
        pull("no heartbeat", T + "_r", sysFlag=0, consumerGroup="diff_silent"),
        *(
            pull(f"{field} missing", T + "_r", **without(field))
            for field in (
                "consumerGroup",
                "topic",
                "queueId",
                "queueOffset",
                "maxMsgNums",
                "sysFlag",
                "commitOffset",
                "suspendTimeoutMillis",
                "subVersion",
            )
        ),
        pull("offset no number", T + "_r", "first"),
        Step("no fields", 11),
        Step("no fields lite", 361),
    ),
)

SUBSCRIBED = Scenario(
    "pull subscribed",
    (
        create_topic("topic", T + "_s"),
        send("red", T + "_s", properties=properties(TAGS="red")),
        send("blue", T + "_s", properties=properties(TAGS="blue")),
        max_offset("there", T + "_s", 2),
        heartbeat("heartbeat", "diff_sub", T + "_s"),
        pull("by heartbeat", T + "_s", sysFlag=0, consumerGroup="diff_sub", subVersion=5),
        pull("older than the heartbeat", T + "_s", sysFlag=0, consumerGroup="diff_sub", subVersion=4),
        pull("newer than the heartbeat", T + "_s", sysFlag=0, consumerGroup="diff_sub", subVersion=6),
        pull("another topic", T, sysFlag=0, consumerGroup="diff_sub", subVersion=5),
        Step("forbid", 353, {"group": "diff_sub", "topic": T + "_s", "readable": False}),
        pull("forbidden", T + "_s", sysFlag=0, consumerGroup="diff_sub", subVersion=5),
        pull("forbidden, with its own subscription", T + "_s", consumerGroup="diff_sub"),
        Step("is it forbidden", 353, {"group": "diff_sub", "topic": T + "_s"}),
        Step("allow", 353, {"group": "diff_sub", "topic": T + "_s", "readable": True}),
        pull("allowed again", T + "_s", sysFlag=0, consumerGroup="diff_sub", subVersion=5),
        heartbeat("sql heartbeat", "diff_sql", T + "_s", "TAGS = 'blue'", "SQL92"),
        pull("by sql heartbeat", T + "_s", sysFlag=0, consumerGroup="diff_sql", subVersion=5),
        create_group("no broadcast", "diff_no_broadcast", consumeBroadcastEnable=False),
        heartbeat("broadcasting", "diff_no_broadcast", T + "_s", messageModel="BROADCASTING"),
        pull("by broadcast", T + "_s", sysFlag=0, consumerGroup="diff_no_broadcast", subVersion=5),
    ),
)

SCENARIOS = (STATUSES, REFUSED, SUBSCRIBED)
