"""The four ways in which a call can end badly, as a caller has to tell them apart."""

from __future__ import annotations


class NeveError(Exception):
    """Base of every error that Neve raises on purpose; `code` is a Remoting response code where there is one."""

    def __init__(self, code: int | None = None, remark: str = "") -> None:
        super().__init__(remark if code is None else f"{remark} (code {code})")
        self.code = code
        self.remark = remark


class ProtocolError(NeveError):
    """The peer broke the protocol: nothing that it sends after this can be trusted."""

    def __init__(self, remark: str) -> None:
        super().__init__(None, remark)


class BrokerError(NeveError):
    """A server understood the request and refused it; raised in a handler it becomes that answer."""

    code: int

    def __init__(self, code: int, remark: str = "") -> None:
        super().__init__(code, remark)


class ClientError(NeveError):
    """The caller asked for something that cannot be done; the request never left."""

    def __init__(self, remark: str, code: int | None = None) -> None:
        super().__init__(code, remark)


class UnknownOutcome(NeveError):
    """The request left and no answer came: it may or may not have taken effect."""

    def __init__(self, remark: str, code: int | None = None) -> None:
        super().__init__(code, remark)


def seconds_text(seconds: float) -> str:
    """A time limit for a message: a tenth of a second is exact enough above one second."""
    return f"{round(seconds, 1 if seconds >= 1 else 3):g} s"
