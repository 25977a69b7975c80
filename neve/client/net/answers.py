"""Reads the answers of servers."""

from __future__ import annotations

from typing import Any

from neve.errors import BrokerError, ProtocolError
from neve.remoting.body import ANSWER_NODES, NodeBudget, lenient_loads
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand


def parse_body(answer: RemotingCommand) -> Any:
    """Return the JSON value in the body of an answer; an empty body is an empty object.

    Raises:
        ProtocolError: the body is not JSON.
    """
    return lenient_loads(answer.body, NodeBudget(ANSWER_NODES)) if answer.body else {}


def require_success(answer: RemotingCommand) -> RemotingCommand:
    """Return the answer.

    Raises:
        BrokerError: its code is not SUCCESS.
    """
    if answer.code != ResponseCode.SUCCESS:
        raise BrokerError(answer.code, answer.remark or "")
    return answer


def ext_int(answer: RemotingCommand, name: str) -> int:
    """Return an integer field of an answer.

    Raises:
        ProtocolError: the field is missing or no integer.
    """
    try:
        return int((answer.ext or {})[name])
    except (KeyError, ValueError) as error:
        raise ProtocolError(f"an answer has no integer {name!r}: {answer.ext}") from error
