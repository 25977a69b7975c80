"""Administration: topics, groups and the broker's configuration."""

import asyncio
from typing import Any

from broker.archiving.deletion import TopicDeletion
from broker.broker_context import BrokerContext
from broker.tables.state_file import encode_table
from broker.tables.subscription_group_manager import SubscriptionGroupConfig
from broker.tables.topic_config_manager import TopicConfig
from infra.config import ConfigError, live_keys, parse_properties, to_properties, update_live
from infra.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting import names
from neve.remoting.body import convert, dumps, dumps_standard, lenient_loads
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import optional_bool, optional_int, require_int, require_str

# What a group may bring beside its name: fields that are only kept.
_MAX_GROUP_BYTES = 16 * 1024


class AdminProcessor:
    """Changes and lists of topics, groups and the broker's configuration (RocketMQ's AdminBrokerProcessor, a part of
    it).

    A change is answered when it is on the disk.
    """

    def __init__(self, context: BrokerContext, topic_deletion: TopicDeletion) -> None:
        self._context = context
        self._topic_deletion = topic_deletion

    # ---- topics ----------------------------------------------------------------------------------------------

    async def update_topic(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """17. Answered when the change is on disk and the name servers were told."""
        ext, context = request.ext, self._context
        topic = require_str(ext, "topic")
        self._check_name(topic)
        known = context.topics.select(topic)
        config = TopicConfig(
            topic_name=topic,
            read_queue_nums=self._queues("readQueueNums", require_int(ext, "readQueueNums")),
            write_queue_nums=self._queues("writeQueueNums", require_int(ext, "writeQueueNums")),
            perm=_in_range("perm", require_int(ext, "perm"), 0, 7),
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

    async def update_topic_list(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        configs = [convert(item, TopicConfig) for item in _list_of(request, "topicConfigList")]
        for config in configs:
            self._check_name(config.topic_name)
            self._queues("readQueueNums", config.read_queue_nums)
            self._queues("writeQueueNums", config.write_queue_nums)
            _in_range("perm", config.perm, 0, 7)
            known = self._context.topics.select(config.topic_name)
            try:
                changes = {(name if name[:1] in "+-" else f"+{name}"): text for name, text in config.attributes.items()}
                current = known.attributes if known is not None else {}
                config.attributes = names.apply_attributes(current, changes, creating=known is None)
            except ValueError as error:
                raise BrokerError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        await self._apply(configs)
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    async def _apply(self, configs: list[TopicConfig]) -> None:
        topics = self._context.topics
        new = len({config.topic_name for config in configs} - topics.topics.keys())
        if new > topics.room and new:
            raise BrokerError(
                ResponseCode.INVALID_PARAMETER, f"there are maxTopics={self._context.config.max_topics} topics"
            )
        changed = [topics.update(config) for config in configs]
        await topics.file.save()
        if any(changed):
            await self._context.registration.now()

    def _queues(self, name: str, number: int) -> int:
        """Tables, statistics and positions have a row for each queue, whether anything is in it or not."""
        return _in_range(name, number, 0, self._context.config.max_queues_per_topic)

    def _check_name(self, topic: str) -> None:
        fault = names.topic_fault(topic)
        if fault is None and self._context.topics.is_system(topic):
            fault = f"The topic[{topic}] is conflict with system topic."
        if fault is not None:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, fault)

    async def delete_topic(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic = require_str(request.ext, "topic")
        if not topic.strip() or self._context.topics.is_system(topic):
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"The topic[{topic}] can't be deleted.")
        await self._topic_deletion.delete(topic)
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    async def all_topics(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        body = await asyncio.to_thread(encode_table, self._context.topics.to_wire())
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=body)

    def topic_config(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        topic = require_str(request.ext, "topic")
        config = self._context.topics.select(topic)
        if config is None:
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {topic}")
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(config.to_wire()))

    def system_topics(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        own = sorted(names.SYSTEM_TOPICS | self._context.topics.system)
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps({"topicList": own}))

    # ---- groups ----------------------------------------------------------------------------------------------

    async def update_group(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        config = convert(lenient_loads(request.body), SubscriptionGroupConfig)
        await self._apply_groups([config])
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    async def update_group_list(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        items = _list_of(request, "groupConfigList")
        await self._apply_groups([convert(item, SubscriptionGroupConfig) for item in items])
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    async def _apply_groups(self, configs: list[SubscriptionGroupConfig]) -> None:
        groups = self._context.groups
        for config in configs:
            fault = names.group_fault(config.group_name)
            if fault is None and len(dumps(config)) > _MAX_GROUP_BYTES:
                fault = f"the settings of the group {config.group_name} are longer than {_MAX_GROUP_BYTES} bytes"
            if fault is not None:
                raise BrokerError(ResponseCode.INVALID_PARAMETER, fault)
            self._queues("retryQueueNums", config.retry_queue_nums)
        new = len({config.group_name for config in configs} - groups.groups.keys())
        if new > groups.room and new:
            limit = self._context.config.max_groups
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"there are maxGroups={limit} groups")
        for config in configs:
            groups.update(config)
        await groups.file.save()

    async def delete_group(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group = require_str(request.ext, "groupName")
        self._context.groups.delete(group)
        self._context.pops.drop(group=group)
        await self._context.groups.file.save()
        if optional_bool(request.ext, "cleanOffset"):
            self._context.offsets.delete_group(group)
            await self._context.offsets.file.save()
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    def all_groups(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(self._context.groups.to_wire()))

    def group_config(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        config = self._context.find_group(require_str(request.ext, "group"))
        return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(config.to_wire()))

    # ---- configuration ---------------------------------------------------------------------------------------

    def broker_config(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        version = dumps_standard(self._context.topics.data_version.to_wire()).decode()
        body = to_properties(self._context.config).encode()
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext={"version": version}, body=body)

    def update_config(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """25: only keys that are meant for it; everything else would need a restart or open a hole."""
        try:
            text = bytes(request.body).decode()
            changes = {name: value for _, name, value in parse_properties(text, "request")}
        except (UnicodeDecodeError, ConfigError) as error:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"properties text expected: {error}") from error
        refused = sorted(set(changes) - set(live_keys(self._context.config)))
        if refused:
            raise BrokerError(ResponseCode.NO_PERMISSION, f"Can not update config in black list: {', '.join(refused)}")
        try:
            update_live(self._context.config, changes)
        except ConfigError as error:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        return RemotingCommand.response(request, ResponseCode.SUCCESS)

    @staticmethod
    def nothing_to_do(connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """306, 316, 329: what they ask for happens by itself."""
        return RemotingCommand.response(request, ResponseCode.SUCCESS)


def _list_of(request: RemotingCommand, name: str) -> list[Any]:
    value = lenient_loads(request.body)
    items = (value.get(name) or []) if isinstance(value, dict) else None
    if not isinstance(items, list):
        raise BrokerError(ResponseCode.INVALID_PARAMETER, f"the body has no {name}")
    return items


def _in_range(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise BrokerError(ResponseCode.INVALID_PARAMETER, f"{name}={value}: allowed are {low} to {high}")
    return value
