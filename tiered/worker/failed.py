"""What a worker answers where it has no answer, as the broker's side raises it."""

from __future__ import annotations

from infra.objects import store
from tiered.write.uploader import ContentConflict, EncodeFailed, GivenUp


class WorkerFailed(Exception):
    """The worker answered with an error, or died twice over one request."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class MadeRoom(ConnectionError):
    """The worker was ended for one of another priority: the request had no part in that."""


def of_an_upload(error: WorkerFailed) -> Exception:
    """As a round knows it."""
    if error.kind == "Conflict":
        return ContentConflict(error.message)
    if error.kind == "GivenUp":
        return GivenUp(error.message)
    kind = getattr(store, error.kind, None)
    if isinstance(kind, type) and issubclass(kind, store.ObjectStoreError):
        return kind(error.message)
    return EncodeFailed(str(error))
