"""Sends messages to a topic in batches, with several requests in flight, and reports the outcome of each message.

Messages that arrive together form batches. A large message is sent alone, because batches are not compressed. Few lines
form small batches, so that all queues get their share.

One batch at a time is sent to a queue: brokers may store concurrent requests in any order, as Apache RocketMQ's do, and
lines must keep their order within a queue. Delayed messages have no order.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from neve.cli.failures import FAILED, Failure, explain
from neve.cli.line_ranges import ranges
from neve.cli.message_lines import BadLine, Outgoing
from neve.cli.output import say
from neve.cli.progress import MessageProgress
from neve.cli.stdout_bytes import NotPrinted, StdoutBytes
from neve.client.send.draft import message_to_send
from neve.client.validators import check_body
from neve.errors import BrokerError, NeveError
from neve.remoting.codes import ResponseCode

if TYPE_CHECKING:
    from neve.client import AsyncClient, Message, MessageQueue, SendResult

log = logging.getLogger(__name__)

_IN_FLIGHT = 64
_BATCH_MESSAGES = 256
_BATCH_BYTES = 256 * 1024
# A batch takes at most this fraction of the messages that arrived together.
_SPREAD = 16
# Seconds for which a broker that failed gets no batch while another broker has queues.
_AVOID_S = 30.0


class How(NamedTuple):
    """The options that apply to all messages."""

    queue: int | None = None
    order_key: str | None = None
    delay: float | None = None
    quiet: bool = False


class _Item(NamedTuple):
    number: int
    message: Message


class Sending:
    """The messages of one command. `noun` is what the numbers count; `names` replaces numbers in messages."""

    def __init__(
        self,
        client: AsyncClient,
        topic: str,
        how: How,
        *,
        receipts: StdoutBytes,
        progress: MessageProgress,
        noun: str = "line",
        names: Sequence[str] | None = None,
    ) -> None:
        self._client = client
        self._topic = topic
        self._how = how
        # in order: the next message is sent after the previous one is stored
        self._in_flight = 1 if how.order_key is not None else _IN_FLIGHT
        self._has_lanes = how.order_key is None and how.delay is None
        self._lanes: list[MessageQueue] = []  # the topic's queues, the next in turn first
        self._busy: set[MessageQueue] = set()
        self._avoided: dict[str, float] = {}  # broker -> the loop's time until which other brokers are preferred
        self._receipts, self._progress = receipts, progress
        self._noun, self._names = noun, names
        self._deflated = client.options.compress_over
        self._collected: list[_Item] = []
        self._waiting: set[asyncio.Task[None]] = set()
        self._failures: dict[int, BaseException] = {}
        self._last = 0
        self._unprinted: BrokenPipeError | NotPrinted | None = None
        self.stored = 0

    @property
    def has_failed(self) -> bool:
        return bool(self._failures)

    def add(self, number: int, outgoing: Outgoing) -> None:
        """Collect a message for the next `send`; one that every broker would refuse is a failure."""
        body, tags, keys, properties, flag = outgoing
        try:
            message = message_to_send(self._topic, body, tags=tags, keys=keys, properties=properties, flag=flag)
            check_body(len(body), self._client.options.max_message_size)
        except NeveError as error:
            self.refuse(number, error)
        else:
            self._collected.append(_Item(number, message))

    def refuse(self, number: int, error: BaseException) -> None:
        """Record a failure; nothing more is sent."""
        self._failures[number] = error

    async def send(self) -> None:
        """Send the collected messages as slots become free, unless an earlier message fails.

        Raises:
            BrokenPipeError, NotPrinted: earlier receipts could not be printed, see `StdoutBytes.flush`.
        """
        items, self._collected = self._collected, []
        for batch in self._batches(items):
            lane = await self._free_lane()
            # a failure stops later messages; those before a message that was refused are still sent
            if any(number < batch[0].number for number in self._failures):
                break
            self._last = batch[-1].number
            task = asyncio.create_task(self._send(batch, lane))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)
        self._require_printed()

    async def _free_lane(self) -> MessageQueue | None:
        """Wait for a free slot, and return the next queue in turn without a batch in flight.

        None leaves the choice to the producer: order is not required, or the topic has no route yet. In the latter case
        no other batch is in flight.
        """
        if self._has_lanes and not self._lanes:
            await self._all_answered()
            self._lanes = await self._queues()
        while True:
            usable = self._usable_lanes()
            lane = next((queue for queue in usable if queue not in self._busy), None)
            if len(self._waiting) < self._in_flight and (lane is not None or not usable):
                break
            await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
        if lane is not None:
            at = self._lanes.index(lane) + 1
            self._lanes = self._lanes[at:] + self._lanes[:at]
            self._busy.add(lane)
        return lane

    def _usable_lanes(self) -> list[MessageQueue]:
        """Return the queues of brokers that did not fail lately, or all if each broker did."""
        now = asyncio.get_running_loop().time()
        return [queue for queue in self._lanes if self._avoided.get(queue.broker_name, 0) <= now] or self._lanes

    async def _queues(self) -> list[MessageQueue]:
        try:
            route = await self._client.admin.topic_route(self._topic)
        except NeveError as error:
            log.info("the route of %s is not known: %s", self._topic, error)  # sending reports it, or creates the topic
            return []
        return [queue for queue in route.write_queues if self._how.queue in (None, queue.queue_id)]

    def _target(self, lane: MessageQueue | None) -> dict[str, Any]:
        """Return where a batch goes: at the first attempt to its lane, then to a broker that was not tried, if any."""
        if lane is None:
            return {"queue": self._how.queue, "order_key": self._how.order_key}
        tried: list[str] = []

        def choose(queues: Sequence[MessageQueue], _: Message) -> MessageQueue:
            if tried:
                self._avoided[tried[-1]] = asyncio.get_running_loop().time() + _AVOID_S
            fitting = [queue for queue in queues if self._how.queue in (None, queue.queue_id)]
            fresh = [queue for queue in fitting if queue.broker_name not in tried]
            chosen = lane if lane in fresh or not fresh else fresh[lane.queue_id % len(fresh)]
            tried.append(chosen.broker_name)
            return chosen

        return {"queue": choose}

    async def _all_answered(self) -> None:
        while self._waiting:
            await asyncio.wait(self._waiting)

    def _require_printed(self) -> None:
        if self._unprinted is not None:
            raise self._unprinted

    def _batches(self, items: list[_Item]) -> list[list[_Item]]:
        at_most = 1
        if self._how.delay is None:
            spread = -(-len(items) // _SPREAD) if self._how.order_key is None else _BATCH_MESSAGES
            at_most = min(spread, _BATCH_MESSAGES)
        batches: list[list[_Item]] = []
        size = _BATCH_BYTES
        for item in items:
            length = len(item.message.body)
            size += length
            if size > _BATCH_BYTES or len(batches[-1]) >= at_most or length >= self._deflated:
                batches.append([])
                size = length if length < self._deflated else _BATCH_BYTES
            batches[-1].append(item)
        return batches

    async def _send(self, batch: list[_Item], lane: MessageQueue | None) -> None:
        try:
            if len(batch) == 1:
                await self._send_one(batch[0], lane)
            else:
                await self._send_together(batch, lane)
        except BaseException as error:  # noqa: BLE001 - reported with the numbers of the lines
            for item in batch:
                self._failures.setdefault(item.number, error)
        finally:
            if lane is not None:
                self._busy.discard(lane)
        try:
            await self._receipts.flush()
        except (BrokenPipeError, NotPrinted) as error:
            self._unprinted = error

    async def _send_one(self, item: _Item, lane: MessageQueue | None) -> None:
        message = item.message
        result = await self._client.send(
            self._topic,
            message.body,
            tags=message.tags,
            keys=message.keys,
            properties=message.properties,
            flag=message.flag,
            delay=self._how.delay,
            **self._target(lane),
        )
        self._note([item], result)

    async def _send_together(self, batch: list[_Item], lane: MessageQueue | None) -> None:
        messages = [item.message for item in batch]
        try:
            result = await self._client.send_batch(self._topic, messages, **self._target(lane))
        except BrokerError as error:
            if error.code != ResponseCode.MESSAGE_ILLEGAL:
                raise
            await self._send_apart(batch, lane)
        else:
            self._note(batch, result)

    async def _send_apart(self, batch: list[_Item], lane: MessageQueue | None) -> None:
        """Send the messages of a refused batch one by one: the batch was too large, or one message is invalid."""
        for item in batch:
            try:
                await self._send_one(item, lane)
            except NeveError as error:
                self._failures[item.number] = error
                rest = (other.number for other in batch if other.number > item.number)
                self._failures |= dict.fromkeys(rest, _NotSent("not sent"))
                return

    def _note(self, batch: Sequence[_Item], result: SendResult) -> None:
        self.stored += len(batch)
        self._progress.count(len(batch))
        if self._how.quiet:
            return
        ids = result.msg_id.split(",")
        head = f'"status": "{result.status}", "msg_id": "'
        tail = f'", "broker": {json.dumps(result.queue.broker_name)}, "queue": {result.queue.queue_id}, "offset": '
        end = "" if result.recall_handle is None else f', "recall_handle": {json.dumps(result.recall_handle)}'
        lines = [
            f"{{{self._label(item.number)}{head}{ids[at]}{tail}{result.queue_offset + at}{end}}}\n"
            for at, item in enumerate(batch)
        ]
        self._receipts.add("".join(lines).encode())

    def _label(self, number: int) -> str:
        if self._names is not None:
            return f'"{self._noun}": {json.dumps(self._names[number - 1])}, '
        return f'"{self._noun}": {number}, ' if number else ""

    async def settle(self) -> None:
        """Wait for all answers, and print their receipts.

        Raises:
            BrokenPipeError, NotPrinted: a receipt could not be printed.
        """
        await self._all_answered()
        self._require_printed()

    def report_interruption(self) -> None:
        """Print how many messages are stored, and after which one none was sent."""
        after = f"; nothing after {self._named(self._last)} was sent" if self._last else ""
        failed = f"; outcome unknown: {self._all(self._failures)}" if self._failures else ""
        say(f"{self.stored} messages are stored{failed}{after}")

    def raise_failure(self) -> None:
        """Raise the first failure, if any.

        Raises:
            Failure: with the number or name of the message, and the number of stored messages.
        """
        if not self._failures:
            return
        first = min(self._failures)
        error = self._failures[first]
        explained = explain(error)
        if explained is None and not isinstance(error, BadLine):
            raise error
        others = self._failures.keys() - {first}
        text = f"{self._named(first)}: {error}" if first else str(error)
        text += f"; failed too, or not sent: {self._all(others)}" if others else ""
        if first:
            receipts = ", their receipts are printed" if self.stored and not self._how.quiet else ""
            after = self._named(max(self._last, first))
            text += f"; {self.stored} messages are stored{receipts}; nothing after {after} was sent"
        raise Failure(FAILED if explained is None else explained.exit_code, text)

    def _named(self, number: int) -> str:
        return f"{self._noun} {number if self._names is None else self._names[number - 1]}"

    def _all(self, numbers: Any) -> str:
        return ranges(numbers) if self._names is None else ", ".join(self._names[at - 1] for at in sorted(numbers))


class _NotSent(Exception):
    """The message was not sent because an earlier one failed."""
