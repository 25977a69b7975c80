"""Reads queues by offset: pulls, the bounds of a queue, committed offsets, and a reader of a topic."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

from neve.client.model import MASTER_ID, Message, MessageQueue, PullResult, PullStatus, inflated, stored_message
from neve.client.net.answers import ext_int
from neve.client.net.connection import Connection
from neve.client.net.route import Reader
from neve.client.net.session import Session
from neve.client.times import Start, start_position
from neve.client.validators import check_timeout
from neve.errors import BrokerError, ClientError, NeveError, ProtocolError
from neve.record.codec import iter_records
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

TOOLS_GROUP = "TOOLS_CONSUMER"  # exists at every broker
_SUSPEND, _SUBSCRIPTION, _LITE = 2, 4, 16
_STATUS = {
    ResponseCode.SUCCESS: PullStatus.FOUND,
    ResponseCode.PULL_NOT_FOUND: PullStatus.NO_NEW_MESSAGE,
    ResponseCode.PULL_RETRY_IMMEDIATELY: PullStatus.NO_MATCHED_MESSAGE,
    ResponseCode.PULL_OFFSET_MOVED: PullStatus.OFFSET_ILLEGAL,
}
MAX_BYTES = 262_144
_INFLATED_MAX = 64 << 20  # bytes of decompressed bodies in one pull; the next pull returns the rest
_PATIENCE_S = 1.0  # beyond the wait of the broker; then the master is looked up
T = TypeVar("T")
_ANSWER_MARGIN_S = 15.0  # the time limit of a pull beyond the wait of the broker


@dataclass(frozen=True, slots=True)
class Subscription:
    """A filter of the messages of a topic.

    Attributes:
        expression: `*`, tags joined by `||`, or an SQL92 expression over the properties.
        kind: `TAG` or `SQL92`.
    """

    expression: str = "*"
    kind: str = "TAG"

    @classmethod
    def sql(cls, expression: str) -> Subscription:
        """Return a filter by an SQL92 expression, such as `colour = 'red' AND size > 5`."""
        return cls(expression, "SQL92")

    @property
    def tags(self) -> frozenset[str]:
        """The tags of the expression; empty for `*` and for SQL92."""
        if self.kind != "TAG" or self.expression.strip() in ("", "*"):
            return frozenset()
        return frozenset(tag for part in self.expression.split("||") if (tag := part.strip()))

    def matches(self, message: Message) -> bool:
        """Return whether the tag of the message matches: the broker compares only hashes."""
        tags = self.tags
        return not tags or message.tags in tags


class StoredPull(NamedTuple):
    """The answer to a pull, with encoded records.

    Attributes:
        status: the outcome.
        records: the records, one after the other; `neve.record.codec.iter_records` decodes them.
        next_offset: the offset of the next pull, whatever the status.
        min_offset: the first offset of the queue.
        max_offset: the offset behind the last message of the queue.
    """

    status: PullStatus
    records: bytes
    next_offset: int
    min_offset: int
    max_offset: int


Topics = str | Iterable[str] | Mapping[str, str | Subscription]


def subscription(expression: str | Subscription) -> Subscription:
    """Return the Subscription of a tag expression, or the given one."""
    return expression if isinstance(expression, Subscription) else Subscription(expression)


def subscriptions(topics: Topics) -> dict[str, Subscription]:
    """Return the subscriptions by topic."""
    if isinstance(topics, str):
        return {topics: Subscription()}
    if isinstance(topics, Mapping):
        return {topic: subscription(expression) for topic, expression in topics.items()}
    return {topic: Subscription() for topic in topics}


class Puller:
    """Reads the queues of one client, without a consumer."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._suggested: dict[MessageQueue, int] = {}  # the replica that a broker suggested for reads

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return the readable queues, sorted."""
        return list((await self._session.routes.get(topic)).read_queues)

    async def resolve(self, topic: str, queue: int | MessageQueue) -> MessageQueue:
        """Return the queue of a number on the first broker that has it, or the given queue."""
        if isinstance(queue, MessageQueue):
            return queue
        for candidate in await self.queues(topic):
            if candidate.queue_id == queue:
                return candidate
        raise ClientError(f"{topic} has no queue {queue}")

    async def address(self, queue: MessageQueue) -> str:
        """Return the address of the master, or of a replica while there is no master."""
        return (await self._reader(queue, MASTER_ID)).address

    async def _reader(self, queue: MessageQueue, wanted: int) -> Reader:
        for fresh in (False, True):
            reader = (await self._session.routes.get(queue.topic, fresh=fresh)).reader(queue.broker_name, wanted)
            if reader is not None:
                return reader
        raise ClientError(f"no broker {queue.broker_name} is known")

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        max_count: int = 32,
        *,
        group: str = TOOLS_GROUP,
        subscription: Subscription | None = None,
        wait: float = 0.0,
        timeout: float | None = None,
        code: RequestCode = RequestCode.PULL_MESSAGE,
    ) -> PullResult:
        """Pull messages, with compressed bodies: see `inflated_result`."""
        wanted = subscription or Subscription()
        parse = partial(_pull_result, queue=queue, wanted=wanted)
        return await self._pull(
            queue, offset, max_count, parse, group=group, wanted=wanted, wait=wait, timeout=timeout, code=code
        )

    async def pull_records(
        self,
        queue: MessageQueue,
        offset: int,
        max_count: int,
        *,
        group: str = TOOLS_GROUP,
        wanted: Subscription,
        wait: float = 0.0,
        timeout: float | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> StoredPull:
        """Pull encoded records. A tag filter selects all records with the hash of a tag."""
        return await self._pull(
            queue, offset, max_count, _stored_pull, group=group, wanted=wanted, wait=wait, timeout=timeout,
            max_bytes=max_bytes,
        )  # fmt: skip

    async def _pull(
        self,
        queue: MessageQueue,
        offset: int,
        max_count: int,
        parse: Callable[[RemotingCommand], T],
        *,
        group: str,
        wanted: Subscription,
        wait: float,
        timeout: float | None,
        code: RequestCode = RequestCode.PULL_MESSAGE,
        max_bytes: int = MAX_BYTES,
    ) -> T:
        flags = _SUBSCRIPTION | (_SUSPEND if wait > 0 else 0)
        if code == RequestCode.LITE_PULL_MESSAGE:
            flags |= _LITE
        ext = {
            **_fields(queue),
            "consumerGroup": group,
            "queueOffset": str(offset),
            "maxMsgNums": str(max_count),
            "sysFlag": str(flags),
            "commitOffset": "0",
            "suspendTimeoutMillis": str(int(wait * 1000)),
            "subscription": wanted.expression,
            "subVersion": "0",
            "expressionType": wanted.kind,
            "maxMsgBytes": str(max_bytes),
        }
        reader = await self._reader(queue, self._suggested.get(queue, MASTER_ID))
        try:
            limit = self.limit(wait, timeout)
            if reader.member == MASTER_ID:
                patience = wait + _PATIENCE_S
                answer = await self._session.requests.ask_watched(
                    queue, reader.address, code, ext, timeout=limit, patience=patience
                )
            else:
                answer = await self._session.pool.invoke(reader.address, code, ext, timeout=limit)
            result = parse(answer)
        except NeveError:
            self._suggest(queue, reader.instead)
            raise
        self._follow(queue, answer, reader)
        return result

    def _follow(self, queue: MessageQueue, answer: RemotingCommand, reader: Reader) -> None:
        """Read from the member that the broker suggests: a replica for old messages, otherwise the master."""
        text = (answer.ext or {}).get("suggestWhichBrokerId", "")
        wanted = int(text) if text.isdecimal() else MASTER_ID
        if wanted == MASTER_ID != reader.member:
            self._session.routes.mark_doubtful(reader.address)  # there may be a master that the route does not name
        self._suggest(queue, wanted)

    def _suggest(self, queue: MessageQueue, member: int) -> None:
        if member == MASTER_ID:
            self._suggested.pop(queue, None)
        else:
            self._suggested[queue] = member

    def limit(self, wait: float, timeout: float | None) -> float:
        """Return the time limit of a pull in seconds; `wait` is the time that the broker may wait for a message."""
        check_timeout(timeout)
        return timeout or (wait + _ANSWER_MARGIN_S if wait > 0 else 2 * self._session.options.timeout)

    # ---- bounds

    async def min_offset(self, queue: MessageQueue) -> int:
        return max(0, await self._offset(RequestCode.GET_MIN_OFFSET, queue, {}))

    async def max_offset(self, queue: MessageQueue) -> int:
        return await self._offset(RequestCode.GET_MAX_OFFSET, queue, {"committed": "true"})

    async def offset_by_time(self, queue: MessageQueue, time_ms: int) -> int:
        """Return the offset of the first message stored at `time_ms` or later."""
        ext = {"timestamp": str(time_ms), "boundaryType": "LOWER"}
        return await self._offset(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, queue, ext)

    async def _offset(self, code: RequestCode, queue: MessageQueue, more: Mapping[str, str]) -> int:
        return ext_int(await self._known(queue, code, {**_fields(queue), **more}), "offset")

    async def _known(self, queue: MessageQueue, code: RequestCode, ext: Mapping[str, str]) -> RemotingCommand:
        """Ask the master, or a replica while there is no master; retry if the replica cannot answer."""
        return await self._session.requests.ask_master(queue, code, ext, may_repeat=True, find=self.address)

    # ---- committed offsets

    async def committed(self, group: str, queue: MessageQueue) -> int | None:
        """Return the committed offset of a group, or None."""
        ext = {**_fields(queue), "consumerGroup": group}
        try:
            answer = await self._known(queue, RequestCode.QUERY_CONSUMER_OFFSET, ext)
        except BrokerError as error:
            if error.code == ResponseCode.QUERY_NOT_FOUND:
                return None
            raise
        return ext_int(answer, "offset")

    async def commit(self, group: str, queue: MessageQueue, offset: int, *, once: bool = False) -> Connection:
        """Commit an offset at the master, and return the connection over which it was sent.

        With `once` there is one attempt, because a retry might overwrite a later commit. Its answer is awaited only
        from a broker with replicas, which may refuse during a switchover.
        """
        ext = {**_fields(queue), "consumerGroup": group, "commitOffset": str(offset)}
        code, session = RequestCode.UPDATE_CONSUMER_OFFSET, self._session
        used: Connection

        async def master(queue: MessageQueue) -> str:
            nonlocal used
            address = await session.routes.master(queue)
            used = await session.pool.get(address)  # the request uses it, too: no other task runs in between
            return address

        if not once:
            await session.requests.ask_master(queue, code, ext, may_repeat=True, find=master)
        elif session.routes.has_replicas(queue):
            await session.requests.ask(await master(queue), code, ext)
        else:
            await session.pool.send_oneway(await master(queue), code, ext, timeout=session.options.attempt_timeout)
        return used

    def keeper(self, queue: MessageQueue) -> object:
        """Return the keeper of a queue's offset; see `OffsetStore.keeper`."""
        return self._session.requests.connection_to_master(queue)

    # ---- reader

    def read(
        self,
        topic: str,
        *,
        start: Start = "earliest",
        queue: int | MessageQueue | None = None,
        subscription: Subscription | None = None,
        group: str = TOOLS_GROUP,
    ) -> AsyncIterator[Message]:
        """Return the messages of each queue in turn, up to its end when the reader gets to it: `AsyncClient.reader`."""
        position = start_position(start)
        if position == "latest":
            raise ClientError("a reader starts 'earliest' or at a time, got 'latest': it ends where the queues end now")
        return self._read(topic, position, queue, subscription or Subscription(), group)

    async def _read(
        self, topic: str, start: str | int, queue: int | MessageQueue | None, wanted: Subscription, group: str
    ) -> AsyncIterator[Message]:
        queues = await self.queues(topic) if queue is None else [await self.resolve(topic, queue)]
        for one in queues:
            end = await self.max_offset(one)
            offset = await (self.min_offset(one) if start == "earliest" else self.offset_by_time(one, int(start)))
            while offset < end:
                result = inflated_result(await self.pull(one, offset, group=group, subscription=wanted))
                for message in result.messages:
                    if message.queue_offset < end:
                        yield message
                if result.next_offset <= offset:
                    break
                offset = result.next_offset


