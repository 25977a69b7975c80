"""Active groups: heartbeats 34, 35, 38, 46, offsets 14, 15, 29 to 32, locks 41, 42, and messages sent back 36."""

from __future__ import annotations

from tests.differential.scenarios.heartbeats import heartbeat, subscription
from tests.differential.scenarios.requests import create_group, create_topic, max_offset, properties, pull, send
from tests.differential.steps import Scenario, Step

T = "diff_cons"
G = "diff_cons_g"


def _queue(topic: str = T, queue_id: int = 0) -> dict[str, object]:
    return {"topic": topic, "queueId": queue_id}


def _offset(name: str, topic: str = T, queue_id: int = 0, group: str = G, **more: object) -> Step:
    return Step(name, 14, {"consumerGroup": group, **_queue(topic, queue_id), **more})


def _commit(name: str, offset: object, topic: str = T, queue_id: int = 0, group: str = G) -> Step:
    return Step(name, 15, {"consumerGroup": group, **_queue(topic, queue_id), "commitOffset": offset})


OFFSETS = Scenario(
    "offsets",
    (
        create_topic("topic", T),
        create_group("group", G),
        *(send(f"message {i}", T, f"m{i}") for i in range(4)),
        max_offset("there", T, 4),
        _offset("of a new group"),
        _offset("of an empty queue", queue_id=1),
        _offset("of a new group, zero unless found", setZeroIfNotFound=False),
        _offset("of an unknown group", group="diff_cons_nobody"),
        _offset("of an unknown topic", topic="diff_cons_none"),
        _offset("of a queue beyond", queue_id=9),
        _commit("commit", 3),
        _offset("committed"),
        _commit("commit backwards", 1),
        _offset("committed backwards"),
        _commit("commit beyond the end", 100),
        _offset("committed beyond the end"),
        _commit("commit negative", -1),
        _offset("committed negative"),
        _commit("commit no number", "x"),
        _commit("commit for an unknown topic", 1, topic="diff_cons_none"),
        _commit("commit for a queue beyond", 1, queue_id=9),
        _commit("commit for an unknown group", 1, group="diff_cons_nobody"),
        Step("commit without offset", 15, {"consumerGroup": G, **_queue()}),
        Step("query without fields", 14),
        Step("commit without fields", 15),
        Step("max", 30, _queue()),
        Step("max of an empty queue", 30, _queue(queue_id=1)),
        Step("max of a queue beyond", 30, _queue(queue_id=9)),
        Step("max of an unknown topic", 30, _queue("diff_cons_none")),
        Step("max without fields", 30),
        Step("max, not committed", 30, {**_queue(), "committed": False}),
        Step("min", 31, _queue()),
        Step("min of an empty queue", 31, _queue(queue_id=1)),
        Step("min of a queue beyond", 31, _queue(queue_id=9)),
        Step("min of an unknown topic", 31, _queue("diff_cons_none")),
        Step("min without fields", 31),
        Step("search the first", 29, {**_queue(), "timestamp": 0}),
        Step("search the future", 29, {**_queue(), "timestamp": 1 << 42}),
        Step("search the future, upper", 29, {**_queue(), "timestamp": 1 << 42, "boundaryType": "UPPER"}),
        Step("search the first, upper", 29, {**_queue(), "timestamp": 0, "boundaryType": "UPPER"}),
        Step("search negative", 29, {**_queue(), "timestamp": -1}),
        Step("search an empty queue", 29, {**_queue(queue_id=1), "timestamp": 0}),
        Step("search an unknown topic", 29, {**_queue("diff_cons_none"), "timestamp": 0}),
        Step("search without time", 29, _queue()),
        Step("earliest", 32, _queue()),
        Step("earliest of an empty queue", 32, _queue(queue_id=1)),
        Step("earliest of an unknown topic", 32, _queue("diff_cons_none")),
        Step("earliest without fields", 32),
    ),
)

