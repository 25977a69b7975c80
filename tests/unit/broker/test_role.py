"""Requests that a broker serves in each role: only one member serves those with a promise."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import cast

import pytest

from bench.wire import send_ext
from broker.long_polling.message_arriving import MessageArriving
from broker.long_polling.pop_long_polling import PopLongPolling
from broker.long_polling.pull_request_hold import PullRequestHold
from broker.requests.role_gate import RoleGate
from broker.requests.route import FENCED, MASTER
from broker.requests.table import ROUTES
from broker.role import FOLLOWING, BrokerRole, Role
from infra.clock import ManualClock
from infra.loop.supervisor import Faults
from infra.net.remoting_server import Connection
from infra.net.request_router import RequestRouter
from neve.errors import BrokerError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from tests.kit.broker.in_process import ask, running, send

_NOBODY = cast("Connection", None)
SLAVES = (Role.SLAVE, Role.SLAVE_IN_SYNC)


def _router() -> RequestRouter:
    """Return a router that answers each code with a row by the code itself."""
    router = RequestRouter()
    for code in ROUTES:
        router.register(code, lambda _, request: RemotingCommand.response(request, request.code))
    return router


def _nobody_waits() -> MessageArriving:
    faults = Faults()
    return MessageArriving(PullRequestHold(ManualClock(), 1, faults), PopLongPolling(), faults)


def _served(router: RequestRouter, code: int) -> int | tuple[ResponseCode, str]:
    try:
        answer = router(_NOBODY, RemotingCommand(code))
    except BrokerError as error:
        return ResponseCode(error.code), error.remark
    assert isinstance(answer, RemotingCommand)
    return answer.code


@pytest.mark.parametrize(("role", "code"), list(itertools.product(Role, ROUTES)))
def test_each_request_is_served_or_refused_according_to_the_roles_table(role: Role, code: int) -> None:
    owned = BrokerRole(Role.FENCED)
    router = _router()
    RoleGate(owned, router, _nobody_waits())
    owned.become(role)
    roles = ROUTES[code].roles
    expected: int | tuple[ResponseCode, str] = code
    if role not in roles.serving:
        expected = tuple(FENCED if role is Role.FENCED else roles.of_a_slave)  # type: ignore[assignment]
    assert _served(router, code) == expected


def test_slave_refuses_with_rocketmqs_codes() -> None:
    for code in (Code.SEND_MESSAGE, Code.SEND_MESSAGE_V2, Code.SEND_BATCH_MESSAGE, Code.CONSUMER_SEND_MSG_BACK):
        refused = ROUTES[code].refusal(Role.SLAVE)
        assert refused is not None
        assert refused.code == ResponseCode.SYSTEM_BUSY  # producers retry on this code
        assert refused.remark.startswith("[REJECTREQUEST]")
    for code, expected in {
        Code.END_TRANSACTION: ResponseCode.SLAVE_NOT_AVAILABLE,
        Code.RECALL_MESSAGE: ResponseCode.SLAVE_NOT_AVAILABLE,
        Code.INVOKE_BROKER_TO_RESET_OFFSET: ResponseCode.SYSTEM_ERROR,
        Code.UPDATE_AND_CREATE_TOPIC: ResponseCode.SYSTEM_ERROR,
    }.items():
        refused = ROUTES[code].refusal(Role.SLAVE_IN_SYNC)
        assert refused is not None
        assert refused.code == expected


def test_slave_out_of_sync_serves_neither_end_nor_committed_offsets() -> None:
    """A lower committed offset would move a group back."""
    for code in (Code.GET_MAX_OFFSET, Code.SEARCH_OFFSET_BY_TIMESTAMP, Code.QUERY_CONSUMER_OFFSET):
        assert ROUTES[code].refusal(Role.SLAVE) is not None
        assert ROUTES[code].refusal(Role.SLAVE_IN_SYNC) is None


def test_only_a_master_serves_locks_pops_acks_and_commits() -> None:
    promises = (Code.LOCK_BATCH_MQ, Code.POP_MESSAGE, Code.ACK_MESSAGE, Code.UPDATE_CONSUMER_OFFSET)
    assert {ROUTES[code].roles.serving for code in promises} == {MASTER.serving}


def test_unknown_request_stays_unknown_in_each_role() -> None:
    router, role = RequestRouter(), BrokerRole()
    RoleGate(role, router, _nobody_waits())
    role.become(Role.FENCED)
    answer = router(_NOBODY, RemotingCommand(Code.SEND_MESSAGE))
    assert isinstance(answer, RemotingCommand)
    assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Role, Role)))
def test_role_changes_between_master_and_slave_only_through_fenced(before: Role, after: Role) -> None:
    role = BrokerRole(before)
    told: list[Role] = []
    role.on_change(lambda: told.append(role.current))
    if after not in FOLLOWING[before]:
        with pytest.raises(AssertionError, match="FENCED alone"):
            role.become(after)
        assert (role.current, told) == (before, [])
        return
    role.become(after)
    assert role.current is after
    assert role.is_master is (after is Role.MASTER)
    assert told == ([] if before is after else [after])
    assert not {before, after} & {Role.MASTER} or before is after or Role.FENCED in (before, after)


def test_only_a_slave_has_a_master_and_listeners_get_the_change() -> None:
    role = BrokerRole(Role.SLAVE)
    told: list[bool] = []
    role.on_change(lambda: told.append(role.has_master))
    role.become(Role.SLAVE, has_master=True)
    role.become(Role.SLAVE, has_master=True)
    role.become(Role.SLAVE)
    assert told == [True, False]
    with pytest.raises(AssertionError):
        role.become(Role.FENCED, has_master=True)


async def test_broker_accepts_sends_only_while_it_is_master(tmp_path: Path) -> None:
    """Also on the fast path: a slave must not append to its log."""

    async with running(tmp_path) as (broker, connection):
        await send(connection, "t")
        end = broker.store.max_physical_offset
        for role, expected in (
            (Role.FENCED, ResponseCode.SERVICE_NOT_AVAILABLE),
            (Role.SLAVE, ResponseCode.SYSTEM_BUSY),
        ):
            broker.role.become(role)
            answer = await ask(connection, Code.SEND_MESSAGE_V2, b"body", **send_ext("t", 0, queues=1))
            assert answer.code == expected
            assert broker.store.max_physical_offset == end
        broker.role.become(Role.FENCED)
        broker.role.become(Role.MASTER)
        answer = await ask(connection, Code.SEND_MESSAGE_V2, b"body", **send_ext("t", 0, queues=1))
        assert answer.code == ResponseCode.SUCCESS
