"""Pulls (11, 361): answered immediately, after a read, or held until there is a message.

Records are sent from the log's memory mapping without a copy.
"""

import logging
from collections.abc import Awaitable, Callable

import msgspec

from access.permissions import SUB, of_topic_and_group
from broker.broker_stats import BrokerStats
from broker.config import BrokerConfig
from broker.long_polling.pull_request_hold import MAX_HELD_SIZE, HeldPull, PullRequestHold
from broker.reading.backlog_turns import BacklogTurns
from broker.reading.sql92 import SqlFilter
from broker.reading.tiered_store import Answer, PendingRead, ReadRequest, TieredStore
from broker.requests.pull_checks import PullChecks
from broker.requests.route import MEMBERS, BrokerRoute, Waits
from broker.requests.slave_pull import held_for, moves_on, slave_code
from broker.role import BrokerRole, Role
from broker.store.reading import GetResult
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.subscription_group_manager import SubscriptionGroupConfig
from infra.clock import Clock
from infra.net.remoting_server import Connection
from infra.observe.metrics import Histogram
from neve.errors import BrokerError
from neve.remoting.codes import GetMessageStatus, ResponseCode
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import PullMessageHeader, parse_header

log = logging.getLogger(__name__)

Answered = RemotingCommand | None | Awaitable[RemotingCommand | None]

COMMIT_OFFSET, SUSPEND = 1, 2
_MAX_COUNT = 1024
_DEFAULT_BYTES = 256 * 1024
_MAX_BYTES = 8 << 20
_MAX_SUSPEND_SECONDS = 25.0
_CODES = {
    GetMessageStatus.FOUND: ResponseCode.SUCCESS,
    GetMessageStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetMessageStatus.OFFSET_FOUND_NULL: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetMessageStatus.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
    GetMessageStatus.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    GetMessageStatus.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    GetMessageStatus.NO_MESSAGE_IN_QUEUE: ResponseCode.PULL_NOT_FOUND,
    GetMessageStatus.OFFSET_RESET: ResponseCode.PULL_OFFSET_MOVED,
}
assert _CODES.keys() == set(GetMessageStatus), "each status has its code"
# Constants for the pull path, because an attribute of an enum costs a call.
_EMPTY = GetMessageStatus.NO_MESSAGE_IN_QUEUE
_SUCCESS, _NOT_FOUND, _MOVED = ResponseCode.SUCCESS, ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_OFFSET_MOVED


class Pull(msgspec.Struct):
    """One pull with the results of its checks; `read.offset` moves past messages that the predicate rejects."""

    connection: Connection
    request: RemotingCommand
    header: PullMessageHeader
    read: ReadRequest
    predicate: SqlFilter | None  # a tag filter is in `read`
    # Monotonic time at which reading began; the time of waiting for messages does not count as latency.
    started: float
    is_slow: bool = False  # it had to wait for a read


