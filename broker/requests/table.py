"""Table of request codes and their handlers."""

from collections.abc import Awaitable
from dataclasses import dataclass

from broker.intake.express_lane import ExpressSend
from broker.requests.admin_config import AdminConfigProcessor
from broker.requests.admin_connections import AdminConnectionsProcessor
from broker.requests.admin_groups import AdminGroupsProcessor
from broker.requests.admin_inspect import AdminInspectProcessor
from broker.requests.admin_offsets import AdminOffsetsProcessor
from broker.requests.admin_relay import AdminRelayProcessor
from broker.requests.admin_stats import AdminStatsProcessor
from broker.requests.admin_topics import AdminTopicsProcessor
from broker.requests.broker_set import BrokerSetProcessor
from broker.requests.client_manage import ClientManageProcessor
from broker.requests.consumer_manage import ConsumerManageProcessor
from broker.requests.end_transaction import EndTransactionProcessor
from broker.requests.lock_batch import LockBatchProcessor
from broker.requests.peek_message import PeekMessageProcessor
from broker.requests.pop_ack import PopAckProcessor
from broker.requests.pop_message import PopMessageProcessor
from broker.requests.pull_message import PullMessageProcessor
from broker.requests.query_assignment import QueryAssignmentProcessor
from broker.requests.query_message import QueryMessageProcessor
from broker.requests.queue_range import QueueRangeProcessor
from broker.requests.recall_message import RecallMessageProcessor
from broker.requests.reply_message import ReplyMessageProcessor
from broker.requests.reset_offset import ResetOffsetProcessor
from broker.requests.runtime_info import RuntimeInfoProcessor
from broker.requests.send_back import SendBackProcessor
from broker.requests.send_message import SendMessageProcessor
from broker.requests.slave_polls import SlavePollsProcessor
from infra.net.remoting_server import Answer, Connection, Handler
from infra.net.request_router import RequestRouter
from neve.errors import BrokerError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.names import is_hidden

# Long-running reads, which are cancelled when their client disconnects.
_READS = frozenset({
    Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE, Code.PEEK_MESSAGE, Code.QUERY_MESSAGE, Code.VIEW_MESSAGE_BY_ID,
    Code.SEARCH_OFFSET_BY_TIMESTAMP, Code.GET_EARLIEST_MSG_STORETIME, Code.QUERY_ASSIGNMENT, Code.GET_CONSUME_STATS,
    Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, Code.GET_CONSUMER_RUNNING_INFO, Code.CONSUME_MESSAGE_DIRECTLY,
    Code.QUERY_CONSUME_TIME_SPAN, Code.QUERY_CONSUME_QUEUE,
})  # fmt: skip

# Requests that read the topic in their field `topic`.
_READS_A_TOPIC = frozenset({
    Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE, Code.POP_MESSAGE, Code.PEEK_MESSAGE, Code.NOTIFICATION,
    Code.QUERY_MESSAGE, Code.QUERY_CONSUME_QUEUE, Code.GET_MAX_OFFSET, Code.GET_MIN_OFFSET,
    Code.SEARCH_OFFSET_BY_TIMESTAMP, Code.GET_EARLIEST_MSG_STORETIME, Code.GET_TOPIC_CONFIG, Code.GET_TOPIC_STATS_INFO,
    Code.QUERY_CONSUME_TIME_SPAN, Code.CONSUME_MESSAGE_DIRECTLY,
})  # fmt: skip


def _refusing_hidden_topics(handler: Handler) -> Handler:
    """Answer as if a hidden topic did not exist. `TieredStore.record_at` refuses reads by physical offset."""

    def serve(connection: Connection, request: RemotingCommand) -> Answer | Awaitable[Answer]:
        topic = request.ext.get("topic", "")
        if is_hidden(topic):
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please!")
        return handler(connection, request)

    return serve


