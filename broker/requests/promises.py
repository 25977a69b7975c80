"""In a broker set: whose answer says that something is in the log, and that it waits until the set has it.

Around the handlers, those of users and policies too. A send is not here, it is answered without a task of its own
(`Intake.acknowledge`); nor is a pop, which waits with what it hands out (`pop_message`).

What an earlier try of the same request left in the log counts as well: an acknowledgement that finds nothing to do is
answered when all that the log holds by then is confirmed, or it would be a promise of what may yet vanish.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable

from broker.intake.replication import Replication
from infra.remoting_server import Answer, Connection, Handler
from infra.request_router import RequestRouter
from neve.errors import BrokerError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand

PROMISES = frozenset({
    Code.CONSUMER_SEND_MSG_BACK, Code.END_TRANSACTION, Code.RESUME_CHECK_HALF_MESSAGE, Code.RECALL_MESSAGE,
    Code.SEND_REPLY_MESSAGE, Code.SEND_REPLY_MESSAGE_V2,
    Code.ACK_MESSAGE, Code.BATCH_ACK_MESSAGE, Code.CHANGE_MESSAGE_INVISIBLETIME, Code.SET_MESSAGE_REQUEST_MODE,
    Code.UPDATE_AND_CREATE_TOPIC, Code.UPDATE_AND_CREATE_TOPIC_LIST, Code.DELETE_TOPIC_IN_BROKER,
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
    Code.DELETE_SUBSCRIPTIONGROUP, Code.UPDATE_AND_GET_GROUP_FORBIDDEN,
    Code.INVOKE_BROKER_TO_RESET_OFFSET, Code.CLONE_GROUP_OFFSET,
    Code.AUTH_CREATE_USER, Code.AUTH_UPDATE_USER, Code.AUTH_DELETE_USER,
    Code.AUTH_CREATE_ACL, Code.AUTH_UPDATE_ACL, Code.AUTH_DELETE_ACL,
})  # fmt: skip


def keep_promises(router: RequestRouter, replication: Replication, log_end: Callable[[], int]) -> None:
    """What makes a promise waits for the set from now on; called when all that is served is registered."""

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
    term = replication.term  # what the handler awaits may last beyond it
    found = handler(connection, request)
    answer = await found if isawaitable(found) else found
    if isinstance(answer, RemotingCommand) and answer.code == ResponseCode.SUCCESS:
        try:
            await replication.replicated(log_end(), term)
        except BrokerError as error:
            answer.code, answer.remark = int(error.code or ResponseCode.SYSTEM_ERROR), error.remark
    return answer
