"""Refusal of the requests that the broker's current role does not serve."""

from __future__ import annotations

from broker.long_polling.message_arriving import MessageArriving
from broker.requests.route import Refusal
from broker.requests.table import ROUTES
from broker.role import BrokerRole, Role
from infra.net.remoting_server import Answer, Connection, Handler
from infra.net.request_router import RequestRouter
from neve.errors import BrokerError
from neve.remoting.command import RemotingCommand


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
        role.on_change(self._changed)
        self._changed()

    def _changed(self) -> None:
        found = ((code, ROUTES[code].refusal(self._role.current)) for code in self._router.codes)
        self._router.replace({code: _refusing(refused) for code, refused in found if refused is not None})
        if self._role.current is not Role.FENCED:
            self._arriving.check_all()
