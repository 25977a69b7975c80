"""Acknowledgements of popped messages (200051, 200151), and changes of their invisible time (200053)."""

import base64
import binascii
from typing import Any

from access.permissions import SUB, of_batch_ack, of_topic_and_group
from broker.long_polling.pop_long_polling import PopLongPolling
from broker.pop.extra_info import ORDER_QUEUE, REVIVE_QUEUE, ExtraInfo
from broker.pop.pop_book import PopBook
from broker.pop.pop_log import Ack, ChangeInvisibleTime
from broker.pop.pop_queue import MAX_INVISIBLE_MS, MAX_OUT, PopQueue, is_out
from broker.reading.tiered_store import TieredStore
from broker.requests.route import MASTER, BrokerRoute, Waits
from broker.tables.topic_config_manager import TopicConfigManager
from infra.clock import Clock
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.body import lenient_loads
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import require_int, require_str
from neve.remoting.names import real_topic

_BATCH_BITS_MAX = 4096


class PopAckProcessor:
    """Acknowledges popped messages and changes their invisible time.

    This is RocketMQ's AckMessageProcessor and ChangeInvisibleTimeProcessor.
    """

    def __init__(
        self, clock: Clock, *, topics: TopicConfigManager, tiered: TieredStore, pops: PopBook, polling: PopLongPolling
    ) -> None:
        self._clock, self._topics, self._tiered = clock, topics, tiered
        self._pops, self._polling = pops, polling

    @BrokerRoute(Code.ACK_MESSAGE, of_topic_and_group(SUB), MASTER, Waits.YES, reads=False, hides_topics=False)
    def ack(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Acknowledge a message; no error if it is no longer in flight, by timeout or an earlier acknowledgement."""
        group, topic, queue_id, offset, info = self._message(request)
        self._land(group, topic, queue_id, [offset], info.pop_time)
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    @BrokerRoute(
        Code.CHANGE_MESSAGE_INVISIBLETIME, of_topic_and_group(SUB), MASTER, Waits.YES, reads=False, hides_topics=False
    )
    def change_invisible(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Change the invisible time of a message (200053); the answer has the data of its new receipt."""
        group, topic, queue_id, offset, info = self._message(request)
        invisible = require_int(request.ext, "invisibleTime")
        if not 0 <= invisible <= MAX_INVISIBLE_MS:
            raise BrokerError(
                ResponseCode.INVALID_PARAMETER,
                f"invisibleTime must be from 0 to {MAX_INVISIBLE_MS} ms (3 days), got {invisible}",
            )
        now = self._clock.now_ms()
        queue = self._pops.find(group, topic, queue_id)
        is_ours = queue is not None and bool(is_out(queue, [offset], info.pop_time))
        in_order = queue.flights[offset].in_order if queue and is_ours else info.revive_queue == ORDER_QUEUE
        # In order the pop time stays, because one checkpoint covers the whole batch. Otherwise the old receipt expires.
        pop_time = info.pop_time if in_order else max(now, info.pop_time + 1)
        if queue is not None and is_ours:
            self._pops.record(
                ChangeInvisibleTime(group, topic, queue_id, offset, info.pop_time, pop_time, now + invisible)
            )
            if in_order:
                self._wake_if_released(queue)
        ext = {
            "popTime": str(pop_time),
            "invisibleTime": str(now + invisible - pop_time),
            "reviveQid": str(ORDER_QUEUE if in_order else REVIVE_QUEUE),
        }
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext=ext)

    @BrokerRoute(Code.BATCH_ACK_MESSAGE, of_batch_ack, MASTER, Waits.YES, reads=False, hides_topics=False)
    def batch_ack(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Acknowledge several messages (200151); all entries are parsed before the first is applied."""
        value = lenient_loads(request.body) if request.body else None
        acks = value.get("acks") if isinstance(value, dict) else None
        if not acks:
            raise BrokerError(ResponseCode.NO_MESSAGE, "the batch has no acknowledgement")
        if not isinstance(acks, list):
            raise BrokerError(ResponseCode.SYSTEM_ERROR, "a malformed batch acknowledgement: acks is no list")
        for item in [_batch_item(ack) for ack in acks]:
            group, topic, queue_id, pop_time, offsets = item
            self._check_queue(topic, queue_id)
            self._land(group, topic, queue_id, offsets, pop_time)
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    # ---- inside

    def _message(self, request: RemotingCommand) -> tuple[str, str, int, int, ExtraInfo]:
        ext = request.ext
        group, topic = require_str(ext, "consumerGroup"), require_str(ext, "topic")
        queue_id, offset = require_int(ext, "queueId"), require_int(ext, "offset")
        info = ExtraInfo.parse(require_str(ext, "extraInfo"))
        self._check_queue(topic, queue_id)
        low, high = self._tiered.min_offset(topic, queue_id), self._tiered.max_offset(topic, queue_id)
        if not low <= offset < high:
            raise BrokerError(ResponseCode.NO_MESSAGE, f"offset {offset} is not from {low} to {high}")
        return group, topic, queue_id, offset, info

    def _check_queue(self, topic: str, queue_id: int) -> None:
        config = self._topics.require(topic)
        if not 0 <= queue_id < config.read_queue_nums:
            raise BrokerError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"queueId[{queue_id}] is illegal, topic:[{topic}] topicConfig.readQueueNums:[{config.read_queue_nums}]",
            )

    def _land(self, group: str, topic: str, queue_id: int, offsets: list[int], pop_time: int) -> None:
        queue = self._pops.find(group, topic, queue_id)
        if queue is None:
            return
        out = is_out(queue, offsets, pop_time)
        if not out:
            return
        was_full, was_in_order = len(queue.flights) >= MAX_OUT, queue.flights[out[0]].in_order
        self._pops.record(Ack(group, topic, queue_id, pop_time, out))
        if was_in_order:
            self._wake_if_released(queue)
        elif was_full:
            self._polling.wake(*queue.key)

    def _wake_if_released(self, queue: PopQueue) -> None:
        """Wake waiting pops if this was the last message that blocked an ordered queue."""
        if self._pops.release(queue):
            self._polling.wake(*queue.key)


def _batch_item(ack: Any) -> tuple[str, str, int, int, list[int]]:
    """Parse one entry to group, topic, queue, pop time and offsets; fields have short or long names."""
    try:
        group, topic, retry = (
            str(_field(ack, *names)) for names in (("c", "consumerGroup"), ("t", "topic"), ("r", "retry"))
        )
        start, queue_id, pop_time = (
            int(_field(ack, *names)) for names in (("so", "startOffset"), ("q", "queueId"), ("pt", "popTime"))
        )
        bits = base64.b64decode(_field(ack, "b", "bitSet"))
        stored_in = real_topic(topic, group, retry)
    except (KeyError, TypeError, ValueError, OverflowError, binascii.Error) as error:
        raise BrokerError(ResponseCode.SYSTEM_ERROR, f"a malformed batch acknowledgement: {error!r}") from error
    if len(bits) * 8 > _BATCH_BITS_MAX:
        raise BrokerError(ResponseCode.SYSTEM_ERROR, f"a batch acknowledgement of {len(bits) * 8} bits is too long")
    offsets = [start + index for index in range(len(bits) * 8) if bits[index >> 3] >> (index & 7) & 1]
    return group, stored_in, queue_id, pop_time, offsets


def _field(ack: Any, short: str, long: str) -> Any:
    return ack[short] if short in ack else ack[long]
