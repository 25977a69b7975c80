"""Errors of a tier worker, as raised in the broker."""

from __future__ import annotations

from infra.objects import store
from tiered.write.uploader import ContentConflict, EncodeFailed, GivenUp


class WorkerFailed(Exception):
    """The worker answered with an error, or died twice during one request."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class MadeRoom(ConnectionError):
    """The worker was replaced by one with another priority; the request was not the cause."""


def of_an_upload(error: WorkerFailed) -> Exception:
    """Return the error of an upload as the exception that a round expects."""
    if error.kind == "Conflict":
        return ContentConflict(error.message)
    if error.kind == "GivenUp":
        return GivenUp(error.message)
    kind = getattr(store, error.kind, None)
    if isinstance(kind, type) and issubclass(kind, store.ObjectStoreError):
        return kind(error.message)
    return EncodeFailed(str(error))
