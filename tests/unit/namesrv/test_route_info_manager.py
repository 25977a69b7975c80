from __future__ import annotations

import json
import struct
import zlib

import pytest

from infra.clock import ManualClock
from namesrv import registration
from namesrv.namesrv_config import NamesrvConfig
from namesrv.registration import BrokerRegistration, check_crc, parse_registration, parse_topic_text
from namesrv.route_info_manager import BrokerIdentity, RouteInfoManager
from neve.errors import BrokerError, ProtocolError
from neve.remoting.body import DataVersion, NodeBudget, QueueData, TopicConfig, dumps

A = BrokerIdentity("c", "a", "10.0.0.1:10911", 0)
A_SLAVE = BrokerIdentity("c", "a", "10.0.0.2:10911", 1)
B = BrokerIdentity("c", "b", "10.0.0.3:10911", 0)

MAX_TOPICS = 1000


def topics(*names: str, counter: int = 1, state: int = 0) -> BrokerRegistration:
    return BrokerRegistration({name: TopicConfig(name, 4, 4) for name in names}, DataVersion(state, 5, counter))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def routes(clock: ManualClock) -> RouteInfoManager:
    return RouteInfoManager(clock, NamesrvConfig())


def test_topic_on_two_brokers_has_both_in_its_route(routes: RouteInfoManager) -> None:
    routes.register(A, topics("t", "u"), connection=1)
    routes.register(B, topics("t"), connection=2)
    route = routes.route("t")
    assert route is not None
    assert [queue.broker_name for queue in route.queue_datas] == ["a", "b"]
    assert [broker.broker_addrs for broker in route.broker_datas] == [{0: A.address}, {0: B.address}]
    assert routes.route("none") is None
    assert routes.topics() == ["t", "u"]
    assert routes.topics_of_cluster("c") == ["t", "u"]
    assert routes.topics_of_cluster("other") == []
    assert routes.cluster_info()["clusterAddrTable"] == {"c": ["a", "b"]}
    names, address = routes.system_topics()
    assert names == ["a", "b", "c"]
    assert address in (A.address, B.address)


def test_slave_registration_returns_the_master_and_changes_no_topics(routes: RouteInfoManager) -> None:
    assert routes.register(A_SLAVE, topics("s"), connection=2).master_addr is None
    assert routes.topics() == []
    routes.register(A, topics("t"), connection=1, ha_server_addr="10.0.0.1:10912")
    result = routes.register(A_SLAVE, topics("s"), connection=2)
    assert (result.master_addr, result.ha_server_addr) == (A.address, "10.0.0.1:10912")
    assert routes.member_group("c", "a")["brokerAddrs"] == {0: A.address, 1: A_SLAVE.address}
    routes.connection_closed(1)
    route = routes.route("t")
    assert route is not None
    assert route.broker_datas[0].broker_addrs == {1: A_SLAVE.address}


def test_slave_with_lowest_id_registers_topics_without_a_master(routes: RouteInfoManager) -> None:
    """After a restart of the name server, consumers find the slaves, and producers find no master."""
    second = BrokerIdentity("c", "a", "10.0.0.4:10911", 2)
    routes.register(second, topics("t"), connection=3, acting_master=False)
    routes.register(A_SLAVE, topics("t", "u"), connection=2, acting_master=False)
    routes.register(second, topics("v", counter=2), connection=3, acting_master=False)
    assert routes.topics() == ["t", "u"]
    route = routes.route("t")
    assert route is not None
    assert route.broker_datas[0].broker_addrs == {1: A_SLAVE.address, 2: second.address}
    routes.register(A, topics("m"), connection=1, acting_master=False, drop_missing_topics=True)
    routes.register(A_SLAVE, topics("s", counter=3), connection=2, acting_master=False)
    assert routes.topics() == ["m"]


def test_unregistered_broker_is_removed_under_any_id(routes: RouteInfoManager) -> None:
    """The broker may unregister with the id that it had before a role change."""
    routes.register(A, topics("t"), connection=1)
    routes.register(BrokerIdentity("c", "a", A_SLAVE.address, 0), topics("t", state=2), connection=2)
    routes.unregister(A_SLAVE)
    assert routes.route("t") is None


