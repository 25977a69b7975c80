"""Promises of answers, by request code: which of them wait for replication in a broker set.

Each code that a broker serves has a row in `ANSWERS`. A start with a code that has none fails, so that no new request
can be answered before replication because its row was forgotten.

An answer that promises a record waits until the set has it. This includes records of an earlier attempt of the same
request. An acknowledgement without effect therefore waits until the whole log is confirmed, because the record of the
earlier attempt could still be truncated.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import Enum
from inspect import isawaitable

from broker.intake.replication import Replication
from infra.net.remoting_server import Answer, Connection, Handler
from infra.net.request_router import RequestRouter
from neve.errors import BrokerError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand


class Promise(Enum):
    """Whether an answer promises a record, and where it waits for the set."""

    #: The wrapper of the handler waits.
    WAITS = "waits"
    #: The handler waits: a send is answered without a task of its own (`Intake.acknowledge`), and a pop waits together
    #: with its messages (`pop_message`).
    WAITS_IN_HANDLER = "waits in handler"
    #: The answer promises no record: a read, or state of this broker only.
    NONE = "none"


def _all(codes: Iterable[Code], promise: Promise) -> dict[Code, Promise]:
    return dict.fromkeys(codes, promise)


ANSWERS: Mapping[Code, Promise] = {
    **_all(
        (
            Code.CONSUMER_SEND_MSG_BACK, Code.END_TRANSACTION, Code.RESUME_CHECK_HALF_MESSAGE, Code.RECALL_MESSAGE,
            Code.SEND_REPLY_MESSAGE, Code.SEND_REPLY_MESSAGE_V2,
            Code.ACK_MESSAGE, Code.BATCH_ACK_MESSAGE, Code.CHANGE_MESSAGE_INVISIBLETIME, Code.SET_MESSAGE_REQUEST_MODE,
            Code.UPDATE_AND_CREATE_TOPIC, Code.UPDATE_AND_CREATE_TOPIC_LIST, Code.DELETE_TOPIC_IN_BROKER,
            Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
            Code.DELETE_SUBSCRIPTIONGROUP, Code.UPDATE_AND_GET_GROUP_FORBIDDEN,
            Code.INVOKE_BROKER_TO_RESET_OFFSET, Code.CLONE_GROUP_OFFSET,
            Code.AUTH_CREATE_USER, Code.AUTH_UPDATE_USER, Code.AUTH_DELETE_USER,
            Code.AUTH_CREATE_ACL, Code.AUTH_UPDATE_ACL, Code.AUTH_DELETE_ACL,
        ),
        Promise.WAITS,
    ),
    **_all(
        (Code.SEND_MESSAGE, Code.SEND_MESSAGE_V2, Code.SEND_BATCH_MESSAGE, Code.POP_MESSAGE), Promise.WAITS_IN_HANDLER
    ),
    # Reads of messages and of their offsets.
    **_all(
        (
            Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE, Code.PEEK_MESSAGE, Code.QUERY_MESSAGE, Code.VIEW_MESSAGE_BY_ID,
            Code.QUERY_CONSUME_QUEUE, Code.GET_MAX_OFFSET, Code.GET_MIN_OFFSET, Code.SEARCH_OFFSET_BY_TIMESTAMP,
            Code.GET_EARLIEST_MSG_STORETIME, Code.NOTIFICATION, Code.POLLING_INFO,
        ),
        Promise.NONE,
    ),
    # A committed offset is no record. Slaves poll it, and a failover loses the last seconds of it, as in RocketMQ.
    **_all((Code.QUERY_CONSUMER_OFFSET, Code.UPDATE_CONSUMER_OFFSET), Promise.NONE),
    # Clients, and locks with the lifetime of a connection.
    **_all(
        (
            Code.HEART_BEAT, Code.UNREGISTER_CLIENT, Code.CHECK_CLIENT_CONFIG, Code.GET_CONSUMER_LIST_BY_GROUP,
            Code.LOCK_BATCH_MQ, Code.UNLOCK_BATCH_MQ, Code.QUERY_ASSIGNMENT, Code.GET_CONSUMER_CONNECTION_LIST,
            Code.GET_PRODUCER_CONNECTION_LIST, Code.GET_ALL_PRODUCER_INFO, Code.GET_CONSUMER_RUNNING_INFO,
            Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, Code.CONSUME_MESSAGE_DIRECTLY,
        ),
        Promise.NONE,
    ),
    # Reads of tables and statistics.
    **_all(
        (
            Code.GET_ALL_TOPIC_CONFIG, Code.GET_TOPIC_CONFIG, Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
            Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, Code.GET_SUBSCRIPTIONGROUP_CONFIG, Code.GET_ALL_MESSAGE_REQUEST_MODE,
            Code.GET_ALL_CONSUMER_OFFSET, Code.GET_ALL_DELAY_OFFSET, Code.QUERY_CORRECTION_OFFSET,
            Code.QUERY_CONSUME_TIME_SPAN, Code.GET_TOPIC_STATS_INFO, Code.GET_CONSUME_STATS,
            Code.GET_BROKER_CONSUME_STATS, Code.VIEW_BROKER_STATS_DATA, Code.GET_BROKER_RUNTIME_INFO,
            Code.QUERY_TOPIC_CONSUME_BY_WHO, Code.QUERY_TOPICS_BY_CONSUMER, Code.QUERY_SUBSCRIPTION_BY_CONSUMER,
            Code.AUTH_GET_USER, Code.AUTH_LIST_USER, Code.AUTH_GET_ACL, Code.AUTH_LIST_ACL,
        ),
        Promise.NONE,
    ),
    # Settings of this broker, its role in the set, and requests without effect.
    **_all(
        (
            Code.GET_BROKER_CONFIG, Code.UPDATE_BROKER_CONFIG, Code.CLEAN_EXPIRED_CONSUMEQUEUE, Code.CLEAN_UNUSED_TOPIC,
            Code.DELETE_EXPIRED_COMMITLOG, Code.POP_ROLLBACK, Code.EXCHANGE_BROKER_HA_INFO, Code.GET_BROKER_HA_STATUS,
            Code.GET_BROKER_EPOCH_CACHE, Code.CONTROLLER_ELECT_MASTER, Code.NOTIFY_BROKER_ROLE_CHANGED,
        ),
        Promise.NONE,
    ),
}  # fmt: skip
PROMISES = frozenset(code for code, promise in ANSWERS.items() if promise is Promise.WAITS)


def check_answers(codes: Iterable[int]) -> None:
    """Raise ValueError if a served code has no row in `ANSWERS`."""
    unstated = sorted(set(codes) - ANSWERS.keys())
    if unstated:
        raise ValueError(f"request codes without a row in broker.requests.promises.ANSWERS: {unstated}")


def keep_promises(router: RequestRouter, replication: Replication, log_end: Callable[[], int]) -> None:
    """Make answers that promise a record wait for the set; call this after all handlers are registered."""

    def promising(handler: Handler) -> Handler:
        def serve(connection: Connection, request: RemotingCommand) -> Answer | Awaitable[Answer]:
            if request.is_oneway:
                return handler(connection, request)
            return _promised(handler, connection, request, replication, log_end)

        return serve

    router.wrap(PROMISES, promising)


async def _promised(
    handler: Handler,
    connection: Connection,
    request: RemotingCommand,
    replication: Replication,
    log_end: Callable[[], int],
) -> Answer:
    term = replication.term  # taken first, because the handler may still be waiting when the term ends
    found = handler(connection, request)
    answer = await found if isawaitable(found) else found
    if isinstance(answer, RemotingCommand) and answer.code == ResponseCode.SUCCESS:
        try:
            await replication.replicated(log_end(), term)
        except BrokerError as error:
            answer.code, answer.remark = int(error.code or ResponseCode.SYSTEM_ERROR), error.remark
    return answer
