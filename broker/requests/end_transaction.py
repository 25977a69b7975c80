"""END_TRANSACTION (37) commits or rolls back half messages. RESUME_CHECK_HALF_MESSAGE (323) restarts checks."""

from collections import Counter
from collections.abc import Awaitable, Callable

from access.guard import Guard
from access.permissions import PUB, UPDATE, of_cluster, of_topic
from broker.intake.intake import REFUSALS, Intake, refusal
from broker.intake.message import NewMessage
from broker.reading.tiered_store import TieredStore
from broker.requests.route import BrokerRoute, Waits, master_else
from broker.store.message_store import MessageStore
from broker.tables.topic_config_manager import TopicConfigManager
from broker.waiting.delivery import delivery_target
from broker.waiting.half_messages import COMMIT, ROLLBACK, TRANSACTION_BITS, UNKNOWN, HalfMessages, immunity
from infra.clock import Clock
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.record.codec import MessageRecord, decode_record, parse_host
from neve.record.ids import parse_offset_msg_id
from neve.record.layout import TRANSACTION_COMMIT
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import optional_bool, require_int, require_str
from neve.remoting.names import CHECK_MAX_TOPIC, HALF_TOPIC

_ROLES = master_else(ResponseCode.SLAVE_NOT_AVAILABLE, "transactions end at the master")


class EndTransactionProcessor:
    """Commits and rolls back half messages (RocketMQ's EndTransactionProcessor).

    A committed message and the end mark of its half message are appended together.
    """

    def __init__(
        self,
        intake: Intake,
        half_messages: HalfMessages,
        store: MessageStore,
        tiered: TieredStore,
        *,
        clock: Clock,
        topics: TopicConfigManager,
        guard: Guard,
        settled: Callable[[], Awaitable[None]],
    ) -> None:
        """`settled` returns when everything stored so far is durable."""
        self._intake, self._half_messages, self._clock = intake, half_messages, clock
        self._store, self._tiered = store, tiered
        self._topics, self._guard, self._settled = topics, guard, settled
        #: Ended transactions by topic.
        self.committed, self.rolled_back = Counter[str](), Counter[str]()

    @BrokerRoute(Code.END_TRANSACTION, of_topic(PUB), _ROLES, Waits.YES, reads=False, hides_topics=False)
    async def end(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """End a transaction in one step of the event loop; the answer waits for the fsync if sends do."""
        outcome = require_int(request.ext, "commitOrRollback")
        if outcome not in (COMMIT, ROLLBACK, UNKNOWN):
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"commitOrRollback={outcome}: allowed are 0, 8 and 12")
        if outcome != UNKNOWN:
            self._end(connection, request, outcome)
            if not request.is_oneway:
                await self._settled()
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    def _end(self, connection: Connection, request: RemotingCommand, outcome: int) -> None:
        transactions = self._half_messages
        record = self._prepared(request)
        self._guard.require_topic(connection, request, record.properties.get("REAL_TOPIC", ""), "Pub")
        half = transactions.find(record.queue_offset)
        if half is None or half.physical_offset != record.physical_offset:
            if transactions.outcome(record.queue_offset) == outcome:
                return
            raise BrokerError(ResponseCode.SYSTEM_ERROR, "the transaction has ended already")
        self._check_time(request, record)
        try:
            if outcome == COMMIT:
                self._commit(record, transactions.end_mark(half))
                transactions.ended(half, COMMIT)
            else:
                transactions.roll_back(half)
                self.rolled_back[record.properties.get("REAL_TOPIC", "")] += 1
        except REFUSALS as error:
            raise refusal(error) from error

    def _prepared(self, request: RemotingCommand) -> MessageRecord:
        ext = request.ext
        offset, position = require_int(ext, "tranStateTableOffset"), require_int(ext, "commitLogOffset")
        half = self._half_messages.reappended_from(position)
        if half is not None:
            offset, position = half.queue_offset, half.physical_offset
        raw = self._store.reader.record_at(position)
        record = decode_record(raw) if raw is not None else None
        if record is None or record.topic != HALF_TOPIC:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, "Find prepared transaction message failed")
        if record.properties.get("PGROUP") != require_str(ext, "producerGroup"):
            raise BrokerError(ResponseCode.SYSTEM_ERROR, "The producer group wrong")
        if record.queue_offset != offset:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, "The transaction state table offset wrong")
        return record

    @BrokerRoute(Code.RESUME_CHECK_HALF_MESSAGE, of_cluster(UPDATE), _ROLES, Waits.YES, reads=False, hides_topics=False)
    async def resume_check(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Restart the checks of a half message from the first one (323), even if it was abandoned."""
        offset = _physical_offset(require_str(request.ext, "msgId"))
        raw = await self._tiered.record_at(offset)
        record = decode_record(raw) if raw is not None else None
        if record is None or record.topic not in (HALF_TOPIC, CHECK_MAX_TOPIC):
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"there is no half message at {offset}")
        self._intake.check_open()
        transactions = self._half_messages
        try:
            if record.topic == CHECK_MAX_TOPIC:
                transactions.put_again(record)
            elif (half := transactions.reappended_from(offset) or transactions.find(record.queue_offset)) is not None:
                transactions.start_over(half)
            else:
                raise BrokerError(ResponseCode.SYSTEM_ERROR, "the transaction has ended already")
        except REFUSALS as error:
            raise refusal(error) from error
        await self._settled()
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    def _check_time(self, request: RemotingCommand, record: MessageRecord) -> None:
        """Raise BrokerError if a producer ends a transaction after its immunity time and without a check."""
        quiet = immunity(record.properties)
        if quiet is None or optional_bool(request.ext, "fromTransactionCheck"):
            return
        if self._clock.now_ms() - record.born_timestamp > quiet:
            raise BrokerError(
                ResponseCode.ILLEGAL_OPERATION, "the time to end the transaction is over, wait for a check"
            )

    def _commit(self, record: MessageRecord, mark: NewMessage) -> None:
        """Append the message together with its end mark, because a crash in between could cause a second commit."""
        properties = record.properties
        topic = properties.get("REAL_TOPIC", "")
        self._topics.require(topic)
        topic, queue = delivery_target(properties, self._topics.read_queues)
        message = NewMessage(
            topic=topic,
            queue_id=queue,
            body=record.body,
            properties=record.properties_raw,
            flag=record.flag,
            sys_flag=record.sys_flag & ~TRANSACTION_BITS | TRANSACTION_COMMIT,
            born_timestamp=record.born_timestamp,
            born_host=parse_host(record.born_host),
            reconsume_times=record.reconsume_times,
            prepared_transaction_offset=record.physical_offset,
            beside=mark,
        )
        self._intake.commit(message, properties)
        self.committed[topic] += 1


def _physical_offset(msg_id: str) -> int:
    try:
        return parse_offset_msg_id(msg_id)[2]
    except ValueError as error:
        raise BrokerError(ResponseCode.SYSTEM_ERROR, f"{msg_id} is not an offset message id") from error