def test_deposed_master_does_not_replace_or_remove_the_new_master(routes: RouteInfoManager) -> None:
    routes.register(A, topics("t", state=1), connection=1)
    promoted = BrokerIdentity("c", "a", A_SLAVE.address, 0)
    routes.register(promoted, topics("t", state=2), connection=2)
    with pytest.raises(BrokerError, match="newer state"):
        routes.register(A, topics("t", state=1), connection=1)
    routes.connection_closed(1)
    assert routes.member_group("c", "a")["brokerAddrs"] == {0: promoted.address}
    routes.register(BrokerIdentity("c", "a", A.address, 1), topics("t", state=2), connection=4)
    assert routes.member_group("c", "a")["brokerAddrs"] == {0: promoted.address, 1: A.address}


def test_only_new_data_versions_change_topics(routes: RouteInfoManager) -> None:
    routes.register(A, topics("t"), connection=1)
    assert routes.set_writable("a", writable=False) == 1
    routes.register(A, topics("t"), connection=1)
    route = routes.route("t")
    assert route is not None
    assert route.queue_datas[0].perm == 4
    assert routes.set_writable("a", writable=True) == 1
    assert route.queue_datas[0].perm == 6
    routes.register(A, topics("v", counter=2), connection=1)
    assert routes.topics() == ["t", "v"]
    routes.register(A, topics("v", counter=3), connection=1, drop_missing_topics=True)
    assert routes.topics() == ["v"]


def test_single_topic_registration_is_accepted(routes: RouteInfoManager) -> None:
    routes.register(A, topics("only"), connection=1)
    assert routes.topics() == ["only"]


def test_version_query_replaces_registration_and_keeps_alive(clock: ManualClock, routes: RouteInfoManager) -> None:
    version = DataVersion(0, 5, 1)
    assert routes.query_data_version("c", A.address, version) == (True, None)
    routes.register(A, topics("t"), connection=1)
    for _ in range(3):
        clock.advance(100_000)
        assert routes.query_data_version("c", A.address, version) == (False, version)
        assert routes.expire() == []
    assert routes.query_data_version("c", A.address, DataVersion(0, 5, 2)) == (True, version)
    clock.advance(100_000)
    routes.heartbeat("c", A.address)
    clock.advance(100_000)
    assert routes.expire() == []


def test_silent_broker_is_removed_independently_of_the_wall_clock(clock: ManualClock, routes: RouteInfoManager) -> None:
    routes.register(A, topics("t"), connection=1)
    routes.register(B, topics("t"), connection=2, timeout_ms=10_000)
    clock.set_wall(clock.now_ms() + 10**9)
    assert routes.expire() == []
    clock.advance(10_001)
    assert routes.expire() == [(B, 2)]
    clock.advance(110_000)
    assert routes.expire() == [(A, 1)]
    assert routes.topics() == []
    assert routes.cluster_info() == {"brokerAddrTable": {}, "clusterAddrTable": {}}


def test_closed_connection_removes_its_broker_unless_reconnected(routes: RouteInfoManager) -> None:
    routes.register(A, topics("t"), connection=1)
    routes.register(A, topics("t"), connection=2)
    assert routes.connection_closed(1) == []
    assert routes.route("t") is not None
    assert routes.connection_closed(2) == [A]
    assert routes.route("t") is None


def test_changed_addresses_are_updated(routes: RouteInfoManager) -> None:
    routes.register(A_SLAVE, topics(), connection=1)
    promoted = BrokerIdentity("c", "a", A_SLAVE.address, 0)
    routes.register(promoted, topics("t"), connection=1)
    assert routes.member_group("c", "a")["brokerAddrs"] == {0: A_SLAVE.address}
    renamed = BrokerIdentity("c", "z", A_SLAVE.address, 0)
    routes.register(renamed, topics("t"), connection=1)
    assert routes.cluster_info()["clusterAddrTable"] == {"c": ["z"]}
    moved = BrokerIdentity("c", "z", "10.0.0.9:1", 0)
    routes.register(moved, topics("t"), connection=3)
    assert routes.connection_closed(1) == [renamed]
    assert routes.member_group("c", "z")["brokerAddrs"] == {0: moved.address}


