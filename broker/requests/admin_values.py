"""Common parts of administration requests: lists of settings in the body, and range checks."""

from collections.abc import Awaitable, Callable
from typing import Any

from neve.errors import BrokerError
from neve.remoting.body import lenient_loads
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand

#: Returns when the records appended so far are as durable as an answer requires.
Settled = Callable[[], Awaitable[None]]


def list_of(request: RemotingCommand, name: str) -> list[Any]:
    """Return the list of this name in the body. Raises BrokerError if there is none."""
    value = lenient_loads(request.body)
    items = (value.get(name) or []) if isinstance(value, dict) else None
    if not isinstance(items, list):
        raise BrokerError(ResponseCode.INVALID_PARAMETER, f"the body has no {name}")
    return items


def in_range(name: str, value: int, low: int, high: int) -> int:
    """Return the value. Raises BrokerError if it is out of range."""
    if not low <= value <= high:
        raise BrokerError(ResponseCode.INVALID_PARAMETER, f"{name}={value}: allowed are {low} to {high}")
    return value
