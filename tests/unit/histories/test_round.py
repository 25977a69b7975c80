"""Which ends of a round say no more than that nobody answered in time."""

from __future__ import annotations

import asyncio

import pytest

from neve.cli.failures import Failure
from neve.client.net.connection import ConnectionFailed
from neve.errors import BrokerError, ClientError, ProtocolError, UnknownOutcome
from neve.remoting.codes import ResponseCode
from tests.histories.round import LATE
from tests.waiting import NotWithin, until, wait_until


@pytest.mark.parametrize("error", [ConnectionFailed("a"), ClientError("a"), UnknownOutcome("a"), TimeoutError()])
def test_a_round_that_nobody_answered_may_be_late(error: Exception) -> None:
    assert isinstance(error, LATE)


@pytest.mark.parametrize("error", [ProtocolError("a"), BrokerError(ResponseCode.SYSTEM_ERROR), Failure(1, "a")])
def test_a_round_that_got_a_wrong_answer_is_not_late(error: Exception) -> None:
    assert not isinstance(error, LATE)


def test_what_was_waited_for_in_vain_is_late() -> None:
    with pytest.raises(NotWithin):
        asyncio.run(until(lambda: False, timeout=0.05))
    with pytest.raises(NotWithin):
        wait_until(lambda: False, timeout=0.05)