MEMBERS = Scenario(
    "members",
    (
        create_topic("topic", T + "_m"),
        Step("nobody is there", 38, {"consumerGroup": G}),
        heartbeat("one", G, T + "_m"),
        Step("one is there", 38, {"consumerGroup": G}),
        heartbeat("again", G, T + "_m"),
        heartbeat("two", G, T + "_m", line="second"),
        Step("two are there", 38, {"consumerGroup": G}),
        heartbeat("another subscription", G, T + "_m", "red || blue", line="second"),
        heartbeat("sql", G + "_sql", T + "_m", "a > 1", "SQL92"),
        heartbeat("bad sql", G + "_sql", T + "_m", "a >", "SQL92"),
        Step("without body", 34),
        Step("body is no json", 34, {}, "{"),
        Step("body without client id", 34, {}, {"producerDataSet": [], "consumerDataSet": []}),
        Step("empty client", 34, {}, {"clientID": "nobody", "producerDataSet": [], "consumerDataSet": []}),
        Step("connections", 203, {"consumerGroup": G}),
        Step("connections of nobody", 203, {"consumerGroup": "diff_cons_nobody"}),
        Step("producer connections", 204, {"producerGroup": G + "_producer"}),
        Step("producer connections of nobody", 204, {"producerGroup": "diff_cons_nobody"}),
        Step("groups of the topic", 300, {"topic": T + "_m"}),
        Step("subscription", 345, {"group": G, "topic": T + "_m"}),
        Step("subscription to another topic", 345, {"group": G, "topic": T}),
        Step("status from clients, nobody", 223, {"topic": T, "group": "diff_cons_nobody"}),
        Step("running info of nobody", 307, {"consumerGroup": "diff_cons_nobody", "clientId": "c"}),
        Step("running info of another client", 307, {"consumerGroup": G, "clientId": "c"}),
        Step(
            "unregister the second",
            35,
            {"clientID": f"{G}@second", "consumerGroup": G, "producerGroup": G + "_producer"},
            line="second",
        ),
        Step("one is left", 38, {"consumerGroup": G}),
        Step("unregister without group", 35, {"clientID": f"{G}@main"}),
        Step("unregister nobody", 35, {"clientID": "x", "consumerGroup": "diff_cons_nobody"}),
        Step("unregister without fields", 35),
        Step("unregister the first", 35, {"clientID": f"{G}@main", "consumerGroup": G}),
        Step("nobody is left", 38, {"consumerGroup": G}),
        Step("list without fields", 38),
        Step(
            "check a subscription",
            46,
            {},
            {"clientId": "c", "group": G, "subscriptionData": subscription(T, "a > 1", "SQL92")},
        ),
        Step(
            "check a bad subscription",
            46,
            {},
            {"clientId": "c", "group": G, "subscriptionData": subscription(T, "a >", "SQL92")},
        ),
        Step("check tags", 46, {}, {"clientId": "c", "group": G, "subscriptionData": subscription(T)}),
        Step("check nothing", 46, {}, {"clientId": "c", "group": G}),
        Step("check without body", 46),
    ),
)


def _lock(name: str, code: int, client: str, *queues: int, group: str = G, topic: str = T + "_l") -> Step:
    names = [{"topic": topic, "brokerName": "${broker_name}", "queueId": queue} for queue in queues]
    return Step(name, code, {}, {"consumerGroup": group, "clientId": client, "mqSet": names, "onlyThisBroker": False})


LOCKS = Scenario(
    "locks",
    (
        create_topic("topic", T + "_l"),
        _lock("lock two", 41, "c1", 0, 1),
        _lock("lock them again", 41, "c1", 0, 1),
        _lock("lock held ones", 41, "c2", 0, 1),
        _lock("unlock what another holds", 42, "c2", 0),
        _lock("still held", 41, "c2", 0),
        _lock("unlock one", 42, "c1", 0),
        _lock("lock the free one", 41, "c2", 0, 1),
        _lock("another group", 41, "c3", 0, group=G + "2"),
        _lock("nothing", 41, "c1"),
        _lock("a queue beyond", 41, "c1", 99),
        _lock("an unknown topic", 41, "c1", 0, topic="diff_cons_none"),
        Step("lock without body", 41),
        Step("unlock without body", 42),
    ),
)


def _back(name: str, **fields: object) -> Step:
    defaults = {"offset": "${position}", "group": G + "_b", "delayLevel": 1, "originTopic": T + "_b", "unitMode": False}
    ext = {key: value for key, value in {**defaults, **fields}.items() if value is not None}
    return Step(name, 36, ext)


_RETRY, _DLQ = f"%RETRY%{G}_b", f"%DLQ%{G}_b"
BACK = Scenario(
    "send back",
    (
        create_topic("topic", T + "_b"),
        create_group("group", G + "_b"),
        create_group("group without retries", G + "_n", retryQueueNums=0),
        send("message", T + "_b", properties=properties(KEYS="k", TAGS="red")),
        pull(
            "found",
            T + "_b",
            step={"until": {"code": 0}, "save": {"position": "body.0.physical_offset"}},
        ),
        _back("to be retried"),
        Step("retry topic", 351, {"topic": _RETRY}),
        _back("to be retried by default level", delayLevel=0, maxReconsumeTimes=16),
        _back("as a dead letter", delayLevel=-1),
        Step("dead letter topic", 351, {"topic": _DLQ}),
        _back("after its last retry", maxReconsumeTimes=0),
        pull("retried", _RETRY, consumerGroup=G + "_b", step={"until": {"code": 0}}),
        max_offset("dead letters", _DLQ, 2),
        _back("of an unknown group", group="diff_cons_nobody"),
        _back("of a group without retries", group=G + "_n"),
        _back("of a bad offset", offset=7),
        _back("of an offset beyond", offset=1 << 50),
        _back("without offset", offset=None),
        _back("without group", group=None),
        _back("without level", delayLevel=None),
        Step("without fields", 36),
    ),
)

SCENARIOS = (OFFSETS, MEMBERS, LOCKS, BACK)
