"""Tables of an Apache RocketMQ master, as its slaves poll them: RocketMQ's JSON.

request  table           body                                                    version
21       topics          {"topicConfigTable":{topic:row},"dataVersion":…}        its own
201      groups          {"subscriptionGroupTable":{group:row},"forbiddenTable":{group:{topic:bits}},"dataVersion":…}
402      request modes   {"messageRequestModeMap":{topic:{group:row}}}           none
45       delay levels    {"offsetTable":{level:offset}}                          none
43       group offsets   {"offsetTable":{topic@group:{queue:offset}}}            none
60       timers          8 bytes each: all due before this time (ms) are delivered | - | the next offset to read | -
26       settings        properties: show which state is not in the log
907      end of the log  {"master":true,"masterCommitLogMaxOffset":offset}

The end of the log is queried last, so no offset in the tables is above it. An image of all tables waits until the own
log has reached that end, as with a neve master, and is installed at once. RocketMQ's own slave merges the tables entry
by entry, and loses topics at a failover in between.

The end of the log is also queried first: deliveries that are not in these positions are above it.
"""

from __future__ import annotations

import asyncio
from struct import Struct
from typing import Annotated, Any, TypeVar

import msgspec

from broker.ha.asked import RequestClient
from broker.ha.stock_master import read_settings
from broker.metadata.images import ModesImage, Positions
from broker.tables.subscription_group_manager import GroupsImage, SubscriptionGroupConfig
from broker.tables.topic_config_manager import TopicConfig, TopicsImage
from neve.errors import BrokerError, NeveError
from neve.remoting.body import ANSWER_NODES, DataVersion, NodeBudget, convert, loads_as
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.headers import Int64

_CHECK_POINT = Struct(">4q")
# Settings that keep popped messages in a store of their own, which slaves don't get.
_ELSEWHERE = ("popConsumerKVServiceEnable",)


class TimerCheckPoint(msgspec.Struct, frozen=True):
    """Progress of timers: those due before `read_ms` and below `next_offset` of their queue are delivered."""

    read_ms: int
    next_offset: int


class StockImage(msgspec.Struct, frozen=True, kw_only=True):
    """Tables of an Apache master.

    `timers`: None if it has no timers. `elsewhere`: settings that keep state from slaves.
    """

    log_begin: int
    log_end: int
    timers: TimerCheckPoint | None
    elsewhere: list[str]
    topics: TopicsImage
    groups: GroupsImage
    modes: ModesImage
    delays: dict[int, int]
    offsets: Positions


_Offset = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class StockTopics(msgspec.Struct, rename="camel"):
    """Answer to 21, and `topics.json`. The files have the same format as the answers, also for the classes below."""

    topic_config_table: dict[str, TopicConfig]
    data_version: DataVersion


class StockGroups(msgspec.Struct, rename="camel"):
    """Answer to 201, and `subscriptionGroup.json`."""

    subscription_group_table: dict[str, SubscriptionGroupConfig]
    data_version: DataVersion
    forbidden_table: dict[str, dict[str, Int64]] = {}


class StockModes(msgspec.Struct, rename="camel"):
    """Answer to 402, and `messageRequestMode.json`."""

    message_request_mode_map: dict[str, dict[str, dict[str, Any]]]


class StockDelays(msgspec.Struct, rename="camel"):
    """Answer to 45, and `delayOffset.json`."""

    offset_table: dict[Int64, _Offset]


class StockOffsets(msgspec.Struct, rename="camel"):
    """Answer to 43, and `consumerOffset.json`."""

    offset_table: dict[str, dict[Int64, Int64]]


class StockTables(msgspec.Struct, frozen=True, kw_only=True):
    """All tables that are also in files."""

    topics: StockTopics
    groups: StockGroups
    modes: StockModes
    delays: StockDelays
    offsets: StockOffsets


class _HaStatus(msgspec.Struct, rename="camel"):
    master: bool
    master_commit_log_max_offset: _Offset


Body = TypeVar("Body", bound=msgspec.Struct)


