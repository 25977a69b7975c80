"""The tables of an Apache master are installed whole, once the own log is confirmed as far."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from broker.metadata.slave_synchronize import Master, SlaveSynchronize
from broker.metadata.stock_tables import TimerCheckPoint, ask_stock_master
from broker.tables.changes import CHANGES
from broker.tables.topic_config_manager import system_topics
from infra.clock import ManualClock
from neve.errors import BrokerError, NeveError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand
from neve.remoting.names import METADATA_LOG, SCHEDULE_TOPIC
from tests.unit.broker.metadata.apache_tables import GROUPS, MODES, TOPICS
from tests.unit.broker.metadata.members import TablesMember

APACHE = Master("apache:1", 0, is_stock=True)


class ApacheAnswers:
    """An Apache master's answers, and the requests in their order."""

    def __init__(self) -> None:
        self.timers: tuple[int, int] | None = (1_700_000_000_000, 5)
        self.answers = {
            Code.GET_BROKER_CONFIG: "brokerName=stock\npopConsumerKVServiceEnable=false\n",
            Code.GET_ALL_TOPIC_CONFIG: TOPICS % (7, ""),
            Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: GROUPS,
            Code.GET_ALL_MESSAGE_REQUEST_MODE: MODES,
            Code.GET_ALL_DELAY_OFFSET: '{"dataVersion":{"counter":1},"offsetTable":{1:2,3:1}}',
            Code.GET_ALL_CONSUMER_OFFSET: '{"dataVersion":{"counter":2},"offsetTable":{"t@g":{0:5,1:7}}}',
            Code.GET_BROKER_HA_STATUS: '{"inSyncSlaveNums":0,"master":true,"masterCommitLogMaxOffset":100}',
        }
        self.asked: list[Code] = []

    async def ask(self, address: str, code: Code, ext: dict[str, str]) -> RemotingCommand:
        assert (address, ext) == (APACHE.address, {})
        self.asked.append(code)
        if code is Code.GET_TIMER_CHECK_POINT:
            if self.timers is None:
                raise BrokerError(1, "The checkpoint is null")
            read_ms, offset = self.timers
            return RemotingCommand(0, body=struct.pack(">7q", read_ms, 0, offset, offset, 0, 0, 0))
        return RemotingCommand(0, body=self.answers[code].encode())

    def close(self) -> None:
        """Do nothing: there is no connection."""


class SlaveOfApache:
    """A slave. The test sets how much of its log is confirmed."""

    def __init__(self, member: TablesMember, api: ApacheAnswers) -> None:
        self.member, self.confirmed = member, 0
        self.sync = SlaveSynchronize(member.metadata, api, confirmed=lambda: self.confirmed, on_unreadable=pytest.fail)


@pytest.fixture
def apache() -> ApacheAnswers:
    return ApacheAnswers()


@pytest.fixture
def member(tmp_path: Path) -> TablesMember:
    member = TablesMember(tmp_path, ManualClock(1_700_000_000_000))
    for _ in range(3):
        for level in (1, 3):
            member.store.put(
                SCHEDULE_TOPIC, level - 1, b"m", b"", flag=0, sys_flag=0, born_timestamp=0, born_host=("127.0.0.1", 1)
            )
    return member


@pytest.fixture
def slave(member: TablesMember, apache: ApacheAnswers) -> SlaveOfApache:
    return SlaveOfApache(member, apache)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(bounded())


def test_all_tables_are_installed_once_the_own_log_is_confirmed(slave: SlaveOfApache, apache: ApacheAnswers) -> None:
    async def scenario() -> None:
        slave.sync.follow(APACHE)
        slave.confirmed = 99
        await slave.sync.poll()
        assert apache.asked[-1] is Code.GET_BROKER_HA_STATUS, "no table may speak of more than it says"
        assert (slave.member.topics.topics, slave.member.offsets.table()) == ({}, {})
        slave.confirmed = 100
        slave.sync.advance()
        member = slave.member
        assert member.topics.topics["t"].read_queue_nums == 4
        assert member.groups.groups["g"].retry_max_times == 3
        assert member.groups.forbidden() == {"g": ["t"]}
        assert member.modes.find("t", "g") == ("POP", 2)
        assert member.schedule.positions() == {1: 2, 3: 1}
        assert member.offsets.table() == {"t@g": {0: 5, 1: 7}}
        assert slave.sync.trouble is None

    run(scenario)


