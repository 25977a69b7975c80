"""Pulls (11, 361): hot ones answered at once, old and cold ones parked while they are read, empty ones held.

The records go from the log's mapping to the socket as they lie there.
"""

import logging
from collections.abc import Awaitable
from dataclasses import dataclass

import msgspec

from broker.broker_context import BrokerContext
from broker.clients.client_manager import BROADCASTING, TAG
from broker.reading.pull_request_hold import MAX_HELD_SIZE, HeldPull
from broker.reading.record_filter import Predicate, select
from broker.reading.sql92 import SqlError, compile_sql
from broker.reading.tiered_store import ReadResult
from broker.validators import PERM_READ
from infra.remoting_server import Connection
from neve.errors import BrokerError
from neve.record.properties import tags_code
from neve.remoting.codes import GetMessageStatus, ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import PullMessageHeader, parse_header

log = logging.getLogger(__name__)

COMMIT_OFFSET, SUSPEND, SUBSCRIPTION, CLASS_FILTER = 1, 2, 4, 8
_MAX_COUNT = 1024
_DEFAULT_BYTES = 256 * 1024
_MAX_BYTES = 8 << 20
_MAX_SUSPEND_SECONDS = 25.0
# Records looked at by one pull with an expression: it runs on the loop, and others wait.
_FILTER_COUNT = 256
_FILTER_BYTES = 1 << 20
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
# Looked up for each pull: an enum's member costs a call.
_EMPTY, _MOVED = GetMessageStatus.NO_MESSAGE_IN_QUEUE, ResponseCode.PULL_OFFSET_MOVED


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a subscription selects: by the hash of the tag, by a predicate over the properties, or all."""

    codes: frozenset[int] | None = None
    predicate: Predicate | None = None


class Pull(msgspec.Struct):
    """One request with what the checks found out; `start` moves on over what was looked at and not wanted."""

    connection: Connection
    request: RemotingCommand
    header: PullMessageHeader
    wanted: Wanted
    max_count: int
    max_bytes: int
    start: int
    # When its reading began, by the monotonic clock: waiting for messages is no latency.
    begun: float


class PullMessageProcessor:
    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def pull(
        self, connection: Connection, request: RemotingCommand
    ) -> RemotingCommand | Awaitable[RemotingCommand] | None:
        header = parse_header(request.ext, PullMessageHeader)
        context = self._context
        wanted = self._check(header)
        pull = Pull(
            connection,
            request,
            header,
            wanted,
            min(max(header.max_msg_nums, 1), _MAX_COUNT),
            min(header.max_msg_bytes or _DEFAULT_BYTES, _MAX_BYTES),
            header.queue_offset,
            context.clock.monotonic(),
        )
        if header.sys_flag & COMMIT_OFFSET and header.commit_offset >= 0:
            context.offsets.commit(header.consumer_group, header.topic, header.queue_id, header.commit_offset)
        target = context.offsets.take_reset(header.consumer_group, header.topic, header.queue_id)
        if target is not None:
            return self._response(pull, self._moved(pull, target))
        if not context.tiered.is_hot(header.topic, header.queue_id, header.queue_offset):
            return self._pull_cold(pull)
        result = self._read_hot(pull)
        if result.pending:
            return self._pull_old(pull, result)
        wants_to_wait = header.sys_flag & SUSPEND and context.config.long_polling_enable
        if (
            wants_to_wait
            and response_code(result, header.queue_offset) == ResponseCode.PULL_NOT_FOUND
            and request.size <= MAX_HELD_SIZE
        ):
            if context.hold.full:
                raise BrokerError(ResponseCode.SYSTEM_BUSY, "too many pulls wait already")
            seconds = min(header.suspend_timeout_millis / 1000, _MAX_SUSPEND_SECONDS)
            self._hold(pull, result.next_offset, context.clock.monotonic() + seconds)
            return None
        return self._response(pull, result)

    # ---- checks ----------------------------------------------------------------------------------------------

    def _check(self, header: PullMessageHeader) -> Wanted:
        context = self._context
        if not context.config.broker_permission & PERM_READ:
            name = context.config.broker_name
            raise BrokerError(ResponseCode.NO_PERMISSION, f"the broker[{name}] pulling message is forbidden")
        group = context.find_group(header.consumer_group)
        if not group.consume_enable:
            raise BrokerError(ResponseCode.NO_PERMISSION, f"subscription group no permission, {header.consumer_group}")
        topic = context.find_topic(header.topic)
        if not topic.perm & PERM_READ:
            raise BrokerError(ResponseCode.NO_PERMISSION, f"the topic[{header.topic}] pulling message is forbidden")
        if not 0 <= header.queue_id < topic.read_queue_nums:
            raise BrokerError(
                ResponseCode.INVALID_PARAMETER,
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] "
                f"topicConfig.readQueueNums:[{topic.read_queue_nums}]",
            )
        if header.sys_flag & CLASS_FILTER:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, "class filters are not supported")
        if header.sys_flag & SUBSCRIPTION:
            return parse_expression(
                header.subscription, header.expression_type, sql=context.config.enable_property_filter
            )
        return self._stored_subscription(header, broadcast=group.consume_broadcast_enable)

    def _stored_subscription(self, header: PullMessageHeader, *, broadcast: bool) -> Wanted:
        """What the heartbeat said that this group wants of the topic."""
        info = self._context.clients.consumers.get(header.consumer_group)
        if info is None:
            raise BrokerError(ResponseCode.SUBSCRIPTION_NOT_EXIST, "the consumer's group info not exist")
        if info.message_model == BROADCASTING and not broadcast:
            raise BrokerError(
                ResponseCode.NO_PERMISSION,
                f"the consumer group[{header.consumer_group}] can not consume by broadcast way",
            )
        if self._context.groups.is_forbidden(header.consumer_group, header.topic):
            raise BrokerError(
                ResponseCode.NO_PERMISSION,
                f"the consumer group[{header.consumer_group}] is forbidden for topic[{header.topic}]",
            )
        subscription = info.subscriptions.get(header.topic)
        if subscription is None:
            raise BrokerError(ResponseCode.SUBSCRIPTION_NOT_EXIST, "the consumer's subscription not exist")
        if subscription.sub_version < header.sub_version:
            raise BrokerError(ResponseCode.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest")
        if subscription.expression_type in (TAG, "", None):
            return Wanted(frozenset(subscription.code_set) if subscription.code_set else None)
        try:
            return parse_expression(
                subscription.sub_string,
                subscription.expression_type,
                sql=self._context.config.enable_property_filter,
            )
        except BrokerError as error:
            if error.code != ResponseCode.SUBSCRIPTION_PARSE_FAILED:
                raise
            raise BrokerError(
                ResponseCode.FILTER_DATA_NOT_EXIST,
                f"The broker's consumer filter data not exist! Your expression may be wrong: {error.remark}",
            ) from error

    # ---- reading -----------------------------------------------------------------------------------------------

    def _read_hot(self, pull: Pull) -> ReadResult:
        """With `pending`, nothing is selected yet."""
        header = pull.header
        result = self._context.tiered.get_hot(header.topic, header.queue_id, pull.start, *self._limits(pull))
        return result if result.pending else self._selected(pull, result)

    async def _pull_old(self, pull: Pull, result: ReadResult) -> RemotingCommand:
        return self._response(pull, self._selected(pull, await self._context.tiered.load(result)))

    async def _pull_cold(self, pull: Pull) -> RemotingCommand:
        header = pull.header
        result = await self._context.tiered.get_cold(
            header.topic, header.queue_id, pull.start, *self._limits(pull),
            group=header.consumer_group, client=pull.connection.remote,
        )  # fmt: skip
        return self._response(pull, self._selected(pull, result))

    @staticmethod
    def _limits(pull: Pull) -> tuple[int, int, frozenset[int] | None]:
        if pull.wanted.predicate is None:
            return pull.max_count, pull.max_bytes, pull.wanted.codes
        return _FILTER_COUNT, _FILTER_BYTES, None

    @staticmethod
    def _selected(pull: Pull, result: ReadResult) -> ReadResult:
        predicate = pull.wanted.predicate
        return result if predicate is None else select(result, predicate, pull.max_count, pull.max_bytes)

    def _moved(self, pull: Pull, target: int) -> ReadResult:
        """An administrator set the group back or forward: the consumer goes on there."""
        header, tiered = pull.header, self._context.tiered
        low, high = (f(header.topic, header.queue_id) for f in (tiered.min_offset, tiered.max_offset))
        return ReadResult(GetMessageStatus.OFFSET_RESET, target, low, high)

    def _hold(self, pull: Pull, offset: int, deadline: float) -> None:
        def resume(last: bool) -> None:
            if not pull.connection.is_closed:
                pull.connection.resume(pull.request, lambda: self._resume(pull, deadline, last=last))

        header = pull.header
        self._context.watch(pull.connection)
        self._context.hold.hold(
            HeldPull(pull.connection, header.topic, header.queue_id, offset, deadline, pull.wanted.codes, resume)
        )

    def _resume(
        self, pull: Pull, deadline: float, *, last: bool
    ) -> RemotingCommand | Awaitable[RemotingCommand] | None:
        """While it was held, what it waits for may have left the local log, or the memory."""
        header, tiered = pull.header, self._context.tiered
        pull.begun = self._context.clock.monotonic()
        self._context.require(pull.connection, pull.request)  # it may have been taken away
        self._check(header)
        target = self._context.offsets.take_reset(header.consumer_group, header.topic, header.queue_id)
        if target is not None:
            return self._response(pull, self._moved(pull, target))
        if not tiered.is_hot(header.topic, header.queue_id, pull.start):
            return self._pull_cold(pull)
        result = self._read_hot(pull)
        if result.pending:
            return self._pull_old(pull, result)
        waits = response_code(result, pull.start) == ResponseCode.PULL_NOT_FOUND
        if pull.wanted.predicate is not None and result.status == GetMessageStatus.NO_MATCHED_MESSAGE:
            # Every message of the queue wakes it, whatever it holds: on waiting, behind what isn't wanted.
            pull.start, waits = result.next_offset, True
        if waits and not last:
            self._hold(pull, pull.start, deadline)
            return None
        return self._response(pull, result)

    def _response(self, pull: Pull, result: ReadResult) -> RemotingCommand:
        header, context = pull.header, self._context
        # A topic or group that was deleted meanwhile has no flags.
        topic, group = context.topics.topics.get(header.topic), context.groups.groups.get(header.consumer_group)
        ext = {
            "suggestWhichBrokerId": "0",
            "nextBeginOffset": str(result.next_offset),
            "minOffset": str(result.min_offset),
            "maxOffset": str(result.max_offset),
            "topicSysFlag": str(topic.topic_sys_flag) if topic else "0",
            "groupSysFlag": str(group.group_sys_flag) if group else "0",
        }
        code = response_code(result, pull.start)
        buffers = result.buffers if code == ResponseCode.SUCCESS else []
        if result.count:
            stats, took = context.stats, context.clock.monotonic() - pull.begun
            stats.got(header.topic, header.consumer_group, result.count, sum(map(len, buffers)))
            stats.took(header.queue_id, header.topic, header.consumer_group, round(took * 1000))
        context.offsets.commit_pull(header.consumer_group, header.topic, header.queue_id, result.next_offset)
        return RemotingCommand.response(pull.request, code, result.status, ext, parts=buffers or None)


def response_code(result: ReadResult, asked: int) -> ResponseCode:
    """RocketMQ's table; 21 sets a consumer's offset, so it is never given for a queue that is only empty."""
    if result.status is _EMPTY and asked not in (0, result.next_offset):
        return _MOVED
    return _CODES[result.status]


def parse_expression(expression: str | None, kind: str | None, *, sql: bool) -> Wanted:
    """What `a || b` or an SQL92 expression selects; `sql`: the broker takes the latter."""
    if kind == "SQL92":
        if not sql:
            raise BrokerError(
                ResponseCode.SYSTEM_ERROR, "The broker does not support consumer to filter message by SQL92"
            )
        try:
            return Wanted(predicate=compile_sql(expression or ""))
        except SqlError as error:
            raise BrokerError(
                ResponseCode.SUBSCRIPTION_PARSE_FAILED, f"parse the consumer's subscription failed: {error}"
            ) from error
    if kind not in (None, "", "TAG"):
        raise BrokerError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, f"ExpressionType={kind} is not known")
    if not expression or expression.strip() == "*":
        return Wanted()
    tags = [part.strip() for part in expression.split("||") if part.strip()]
    if not tags:
        raise BrokerError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, "parse the consumer's subscription failed")
    return Wanted(frozenset(map(tags_code, tags)))
