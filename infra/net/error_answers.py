"""The answers of a server to unknown request codes, failed requests and requests over a limit."""

from __future__ import annotations

import logging

from neve.errors import BrokerError, NeveError
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand

log = logging.getLogger(__name__)

_MAX_REMARK = 4096  # remarks repeat names from requests, which may be long


def not_supported(command: RemotingCommand) -> RemotingCommand:
    """Return the answer to a request code without a handler."""
    remark = f" request type {command.code} not supported"
    return RemotingCommand.response(command, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark)


def error_answer(command: RemotingCommand, error: Exception) -> RemotingCommand:
    if isinstance(error, BrokerError):
        return RemotingCommand.response(command, error.code or ResponseCode.SYSTEM_ERROR, error.remark[:_MAX_REMARK])
    if not isinstance(error, NeveError):
        log.error("request failed: code=%d", command.code, exc_info=error)
    remark = f"{type(error).__name__}: {error}"[:_MAX_REMARK]
    return RemotingCommand.response(command, ResponseCode.SYSTEM_ERROR, remark)


def too_much_in_work(command: RemotingCommand) -> RemotingCommand:
    """Return the answer to a request whose body exceeds the limit for all requests in progress."""
    return RemotingCommand.response(command, ResponseCode.SYSTEM_BUSY, "too many large requests are in progress")