def test_deletions_and_resets_of_the_master_are_applied(slave: SlaveOfApache, apache: ApacheAnswers) -> None:
    async def scenario() -> None:
        slave.confirmed = 100
        more = ',"gone":{"topicName":"gone"}'
        apache.answers[Code.GET_ALL_TOPIC_CONFIG] = TOPICS % (7, more)
        slave.sync.follow(APACHE)
        await slave.sync.poll()
        assert "gone" in slave.member.topics.topics
        apache.answers[Code.GET_ALL_TOPIC_CONFIG] = TOPICS % (8, "")
        apache.answers[Code.GET_ALL_CONSUMER_OFFSET] = '{"offsetTable":{"t@g":{0:1}}}'
        apache.answers[Code.GET_ALL_MESSAGE_REQUEST_MODE] = '{"messageRequestModeMap":{}}'
        await slave.sync.poll()
        assert "gone" not in slave.member.topics.topics
        assert slave.member.offsets.table() == {"t@g": {0: 1}}
        assert slave.member.modes.find("t", "g") == ("PULL", -1)

    run(scenario)


def test_tables_of_the_installed_version_are_neither_replaced_nor_saved(
    slave: SlaveOfApache, apache: ApacheAnswers
) -> None:
    async def scenario() -> None:
        slave.confirmed = 100
        slave.sync.follow(APACHE)
        await slave.sync.poll()
        member = slave.member
        member.save()
        before = dict(member.topics.topics)
        for _ in range(3):
            await slave.sync.poll()
        files = (member.topics.file, member.groups.file, member.modes.file, member.schedule.file, member.offsets.file)
        assert [file.dirty for file in files] == [False] * 5
        assert all(member.topics.topics[name] is row for name, row in before.items())
        member.kill()
        again = SlaveOfApache(member, apache)
        again.confirmed = 100
        again.sync.follow(APACHE)
        await again.sync.poll()
        assert again.sync.installed == 1
        assert not member.topics.file.dirty, "nor by the next life"

    run(scenario)


def test_system_topics_of_the_broker_are_kept(slave: SlaveOfApache, apache: ApacheAnswers) -> None:
    async def scenario() -> None:
        own = system_topics("b", "c", auto_create=True, queues=8, trace=False)
        slave.member.topics.ensure_system(own)
        slave.confirmed = 100
        slave.sync.follow(APACHE)
        await slave.sync.poll()
        assert slave.member.topics.topics.keys() == {"t", *(config.topic_name for config in own)}
        assert "TOOLS_CONSUMER" in slave.member.groups.groups
        assert slave.member.topics.data_version.counter == 7, "the master's: or each answer would be another"

    run(scenario)


def test_rows_of_internal_topics_are_not_installed(slave: SlaveOfApache, apache: ApacheAnswers) -> None:
    async def scenario() -> None:
        own = system_topics("b", "c", auto_create=True, queues=8, trace=False)
        slave.member.topics.ensure_system(own)
        rows = ("rmq_sys_METADATA_LOG", "rmq_sys_wheel_timer", "rmq_sys_REVIVE_LOG_other")
        more = "".join(f',"{name}":{{"topicName":"{name}","readQueueNums":7}}' for name in rows)
        apache.answers[Code.GET_ALL_TOPIC_CONFIG] = TOPICS % (7, more)
        slave.confirmed = 100
        slave.sync.follow(APACHE)
        await slave.sync.poll()
        topics = slave.member.topics
        assert topics.topics.keys() == {"t", *(config.topic_name for config in own)}
        assert topics.topics["rmq_sys_wheel_timer"].read_queue_nums == 1

    run(scenario)


