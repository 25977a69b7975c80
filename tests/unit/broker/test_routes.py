"""The rows of all request codes of all servers: complete, consistent, and exactly what the servers serve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from access.admin import ROUTES as USERS
from access.permissions import of_cluster, of_topic, super_users
from access.route import Route, routes_of
from broker.requests.route import MASTER, MASTER_CHANGE, BrokerRoute, Waits
from broker.requests.table import PROCESSORS, ROUTES, register_all
from broker.role import Role
from controller.requests import ROUTES as CONTROLLER
from infra.net.remoting_server import Connection
from infra.net.request_router import RequestRouter
from namesrv.request_processor import ROUTES as NAME_SERVER
from neve.errors import NeveError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.command import RemotingCommand
from tests.kit.broker.in_process import running

SERVERS: dict[str, Mapping[int, Route]] = {
    "broker": ROUTES, "name server": NAME_SERVER, "controller": CONTROLLER, "users": USERS
}  # fmt: skip
#: Requests of servers to clients, and one that neve asks of Apache's brokers only.
NOT_SERVED = {
    Code.CHECK_TRANSACTION_STATE, Code.NOTIFY_CONSUMER_IDS_CHANGED, Code.RESET_CONSUMER_CLIENT_OFFSET,
    Code.GET_CONSUMER_STATUS_FROM_CLIENT, Code.PUSH_REPLY_MESSAGE_TO_CLIENT, Code.NOTIFY_MIN_BROKER_ID_CHANGE,
    Code.GET_TIMER_CHECK_POINT,
}  # fmt: skip
AUTH = ("authenticationEnabled=true", 'initAuthenticationUser={"username":"a","password":"b12345"}')


def test_every_request_code_has_a_complete_row() -> None:
    assert {code for routes in SERVERS.values() for code in routes} == set(Code) - NOT_SERVED
    for server, routes in SERVERS.items():
        for code, route in routes.items():
            assert route.code == code
            assert isinstance(route.reads, bool), (server, route)
            assert (route.permission is super_users) == (code in USERS), (server, route)
            if route.permission is not super_users:
                _needs(route)


def _needs(route: Route) -> None:
    for body in (b"", b"{}", b"[]", b"x"):
        try:
            list(route.permission(RemotingCommand(route.code, body=body), "cluster"))
        except NeveError:
            continue


@pytest.mark.parametrize("route", ROUTES.values(), ids=lambda route: route.code.name)
def test_row_of_a_broker_is_consistent(route: BrokerRoute) -> None:
    assert route.refusal(Role.MASTER) is None
    if route.refusal(Role.SLAVE) is None:
        assert route.refusal(Role.SLAVE_IN_SYNC) is None
    if route.refusal(Role.FENCED) is None:
        assert route.refusal(Role.SLAVE) is None
    if route.waits is not Waits.NO:  # only the master's log gets records
        assert route.roles.serving == MASTER.serving
        assert not route.reads
    if route.roles == MASTER_CHANGE:
        assert route.waits is Waits.YES


@pytest.mark.parametrize("settings", [(), AUTH])
async def test_broker_serves_exactly_the_codes_with_rows(tmp_path: Path, settings: tuple[str, ...]) -> None:
    async with running(tmp_path, *settings) as (broker, _):
        assert broker.router.codes == ROUTES.keys() - (set() if settings else USERS.keys())
        assert broker.role.current is Role.MASTER  # the role of a broker without a set


def test_incomplete_row_fails_at_import() -> None:
    with pytest.raises(TypeError, match="roles"):
        BrokerRoute(Code.PULL_MESSAGE, of_cluster(frozenset()), reads=True, hides_topics=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="hides_topics"):
        BrokerRoute(Code.PULL_MESSAGE, of_cluster(frozenset()), MASTER, Waits.NO, reads=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="reads"):
        Route(Code.PULL_MESSAGE, of_cluster(frozenset()))  # type: ignore[call-arg]


class Twice:
    """A processor whose handlers serve the same code."""

    @Route(Code.PULL_MESSAGE, of_topic(frozenset()), reads=True)
    def pull(self, connection: Connection, request: RemotingCommand) -> None: ...

    @Route(Code.PULL_MESSAGE, of_topic(frozenset()), reads=True)
    def pull_again(self, connection: Connection, request: RemotingCommand) -> None: ...


def test_code_with_two_rows_or_a_row_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Twice\.pull_again: PULL_MESSAGE"):
        routes_of(Route, [Twice])
    with pytest.raises(ValueError, match="BrokerRoute"):
        routes_of(BrokerRoute, [Twice])


def test_processor_that_is_not_registered_is_refused() -> None:
    with pytest.raises(ValueError, match=PROCESSORS[0].__name__):
        register_all(RequestRouter(), ())
