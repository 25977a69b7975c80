"""The errors of neve, by what the caller can conclude from them.

NeveError
├── ClientError         the call was invalid; no request was sent
├── ConnectionFailed    the peer was unreachable; no request was sent           (also a ConnectionError)
├── BrokerError         the server answered with an error code
├── UnknownOutcome      a request was sent and its outcome is unknown
│   ├── RequestTimeout  because no answer arrived in time                       (also a TimeoutError)
│   └── ConnectionLost  because the connection broke before the answer arrived  (also a ConnectionError)
└── ProtocolError       the peer violated the protocol
"""

from __future__ import annotations


class NeveError(Exception):
    """Base class of all errors that neve raises.

    Attributes:
        code: RocketMQ's response code, or None.
        remark: the text without the code.
    """

    def __init__(self, code: int | None = None, remark: str = "") -> None:
        super().__init__(remark if code is None else f"{remark} (code {code})")
        self.code = code
        self.remark = remark


class ProtocolError(NeveError):
    """The peer violated the protocol, so the rest of its data cannot be interpreted."""

    def __init__(self, remark: str) -> None:
        super().__init__(None, remark)


class BrokerError(NeveError):
    """A server answered with an error code. If a request handler raises it, the server sends it as its answer."""

    code: int

    def __init__(self, code: int, remark: str = "") -> None:
        super().__init__(code, remark)


class ClientError(NeveError):
    """The call was invalid, so no request was sent."""

    def __init__(self, remark: str, code: int | None = None) -> None:
        super().__init__(code, remark)


class ConnectionFailed(NeveError, ConnectionError):
    """The peer was unreachable, so no request was sent."""

    def __init__(self, remark: str) -> None:
        super().__init__(None, remark)


class UnknownOutcome(NeveError):
    """A request was sent and its outcome is unknown: the server may or may not have executed it."""

    def __init__(self, remark: str, code: int | None = None) -> None:
        super().__init__(code, remark)


class RequestTimeout(UnknownOutcome, TimeoutError):
    """A request was sent, and no answer arrived in time."""


class ConnectionLost(UnknownOutcome, ConnectionError):
    """A request was sent, and the connection broke before the answer arrived."""


def seconds_text(seconds: float) -> str:
    """Format a time limit for an error message, rounded to tenths above one second."""
    return f"{round(seconds, 1 if seconds >= 1 else 3):g} s"
