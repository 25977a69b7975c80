"""Stock clients read messages that only MinIO has: the results equal those from the local log.

The client is 5.3.3; `make soak` tests 4.9.8 as well. Each version has one broker: topics are filled and consumed hot,
then archived and evicted, so that every test reads from the archive.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from bench import jvm
from tests.interop.agent import Acknowledged, Consumed
from tests.interop.cold_cluster import ColdCluster, running

pytestmark = pytest.mark.servers
COUNT = 60
PAIR_QUEUES, PAIR_COUNT = 10, 800
FOREVER = 1 << 60
DEAD = "%DLQ%g_dead"


@pytest.fixture(scope="module", params=[jvm.SERVER, jvm.CLIENT_OLD] if os.environ.get("NEVE_SOAK") else [jvm.SERVER])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ColdCluster]:
    with running(tmp_path_factory.mktemp("cold"), request.param) as cluster:
        fill(cluster)
        cluster.offload_all()
        yield cluster


def fill(cluster: ColdCluster) -> None:
    """Fill a topic for each way to send and consume it while local; one group's messages all become dead letters."""
    agent = cluster.agent
    for topic, mode, count in (("plain", "plain", COUNT), ("batch", "batch", COUNT), ("ordered", "queued", COUNT)):
        cluster.make_topic(topic)
        assert_arrived(agent.produce(mode, topic, count, topic), cluster.consumed_hot(topic, count))
    cluster.make_topic("paid")
    committed = agent.produce("transaction", "paid", COUNT, "paid")
    assert sorted(got.key for got in cluster.consumed_hot("paid", len(committed))) == sorted(s.key for s in committed)
    cluster.make_topic("later")
    delayed = agent.produce("level 1", "later", 8, "later")
    assert sorted(got.key for got in cluster.consumed_hot("later", len(delayed))) == sorted(s.key for s in delayed)
    cluster.make_topic("wide", PAIR_QUEUES)
    agent.produce("queued", "wide", PAIR_COUNT, "wide")
    cluster.make_topic("doomed")
    agent.produce("plain", "doomed", 6, "doomed")
    agent.push("g_dead", "doomed", 12, mode="fail 9 dead")
    cluster.consumed_hot(DEAD, 6)


def assert_arrived(sent: Iterable[Acknowledged], got: Iterable[Consumed]) -> None:
    places = Counter((one.queue, one.offset, one.key, one.body) for one in sent)
    assert Counter((one.queue, one.offset, one.key, one.body) for one in got) == places


def assert_same(got: Iterable[Consumed], expected: Iterable[Consumed]) -> None:
    """Assert equality with the messages consumed hot: each once, with ids, times, hosts and properties."""
    assert sorted(got) == sorted(expected)


@pytest.mark.parametrize("topic", ["plain", "batch", "ordered", "paid", "later", DEAD])
def test_cold_messages_equal_hot_messages(cluster: ColdCluster, topic: str) -> None:
    before = cluster.cold_reads()
    assert_same(cluster.agent.push(f"cold_{topic[-4:]}", topic, len(cluster.hot[topic])), cluster.hot[topic])
    assert cluster.cold_reads() > before


def test_orderly_consumption_crosses_from_archive_to_local_log(cluster: ColdCluster) -> None:
    cluster.make_topic("border")
    first = cluster.agent.produce("queued", "border", COUNT, "first")
    cluster.offload_all()
    second = cluster.agent.produce("queued", "border", COUNT, "second")
    got = cluster.agent.push("g_border", "border", 2 * COUNT, mode="orderly")
    assert_arrived(first + second, got)
    for queue in range(4):
        offsets = [one.offset for one in got if one.queue == queue]
        assert offsets == list(range(len(offsets))), f"queue {queue}"


def test_filters_select_the_same_messages_cold(cluster: ColdCluster) -> None:
    odd = [one for one in cluster.hot["plain"] if one.value_of("TAGS") == "odd"]
    assert_same(cluster.agent.push("g_tag", "plain", len(odd), expression="odd || none"), odd)
    red = [one for one in cluster.hot["batch"] if one.value_of("colour") == "red" and int(one.value_of("number")) > 20]
    expression = "colour = 'red' AND number > 20 AND TAGS IS NOT NULL"
    assert_same(cluster.agent.push("g_sql", "batch", len(red), expression=expression, mode="sql"), red)


def test_broadcast_consumer_gets_all_cold(cluster: ColdCluster) -> None:
    got = cluster.agent.push("g_broadcast", "plain", COUNT, mode="broadcast")
    assert_same(got, cluster.hot["plain"])


def test_lite_pull_seeks_to_a_cold_offset(cluster: ColdCluster) -> None:
    wanted = [one for one in cluster.hot["ordered"] if one.queue == 2 and one.offset >= 5]
    assert_same(cluster.agent.lite("g_lite", "ordered", 2, 5, len(wanted)), wanted)


