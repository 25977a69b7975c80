"""Requests of mqadmin and dashboards to a broker: topics, groups, settings, statistics, offsets."""

from __future__ import annotations

from tests.differential.scenarios.heartbeats import heartbeat
from tests.differential.scenarios.requests import create_group, create_topic, max_offset, pull, send
from tests.differential.steps import Scenario, Step

T = "diff_admin"
G = "diff_admin_g"


def _config(name: str, topic: str) -> Step:
    return Step(name, 351, {"topic": topic, "lo": True})


def _topic_list(name: str, *configs: dict[str, object]) -> Step:
    return Step(name, 18, {}, {"topicConfigList": list(configs)})


_PLAIN = {"readQueueNums": 3, "writeQueueNums": 3, "perm": 6, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0}

TOPICS = Scenario(
    "topics",
    (
        create_topic("new", T),
        _config("new config", T),
        create_topic("more queues", T, readQueueNums=4, writeQueueNums=4),
        create_topic("fewer queues", T, readQueueNums=1, writeQueueNums=1),
        create_topic("the same again", T, readQueueNums=1, writeQueueNums=1),
        create_topic("read only", T, perm=4),
        create_topic("ordered", T, order=True),
        create_topic("of a unit", T, topicSysFlag=1),
        _config("changed config", T),
        create_topic("two tags", T + "_multi", topicFilterType="MULTI_TAG"),
        create_topic("with attributes", T + "_attr", attributes="+message.type=FIFO,+reserve.time=100"),
        _config("attributes", T + "_attr"),
        create_topic("attribute changed", T + "_attr", attributes="+reserve.time=200"),
        create_topic("attribute taken away", T + "_attr", attributes="-reserve.time"),
        _config("attributes later", T + "_attr"),
        create_topic("unknown attribute", T + "_attr", attributes="+colour=red"),
        create_topic("malformed attribute", T + "_attr", attributes="colour"),
        create_topic("attribute out of range", T + "_attr", attributes="+reserve.time=-5"),
        create_topic("fixed attribute", T + "_attr", attributes="+queue.type=BatchCQ"),
        create_topic("message types mixed", T + "_mixed", attributes="+message.type=MIXED"),
        *(
            create_topic(f"message type {kind}", f"{T}_{kind}", attributes=f"+message.type={kind}")
            for kind in ("NORMAL", "DELAY", "TRANSACTION", "UNSPECIFIED", "ODD")
        ),
        create_topic("bad name", "bad name"),
        create_topic("empty name", ""),
        create_topic("long name", "x" * 128),
        create_topic("system name", "SCHEDULE_TOPIC_XXXX"),
        create_topic("name of the broker", "${broker_name}"),
        create_topic("name missing", T, topic=None),
        create_topic("queues missing", T + "_q", readQueueNums=None),
        create_topic("no queues", T + "_0", readQueueNums=0, writeQueueNums=0),
        create_topic("perm missing", T + "_p", perm=None),
        create_topic("perm 7", T + "_p", perm=7),
        create_topic("perm 9", T + "_odd", perm=9),
        create_topic("filter missing", T + "_odd", topicFilterType=None),
        create_topic("odd filter", T + "_odd", topicFilterType="NONE"),
        Step("delete what only one of them took", 215, {"topic": T + "_odd"}),
        Step("no fields", 17),
        _topic_list("list", {"topicName": T + "_l1", **_PLAIN}, {"topicName": T + "_l2", **_PLAIN}),
        _config("first of the list", T + "_l1"),
        _topic_list("list with a bad name", {"topicName": T + "_l3", **_PLAIN}, {"topicName": "bad name", **_PLAIN}),
        _config("good one of the bad list", T + "_l3"),
        _topic_list("empty list"),
        Step("list without body", 18),
        _config("unknown", T + "_none"),
        Step("config without fields", 351),
        Step("delete", 215, {"topic": T + "_l1"}),
        _config("deleted", T + "_l1"),
        Step("delete again", 215, {"topic": T + "_l1"}),
        Step("delete unknown", 215, {"topic": T + "_none"}),
        Step("delete system topic", 215, {"topic": "TBW102"}),
        Step("delete blank", 215, {"topic": " "}),
        Step("delete without fields", 215),
        Step("all", 21),
        Step("system topics", 305),
    ),
)

