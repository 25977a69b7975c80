"""Errors of administrative operations, by what a caller can do about them."""

from __future__ import annotations

from neve.errors import NeveError


class AdminError(NeveError):
    """An operation failed, or was done in part; the message names the object, the cause and the next step."""

    def __init__(self, remark: str) -> None:
        super().__init__(None, remark)


class NotFound(AdminError):
    """The cluster has no such topic, group, broker, member or user."""


class NotPermitted(AdminError):
    """A server denied the request to this user."""


class Conflict(AdminError):
    """The present state forbids the operation, such as connected members or a living master."""


class Unreachable(AdminError):
    """A server that must answer did not, so the result would be incomplete."""