def test_conflicting_registration_is_refused(routes: RouteInfoManager) -> None:
    routes.register(A, topics("t", state=5), connection=1)
    with pytest.raises(BrokerError, match="newer state"):
        routes.register(BrokerIdentity("c", "a", "10.0.0.9:1", 0), topics("t", state=4), connection=2)
    with pytest.raises(BrokerError, match="belongs to cluster"):
        routes.register(BrokerIdentity("other", "a", "10.0.0.9:1", 0), topics("t"), connection=2)
    assert routes.member_group("c", "a")["brokerAddrs"] == {0: A.address}
    assert routes.member_group("other", "a")["brokerAddrs"] == {}


def test_manually_registered_topics_persist_until_deleted(routes: RouteInfoManager) -> None:
    routes.register(A, topics("t"), connection=1)
    routes.register_topic("n", [QueueData("a", 1, 1), QueueData("stranger", 1, 1)])
    assert routes.topics() == ["n", "t"]
    routes.delete_topic("n", "other")
    assert routes.topics() == ["n", "t"]
    routes.delete_topic("n", "c")
    routes.delete_topic("t")
    assert routes.topics() == []
    routes.unregister(A)
    routes.unregister(A)


def test_topics_are_listed_by_their_flag(routes: RouteInfoManager) -> None:
    registration = BrokerRegistration({n: TopicConfig(n, topic_sys_flag=f) for n, f in (("u", 1), ("s", 2), ("us", 3))})
    routes.register(A, registration, connection=1)
    assert routes.topics_by_flag(lambda flag: bool(flag & 1)) == ["u", "us"]
    assert routes.topics_by_flag(lambda flag: flag == 2) == ["s"]