def _fields(queue: MessageQueue) -> dict[str, str]:
    """Return the fields that identify a queue in requests."""
    return {"topic": queue.topic, "queueId": str(queue.queue_id), "bname": queue.broker_name}


def _pull_status(answer: RemotingCommand) -> PullStatus:
    status: PullStatus | None = _STATUS.get(answer.code)  # type: ignore[call-overload]
    if status is None:
        raise BrokerError(answer.code, answer.remark or "")
    return status


def _stored_pull(answer: RemotingCommand) -> StoredPull:
    status = _pull_status(answer)
    return StoredPull(
        status,
        answer.body if status is PullStatus.FOUND else b"",
        ext_int(answer, "nextBeginOffset"),
        ext_int(answer, "minOffset"),
        ext_int(answer, "maxOffset"),
    )


def _pull_result(answer: RemotingCommand, queue: MessageQueue, wanted: Subscription) -> PullResult:
    status = _pull_status(answer)
    messages: tuple[Message, ...] = ()
    if status is PullStatus.FOUND:
        try:
            found = (stored_message(record, queue.broker_name) for record in iter_records(answer.body))
            messages = tuple(message for message in found if wanted.matches(message))
        except ValueError as error:
            raise ProtocolError(f"{queue}: {error}") from error
    return PullResult(
        status,
        messages,
        ext_int(answer, "nextBeginOffset"),
        ext_int(answer, "minOffset"),
        ext_int(answer, "maxOffset"),
    )


def inflated_result(result: PullResult) -> PullResult:
    """Decompress the bodies, up to 64 MiB in all but at least one; the next pull returns the others."""
    messages: list[Message] = []
    size = 0
    for stored in result.messages:
        message = inflated(stored)
        if messages and size + len(message.body) > _INFLATED_MAX:
            return replace(result, messages=tuple(messages), next_offset=stored.queue_offset)
        size += len(message.body)
        messages.append(message)
    return replace(result, messages=tuple(messages))
