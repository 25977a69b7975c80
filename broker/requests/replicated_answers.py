"""Answers that promise a record: they wait until the broker set has it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable

from broker.intake.replication import Replication
from broker.requests.route import Waits
from broker.requests.table import ROUTES
from infra.net.remoting_server import Answer, Connection, Handler
from infra.net.request_router import RequestRouter
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand


def wait_for_replication(router: RequestRouter, replication: Replication, log_end: Callable[[], int]) -> None:
    """Make answers that promise a record wait for the set; call this after all handlers are registered."""

    def waiting(handler: Handler) -> Handler:
        def serve(connection: Connection, request: RemotingCommand) -> Answer | Awaitable[Answer]:
            if request.is_oneway:
                return handler(connection, request)
            return _replicated(handler, connection, request, replication, log_end)

        return serve

    router.wrap((code for code, route in ROUTES.items() if route.waits is Waits.YES), waiting)


async def _replicated(
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
