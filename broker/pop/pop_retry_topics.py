"""Pop-retry topics: messages that were popped and not acknowledged in time are appended there."""

from collections.abc import Callable

from broker.intake.log_writer import LogWriter, found_by
from broker.intake.message import NewMessage
from broker.intake.property_text import drop_stated_origin
from broker.tables.retry_names import RetryNames
from broker.tables.topic_config_manager import TopicConfigManager
from neve.record.codec import MessageRecord, fitting_properties
from neve.record.properties import PROPERTY_FIRST_POP_TIME, PROPERTY_POP_CK, PROPERTY_TAGS, tags_code


class PopRetryTopics:
    """Creates the retry topic of a group and topic for its first redelivery, and appends messages to it."""

    def __init__(
        self,
        writer: LogWriter,
        names: RetryNames,
        topics: TopicConfigManager,
        *,
        register_soon: Callable[[], None],
        sync_soon: Callable[[], None],
        store_host: tuple[str, int],
    ) -> None:
        self._writer, self._names, self._topics = writer, names, topics
        self._register_soon, self._sync_soon, self._store_host = register_soon, sync_soon, store_host

    def of_pair(self, group: str, topic: str) -> str:
        return self._names.of_pair(group, topic)

    async def make(self, retry: str) -> None:
        """Create a retry topic if it does not exist, and save it.

        It must be durable before its first message leaves the pop book: a restart would not find the message otherwise.
        """
        topics = self._topics
        if topics.select(retry) is None or not topics.is_saved(retry):
            await topics.create_saved(retry, 1)
            self._register_soon()

    def put(self, retry: str, record: MessageRecord, pop_time: int) -> None:
        """Append a copy of a message to its retry topic. Raises StoreError."""
        properties = record.properties
        drop_stated_origin(record.topic, properties)
        properties.pop(PROPERTY_POP_CK, None)
        properties.setdefault(PROPERTY_FIRST_POP_TIME, str(pop_time))
        again = NewMessage(
            topic=retry,
            queue_id=0,
            body=record.body,
            properties=fitting_properties(record, properties),
            flag=record.flag,
            sys_flag=record.sys_flag,
            born_timestamp=record.born_timestamp,
            born_host=self._store_host,
            reconsume_times=record.next_reconsume_times,
            tags_code=tags_code(properties.get(PROPERTY_TAGS)),
            keys=found_by(properties),
        )
        self._writer.put(again)
        self._sync_soon()  # pops see the message only after the fsync
