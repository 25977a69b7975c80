"""Pop consumers: 200050 to 200055 and 200151, queue assignment 400, request modes 401 and 402."""

from __future__ import annotations

from tests.differential.scenarios.heartbeats import heartbeat
from tests.differential.scenarios.requests import create_group, create_topic, max_offset, properties, send
from tests.differential.steps import Scenario, Step

T = "diff_pop"
G = "diff_pop_g"


#: A receipt as a client builds it: start offset, pop time, invisible time, revive queue, retry flag, broker, queue,
#: offset.
_RECEIPT = "0 ${pop_time} 60000 ${revive} 0 ${broker_name} 0"
_SAVE = {"pop_time": "ext.popTime", "revive": "ext.reviveQid"}


def _pop(name: str, *, topic: str = T, group: str = G, step: dict[str, object] | None = None, **more: object) -> Step:
    ext = {
        "consumerGroup": group,
        "topic": topic,
        "queueId": 0,
        "maxMsgNums": 2,
        "invisibleTime": 60_000,
        "pollTime": 0,
        "bornTime": "${now}",
        "initMode": 0,
        "expType": "TAG",
        "exp": "*",
        **more,
    }
    given = {field: value for field, value in ext.items() if value is not None}
    return Step(name, 200050, given, **(step or {}))  # type: ignore[arg-type]


def _ack(name: str, code: int = 200051, *, offset: object = 0, **more: object) -> Step:
    ext = {
        "consumerGroup": G,
        "topic": T,
        "queueId": 0,
        "offset": offset,
        "extraInfo": f"{_RECEIPT} {offset}",
        **more,
    }
    return Step(name, code, {field: value for field, value in ext.items() if value is not None})


def _batch_ack(name: str, **more: object) -> Step:
    ack = {"c": G, "t": T, "r": "0", "so": 2, "q": 0, "rq": "${revive}", "pt": "${pop_time}", "it": 60000, "b": "AQ=="}
    return Step(name, 200151, {}, {"brokerName": "${broker_name}", "acks": [{**ack, **more}]})


POPS = Scenario(
    "pop",
    (
        create_topic("topic", T),
        create_group("group", G),
        create_group("no consumption", G + "_no", consumeEnable=False),
        create_topic("write only", T + "_wo", perm=2),
        *(send(f"message {i}", T, f"m{i}", properties=properties(TAGS="red" if i % 2 else "blue")) for i in range(6)),
        max_offset("there", T, 6),
        _pop("two", step={"until": {"code": 0}, "save": _SAVE}),
        _ack("acknowledge"),
        _ack("acknowledge twice"),
        _ack("acknowledge an offset beyond", offset=99),
        _ack("acknowledge a queue beyond", queueId=9),
        _ack("acknowledge in an unknown topic", topic="diff_pop_none"),
        _ack("acknowledge without receipt", extraInfo=None),
        _ack("acknowledge with nonsense", extraInfo="nonsense"),
        Step("acknowledge nothing", 200051),
        _ack("keep hidden", 200053, offset=1, invisibleTime=120_000),
        _ack("keep hidden, unknown topic", 200053, topic="diff_pop_none", invisibleTime=1),
        _ack("keep hidden, queue beyond", 200053, queueId=9, invisibleTime=1),
        _ack("keep hidden, offset beyond", 200053, offset=99, invisibleTime=1),
        Step("keep nothing hidden", 200053),
        _pop("two more", step={"save": _SAVE}),
        _batch_ack("acknowledge a batch", b="Aw=="),
        _batch_ack("batch of an unknown topic", t="diff_pop_none"),
        _batch_ack("batch of a queue beyond", q=9),
        Step("empty batch", 200151, {}, {"brokerName": "${broker_name}", "acks": []}),
        Step("no batch", 200151),
        _pop("the rest by tag", exp="red"),
        _pop("nothing is left", maxMsgNums=32),
        _pop("any queue", queueId=-1, group=G + "2"),
        _pop("unknown group", group="diff_pop_nobody"),
        _pop("group without consumption", group=G + "_no"),
        _pop("unknown topic", topic="diff_pop_none"),
        _pop("write only topic", topic=T + "_wo"),
        _pop("queue beyond", queueId=9),
        _pop("bad expression", expType="SQL92", exp="a >"),
        _pop("too many", maxMsgNums=33),
        _pop("none", maxMsgNums=0),
        _pop("invisible for no time", invisibleTime=0),
        _pop("invisible too long", invisibleTime=1 << 40),
        _pop("born long ago", bornTime=1000, pollTime=1000),
        Step("without fields", 200050),
        Step("peek", 200052, {"consumerGroup": G + "_peek", "topic": T, "queueId": 0, "maxMsgNums": 2}),
        Step(
            "peek in an unknown topic",
            200052,
            {"consumerGroup": G, "topic": "diff_pop_none", "queueId": 0, "maxMsgNums": 2},
        ),
        Step("peek without fields", 200052),
        Step(
            "is there something",
            200054,
            {"consumerGroup": G + "_n", "topic": T, "queueId": 0, "pollTime": 0, "bornTime": "${now}"},
        ),
        Step(
            "is there something in an unknown topic",
            200054,
            {"consumerGroup": G, "topic": "diff_pop_none", "queueId": 0, "pollTime": 0, "bornTime": "${now}"},
        ),
        Step("notification without fields", 200054),
        Step("who polls", 200055, {"consumerGroup": G, "topic": T, "queueId": 0}),
        Step("who polls an unknown topic", 200055, {"consumerGroup": G, "topic": "diff_pop_none", "queueId": 0}),
        Step("who polls, without fields", 200055),
    ),
)


def _assign(name: str, **more: object) -> Step:
    body = {
        "topic": T + "_a",
        "consumerGroup": G,
        "clientId": f"{G}@main",
        "strategyName": "AVG",
        "messageModel": "CLUSTERING",
    }
    return Step(name, 400, {}, {**body, **more})


def _mode(name: str, mode: str, **more: object) -> Step:
    return Step(name, 401, {}, {"topic": T + "_a", "consumerGroup": G, "mode": mode, "popShareQueueNum": 0, **more})


ASSIGNMENT = Scenario(
    "assignment",
    (
        create_topic("topic", T + "_a"),
        create_group("group", G),
        _assign("nobody is there"),
        heartbeat("member", G, T + "_a"),
        _assign("one member"),
        heartbeat("second member", G, T + "_a", line="second"),
        _assign("two members"),
        _assign("second of two", clientId=f"{G}@second"),
        _assign("a stranger", clientId="stranger"),
        _assign("in a circle", strategyName="AVG_BY_CIRCLE"),
        _assign("unknown strategy", strategyName="DICE"),
        _assign("broadcasting", messageModel="BROADCASTING"),
        _assign("unknown topic", topic="diff_pop_none"),
        _mode("pop", "POP"),
        _assign("one member pops"),
        _mode("pop with two shared", "POP", popShareQueueNum=1),
        _assign("one member pops, shared"),
        _mode("pull", "PULL"),
        _assign("one member pulls again"),
        _mode("mode of a retry topic", "POP", topic="%RETRY%" + G),
        _mode("mode of an unknown topic", "POP", topic="diff_pop_none"),
        _mode("mode of an unknown group", "POP", consumerGroup="diff_pop_nobody"),
        Step("all modes", 402),
        _mode("unknown mode", "PUSH"),
        Step("assign without body", 400),
        Step("mode without body", 401),
    ),
)

SCENARIOS = (POPS, ASSIGNMENT)