GROUPS = Scenario(
    "groups",
    (
        create_group("new", G),
        Step("config", 352, {"group": G}),
        create_group("changed", G, retryMaxTimes=3, retryQueueNums=2, consumeMessageOrderly=True),
        Step("changed config", 352, {"group": G}),
        create_group("few fields", G + "_few", consumeEnable=None, retryMaxTimes=None, brokerId=None),
        Step("config of few fields", 352, {"group": G + "_few"}),
        create_group("with a retry policy", G + "_policy", groupRetryPolicy={"type": "CUSTOMIZED"}),
        Step("config with a retry policy", 352, {"group": G + "_policy"}),
        Step("without body", 200),
        Step("unknown config", 352, {"group": "diff_admin_nobody"}),
        Step("config without fields", 352),
        Step("list", 225, {}, {"groupConfigList": [{"groupName": G + "_l1"}, {"groupName": G + "_l2"}]}),
        Step("config of the list", 352, {"group": G + "_l1"}),
        Step("list without body", 225),
        Step("forbid", 353, {"group": G, "topic": T, "readable": False}),
        Step("forbidden", 353, {"group": G, "topic": T}),
        Step("allow", 353, {"group": G, "topic": T, "readable": True}),
        Step("allowed", 353, {"group": G, "topic": T}),
        Step("forbid without fields", 353),
        Step("delete", 207, {"groupName": G + "_l1"}),
        Step("delete with offsets", 207, {"groupName": G + "_l2", "cleanOffset": True}),
        Step("delete unknown", 207, {"groupName": "diff_admin_y"}),
        Step("delete without fields", 207),
        Step("forbid again", 353, {"group": G, "topic": T, "readable": False}),
        Step("all", 201),
        Step("forbid an unknown group", 353, {"group": "diff_admin_x", "topic": T, "readable": False}),
        create_group("bad name", "bad group"),
        create_group("empty name", ""),
        create_group("name missing", G, groupName=None),
        create_group("long name", "x" * 256),
        Step("config of a bad name", 352, {"group": "bad group"}),
    ),
)

_S = T + "_s"
_SG = G + "_s"
STATISTICS = Scenario(
    "statistics",
    (
        create_topic("its topic", _S),
        create_group("group", _SG),
        *(send(f"message {i}", _S, f"m{i}") for i in range(4)),
        max_offset("there", _S, 4),
        Step("put numbers", 315, {"statsName": "TOPIC_PUT_NUMS", "statsKey": _S}, names_only=True),
        pull("two", _S, maxMsgNums=2, consumerGroup=_SG),
        Step("committed", 15, {"consumerGroup": _SG, "topic": _S, "queueId": 0, "commitOffset": 2}),
        Step("topic", 202, {"topic": _S}),
        Step("unknown topic", 202, {"topic": "diff_admin_none"}),
        Step("topic without fields", 202),
        Step("consumption", 208, {"consumerGroup": _SG, "topic": _S}),
        Step("consumption of all topics", 208, {"consumerGroup": _SG}),
        Step("consumption of listed topics", 208, {"consumerGroup": _SG, "topicList": _S + ";"}),
        Step("consumption of an unknown topic", 208, {"consumerGroup": _SG, "topic": "diff_admin_none"}),
        Step("consumption of an unknown group", 208, {"consumerGroup": "diff_admin_nobody", "topic": _S}),
        Step("consumption without fields", 208),
        Step("consumption of everybody", 317, {"isOrder": False}, names_only=True),
        Step("time span", 303, {"topic": _S, "group": _SG}),
        Step("time span of an unknown topic", 303, {"topic": "diff_admin_none", "group": _SG}),
        Step("time span without fields", 303),
        Step("topics of the group", 343, {"group": _SG}),
        Step("topics of an unknown group", 343, {"group": "diff_admin_nobody"}),
        Step("groups of an offline topic", 300, {"topic": _S}),
        Step("groups of an unknown topic", 300, {"topic": "diff_admin_none"}),
        Step("subscription of nobody", 345, {"group": "diff_admin_nobody", "topic": _S}),
        Step("queue entries", 321, {"topic": _S, "queueId": 0, "index": 0, "count": 2, "consumerGroup": _SG}),
        Step("queue entries behind the end", 321, {"topic": _S, "queueId": 0, "index": 99, "count": 2}),
        Step("queue entries of a queue beyond", 321, {"topic": _S, "queueId": 9, "index": 0, "count": 2}),
        Step("queue entries without fields", 321),
        Step("statistics unknown", 315, {"statsName": "NO_SUCH", "statsKey": _S}),
        Step("statistics of an unknown key", 315, {"statsName": "TOPIC_PUT_NUMS", "statsKey": "diff_admin_none"}),
        Step("statistics without fields", 315),
        Step("producers", 328),
        heartbeat("producer", _SG, _S),
        Step("producers then", 328),
        Step("clean queues", 306),
        Step("clean unused topics", 316),
        Step("delete expired", 329),
        Step("runtime", 28, names_only=True),
        Step("ha", 907, names_only=True),
        Step("epochs", 1007),
        Step("all offsets", 43, names_only=True),
        Step("all delay offsets", 45, names_only=True),
        Step("roll pops back", 200056),
    ),
)


