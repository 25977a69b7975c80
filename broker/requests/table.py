"""All request codes of a broker, collected from the rows above their handlers."""

from collections.abc import Awaitable, Collection, Mapping, Sequence

from access.admin import ROUTES as USER_ROUTES
from access.route import register_handlers, routes_of
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
from broker.requests.route import ANY_ROLE, MASTER_CHANGE, BrokerRoute, Waits
from broker.requests.runtime_info import RuntimeInfoProcessor
from broker.requests.send_back import SendBackProcessor
from broker.requests.send_message import SendMessageProcessor
from broker.requests.slave_polls import SlavePollsProcessor
from infra.net.remoting_server import Answer, Connection, Handler
from infra.net.request_router import RequestRouter
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.names import is_hidden

PROCESSORS: Sequence[type] = (
    SendMessageProcessor,
    SendBackProcessor,
    PullMessageProcessor,
    ClientManageProcessor,
    ConsumerManageProcessor,
    QueueRangeProcessor,
    LockBatchProcessor,
    PopMessageProcessor,
    PeekMessageProcessor,
    PopAckProcessor,
    QueryAssignmentProcessor,
    QueryMessageProcessor,
    EndTransactionProcessor,
    RecallMessageProcessor,
    ReplyMessageProcessor,
    AdminTopicsProcessor,
    AdminGroupsProcessor,
    AdminConfigProcessor,
    AdminStatsProcessor,
    AdminConnectionsProcessor,
    RuntimeInfoProcessor,
    AdminOffsetsProcessor,
    ResetOffsetProcessor,
    AdminRelayProcessor,
    AdminInspectProcessor,
    SlavePollsProcessor,
    BrokerSetProcessor,
)


def _user_routes() -> dict[int, BrokerRoute]:
    """Return the rows of users and policies: a change is logged and replicated like that of a topic."""
    return {
        code: BrokerRoute(
            route.code,
            route.permission,
            ANY_ROLE if route.reads else MASTER_CHANGE,
            Waits.NO if route.reads else Waits.YES,
            reads=route.reads,
            hides_topics=False,
        )
        for code, route in USER_ROUTES.items()
    }


ROUTES: Mapping[int, BrokerRoute] = routes_of(BrokerRoute, PROCESSORS) | _user_routes()


def register_all(router: RequestRouter, processors: Collection[object]) -> None:
    """Register all handlers; those that read a topic refuse hidden topics. Raise ValueError if a processor lacks."""
    if {type(processor) for processor in processors} != set(PROCESSORS):
        raise ValueError(f"expected one processor of each type in {[one.__name__ for one in PROCESSORS]}")
    for processor in processors:
        register_handlers(router, processor)
    router.wrap((code for code, route in ROUTES.items() if route.hides_topics), _refusing_hidden_topics)


def _refusing_hidden_topics(handler: Handler) -> Handler:
    """Answer as if a hidden topic did not exist. `TieredStore.record_at` refuses reads by physical offset."""

    def serve(connection: Connection, request: RemotingCommand) -> Answer | Awaitable[Answer]:
        topic = request.ext.get("topic", "")
        if is_hidden(topic):
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please!")
        return handler(connection, request)

    return serve