def block(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


def compressed(*topic_texts: str, tail: bytes = b"") -> bytes:
    version = json.dumps({"stateVersion": 1, "timestamp": 2, "counter": 3}).encode()
    table = struct.pack(">i", len(topic_texts)) + b"".join(block(text.encode()) for text in topic_texts)
    return zlib.compress(block(version) + table + block(b'["f:1"]') + tail)


def test_compressed_registration_is_parsed() -> None:
    body = compressed(
        "t 8 4 6 SINGLE_TAG {}", "old 1 2 4 MULTI_TAG", 'x 1 1 6 SINGLE_TAG {"+k":"v w"}', tail=b"\0\0\0\0"
    )
    parsed = parse_registration(body, compressed=True, max_topics=MAX_TOPICS)
    assert parsed.data_version == DataVersion(1, 2, 3)
    assert parsed.topics["t"] == TopicConfig("t", 8, 4, 6)
    assert parsed.topics["old"].topic_filter_type == "MULTI_TAG"
    assert parsed.topics["x"].attributes == {"+k": "v w"}
    assert parsed.filter_servers == ["f:1"]


@pytest.mark.parametrize(
    "body",
    [
        b"no zlib",
        compressed("t 8 4 6 SINGLE_TAG {}")[:-6],
        zlib.compress(struct.pack(">i", -1)),
        zlib.compress(struct.pack(">i", 100) + b"x"),
        zlib.compress(b"\0"),
        zlib.compress(bytes(65 * 1024 * 1024)),
        compressed("t x 4 6 SINGLE_TAG"),
        compressed("t"),
    ],
)
def test_hostile_compressed_registration_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_registration(body, compressed=True, max_topics=MAX_TOPICS)


def test_plain_registration_in_the_dialect() -> None:
    body = (
        b'{"filterServerList":[],"topicConfigSerializeWrapper":{"dataVersion":{"counter":3,"stateVersion":0,"timestamp":9},'
        b'"mappingDataVersion":{"counter":0,"stateVersion":0,"timestamp":1},"topicConfigTable":{"t":{"attributes":{},"order":'
        b'false,"perm":6,"readQueueNums":8,"topicFilterType":"SINGLE_TAG","topicName":"t","topicSysFlag":0,"writeQueueNums":8}},'
        b'"topicQueueMappingDetailMap":{},"topicQueueMappingInfoMap":{}}}'
    )
    parsed = parse_registration(body, compressed=False, max_topics=MAX_TOPICS)
    assert parsed.data_version == DataVersion(0, 9, 3)
    assert parsed.topics == {"t": TopicConfig("t", 8, 8)}
    assert parse_registration(b"", compressed=False, max_topics=MAX_TOPICS).topics == {}
    check_crc(body, 0)
    check_crc(body, zlib.crc32(body) & 0x7FFFFFFF)
    with pytest.raises(BrokerError, match="crc32"):
        check_crc(body, 1)
    assert parse_topic_text("t 1 1 6 SINGLE_TAG ", NodeBudget()).attributes == {}


class Counting(NodeBudget):
    """A budget that records the granted amount."""

    spent = 0

    def spend(self, nodes: int) -> None:
        super().spend(nodes)
        Counting.spent += nodes


@pytest.mark.parametrize(
    "body",
    [
        zlib.compress(block(b"{'a':[" + b"{}," * 4_000_000 + b"0]}"), 9),
        zlib.compress(
            block(b"{}") + struct.pack(">i", 1) + block(b"t 1 1 6 S {'a':[" + b"{}," * 4_000_000 + b"0]}"), 9
        ),
        zlib.compress(block(b"{}") + struct.pack(">i", 4_000_000) + bytes(4 * 4_000_000), 9),
        zlib.compress(bytes(17 * 1024 * 1024), 9),
    ],
    ids=["version", "attributes", "topics", "bytes"],
)
def test_expanding_registration_has_bounded_cost(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "NodeBudget", Counting)
    Counting.spent = 0
    with pytest.raises((ProtocolError, BrokerError)):
        parse_registration(body, compressed=True, max_topics=MAX_TOPICS)
    assert Counting.spent < 40 * MAX_TOPICS


def test_registration_with_too_many_topics_is_refused() -> None:
    texts = [f"t{number} 1 1 6 SINGLE_TAG" for number in range(3)]
    assert len(parse_registration(compressed(*texts), compressed=True, max_topics=3).topics) == 3
    with pytest.raises(BrokerError, match="maxTopicsPerBroker"):
        parse_registration(compressed(*texts), compressed=True, max_topics=2)
    plain = dumps(
        {"topicConfigSerializeWrapper": {"topicConfigTable": {f"t{n}": TopicConfig(f"t{n}") for n in range(3)}}}
    )
    assert len(parse_registration(plain, compressed=False, max_topics=3).topics) == 3
    with pytest.raises(BrokerError, match="maxTopicsPerBroker"):
        parse_registration(plain, compressed=False, max_topics=2)
    with pytest.raises(ProtocolError):
        parse_registration(compressed(f"t {'9' * 30} 1 6 SINGLE_TAG"), compressed=True, max_topics=3)


def test_tables_are_bounded_and_a_refusal_changes_nothing(clock: ManualClock) -> None:
    limits = NamesrvConfig(max_brokers=2, max_topic_routes=3)
    routes = RouteInfoManager(clock, limits)
    routes.register(A, topics("t", "u"), connection=1)
    routes.register(B, topics("t"), connection=2)
    with pytest.raises(BrokerError, match="maxBrokers"):
        routes.register(BrokerIdentity("c", "third", "10.0.0.9:1", 0), topics(), connection=3)
    with pytest.raises(BrokerError, match="maxTopicRoutes"):
        routes.register(B, topics("t", "v", counter=2), connection=2)
    with pytest.raises(BrokerError, match="maxTopicRoutes"):
        routes.register_topic("w", [QueueData("a", 1, 1)])
    for wrong in (topics("x" * 256, counter=2), BrokerRegistration({}, DataVersion(0, 5, 2), ["f"] * 65)):
        with pytest.raises(BrokerError, match="too"):
            routes.register(B, wrong, connection=2)
    assert routes.topics() == ["t", "u"]
    routes.delete_topic("u")
    routes.register(B, topics("t", "v", counter=2), connection=2)
    assert routes.topics() == ["t", "v"]
    routes.unregister(A)
    routes.register_topic("w", [QueueData("b", 1, 1)])
    assert routes.topics() == ["t", "v", "w"]