def _reset(name: str, **fields: object) -> Step:
    ext = {"topic": _S + "r", "group": _SG + "r", "timestamp": 0, "isForce": True, **fields}
    return Step(name, 222, {field: value for field, value in ext.items() if value is not None})


RESETS = Scenario(
    "reset",
    (
        create_topic("topic", _S + "r"),
        create_group("group", _SG + "r"),
        *(send(f"message {i}", _S + "r", f"m{i}") for i in range(3)),
        max_offset("there", _S + "r", 3),
        Step("committed", 15, {"consumerGroup": _SG + "r", "topic": _S + "r", "queueId": 0, "commitOffset": 2}),
        _reset("nobody online"),
        Step("offset after", 14, {"consumerGroup": _SG + "r", "topic": _S + "r", "queueId": 0}),
        pull("goes on there", _S + "r", 2, consumerGroup=_SG + "r"),
        _reset("one queue", queueId=0, offset=1),
        pull("goes on at one", _S + "r", 2, consumerGroup=_SG + "r"),
        _reset("to the end", timestamp=-1),
        pull("goes on at the end", _S + "r", 0, consumerGroup=_SG + "r"),
        _reset("offset out of range", queueId=0, offset=99),
        _reset("unknown topic", topic="diff_admin_none"),
        _reset("unknown group", group="diff_admin_nobody"),
        Step("without fields", 222),
        Step("clone", 314, {"srcGroup": _SG + "r", "destGroup": _SG + "c", "topic": _S + "r", "offline": True}),
        Step("cloned", 14, {"consumerGroup": _SG + "c", "topic": _S + "r", "queueId": 0}),
        Step("clone all topics", 314, {"srcGroup": _SG + "r", "destGroup": _SG + "d"}),
        Step("clone without fields", 314),
        Step("correction", 308, {"filterGroups": "", "compareGroup": _SG + "r", "topic": _S + "r"}),
        Step("correction without fields", 308),
        Step("status of nobody", 223, {"topic": _S + "r", "group": _SG + "r"}),
        Step("status without fields", 223),
        Step("directly to nobody", 309, {"consumerGroup": _SG + "r", "clientId": "c", "topic": _S + "r"}),
        Step("directly without fields", 309),
        Step("running info without fields", 307),
        _reset("without time", timestamp=None),
        _reset("queue beyond", queueId=9, offset=1),
    ),
)

SETTINGS = Scenario(
    "settings",
    (
        Step("set", 25, {}, "autoCreateTopicEnable=false"),
        send("no topic is made now", "diff_admin_auto"),
        Step("set back", 25, {}, "autoCreateTopicEnable=true"),
        send("a topic is made again", "diff_admin_auto"),
        Step("set the broker's home", 25, {}, "rocketmqHome=/nowhere"),
        Step("set the list of what must not be set", 25, {}, "configBlackList=x"),
        Step("set nothing", 25),
        Step("set an unknown key", 25, {}, "noSuchKey=1"),
        Step("set no properties", 25, {}, "just text"),
        Step("settings", 26, names_only=True),
        *(Step(f"unknown code {code}", code) for code in (1, 999, 12345, 32767)),
        *(Step(f"unknown code {code} of the name server", code, to="namesrv") for code in (10, 11, 999, 32767)),
        *(Step(f"authentication off, code {code}", code) for code in range(3001, 3011)),
    ),
)

SCENARIOS = (TOPICS, GROUPS, STATISTICS, RESETS, SETTINGS)