async def ask_stock_master(api: RequestClient, address: str) -> StockImage:
    """Return all tables of a master. Raise OSError, TimeoutError or NeveError; then no partial result counts."""

    async def ask(code: RequestCode, kind: type[Body]) -> Body:
        answer = await api.ask(address, code, {})
        return await asyncio.to_thread(loads_as, bytes(answer.body), kind, NodeBudget(ANSWER_NODES))

    log_begin = (await ask(RequestCode.GET_BROKER_HA_STATUS, _HaStatus)).master_commit_log_max_offset
    settings = await api.ask(address, RequestCode.GET_BROKER_CONFIG, {})
    topics = await ask(RequestCode.GET_ALL_TOPIC_CONFIG, StockTopics)
    groups = await ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, StockGroups)
    modes = await ask(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE, StockModes)
    delays = await ask(RequestCode.GET_ALL_DELAY_OFFSET, StockDelays)
    timers = await _ask_timers(api, address)
    offsets = await ask(RequestCode.GET_ALL_CONSUMER_OFFSET, StockOffsets)
    status = await ask(RequestCode.GET_BROKER_HA_STATUS, _HaStatus)
    if not status.master:
        raise NeveError(None, f"{address} is not a master")
    tables = StockTables(topics=topics, groups=groups, modes=modes, delays=delays, offsets=offsets)
    end = status.master_commit_log_max_offset
    return image_of(tables, log_begin=log_begin, log_end=end, timers=timers, elsewhere=_elsewhere(bytes(settings.body)))


def image_of(
    tables: StockTables, *, log_begin: int, log_end: int, timers: TimerCheckPoint | None, elsewhere: list[str]
) -> StockImage:
    """Convert a master's tables to an image. Raise ProtocolError for an invalid row."""
    topics, groups = tables.topics, tables.groups
    return StockImage(
        log_begin=log_begin,
        log_end=log_end,
        timers=timers,
        elsewhere=elsewhere,
        topics=TopicsImage(topics=topics.topic_config_table, version=_version(topics.data_version)),
        groups=GroupsImage(
            groups=groups.subscription_group_table,
            forbidden={
                group: sorted(topic for topic, bits in table.items() if bits)
                for group, table in groups.forbidden_table.items()
                if any(table.values())
            },
            version=_version(groups.data_version),
        ),
        modes=_known_modes(tables.modes.message_request_mode_map),
        delays=tables.delays.offset_table,
        offsets={name: dict(queues) for name, queues in tables.offsets.offset_table.items()},
    )


async def _ask_timers(api: RequestClient, address: str) -> TimerCheckPoint | None:
    try:
        body = bytes((await api.ask(address, RequestCode.GET_TIMER_CHECK_POINT, {})).body)
    except BrokerError as error:
        if error.code in (ResponseCode.SYSTEM_ERROR, ResponseCode.REQUEST_CODE_NOT_SUPPORTED):
            return None  # timerWheelEnable=false
        raise
    if len(body) < _CHECK_POINT.size:
        raise NeveError(None, f"{address}: {len(body)} bytes are not a checkpoint of timers")
    read_ms, _, next_offset, _ = _CHECK_POINT.unpack_from(body)
    return TimerCheckPoint(read_ms, next_offset)


def _elsewhere(properties: bytes) -> list[str]:
    settings = read_settings(properties.decode("utf-8", "replace"))
    return [f"{name}=true" for name in _ELSEWHERE if settings.get(name) == "true"]


def _version(version: DataVersion) -> dict[str, int]:
    return {"counter": version.counter, "stateVersion": version.state_version, "timestamp": version.timestamp}


class _Mode(msgspec.Struct, rename="camel"):
    mode: str
    pop_share_queue_num: Int64 = 0


def _known_modes(rows: ModesImage) -> ModesImage:
    """Convert request modes to the rows of neve's table."""
    known: ModesImage = {}
    for topic, groups in rows.items():
        for group, row in groups.items():
            mode = convert(row, _Mode)
            known.setdefault(topic, {})[group] = {
                "topic": topic, "consumerGroup": group, "mode": mode.mode, "popShareQueueNum": mode.pop_share_queue_num,
            }  # fmt: skip
    return known