def test_failed_cold_messages_are_retried_and_become_dead_letters(cluster: ColdCluster) -> None:
    """The consumer sends back the physical offset of an evicted record."""
    got = cluster.agent.push("g_fail", "plain", 2 * COUNT, mode="fail 9 dead")
    first = [one for one in got if one.retries == 0]
    assert_same(first, cluster.hot["plain"])
    again = [one for one in got if one.retries == 1]
    assert Counter(one.key for one in again) == Counter(one.key for one in first)
    ids = {one.key: one.offset_id for one in first}
    assert all(one.value_of("ORIGIN_MESSAGE_ID") == ids[one.key] for one in again)
    dead = cluster.agent.push("g_mourner", "%DLQ%g_fail", COUNT)
    assert {one.key: one.body for one in dead} == {one.key: one.body for one in first}
    cluster.offload_all()
    assert_same(cluster.agent.push("g_digger", "%DLQ%g_fail", COUNT), dead)


def test_cold_messages_are_found_by_key_id_offset_or_time(cluster: ColdCluster) -> None:
    agent, plain = cluster.agent, cluster.hot["plain"]
    one = plain[17]
    assert [found.body for found in agent.by_key("plain", one.key, 32, 0, FOREVER)] == [one.body]
    for message_id in (one.offset_id, one.unique_id):
        found = agent.view("plain", message_id)
        assert (found.place, found.stored, found.properties, found.body) == (
            one.place, one.stored, one.properties, one.body,
        )  # fmt: skip
    assert one.unique_id in agent.admin("queryMsgByKey", "-t", "plain", "-k", one.key)
    assert f"{one.offset}" in agent.admin("queryMsgByUniqueKey", "-t", "plain", "-i", one.unique_id)
    topic = ["-t", "plain"] if agent.version == jvm.SERVER else []  # 4.x does not have this option.
    assert one.key in agent.admin("queryMsgById", "-i", one.offset_id, *topic)
    place = ["-b", "broker-a", "-i", str(one.queue), "-o", str(one.offset)]
    assert one.key in agent.admin("queryMsgByOffset", "-t", "plain", *place)
    for queue in range(4):
        rows = sorted((each.offset, each.stored) for each in plain if each.queue == queue)
        for offset, stored in rows:
            first = min(other for other, time in rows if time == stored)
            assert agent.offset_at("plain", queue, stored) == first, (queue, offset)


def test_group_reset_to_a_cold_time_resumes_there(cluster: ColdCluster) -> None:
    agent, plain = cluster.agent, cluster.hot["plain"]
    group = "g_reset"
    assert len(agent.push(group, "plain", COUNT)) == COUNT
    times = sorted(one.stored for one in plain)
    since = times[COUNT // 2]
    wanted = [one for one in plain if one.stored >= since]
    said = agent.admin("resetOffsetByTime", "-g", group, "-t", "plain", "-s", since, "-f", "true")
    assert "#offset" in said or "rollback" in said.lower(), said
    assert_same(agent.push(group, "plain", len(wanted)), wanted)


def test_rebalance_during_a_cold_replay_loses_no_message(cluster: ColdCluster) -> None:
    """There are ten queues and two members: the second joins at a quarter, the first leaves at three quarters.

    Messages that the first member held may be redelivered.
    """
    got, second = cluster.agent.pair("g_pair", "wide", PAIR_COUNT)
    assert 0 < second < len(got)
    offsets = {queue: {one.offset for one in got if one.queue == queue} for queue in range(PAIR_QUEUES)}
    assert offsets == {queue: set(range(PAIR_COUNT // PAIR_QUEUES)) for queue in range(PAIR_QUEUES)}
    by_place: dict[tuple[str, int, int], set[Consumed]] = {}
    for one in got:
        by_place.setdefault(one.place, set()).add(one)
    assert all(len(seen) == 1 for seen in by_place.values())


@pytest.mark.parametrize("cluster", [jvm.SERVER], indirect=True)
def test_pending_messages_are_delivered_after_earlier_ones_were_evicted(cluster: ColdCluster) -> None:
    """Messages with a delay level or a timer keep their segment while pending; once delivered, they are read cold."""
    cluster.make_topic("waiting")
    sent = [
        one for mode in ("level 3", "timer 9000") for one in cluster.agent.produce(mode, "waiting", 8, f"w{mode[0]}")
    ]
    written = cluster.segments()
    assert cluster.offload_leaves(written), "nothing waits: the messages were delivered at once"
    hot = cluster.agent.push("g_waiting", "waiting", len(sent))
    assert {one.key: one.body for one in hot} == {one.key: one.body for one in sent}
    cluster.offload_all()
    assert_same(cluster.agent.push("g_waited", "waiting", len(sent)), hot)
