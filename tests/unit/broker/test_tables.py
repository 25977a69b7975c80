"""The broker's tables and rules, without a socket."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from broker.clients.rebalance_lock import RebalanceLock
from broker.config import BrokerConfig
from broker.long_polling.pull_request_hold import SLICE, HeldPull, PullRequestHold
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.topic_config_manager import TopicConfigManager, system_topics
from broker.waiting.schedule_message import parse_levels
from infra.clock import ManualClock
from infra.config.properties import ConfigError, load, to_properties, update_live
from infra.disk.filesystem import RealDisk
from infra.loop.supervisor import Faults
from neve.remoting import names
from tests.kit.broker.synced import nothing_to_sync

T = TypeVar("T")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_configuration_accepts_rocketmq_keys_with_units(tmp_path: Path) -> None:
    path = write(tmp_path / "broker.conf", "# a comment\nbrokerName = b1\nlistenPort=1234\nmaxMessageSize=1m\n")
    config = load(BrokerConfig, path, ["archiveMaxAge=10m", "brokerIP1=10.0.0.1"])
    assert (config.broker_name, config.listen_port, config.max_message_size) == ("b1", 1234, 1 << 20)
    assert (config.archive_max_age, config.broker_ip1) == (600_000, "10.0.0.1")
    assert "brokerIP1=10.0.0.1\n" in to_properties(config)


def test_internal_topics_are_recognized() -> None:
    for topic in ("RMQ_SYS_TRANS_HALF_TOPIC", "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer", "rmq_sys_REVIVE_LOG_c"):
        assert names.is_system_topic(topic)
    for topic in ("orders", "%RETRY%g", "%DLQ%g"):
        assert not names.is_system_topic(topic)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("listenPrt=1", "unknown key listenPrt"),
        ("listenport=1", "did you mean listenPort?"),
        ("listenPort=99999", "from 0 to 65535"),
        ("listenPort=x", "from 0 to 65535"),
        ("flushDiskType=SOMETIMES", "ASYNC_FLUSH, SYNC_FLUSH"),
        ("autoCreateTopicEnable=maybe", "true, false"),
        ("just words", "unknown key just"),
        ("words", "is not key=value"),
    ],
)
def test_invalid_configuration_line_is_reported_with_the_valid_range(tmp_path: Path, line: str, told: str) -> None:
    path = write(tmp_path / "broker.conf", f"brokerName=b\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load(BrokerConfig, path)
    assert told in str(caught.value)
    assert "broker.conf:2" in str(caught.value)


def test_running_broker_changes_only_live_keys() -> None:
    config = BrokerConfig()
    with pytest.raises(ConfigError):
        update_live(config, {"fileReservedTime": "10", "storePathRootDir": "/"})
    assert config.file_reserved_time == 72
    update_live(config, {"fileReservedTime": "10"})
    assert config.file_reserved_time == 10


@pytest.mark.parametrize("value", ["0", "-2", "1.5", "x", ""])
def test_invalid_or_zero_reserve_time_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"reserve\.time"):
        names.check_reserve_time(value)


def test_topic_attributes_are_added_and_removed_by_sign() -> None:
    changes = names.parse_attributes("+reserve.time=720,-message.type")
    result = names.apply_attributes({"message.type": "FIFO"}, changes, creating=False)
    assert result == {"reserve.time": "720"}
    with pytest.raises(ValueError, match="unsupported"):
        names.apply_attributes({}, {"+colour": "red"}, creating=True)
    with pytest.raises(ValueError, match="not"):
        names.parse_attributes("reserve.time=1")


def test_topic_names_follow_rocketmqs_rules() -> None:
    assert names.topic_fault("orders_1-%|A") is None
    assert names.topic_fault("a b") is not None
    assert names.topic_fault("") is not None
    assert names.topic_fault("x" * 128) is not None
    assert names.topic_fault("%RETRY%" + "x" * 200) is None


def test_topic_is_created_from_a_default_only_if_that_permits_it(tmp_path: Path) -> None:
    manager = TopicConfigManager(RealDisk(), tmp_path / "topics.json", ManualClock())
    manager.ensure_system(system_topics("b", "c", auto_create=True, queues=8, trace=False))
    created = manager.create_in_send("t", "TBW102", 4, enabled=True)
    assert created is not None
    assert (created.read_queue_nums, created.perm) == (4, 6)
    assert manager.create_in_send("u", "TBW102", 4, enabled=False) is None
    assert manager.create_in_send("u", "t", 4, enabled=True) is None
    manager.file.save_now()
    again = TopicConfigManager(RealDisk(), tmp_path / "topics.json", ManualClock())
    again.load()
    assert again.topics == manager.topics
    assert again.data_version.to_wire() == manager.data_version.to_wire()


def test_table_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "topics.json", '{"neveFormat": 2}')
    with pytest.raises(ValueError, match="newer"):
        TopicConfigManager(RealDisk(), path, ManualClock()).load()


def test_committed_offsets_above_their_queue_end_are_lowered(tmp_path: Path) -> None:
    offsets = ConsumerOffsetManager(RealDisk(), tmp_path / "consumerOffset.json", nothing_to_sync)
    offsets.commit("g", "t", 0, 10)
    offsets.commit("g", "t", 1, 3)
    assert len(offsets.clip(lambda topic, queue: 5)) == 1
    assert (offsets.query("g", "t", 0), offsets.query("g", "t", 1), offsets.query("g", "t", 2)) == (5, 3, -1)


def test_queue_lock_passes_on_after_a_silent_minute() -> None:
    clock = ManualClock()
    locks = RebalanceLock(clock, lambda: 3)
    queue = ("t", "b", 0)
    assert locks.lock("g", "one", [queue]) == [queue]
    assert locks.lock("g", "two", [queue]) == []
    assert locks.any_held("g")
    clock.advance(60_001)
    assert not locks.any_held("g")
    assert locks.lock("g", "two", [queue]) == [queue]
    locks.unlock("g", "one", [queue])
    assert locks.lock("g", "one", [queue]) == []


def held(resume: Callable[[bool], None], codes: frozenset[int] | None, deadline: float = 10.0) -> HeldPull:
    return HeldPull(cast("Any", object()), "t", 0, 5, deadline, codes, resume)


def telling(told: list[T], what: T) -> Callable[[bool], None]:
    return lambda last: told.append(what)


def test_expired_locks_are_dropped_and_their_number_is_limited() -> None:
    clock = ManualClock()
    locks = RebalanceLock(clock, lambda: 3)
    queues = [("t", "b", number) for number in range(5)]
    assert locks.lock("g", "a", queues) == queues[:3]
    assert locks.lock("h", "a", queues) == []
    locks.unlock("g", "other", queues)
    assert locks.count == 3
    locks.unlock("g", "a", queues[:1])
    assert locks.lock("h", "a", queues) == queues[:1]
    clock.advance(40_000)
    assert locks.lock("g", "a", queues[1:2]) == queues[1:2], "renewed"
    clock.advance(40_000)
    locks.expire()
    assert locks.count == 2, "the group h is forgotten"
    assert locks.lock("g", "a", queues[3:]) == queues[3:], "what a living group gave up is found by its next lock"
    assert locks.count == 3
    clock.advance(60_001)
    locks.expire()
    assert locks.count == 0
    assert not locks.any_held("g")


def test_suspended_pull_resumes_once_by_a_matching_message_or_its_deadline() -> None:
    clock = ManualClock()
    hold = PullRequestHold(clock, 10, Faults())
    told: list[tuple[str, bool]] = []
    hold.hold(held(lambda last: told.append(("all", last)), None))
    hold.hold(held(lambda last: told.append(("tag", last)), frozenset({7})))
    assert hold.arrived("t", 0, 5, 8)
    assert not hold.arrived("u", 0, 5, 8)
    hold.wake()
    assert told == [("all", False)]
    assert hold.count == 1
    clock.advance(10_001)
    hold.check_deadlines()
    hold.check_deadlines()
    assert told == [("all", False), ("tag", True)]
    assert hold.count == 0


class Codes(frozenset[int]):
    """Counts membership tests."""

    asked = 0

    def __contains__(self, code: object) -> bool:
        Codes.asked += 1
        return super().__contains__(code)


def test_arrival_costs_only_the_pulls_that_it_resumes() -> None:
    clock, told = ManualClock(), list[int]()
    hold = PullRequestHold(clock, 10_000, Faults())
    for tag in range(5000):
        hold.hold(held(telling(told, tag), Codes((tag, tag + 1)), 10 + tag / 100))
    Codes.asked = 0
    assert not hold.arrived("t", 0, 5, 90_000)
    assert hold.arrived("t", 0, 5, 70)
    assert Codes.asked == 0
    hold.wake()
    assert told == [69, 70]
    assert not hold.arrived("t", 1, 5, 70)
    clock.advance(10_100)
    hold.check_deadlines()
    assert hold.count == 5000 - 2 - 11
    assert hold.arrived("t", 0, 4, 90_000), "the queue began again below them: all hear of it"
    assert hold.count == 0


async def test_due_pulls_resume_in_slices_with_other_callbacks_in_between() -> None:
    told, between = list[int](), list[int]()
    hold = PullRequestHold(ManualClock(), 10_000, Faults())
    for number in range(1000):
        hold.hold(held(telling(told, number), None))
    assert hold.arrived("t", 0, 5, 0)
    hold.wake()
    while len(told) < 1000:
        between.append(len(told))
        await asyncio.to_thread(len, b"")
    assert between[0] == SLICE
    assert told == list(range(1000))


def test_suspended_pulls_are_dropped_with_their_connection_or_topic() -> None:
    clock, told = ManualClock(), list[str]()
    hold = PullRequestHold(clock, 10, Faults())
    mine, other = cast("Any", object()), cast("Any", object())
    for connection, topic, codes in ((mine, "t", None), (mine, "u", frozenset({1})), (other, "t", frozenset({1, 2}))):
        hold.hold(HeldPull(connection, topic, 0, 5, 10.0, codes, telling(told, topic)))
    hold.connection_closed(mine)
    assert hold.count == 1
    hold.connection_closed(mine)
    hold.release_topic("u")
    assert told == []
    hold.release_topic("t")
    assert (told, hold.count) == (["t"], 0)
    hold.hold(held(lambda last: told.append("end"), None))
    hold.release_all()
    clock.advance(20_000)
    hold.check_deadlines()
    assert (told, hold.count) == (["t", "end"], 0)


def test_delay_levels_are_parsed_with_units() -> None:
    assert parse_levels("1s 5m 2h") == [1_000, 300_000, 7_200_000]
    with pytest.raises(ConfigError):
        parse_levels("1s soon")


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"offsetTable": []}', '{"offsetTable": {"t@g": 5}}', '{"offsetTable": {"t@g": {"0": "x"}}}'],
)
def test_damaged_table_is_reported_by_name(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "consumerOffset.json", text)
    with pytest.raises(ValueError, match=r"consumerOffset\.json"):
        ConsumerOffsetManager(RealDisk(), path, nothing_to_sync).load()
