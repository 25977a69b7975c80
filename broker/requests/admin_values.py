"""What administrators' requests have in common: lists of settings in the body, numbers within bounds."""

from collections.abc import Awaitable, Callable
from typing import Any

from neve.errors import BrokerError
from neve.remoting.body import lenient_loads
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand

#: Returns when what was put into the log is as safe as what is answered.
Settled = Callable[[], Awaitable[None]]


def list_of(request: RemotingCommand, name: str) -> list[Any]:
    """The list of this name; BrokerError where the body has none."""
    value = lenient_loads(request.body)
    items = (value.get(name) or []) if isinstance(value, dict) else None
    if not isinstance(items, list):
        raise BrokerError(ResponseCode.INVALID_PARAMETER, f"the body has no {name}")
    return items


def in_range(name: str, value: int, low: int, high: int) -> int:
    """The value; BrokerError where it is not allowed."""
    if not low <= value <= high:
        raise BrokerError(ResponseCode.INVALID_PARAMETER, f"{name}={value}: allowed are {low} to {high}")
    return value
