"""Errors of the lower layers as exit codes and one line of text."""

from __future__ import annotations

from typing import NamedTuple

from neve.admin.errors import Conflict, NotFound, NotPermitted, Unreachable
from neve.errors import ConnectionFailed, UnknownOutcome

FAILED, USAGE, NOT_FOUND, AUTH, CONFLICT, UNREACHABLE, FEWER = 1, 2, 3, 4, 5, 6, 7

# RocketMQ response codes: topic or group unknown, message not found; no permission; version or state conflict.
_NOT_FOUND_CODES = frozenset({17, 22, 26})
_AUTH_CODES = frozenset({16, 215})
_CONFLICT_CODES = frozenset({205})
_S3_NOT_FOUND = frozenset({"404", "NoSuchKey", "NoSuchBucket", "NotFound"})
_S3_AUTH = frozenset({"401", "403", "AccessDenied", "Forbidden"})


class Explained(NamedTuple):
    """The exit code and the message for an error."""

    exit_code: int
    text: str


class Failure(Exception):
    """An error with an exit code that scripts rely on."""

    def __init__(self, exit_code: int, text: str) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def explain(error: BaseException) -> Explained | None:
    """Return the exit code and text of an error that a user can act on; None for a defect of neve."""
    text = str(error) or type(error).__name__
    if isinstance(error, Failure):
        return Explained(error.exit_code, text)
    code = getattr(error, "code", None)
    if isinstance(code, int):
        return Explained(_by_code(code), text)
    of_s3 = _s3_code(error)
    if of_s3 is not None:
        return Explained(of_s3, text)
    for kinds, exit_code in _KINDS:
        if isinstance(error, kinds):
            return Explained(exit_code, text)
    if _is_neves(error):
        return Explained(FAILED, text)
    return None


_KINDS: tuple[tuple[tuple[type[BaseException], ...], int], ...] = (
    ((ConnectionFailed, UnknownOutcome, Unreachable), UNREACHABLE),
    ((FileNotFoundError, NotFound), NOT_FOUND),
    ((PermissionError, NotPermitted), AUTH),
    ((FileExistsError, Conflict), CONFLICT),
    ((ConnectionError, TimeoutError, OSError), UNREACHABLE),
)


def _by_code(code: int) -> int:
    if code in _NOT_FOUND_CODES:
        return NOT_FOUND
    if code in _AUTH_CODES:
        return AUTH
    return CONFLICT if code in _CONFLICT_CODES else FAILED


def _s3_code(error: BaseException) -> int | None:
    """Return the exit code of an error of botocore, which is recognised without importing botocore."""
    if not any(kind.__module__.startswith("botocore") for kind in type(error).__mro__):
        return None
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return AUTH if "Credentials" in type(error).__name__ else UNREACHABLE
    from neve.archive.store.s3_credentials import REFUSED

    code = str(response.get("Error", {}).get("Code", ""))
    if code in _S3_NOT_FOUND:
        return NOT_FOUND
    if code in _S3_AUTH or code in REFUSED:
        return AUTH
    return CONFLICT if code in {"409", "412", "PreconditionFailed"} else FAILED


def _is_neves(error: BaseException) -> bool:
    return any(kind.__module__.split(".")[0] == "neve" for kind in type(error).__mro__)
