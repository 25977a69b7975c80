"""Administration: creation, change, deletion and listing of topics."""

import asyncio
import logging

from access.permissions import CREATE, DELETE, GET, LIST, of_cluster, of_topic, of_topic_list
from broker.archiving.deletion import TopicDeletion
from broker.clients.registration import Registration
from broker.config import BrokerConfig
from broker.requests.admin_values import Settled, in_range, list_of
from broker.requests.route import MASTER_CHANGE, MEMBERS, BrokerRoute, Waits
from broker.tables.state_file import encode_table
from broker.tables.topic_config_manager import TopicConfig, TopicConfigManager
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting import names
from neve.remoting.body import convert, dumps
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import optional_bool, optional_int, require_int, require_str

log = logging.getLogger(__name__)


class AdminTopicsProcessor:
    """Creates, changes, deletes and lists topics (a part of RocketMQ's AdminBrokerProcessor)."""

    def __init__(
        self,
        config: BrokerConfig,
        topics: TopicConfigManager,
        deletion: TopicDeletion,
        registration: Registration,
        settled: Settled,
    ) -> None:
        self._config, self._topics, self._deletion, self._registration = config, topics, deletion, registration
        self._settled = settled

    @BrokerRoute(
        Code.UPDATE_AND_CREATE_TOPIC, of_topic(CREATE), MASTER_CHANGE, Waits.YES, reads=False, hides_topics=False
    )
    async def update_topic(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Create or change a topic (17); answer when it is durable and registered with the name servers.

        The cost does not depend on the number of existing topics.
        """
        ext = request.ext
        topic = require_str(ext, "topic")
        self._check_name(topic)
        known = self._topics.select(topic)
        config = TopicConfig(
            topic_name=topic,
            read_queue_nums=_queues(self._config, "readQueueNums", require_int(ext, "readQueueNums")),
            write_queue_nums=_queues(self._config, "writeQueueNums", require_int(ext, "writeQueueNums")),
            perm=in_range("perm", require_int(ext, "perm"), 0, 7),
            topic_filter_type=ext.get("topicFilterType") or "SINGLE_TAG",
            topic_sys_flag=optional_int(ext, "topicSysFlag", 0),
            order=optional_bool(ext, "order"),
            attributes={},
        )
        if config.topic_filter_type not in ("SINGLE_TAG", "MULTI_TAG"):
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"topicFilterType {config.topic_filter_type}")
        if "message.type=MIXED" in (ext.get("attributes") or ""):
            raise BrokerError(ResponseCode.INVALID_PARAMETER, "MIXED message type is not supported.")
        try:
            changes = names.parse_attributes(ext.get("attributes") or "")
            current = known.attributes if known is not None else {}
            config.attributes = names.apply_attributes(current, changes, creating=known is None)
        except ValueError as error:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        await self._apply([config])
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    @BrokerRoute(
        Code.UPDATE_AND_CREATE_TOPIC_LIST, of_topic_list, MASTER_CHANGE, Waits.YES, reads=False, hides_topics=False
    )
    async def update_topic_list(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        configs = [convert(item, TopicConfig) for item in list_of(request, "topicConfigList")]
        for config in configs:
            self._check_name(config.topic_name)
            _queues(self._config, "readQueueNums", config.read_queue_nums)
            _queues(self._config, "writeQueueNums", config.write_queue_nums)
            in_range("perm", config.perm, 0, 7)
            known = self._topics.select(config.topic_name)
            try:
                changes = {(name if name[:1] in "+-" else f"+{name}"): text for name, text in config.attributes.items()}
                current = known.attributes if known is not None else {}
                config.attributes = names.apply_attributes(current, changes, creating=known is None)
            except ValueError as error:
                raise BrokerError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        await self._apply(configs)
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    async def _apply(self, configs: list[TopicConfig]) -> None:
        topics = self._topics
        new = len({config.topic_name for config in configs} - topics.topics.keys())
        if new > topics.room and new:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"there are maxTopics={self._config.max_topics} topics")
        changed = [config.topic_name for config in configs if topics.update(config)]
        for config in configs:
            if config.topic_name in changed:
                _warn_of_attributes(config)
        await topics.keep()
        await self._settled()
        if changed:
            await self._registration.topics(changed)

    def _check_name(self, topic: str) -> None:
        fault = names.topic_fault(topic)
        if fault is None and self._topics.is_system(topic):
            fault = f"The topic[{topic}] is conflict with system topic."
        if fault is not None:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, fault)

    @BrokerRoute(
        Code.DELETE_TOPIC_IN_BROKER, of_topic(DELETE), MASTER_CHANGE, Waits.YES, reads=False, hides_topics=False
    )
    async def delete_topic(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic = require_str(request.ext, "topic")
        if not topic.strip() or self._topics.is_system(topic):
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"The topic[{topic}] can't be deleted.")
        await self._deletion.delete(topic)
        await self._settled()
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    async def all_topics(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        body = await asyncio.to_thread(encode_table, self._topics.to_wire())
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=body)

    @BrokerRoute(Code.GET_TOPIC_CONFIG, of_topic(GET), MEMBERS, Waits.NO, reads=True, hides_topics=True)
    def topic_config(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic = require_str(request.ext, "topic")
        config = self._topics.select(topic)
        if config is None:
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {topic}")
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(config.to_wire()))

    @BrokerRoute(
        Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, of_cluster(LIST), MEMBERS, Waits.NO, reads=True, hides_topics=False
    )
    def system_topics(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        own = sorted(names.SYSTEM_TOPICS | self._topics.system)
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps({"topicList": own}))


def _warn_of_attributes(config: TopicConfig) -> None:
    for name, value in names.WITHOUT_EFFECT.items():
        if config.attributes.get(name) == value:
            log.warning(
                "topic attribute without effect: topic=%s %s=%s, the topic is an ordinary one",
                config.topic_name,
                name,
                value,
            )


def _queues(config: BrokerConfig, name: str, number: int) -> int:
    """Check a number of queues: tables, statistics and offsets have a row for each queue, even an empty one."""
    return in_range(name, number, 0, config.max_queues_per_topic)