def test_changes_older_than_the_master_are_not_applied_again(
    slave: SlaveOfApache, apache: ApacheAnswers, tmp_path: Path
) -> None:
    """The log is of a set whose master was a neve broker. Its first changes are evicted on all members."""

    async def scenario() -> None:
        clock = ManualClock(1_700_000_000_000)
        earlier = TablesMember(tmp_path / "earlier", clock)
        for name in ("t", "old"):
            earlier.topics.create_plain(name, 1)
        young = SlaveOfApache(TablesMember(tmp_path / "young", clock), apache)
        young.member.store.queue_changes.create_queue_at(METADATA_LOG, CHANGES, 1)
        for record in earlier.records():
            if record.queue_offset >= 1:
                young.member.receive(record)
        young.confirmed = 1 << 20
        young.sync.follow(APACHE)
        await young.sync.poll()
        young.sync.advance()
        assert young.member.topics.topics.keys() == {"t"}
        assert young.member.metadata.lead() == ["t@g queue 0: 5 → 0", "t@g queue 1: 7 → 0"]

    run(scenario)


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (Code.GET_ALL_TOPIC_CONFIG, "{}"),
        (Code.GET_ALL_TOPIC_CONFIG, '{"topicConfigTable":{"t":{"topicName":"t","perm":"x"}},"dataVersion":{}}'),
        (Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, '{"subscriptionGroupTable":{"g":7},"dataVersion":{}}'),
        (Code.GET_ALL_MESSAGE_REQUEST_MODE, '{"messageRequestModeMap":{"t":{"g":{}}}}'),
        (Code.GET_ALL_DELAY_OFFSET, '{"offsetTable":{1:-1}}'),
        (Code.GET_ALL_CONSUMER_OFFSET, '{"offsetTable":{"t@g":{0:"x"}}}'),
        (Code.GET_ALL_CONSUMER_OFFSET, "not JSON"),
        (Code.GET_BROKER_HA_STATUS, '{"master":false,"masterCommitLogMaxOffset":5}'),
        (Code.GET_BROKER_HA_STATUS, '{"master":true}'),
    ],
)
def test_incomplete_answer_installs_nothing(slave: SlaveOfApache, apache: ApacheAnswers, code: Code, body: str) -> None:
    async def scenario() -> None:
        apache.answers[code] = body
        with pytest.raises(NeveError):
            await ask_stock_master(apache, APACHE.address)
        slave.confirmed = 100
        slave.sync.follow(APACHE)
        await slave.sync.poll()
        assert (slave.sync.failures, slave.member.topics.topics, slave.member.offsets.table()) == (1, {}, {})

    run(scenario)


def test_timers_and_unsupported_state_of_a_master_are_read(apache: ApacheAnswers) -> None:
    async def scenario() -> None:
        image = await ask_stock_master(apache, APACHE.address)
        assert (image.timers, image.elsewhere) == (TimerCheckPoint(1_700_000_000_000, 5), [])
        assert apache.asked[0] is Code.GET_BROKER_HA_STATUS, "what no table tells of lies above"
        apache.timers = None  # timerWheelEnable=false
        apache.answers[Code.GET_BROKER_CONFIG] = "popConsumerKVServiceEnable = true\n"
        image = await ask_stock_master(apache, APACHE.address)
        assert (image.timers, image.elsewhere) == (None, ["popConsumerKVServiceEnable=true"])

    run(scenario)


def test_answer_of_a_former_master_is_discarded(slave: SlaveOfApache, apache: ApacheAnswers) -> None:
    async def scenario() -> None:
        slave.sync.follow(APACHE)
        await slave.sync.poll()
        slave.sync.forget()
        slave.confirmed = 100
        slave.sync.follow(Master("apache:1", 1, is_stock=True))
        slave.sync.advance()
        assert slave.member.topics.topics == {}

    run(scenario)