class PullMessageProcessor:
    """Translates pulls to reads and results to answers (RocketMQ's PullMessageProcessor).

    A pull that finds nothing is held if the client allows that. The offset in its header is committed.
    """

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        role: BrokerRole,
        *,
        checks: PullChecks,
        tiered: TieredStore,
        hold: PullRequestHold,
        turns: BacklogTurns,
        offsets: ConsumerOffsetManager,
        stats: BrokerStats,
        latency: Histogram,
        master_may_lack: Callable[[str, int, int], bool] | None = None,
    ) -> None:
        """Create the processor.

        `latency` observes the time from the start of reading to the answer, for pulls with messages.
        `master_may_lack(topic, queue, offset)` returns whether a slave must keep its readers, because the master may
        not have the messages; None: the master has all.
        """
        self._config, self._clock, self._role, self._checks = config, clock, role, checks
        self._master_may_lack = master_may_lack
        self._tiered, self._hold, self._turns, self._stats = tiered, hold, turns, stats
        self._check, self._topics, self._groups = checks.check, checks.topics, checks.groups
        self._offsets, self._latency = offsets, latency

    @BrokerRoute(Code.PULL_MESSAGE, of_topic_and_group(SUB), MEMBERS, Waits.NO, reads=True, hides_topics=True)
    @BrokerRoute(Code.LITE_PULL_MESSAGE, of_topic_and_group(SUB), MEMBERS, Waits.NO, reads=True, hides_topics=True)
    def pull(self, connection: Connection, request: RemotingCommand) -> Answered:
        """Handle a pull: check it, commit its offset, then read or wait for a turn among pulls of a backlog."""
        header = parse_header(request.ext, PullMessageHeader)
        message_filter = self._check(header)
        read = ReadRequest(
            header.consumer_group,
            header.topic,
            header.queue_id,
            header.queue_offset,
            min(max(header.max_msg_nums, 1), _MAX_COUNT),
            min(header.max_msg_bytes or _DEFAULT_BYTES, _MAX_BYTES),
            message_filter.codes,
            connection.remote,
        )
        pull = Pull(connection, request, header, read, message_filter.predicate, self._clock.monotonic())
        if header.sys_flag & COMMIT_OFFSET and header.commit_offset >= 0 and self._role.is_master:
            self._offsets.commit(header.consumer_group, header.topic, header.queue_id, header.commit_offset)
        if not self._is_backlog(pull):
            return self._begin(pull)
        if not self._turns.has_room and request.size <= MAX_HELD_SIZE:
            self._turns.wait(lambda: self._take_turn(pull))
            return None
        return self._in_turn(pull, self._begin)

    def _is_backlog(self, pull: Pull) -> bool:
        """Return whether the pull will not reach the end of its queue, so that latency does not matter."""
        read = pull.read
        return read.offset + read.max_count < self._tiered.max_offset(read.topic, read.queue_id)

    def _take_turn(self, pull: Pull) -> None:
        if not pull.connection.is_closed:
            pull.connection.resume(pull.request, lambda: self._in_turn(pull, self._restart), in_work=True)

    def _in_turn(self, pull: Pull, read: Callable[[Pull], Answered]) -> Answered:
        began = self._clock.monotonic()
        try:
            return read(pull)
        finally:
            self._turns.used(self._clock.monotonic() - began)

    def _begin(self, pull: Pull) -> Answered:
        answer = self._read(pull)
        if not isinstance(answer, GetResult):
            return self._respond_later(pull, answer, self._first_deadline(pull), last=not self._may_wait(pull))
        if self._may_wait(pull) and self._waits(pull, answer):
            self._require_place()
            self._hold_on(pull, self._first_deadline(pull))
            return None
        return self._response(pull, answer)

    def _restart(self, pull: Pull) -> Answered:
        """Read after the wait for a turn, with all checks again."""
        self._checks.check_again(pull.connection, pull.request, pull.header)
        return self._begin(pull)

    def _may_wait(self, pull: Pull) -> bool:
        wants = pull.header.sys_flag & SUSPEND and self._config.long_polling_enable
        return bool(wants and pull.request.size <= MAX_HELD_SIZE)

    def _waits(self, pull: Pull, result: GetResult) -> bool:
        if self._role.is_master:
            return response_code(result, pull.read.offset) is _NOT_FOUND
        return not moves_on(result.status)

    def _require_place(self) -> None:
        if self._hold.full:
            raise BrokerError(ResponseCode.SYSTEM_BUSY, "too many waiting pulls")

    def _first_deadline(self, pull: Pull) -> float:
        """Return the deadline of the request, which stays the same when the pull is held again."""
        return self._clock.monotonic() + min(pull.header.suspend_timeout_millis / 1000, _MAX_SUSPEND_SECONDS)

    # ---- reading

    def _read(self, pull: Pull) -> Answer:
        header = pull.header
        group, topic, queue_id = header.consumer_group, header.topic, header.queue_id
        # A slave keeps pending resets until it is the master.
        target = self._offsets.take_reset(group, topic, queue_id) if self._role.is_master else None
        if target is not None:  # an administrator has reset the offset: the consumer continues there
            low, high = self._tiered.min_offset(topic, queue_id), self._tiered.max_offset(topic, queue_id)
            return GetResult(GetMessageStatus.OFFSET_RESET, target, low, high)
        return self._tiered.get_message(pull.read, pull.predicate)

    async def _respond_later(
        self, pull: Pull, pending: PendingRead, deadline: float, *, last: bool
    ) -> RemotingCommand | None:
        pull.is_slow = True
        result = await pending
        # A master's answer has the next offset. A slave's answer would make the client repeat the pull immediately.
        is_time_left = not last and self._clock.monotonic() < deadline
        if is_time_left and not self._role.is_master and self._waits(pull, result):
            self._require_place()
            self._hold_on(pull, deadline)
            return None
        return self._response(pull, result)

    def _hold_on(self, pull: Pull, deadline: float) -> None:
        def resume(last: bool) -> None:
            if not pull.connection.is_closed:
                pull.connection.resume(pull.request, lambda: self._resume(pull, deadline, last=last))

        read = pull.read
        if not self._role.is_master:
            now = self._clock.monotonic()
            deadline = now + held_for(deadline - now, has_master=self._role.has_master)
        self._hold.watch(pull.connection)
        self._hold.hold(HeldPull(pull.connection, read.topic, read.queue_id, read.offset, deadline, read.codes, resume))

    def _resume(self, pull: Pull, deadline: float, *, last: bool) -> Answered:
        """Read again after the wait, with all checks; the offset may have moved past rejected messages."""
        if self._role.current is Role.FENCED and not last:  # wait for the next role
            self._hold_on(pull, deadline)
            return None
        pull.started, pull.is_slow = self._clock.monotonic(), False
        self._checks.check_again(pull.connection, pull.request, pull.header)
        answer = self._read(pull)
        if not isinstance(answer, GetResult):
            return self._respond_later(pull, answer, deadline, last=last)
        waits = self._waits(pull, answer)
        if pull.predicate is not None and answer.status is GetMessageStatus.NO_MATCHED_MESSAGE:
            # Each message of the queue wakes this pull, whatever its properties, so it waits after the rejected ones.
            pull.read.offset, waits = answer.next_offset, True
        if waits and not last:
            self._hold_on(pull, deadline)
            return None
        return self._response(pull, answer)

    def _code(self, pull: Pull, result: GetResult) -> ResponseCode:
        if self._role.is_master:
            return response_code(result, pull.read.offset)
        return slave_code(result.status, has_master=self._role.has_master)

    def _response(self, pull: Pull, result: GetResult) -> RemotingCommand:
        header, config, is_master = pull.header, self._config, self._role.is_master
        # A topic or group that has been deleted meanwhile has no flags.
        topic, group = self._topics.topics.get(header.topic), self._groups.groups.get(header.consumer_group)
        following = result.next_offset if is_master or moves_on(result.status) else pull.read.offset
        ext = {
            "suggestWhichBrokerId": self._suggested(pull, result, group, following)
            if config.slave_read_enable
            else "0",
            "nextBeginOffset": str(following),
            "minOffset": str(result.min_offset),
            "maxOffset": str(result.max_offset),
            "topicSysFlag": str(topic.topic_sys_flag) if topic else "0",
            "groupSysFlag": str(group.group_sys_flag) if group else "0",
        }
        code = self._code(pull, result)
        buffers = result.buffers if code is _SUCCESS else []
        if result.count:
            stats, took = self._stats, self._clock.monotonic() - pull.started
            stats.got(header.topic, header.consumer_group, result.count, sum(map(len, buffers)))
            stats.took(header.queue_id, header.topic, header.consumer_group, round(took * 1000))
            self._latency.observe(took)
        if is_master:
            self._offsets.commit_pull(header.consumer_group, header.topic, header.queue_id, following)
        return RemotingCommand.response(pull.request, code, result.status, ext, parts=buffers or None)

    def _suggested(self, pull: Pull, result: GetResult, group: SubscriptionGroupConfig | None, following: int) -> str:
        """Return the broker id for the next pull: a slave for readers of old messages, otherwise the master."""
        lacks, header = self._master_may_lack, pull.header
        if lacks is not None and lacks(header.topic, header.queue_id, following):
            return str(self._config.broker_id)
        if group is None:
            return "0"
        if (pull.is_slow or result.is_archived) and result.count:
            return str(group.which_broker_when_consume_slowly)
        return "0" if self._role.has_master else str(group.broker_id)


def response_code(result: GetResult, asked: int) -> ResponseCode:
    """Return the code by RocketMQ's table; 21 makes a client change its offset, so an empty queue never gets it."""
    if result.status is _EMPTY and asked not in (0, result.next_offset):
        return _MOVED
    return _CODES[result.status]
