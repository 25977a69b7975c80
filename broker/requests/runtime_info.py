"""Runtime information of the broker (28)."""

import os
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version

from access.permissions import GET, of_cluster
from broker.requests.route import ANY_ROLE, BrokerRoute, Waits
from broker.stats.totals import Totals
from broker.store.message_store import MessageStore
from broker.waiting.schedule_message import ScheduleMessage
from infra.clock import Clock
from infra.net.remoting_server import Connection
from infra.observe.conditions import Condition
from neve.remoting.body import dumps
from neve.remoting.codes import VERSION, ResponseCode
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand

_ZEROS = (
    "sendThreadPoolQueueSize", "pullThreadPoolQueueSize", "sendThreadPoolQueueHeadWaitTimeMills",
    "pullThreadPoolQueueHeadWaitTimeMills", "pageCacheLockTimeMills", "timerReadBehind", "timerOffsetBehind",
    "timerCongestNum", "timerEnqueueTps", "timerDequeueTps", "dispatchBehindBytes", "dispatchMaxBuffer",
    "putMessageFailedTimes", "putMessageEntireTimeMax", "getMessageEntireTimeMax", "putLatency99", "putLatency999",
    "litePullThreadPoolQueueSize", "queryThreadPoolQueueSize", "ackThreadPoolQueueSize", "EndTransactionQueueSize",
    "remainTransientStoreBufferNumbs", "remainHowManyDataToCommit",
)  # fmt: skip


class RuntimeInfoProcessor:
    """Returns runtime information (a part of RocketMQ's AdminBrokerProcessor)."""

    def __init__(
        self,
        clock: Clock,
        store: MessageStore,
        schedule: ScheduleMessage,
        totals: Totals,
        *,
        used_ratio: Callable[[], float],
        conditions: Callable[[], Iterable[Condition]],
        waiting: Callable[[], Mapping[str, int]],
    ) -> None:
        """Create the processor.

        `used_ratio` returns the used share of the data disk, `conditions` the current impairments, `waiting` the
        numbers of waiting messages by kind.
        """
        self._clock, self._store, self._schedule = clock, store, schedule
        self._totals, self._used_ratio, self._conditions, self._waiting = totals, used_ratio, conditions, waiting
        self._boot_ms = clock.now_ms()

    @BrokerRoute(Code.GET_BROKER_RUNTIME_INFO, of_cluster(GET), ANY_ROLE, Waits.NO, reads=True, hides_topics=False)
    def runtime_info(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Return the runtime information (28); mqadmin fails if one of these keys is missing."""
        store = self._store
        now = self._clock.now_ms()
        ratio = str(self._used_ratio())
        segments = store.reader.segments()
        oldest = min((s.newest_store_time for s in segments if s.newest_store_time > 0), default=now)
        put, got = self._totals.put_rates(), self._totals.get_rates()
        table = {
            **dict.fromkeys(_ZEROS, "0"),
            "bootTimestamp": str(self._boot_ms),
            "brokerActive": "true",
            "brokerVersion": str(int(VERSION)),
            "brokerVersionDesc": "V5_3_3",
            "neveVersion": version("neve"),
            "commitLogDiskRatio": ratio,
            "consumeQueueDiskRatio": ratio,
            "commitLogMaxOffset": str(store.max_physical_offset),
            "commitLogMinOffset": str(store.min_physical_offset),
            "earliestMessageTimeStamp": str(oldest),
            "getFoundTps": got,
            "getMissTps": "0.0 0.0 0.0",
            "getTotalTps": got,
            "getTransferredTps": got,
            **self._totals.mornings(),
            "pid": str(os.getpid()),
            "putMessageAverageSize": str(self._totals.average_size()),
            "putMessageSizeTotal": str(self._totals.size()),
            "putMessageTimesTotal": str(self._totals.put()),
            "putTps": put,
            "remainHowManyDataToFlush": f"{store.max_physical_offset - store.visibility.flushed} B",
            "startAcceptSendRequestTimeStamp": str(self._boot_ms),
            "conditions": " | ".join(f"{one.name}: {one}" for one in self._conditions()) or "none",
            **{name: str(count) for name, count in self._waiting().items()},
            "runtime": f"[ {(now - self._boot_ms) // 1000} seconds ]",
        }
        for level in range(1, self._schedule.max_level + 1):
            done, end = self._schedule.position(level)
            table[f"scheduleMessageOffset_{level}"] = f"{done},{end}"
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps({"table": table}))