@dataclass(frozen=True, kw_only=True)
class Processors:
    """All request processors of a broker."""

    sender: SendMessageProcessor
    send_back: SendBackProcessor
    express: ExpressSend
    puller: PullMessageProcessor
    clients: ClientManageProcessor
    consumers: ConsumerManageProcessor
    ranges: QueueRangeProcessor
    locks: LockBatchProcessor
    popper: PopMessageProcessor
    peeker: PeekMessageProcessor
    pop_acks: PopAckProcessor
    assignment: QueryAssignmentProcessor
    query: QueryMessageProcessor
    transactions: EndTransactionProcessor
    recall: RecallMessageProcessor
    replies: ReplyMessageProcessor
    topics: AdminTopicsProcessor
    groups: AdminGroupsProcessor
    config: AdminConfigProcessor
    stats: AdminStatsProcessor
    connections: AdminConnectionsProcessor
    runtime: RuntimeInfoProcessor
    offsets: AdminOffsetsProcessor
    reset: ResetOffsetProcessor
    relay: AdminRelayProcessor
    inspect: AdminInspectProcessor
    polls: SlavePollsProcessor
    broker_set: BrokerSetProcessor

    def register_on(self, router: RequestRouter) -> None:
        """Register all handlers; those that read a topic refuse hidden topics."""
        router.express = self.express.serve
        for table in (self._messaging(), self._popping(), self._administration(), self._inspection()):
            for code, handler in table.items():
                router.register(code, handler, reads=code in _READS)
        router.wrap(_READS_A_TOPIC, _refusing_hidden_topics)

    def _messaging(self) -> dict[Code, Handler]:
        consumers, ranges, locks, clients = self.consumers, self.ranges, self.locks, self.clients
        return {
            Code.SEND_MESSAGE: self.sender.send,
            Code.SEND_MESSAGE_V2: self.sender.send,
            Code.SEND_BATCH_MESSAGE: self.sender.send,
            Code.CONSUMER_SEND_MSG_BACK: self.send_back.send_back,
            Code.END_TRANSACTION: self.transactions.end,
            Code.RESUME_CHECK_HALF_MESSAGE: self.transactions.resume_check,
            Code.RECALL_MESSAGE: self.recall.recall,
            Code.SEND_REPLY_MESSAGE: self.replies.reply,
            Code.SEND_REPLY_MESSAGE_V2: self.replies.reply,
            Code.PULL_MESSAGE: self.puller.pull,
            Code.LITE_PULL_MESSAGE: self.puller.pull,
            Code.QUERY_MESSAGE: self.query.query,
            Code.VIEW_MESSAGE_BY_ID: self.query.view,
            Code.QUERY_CONSUMER_OFFSET: consumers.query_offset,
            Code.UPDATE_CONSUMER_OFFSET: consumers.update_offset,
            Code.GET_MAX_OFFSET: ranges.max_offset,
            Code.GET_MIN_OFFSET: ranges.min_offset,
            Code.SEARCH_OFFSET_BY_TIMESTAMP: ranges.search_offset,
            Code.GET_EARLIEST_MSG_STORETIME: ranges.earliest_store_time,
            Code.GET_CONSUMER_LIST_BY_GROUP: consumers.consumer_list,
            Code.LOCK_BATCH_MQ: locks.lock_batch,
            Code.UNLOCK_BATCH_MQ: locks.unlock_batch,
            Code.HEART_BEAT: clients.heartbeat,
            Code.UNREGISTER_CLIENT: clients.unregister,
            Code.CHECK_CLIENT_CONFIG: clients.check_client,
        }

    def _popping(self) -> dict[Code, Handler]:
        popper, peeker, acks, assignment = self.popper, self.peeker, self.pop_acks, self.assignment
        return {
            Code.QUERY_ASSIGNMENT: assignment.query,
            Code.SET_MESSAGE_REQUEST_MODE: assignment.set_mode,
            Code.GET_ALL_MESSAGE_REQUEST_MODE: assignment.all_modes,
            Code.POP_MESSAGE: popper.pop,
            Code.PEEK_MESSAGE: peeker.peek,
            Code.NOTIFICATION: peeker.notification,
            Code.POLLING_INFO: peeker.polling_info,
            Code.ACK_MESSAGE: acks.ack,
            Code.BATCH_ACK_MESSAGE: acks.batch_ack,
            Code.CHANGE_MESSAGE_INVISIBLETIME: acks.change_invisible,
            Code.POP_ROLLBACK: self.config.nothing_to_do,  # pop state is always in the log
        }

    def _administration(self) -> dict[Code, Handler]:
        topics, groups, config = self.topics, self.groups, self.config
        stats, connections = self.stats, self.connections
        return {
            Code.UPDATE_AND_CREATE_TOPIC: topics.update_topic,
            Code.UPDATE_AND_CREATE_TOPIC_LIST: topics.update_topic_list,
            Code.DELETE_TOPIC_IN_BROKER: topics.delete_topic,
            Code.GET_ALL_TOPIC_CONFIG: self.polls.all_topics,
            Code.GET_TOPIC_CONFIG: topics.topic_config,
            Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: topics.system_topics,
            Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: groups.update_group,
            Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: groups.update_group_list,
            Code.DELETE_SUBSCRIPTIONGROUP: groups.delete_group,
            Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: groups.all_groups,
            Code.GET_SUBSCRIPTIONGROUP_CONFIG: groups.group_config,
            Code.GET_BROKER_CONFIG: config.broker_config,
            Code.UPDATE_BROKER_CONFIG: config.update_config,
            Code.CLEAN_EXPIRED_CONSUMEQUEUE: config.nothing_to_do,
            Code.CLEAN_UNUSED_TOPIC: config.nothing_to_do,
            Code.DELETE_EXPIRED_COMMITLOG: config.nothing_to_do,
            Code.GET_TOPIC_STATS_INFO: stats.topic_stats,
            Code.GET_CONSUME_STATS: stats.consume_stats,
            Code.GET_CONSUMER_CONNECTION_LIST: connections.consumer_connections,
            Code.GET_PRODUCER_CONNECTION_LIST: connections.producer_connections,
            Code.QUERY_TOPIC_CONSUME_BY_WHO: connections.groups_of_topic,
            Code.QUERY_TOPICS_BY_CONSUMER: connections.topics_of_group,
            Code.QUERY_SUBSCRIPTION_BY_CONSUMER: connections.subscription,
            Code.GET_BROKER_RUNTIME_INFO: self.runtime.runtime_info,
        }

    def _inspection(self) -> dict[Code, Handler]:
        offsets, relay, inspect = self.offsets, self.relay, self.inspect
        return {
            Code.INVOKE_BROKER_TO_RESET_OFFSET: self.reset.reset_offset,
            Code.GET_ALL_CONSUMER_OFFSET: self.polls.all_offsets,
            Code.GET_ALL_DELAY_OFFSET: offsets.delay_offsets,
            Code.CLONE_GROUP_OFFSET: offsets.clone_offset,
            Code.QUERY_CORRECTION_OFFSET: offsets.correction_offset,
            Code.QUERY_CONSUME_TIME_SPAN: offsets.time_span,
            Code.UPDATE_AND_GET_GROUP_FORBIDDEN: self.groups.group_forbidden,
            Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: relay.consumer_status,
            Code.GET_CONSUMER_RUNNING_INFO: relay.running_info,
            Code.CONSUME_MESSAGE_DIRECTLY: relay.consume_directly,
            Code.VIEW_BROKER_STATS_DATA: inspect.stats_data,
            Code.GET_BROKER_CONSUME_STATS: self.stats.all_consume_stats,
            Code.QUERY_CONSUME_QUEUE: inspect.queue_entries,
            Code.GET_ALL_PRODUCER_INFO: self.connections.all_producers,
            Code.EXCHANGE_BROKER_HA_INFO: self.broker_set.exchange_ha_info,
            Code.GET_BROKER_HA_STATUS: self.broker_set.ha_status,
            Code.GET_BROKER_EPOCH_CACHE: self.broker_set.epoch_cache,
            Code.CONTROLLER_ELECT_MASTER: self.broker_set.elect_master,
            Code.NOTIFY_BROKER_ROLE_CHANGED: self.broker_set.role_changed,
        }
