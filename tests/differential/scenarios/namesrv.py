"""The name server: registration and removal of brokers, routes, topic lists, settings."""

from __future__ import annotations

from tests.differential.scenarios.requests import create_topic
from tests.differential.steps import NAMESRV, Body, Scenario, Step

T = "diff_names"
_BROKER = {
    "brokerName": "diff_broker",
    "brokerAddr": "10.0.0.1:10911",
    "clusterName": "diff_cluster",
    "brokerId": 0,
}
_QUEUES = {"brokerName": "diff_broker", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6, "topicSysFlag": 0}


def _ask(name: str, code: int, body: Body = b"", /, **ext: object) -> Step:
    return Step(name, code, {field: value for field, value in ext.items() if value is not None}, body, to=NAMESRV)


def _topic(name: str, **more: object) -> dict[str, object]:
    plain = {"readQueueNums": 2, "writeQueueNums": 2, "perm": 6, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0}
    return {"topicName": name, **plain, "order": False, **more}


_VERSION = {"counter": 1, "stateVersion": 0, "timestamp": 1_700_000_000_000}


def _register(name: str, *topics: dict[str, object], counter: int = 1, **ext: object) -> Step:
    wrapper = {
        "topicConfigTable": {str(topic["topicName"]): topic for topic in topics},
        "dataVersion": {**_VERSION, "counter": counter},
    }
    body: Body = {"topicConfigSerializeWrapper": wrapper, "filterServerList": []}
    return _ask(name, 103, body, **{**_BROKER, "haServerAddr": "10.0.0.1:10912", "bodyCrc32": 0, **ext})


REGISTRATION = Scenario(
    "registration",
    (
        _register("two topics", _topic(T), _topic(T + "_unit", topicSysFlag=1)),
        _ask("route", 105, topic=T),
        _ask("route in standard json", 105, topic=T, acceptStandardJsonOnly=True),
        _register("as it was", _topic(T), _topic(T + "_unit", topicSysFlag=1)),
        _register("more topics", _topic(T), _topic(T + "_sub", topicSysFlag=2), _topic(T + "_ro", perm=4), counter=2),
        _register("with a wrong checksum", _topic(T), _topic(T + "2"), bodyCrc32=5),
        _register("a slave", brokerId=1, brokerAddr="10.0.0.2:10911", counter=2),
        _ask("route with a slave", 105, topic=T),
        _register("one topic only", _topic(T + "_one"), brokerName="diff_single", brokerAddr="10.0.0.3:10911"),
        _ask("unregister the single", 104, **{**_BROKER, "brokerName": "diff_single", "brokerAddr": "10.0.0.3:10911"}),
        _ask("registered nothing", 103, **_BROKER, haServerAddr="10.0.0.1:10912"),
        _ask("registered without fields", 103),
        _ask("heartbeat", 904, clusterName="diff_cluster", brokerAddr="10.0.0.1:10911", brokerName="diff_broker"),
        _ask("heartbeat of nobody", 904, clusterName="none", brokerAddr="10.0.0.9:10911", brokerName="none"),
        _ask("heartbeat without fields", 904),
        _ask("same version", 322, {**_VERSION, "counter": 2}, **_BROKER),
        _ask("other version", 322, {**_VERSION, "counter": 3}, **_BROKER),
        _ask("version of nobody", 322, dict(_VERSION), **{**_BROKER, "brokerAddr": "10.0.0.9:10911"}),
        _ask("version without fields", 322),
        _ask("members", 901, clusterName="diff_cluster", brokerName="diff_broker"),
        _ask("members of nobody", 901, clusterName="none", brokerName="none"),
        _ask("members without fields", 901),
        _ask("clusters", 106),
        _ask("wipe write permission", 205, brokerName="diff_broker"),
        _ask("route without write", 105, topic=T),
        _ask("add write permission", 327, brokerName="diff_broker"),
        _ask("route with write", 105, topic=T),
        _ask("wipe for nobody", 205, brokerName="none"),
        _ask("add for nobody", 327, brokerName="none"),
        _ask("wipe without fields", 205),
        _ask("add without fields", 327),
        _ask("topics of the cluster", 224, cluster="diff_cluster"),
        _ask("topics of no cluster", 224, cluster="none"),
        _ask("topics without fields", 224),
        _ask("unit topics", 311),
        _ask("unit subscriptions", 312),
        _ask("unit subscriptions without unit", 313),
        _ask("system topics", 304),
        _ask("all topics", 206),
        _ask("unknown route", 105, topic="diff_names_none"),
        _ask("route without fields", 105),
        _ask("register a topic", 217, {"queueDatas": [_QUEUES], "brokerDatas": []}, topic=T + "_217"),
        _ask("its route", 105, topic=T + "_217"),
        _ask("register a topic of nobody", 217, {"queueDatas": [{**_QUEUES, "brokerName": "none"}]}, topic=T + "_218"),
        _ask("no route", 105, topic=T + "_218"),
        _ask("register a topic without body", 217, topic=T + "_219"),
        _ask("register without fields", 217),
        _ask("delete a topic", 216, topic=T + "_217"),
        _ask("deleted", 105, topic=T + "_217"),
        _ask("delete in a cluster", 216, topic=T, clusterName="diff_cluster"),
        _ask("deleted there", 105, topic=T),
        _ask("delete in no cluster", 216, topic=T + "_sub", clusterName="none"),
        _ask("delete without fields", 216),
        _ask("unregister the slave", 104, **{**_BROKER, "brokerId": 1, "brokerAddr": "10.0.0.2:10911"}),
        _ask("unregister", 104, **_BROKER),
        Step("route of who left", 105, {"topic": T + "_sub"}, to=NAMESRV, until={"code": 17}),
        _ask("unregister nobody", 104, **{**_BROKER, "brokerName": "none"}),
        _ask("unregister without fields", 104),
    ),
)

