"""Transaction check-back: asks producers for the outcome of half messages, and abandons those without an answer."""

import asyncio
import logging
from collections.abc import Callable

from access.guard import Guard
from broker.clients.client_manager import ClientManager
from broker.config import BrokerConfig
from broker.intake.log_writer import LogWriter
from broker.life import BrokerLife
from broker.store.errors import MessageIllegal, StoreFull, StoreNotWritable
from broker.store.layout import STANDS_STILL_MS
from broker.store.message_store import MessageStore
from broker.tables.topic_config_manager import TopicConfigManager
from broker.waiting.delivery import Quarantine
from broker.waiting.half_messages import ROLLBACK, TRANSACTION_BITS, Half, HalfMessages
from infra.clock import Clock
from infra.loop.supervisor import Faults
from neve.record.codec import MessageRecord, decode_record, reencode_record
from neve.record.ids import offset_msg_id
from neve.remoting.codes import RequestCode
from neve.remoting.command import RemotingCommand
from neve.remoting.names import CHECK_MAX_TOPIC, HALF_TOPIC

log = logging.getLogger(__name__)

# Half messages checked in one turn of the event loop.
_SLICE = 64
_HOUR_MS = 3_600_000


class ProducerQuestions:
    """Questions to producers about the outcome of their half messages."""

    def __init__(self, clients: ClientManager, guard: Guard, *, broker_name: str, address: tuple[str, int]) -> None:
        self._clients, self._guard, self._broker_name, self._address = clients, guard, broker_name, address

    def ask(self, half: Half, record: MessageRecord) -> None:
        """Ask a producer of the message's group, if one is connected."""
        properties = record.properties
        # Any client can register as a producer of the group, but only one that may publish gets the message.
        channel = self._clients.next_producer(
            properties.get("PGROUP", ""),
            lambda producer: self._guard.may_use_topic(
                producer.connection, producer.user, properties.get("REAL_TOPIC", ""), "Pub"
            ),
        )
        if channel is None:
            log.warning("no producer of the group %s to ask about a transaction", properties.get("PGROUP"))
        else:
            channel.connection.send_oneway(self._question(half, record, properties))

    def _question(self, half: Half, record: MessageRecord, properties: dict[str, str]) -> RemotingCommand:
        unique = properties.get("UNIQ_KEY", "")
        properties["TRANSACTION_CHECK_TIMES"] = str(half.checks + 1)
        body = reencode_record(
            record,
            topic=properties.get("REAL_TOPIC", ""),
            properties=properties,
            queue_id=int(properties.get("REAL_QID", "0")),
        )
        ext = {
            "topic": HALF_TOPIC,
            "tranStateTableOffset": str(half.queue_offset),
            "commitLogOffset": str(half.physical_offset),
            "msgId": unique,
            "transactionId": unique,
            "offsetMsgId": offset_msg_id(self._address, half.physical_offset),
            "bname": self._broker_name,
        }
        return RemotingCommand(RequestCode.CHECK_TRANSACTION_STATE, ext=ext, body=body)


class CheckBack:
    """Asks producers about unresolved half messages (RocketMQ's TransactionalMessageCheckService).

    After `transactionCheckMax` checks, or fileReservedTime hours, a half message is moved to
    TRANS_CHECK_MAX_TIME_TOPIC. `trusted_ms` returns the time for that decision. It errs towards the past, so that none
    is abandoned too early.
    """

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        life: BrokerLife,
        faults: Faults,
        trusted_ms: Callable[[], int],
        *,
        transactions: HalfMessages,
        store: MessageStore,
        writer: LogWriter,
        producers: ProducerQuestions,
        topics: TopicConfigManager,
        register_soon: Callable[[], None],
    ) -> None:
        self._config, self._clock, self._life, self._faults = config, clock, life, faults
        self._trusted_ms, self._producers = trusted_ms, producers
        self._transactions, self._store, self._writer = transactions, store, writer
        self._topics, self._register_soon = topics, register_soon
        self._quarantine = Quarantine(store, HALF_TOPIC, faults)

    async def run(self) -> None:
        """Check all due half messages, each at most once. A slave does nothing."""
        if not self._life.accepting or self._store.end.is_following:
            return
        self._transactions.write_marks()
        asked: list[Half] = []
        for number, half in enumerate(self._transactions.waiting(), 1):
            # It may have ended while this coroutine yielded.
            if self._transactions.find(half.queue_offset) is half and self._is_due(half) and self._try(half):
                asked.append(half)
            if number % _SLICE == 0:
                self._transactions.asked(asked)
                asked = []
                await asyncio.sleep(0)
        self._transactions.asked(asked)

    def _is_due(self, half: Half) -> bool:
        wish = half.immunity_ms
        quiet = self._config.transaction_time_out if wish is None else wish
        age = self._age_ms(half)
        # A store time in the future was set while the clock was ahead, so the message is checked early rather than
        # late.
        return age >= quiet or age < -STANDS_STILL_MS or self._is_too_old(half)

    def _age_ms(self, half: Half) -> int:
        return self._clock.now_ms() - half.store_ms

    def _is_too_old(self, half: Half) -> bool:
        """Return whether a half message is too old to wait (RocketMQ's needSkip).

        A producer's immunity time does not matter here, because the message would pin its log segment for ever.
        """
        age = self._trusted_ms() - half.store_ms
        return age > self._config.file_reserved_time * _HOUR_MS

    def _try(self, half: Half) -> bool:
        """Check one half message; return whether that counts as a question to its producer.

        A failure counts, so the message leaves the queue after `transactionCheckMax` rounds. If its record is damaged,
        it is quarantined.
        """
        try:
            return self._check(half)
        except OSError as error:  # a disk error does not count as a check
            self._faults.add("a half message", error, f"at {half.physical_offset}")
            return False
        except Exception as error:  # noqa: BLE001 - any content of one message must not stop the others
            if not self._quarantine.failed("a half message", 0, half.queue_offset, error):
                return True
            self._transactions.end(half, ROLLBACK)
            return False

    def _check(self, half: Half) -> bool:
        """Check one half message; return whether that counts.

        As in RocketMQ, a check without a connected producer counts as well.
        """
        store = self._store
        raw = store.reader.record_at(half.physical_offset)
        if raw is None:
            if half.physical_offset < store.min_physical_offset:
                log.error("the half message at %d is no longer in the log: skipped", half.physical_offset)
                self._transactions.end(half, ROLLBACK)
            return False
        record = decode_record(raw)
        if half.checks >= self._config.transaction_check_max or self._is_too_old(half):
            self._give_up(half, record)
            return False
        self._producers.ask(half, record)
        return True

    def _give_up(self, half: Half, record: MessageRecord) -> None:
        """Move a half message to TRANS_CHECK_MAX_TIME_TOPIC, where an operator finds it."""
        properties = record.properties
        self._topics.create_now(CHECK_MAX_TOPIC, 1)
        try:
            sys_flag = record.sys_flag & ~TRANSACTION_BITS
            mark = self._transactions.end_mark(half)
            self._writer.put_copy(
                record,
                CHECK_MAX_TOPIC,
                0,
                properties=properties,
                sys_flag=sys_flag,
                beside=mark,
                internal=True,
            )
        except (StoreFull, StoreNotWritable, MessageIllegal) as error:
            log.warning("transaction %s can't be abandoned now: %s", properties.get("UNIQ_KEY"), error)
            return
        log.warning("transaction %s abandoned after %d checks", properties.get("UNIQ_KEY"), half.checks)
        self._transactions.ended(half, ROLLBACK)
        self._register_soon()
