"""Consumers' offsets and queue ranges: 14, 15, 29 to 32, 38, 41, 42."""

import msgspec

from broker import validators
from broker.broker_context import BrokerContext
from broker.clients.client_manager import MAX_CLIENT_ID
from infra.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.body import MessageQueue, convert, dumps, dumps_object_keys, lenient_loads
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import Int32, optional_bool, require_int, require_str


class ConsumerManageProcessor:
    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def query_offset(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        ext, context = request.ext, self._context
        group, topic = require_str(ext, "consumerGroup"), require_str(ext, "topic")
        queue = require_int(ext, "queueId")
        offset = context.offsets.query(group, topic, queue)
        if offset < 0 and optional_bool(ext, "setZeroIfNotFound", True) and self._is_young(topic, queue):
            offset = 0
        if offset < 0:
            raise BrokerError(ResponseCode.QUERY_NOT_FOUND, "Not found, maybe this group consumer boot first")
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext={"offset": str(offset)})

    def _is_young(self, topic: str, queue: int) -> bool:
        """Record 0 is still hot: a new group reads all of a young topic, but not years of an archive."""
        return self._context.store.min_offset(topic, queue) <= 0

    def update_offset(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        ext, context = request.ext, self._context
        group, topic = require_str(ext, "consumerGroup"), require_str(ext, "topic")
        config = context.find_topic(topic)
        if group not in context.groups.groups:
            raise BrokerError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{group}] does not exist")
        queue, offset = require_int(ext, "queueId"), require_int(ext, "commitOffset")
        if not 0 <= queue < config.queue_nums or offset < 0:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"queueId {queue}, commitOffset {offset}")
        context.offsets.commit(group, topic, queue, offset)
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    def max_offset(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic, queue = self._queue(request)
        return _offset(request, self._context.tiered.max_offset(topic, queue))

    def min_offset(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic, queue = self._queue(request)
        return _offset(request, self._context.tiered.min_offset(topic, queue))

    async def search_offset(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic, queue = self._queue(request)
        upper = request.ext.get("boundaryType", "LOWER").upper() == "UPPER"
        timestamp = require_int(request.ext, "timestamp")
        return _offset(request, await self._context.tiered.offset_by_time(topic, queue, timestamp, upper))

    async def earliest_store_time(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic, queue = self._queue(request)
        tiered = self._context.tiered
        time = await tiered.store_time(topic, queue, tiered.min_offset(topic, queue))
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext={"timestamp": str(time)})

    def consumer_list(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group = require_str(request.ext, "consumerGroup")
        info = self._context.clients.consumers.get(group)
        if info is None or not info.channels:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {group}")
        return RemotingCommand.response(
            request, ResponseCode.SUCCESS, body=dumps({"consumerIdList": info.client_ids()})
        )

    def lock_batch(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group, client, queues = _lock_body(request)
        context, broker = self._context, self._context.config.broker_name
        if group not in context.groups.groups or len(client) > MAX_CLIENT_ID:
            queues = []  # nobody who could hold one
        known = context.topics.topics
        real = [
            (topic, name, queue) for topic, name, queue in queues
            if name == broker and topic in known and 0 <= queue < known[topic].queue_nums
        ]  # fmt: skip
        held = context.locks.lock(group, client, real)
        wire = [{"brokerName": broker, "queueId": queue, "topic": topic} for topic, broker, queue in held]
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps_object_keys({"lockOKMQSet": wire}))

    def unlock_batch(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group, client, queues = _lock_body(request)
        self._context.locks.unlock(group, client, queues)
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    def _queue(self, request: RemotingCommand) -> tuple[str, int]:
        """An unknown topic or queue is no error here: its offsets are 0."""
        topic, queue = require_str(request.ext, "topic"), require_int(request.ext, "queueId")
        if validators.topic_fault(topic) is not None or not 0 <= queue < 1 << 31:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"topic {topic!r}, queueId {queue}")
        return topic, queue


def _offset(request: RemotingCommand, offset: int) -> RemotingCommand:
    return RemotingCommand.response(request, ResponseCode.SUCCESS, ext={"offset": str(max(offset, 0))})


class _LockQueue(msgspec.Struct, rename="camel"):
    topic: str
    broker_name: str
    queue_id: Int32


def _lock_body(request: RemotingCommand) -> tuple[str, str, list[tuple[str, str, int]]]:
    value = lenient_loads(request.body)
    items = value.get("mqSet") or () if isinstance(value, dict) else None
    if not isinstance(items, list | tuple):
        raise BrokerError(ResponseCode.SYSTEM_ERROR, "the body is no lock request")
    queues = [item if isinstance(item, MessageQueue) else convert(item, _LockQueue) for item in items]
    places = [(queue.topic, queue.broker_name, queue.queue_id) for queue in queues]
    return str(value.get("consumerGroup", "")), str(value.get("clientId", "")), places
