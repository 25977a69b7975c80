"""Roles that serve each request code, and the answers of other roles, as one table.

A slave of RocketMQ 5.3 also serves requests that its master does not learn of, like queue locks and committed offsets.
A neve slave refuses these, because conflicting promises of two members would break both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from broker.long_polling.message_arriving import MessageArriving
from broker.role import BrokerRole, Role
from infra.net.remoting_server import Answer, Connection, Handler
from infra.net.request_router import RequestRouter
from neve.errors import BrokerError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand


class Who(Enum):
    """Roles that serve a request."""

    MASTER = frozenset({Role.MASTER})
    #: Queue bounds and group progress. Clients reset offsets by them, and a member without all confirmed records
    #: would return too low ones.
    IN_SYNC = frozenset({Role.MASTER, Role.SLAVE_IN_SYNC})
    #: Slaves as well: their visible messages are confirmed and can't disappear.
    MEMBER = frozenset({Role.MASTER, Role.SLAVE_IN_SYNC, Role.SLAVE})
    ANYBODY = frozenset(Role)


class Refusal(NamedTuple):
    """Answer of a role that does not serve a request."""

    code: ResponseCode
    remark: str


FENCED = Refusal(ResponseCode.SERVICE_NOT_AVAILABLE, "service not available now: this broker has no role in its set")
# Producers and consumers retry with another broker, or later with this one.
SLAVE = Refusal(ResponseCode.SYSTEM_BUSY, "[REJECTREQUEST]system busy, start flow control for a while: a slave")
NOT_IN_SYNC = Refusal(
    ResponseCode.SYSTEM_BUSY, "[REJECTREQUEST]system busy, start flow control for a while: a slave that is not in sync"
)
_NO_TRANSACTION = Refusal(ResponseCode.SLAVE_NOT_AVAILABLE, "a slave ends no transaction")
_NO_RECALL = Refusal(ResponseCode.SLAVE_NOT_AVAILABLE, "recall failed, broker service not available")
_NO_RESET = Refusal(ResponseCode.SYSTEM_ERROR, "Can not reset offset in slave broker")
_NO_CHANGE = Refusal(
    ResponseCode.SYSTEM_ERROR,
    "Can't modify topic or subscription group from slave broker, please execute it from master broker.",
)


def _all(codes: Iterable[Code], who: Who, refusal: Refusal = SLAVE) -> dict[int, tuple[Who, Refusal]]:
    return {code.value: (who, refusal) for code in codes}


#: For each code, the roles that serve it and the answer of a slave that does not.
RULES: Mapping[int, tuple[Who, Refusal]] = {
    # Requests that append messages or make promises.
    **_all(
        (
            Code.SEND_MESSAGE,
            Code.SEND_MESSAGE_V2,
            Code.SEND_BATCH_MESSAGE,
            Code.CONSUMER_SEND_MSG_BACK,
            Code.SEND_REPLY_MESSAGE,
            Code.SEND_REPLY_MESSAGE_V2,
            Code.POP_MESSAGE,
            Code.PEEK_MESSAGE,
            Code.NOTIFICATION,
            Code.ACK_MESSAGE,
            Code.BATCH_ACK_MESSAGE,
            Code.CHANGE_MESSAGE_INVISIBLETIME,
            Code.UPDATE_CONSUMER_OFFSET,
            Code.LOCK_BATCH_MQ,
            Code.UNLOCK_BATCH_MQ,
        ),
        Who.MASTER,
    ),
    **_all((Code.END_TRANSACTION, Code.RESUME_CHECK_HALF_MESSAGE), Who.MASTER, _NO_TRANSACTION),
    **_all((Code.RECALL_MESSAGE,), Who.MASTER, _NO_RECALL),
    **_all((Code.INVOKE_BROKER_TO_RESET_OFFSET,), Who.MASTER, _NO_RESET),
    # Changes of tables, which are logged first.
    **_all(
        (
            Code.UPDATE_AND_CREATE_TOPIC,
            Code.UPDATE_AND_CREATE_TOPIC_LIST,
            Code.DELETE_TOPIC_IN_BROKER,
            Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
            Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
            Code.DELETE_SUBSCRIPTIONGROUP,
            Code.UPDATE_AND_GET_GROUP_FORBIDDEN,
            Code.SET_MESSAGE_REQUEST_MODE,
            Code.CLONE_GROUP_OFFSET,
            Code.AUTH_CREATE_USER,
            Code.AUTH_UPDATE_USER,
            Code.AUTH_DELETE_USER,
            Code.AUTH_CREATE_ACL,
            Code.AUTH_UPDATE_ACL,
            Code.AUTH_DELETE_ACL,
        ),
        Who.MASTER,
        _NO_CHANGE,
    ),
    # Bounds of queues and progress of groups.
    **_all(
        (
            Code.GET_MAX_OFFSET,
            Code.GET_MIN_OFFSET,
            Code.SEARCH_OFFSET_BY_TIMESTAMP,
            Code.GET_EARLIEST_MSG_STORETIME,
            Code.QUERY_CONSUMER_OFFSET,
            Code.QUERY_CORRECTION_OFFSET,
            Code.QUERY_CONSUME_TIME_SPAN,
            Code.GET_TOPIC_STATS_INFO,
            Code.GET_CONSUME_STATS,
            Code.GET_BROKER_CONSUME_STATS,
        ),
        Who.IN_SYNC,
        NOT_IN_SYNC,
    ),
    # Messages, tables, and clients by group. A slave serves pulls only with `slaveReadEnable`.
    **_all(
        (
            Code.PULL_MESSAGE,
            Code.LITE_PULL_MESSAGE,
            Code.QUERY_MESSAGE,
            Code.VIEW_MESSAGE_BY_ID,
            Code.QUERY_CONSUME_QUEUE,
            Code.CONSUME_MESSAGE_DIRECTLY,
            Code.GET_ALL_TOPIC_CONFIG,
            Code.GET_TOPIC_CONFIG,
            Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
            Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
            Code.GET_SUBSCRIPTIONGROUP_CONFIG,
            Code.GET_ALL_CONSUMER_OFFSET,
            Code.GET_ALL_DELAY_OFFSET,
            Code.GET_ALL_MESSAGE_REQUEST_MODE,
            Code.QUERY_ASSIGNMENT,
            Code.POLLING_INFO,
            Code.GET_CONSUMER_LIST_BY_GROUP,
            Code.QUERY_TOPIC_CONSUME_BY_WHO,
            Code.QUERY_TOPICS_BY_CONSUMER,
            Code.QUERY_SUBSCRIPTION_BY_CONSUMER,
            Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS,
        ),
        Who.MEMBER,
    ),
    # Requests about the broker itself and its connections.
    **_all(
        (
            Code.HEART_BEAT,
            Code.UNREGISTER_CLIENT,
            Code.CHECK_CLIENT_CONFIG,
            Code.GET_CONSUMER_CONNECTION_LIST,
            Code.GET_PRODUCER_CONNECTION_LIST,
            Code.GET_ALL_PRODUCER_INFO,
            Code.GET_CONSUMER_RUNNING_INFO,
            Code.GET_BROKER_CONFIG,
            Code.UPDATE_BROKER_CONFIG,
            Code.GET_BROKER_RUNTIME_INFO,
            Code.VIEW_BROKER_STATS_DATA,
            Code.EXCHANGE_BROKER_HA_INFO,
            Code.GET_BROKER_HA_STATUS,
            Code.CONTROLLER_ELECT_MASTER,
            Code.NOTIFY_BROKER_ROLE_CHANGED,
            Code.GET_BROKER_EPOCH_CACHE,
            Code.CLEAN_EXPIRED_CONSUMEQUEUE,
            Code.CLEAN_UNUSED_TOPIC,
            Code.DELETE_EXPIRED_COMMITLOG,
            Code.POP_ROLLBACK,
            Code.AUTH_GET_USER,
            Code.AUTH_LIST_USER,
            Code.AUTH_GET_ACL,
            Code.AUTH_LIST_ACL,
        ),
        Who.ANYBODY,
    ),
}


def refusal(code: int, role: Role) -> Refusal | None:
    """Return the refusal of a request code in a role, None if it is served."""
    who, of_a_slave = RULES[code]
    if role in who.value:
        return None
    return FENCED if role is Role.FENCED else of_a_slave


def _refusing(refused: Refusal) -> Handler:
    def refuse(connection: Connection, request: RemotingCommand) -> Answer:
        raise BrokerError(*refused)

    return refuse


class RoleGate:
    """Replaces the handlers of request codes that the current role does not serve, behind authentication.

    Requests of served codes cost nothing extra. Requests that wait for messages are checked again after a role change.
    """

    def __init__(self, role: BrokerRole, router: RequestRouter, arriving: MessageArriving) -> None:
        self._role, self._router, self._arriving = role, router, arriving
        role.tell(self._changed)
        self._changed()

    def _changed(self) -> None:
        found = ((code, refusal(code, self._role.current)) for code in self._router.codes)
        self._router.replace({code: _refusing(refused) for code, refused in found if refused is not None})
        if self._role.current is not Role.FENCED:
            self._arriving.look_again()