_N = "DIFF_NAMESPACE"
KEYS = Scenario(
    "kv",
    (
        _ask("get nothing", 101, namespace=_N, key="a"),
        _ask("list nothing", 219, namespace=_N),
        _ask("put", 100, namespace=_N, key="a", value="1"),
        _ask("put another", 100, namespace=_N, key="b", value="2"),
        _ask("put again", 100, namespace=_N, key="a", value="3"),
        _ask("get", 101, namespace=_N, key="a"),
        _ask("list", 219, namespace=_N),
        _ask("delete", 102, namespace=_N, key="a"),
        _ask("get deleted", 101, namespace=_N, key="a"),
        _ask("delete again", 102, namespace=_N, key="a"),
        _ask("delete the last", 102, namespace=_N, key="b"),
        _ask("list emptied", 219, namespace=_N),
        _ask("delete in no namespace", 102, namespace="none", key="a"),
        _ask("put without value", 100, namespace=_N, key="a"),
        _ask("put without namespace", 100, key="a", value="1"),
        _ask("get without fields", 101),
        _ask("delete without fields", 102),
        _ask("list without fields", 219),
        create_topic("ordered topic", T + "_order", order=True),
        _ask("order", 100, namespace="ORDER_TOPIC_CONFIG", key=T + "_order", value="${broker_name}:2"),
        Step("route of the ordered topic", 105, {"topic": T + "_order"}, to=NAMESRV, until={"code": 0}),
        _ask("no order", 102, namespace="ORDER_TOPIC_CONFIG", key=T + "_order"),
    ),
)

SETTINGS = Scenario(
    "name server settings",
    (
        Step("settings", 319, to=NAMESRV, names_only=True),
        _ask("set", 318, "enableAllTopicList=false"),
        _ask("no list now", 206),
        _ask("set back", 318, "enableAllTopicList=true"),
        _ask("set the home", 318, "rocketmqHome=/nowhere"),
        _ask("set the path of its keys", 318, "kvConfigPath=/nowhere"),
        _ask("set an unknown key", 318, "noSuchKey=1"),
        _ask("set nothing", 318),
        _ask("set no properties", 318, "just text"),
    ),
)

SCENARIOS = (REGISTRATION, KEYS, SETTINGS)
