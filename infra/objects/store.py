"""Object stores: one small synchronous protocol and its errors.

Keys are relative to the store's URL, use "/" and never start or end with it. A `prefix` names a folder and
ends with "/" (or is empty). Callers run these calls in threads; each store is safe to share between threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Pace = Callable[[int], None]
"""Called with a number of bytes before they go out; it may wait."""


def unpaced(count: int) -> None:
    """As fast as it goes."""


class ObjectStoreError(Exception):
    """Something went wrong with the archive store."""


class PreconditionFailed(ObjectStoreError, FileExistsError):
    """The object exists already: perhaps by an earlier attempt of our own. Read it back."""


class UnknownOutcome(ObjectStoreError):
    """The write may or may not have happened. Read it back, never guess."""


class StoreUnavailable(ObjectStoreError, ConnectionError):
    """The store can't be reached or answered with a server error; a read had no result."""


class NoSuchBucket(StoreUnavailable):
    """The store has no bucket of this name. Unlike NotFound, this says nothing about any object."""


class AccessDenied(ObjectStoreError, PermissionError):
    """The credentials are missing, wrong or too weak.

    `of_credentials`: the store refused the credentials themselves, and may accept others for this request.
    """

    of_credentials = False


class NotFound(ObjectStoreError, FileNotFoundError):
    """There is no such object."""


class BadStoreUrl(ObjectStoreError, ValueError):
    """The URL does not name a store, or carries what must not stand in a URL."""


class ProbeFailed(ObjectStoreError):
    """The store lacks something that the archive's safety rests on."""


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """What a PUT that succeeded left: the object's etag as the store gives it."""

    etag: str


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as a HEAD or a listing says: size in bytes, time of its PUT in ms by the store's clock."""

    key: str
    size: int
    etag: str
    modified_ms: int


class ObjectStore(Protocol):
    """What the archive needs of a store; `requests` counts the calls by verb.

    NotFound and PreconditionFailed are answers. Any other ObjectStoreError leaves open whether the call had its
    effect: read back before acting on it.
    """

    url: str
    requests: Counter[str]

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False, pace: Pace = unpaced) -> PutOutcome: ...

    def get(self, key: str) -> bytes: ...

    def get_range(self, key: str, start: int, length: int) -> bytes: ...

    def head(self, key: str) -> ObjectInfo: ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]: ...

    def list_prefixes(self, prefix: str) -> Sequence[str]: ...

    def delete(self, key: str) -> None: ...

    def delete_many(self, keys: Sequence[str]) -> None:
        """As `delete` of each, with fewer requests or syncs. Where it raises, some of them may be gone."""
        ...

    def now_ms(self) -> int | None:
        """The store's own clock, or None where it has none."""
        ...

    def remove_stale_uploads(self, ours: Callable[[str], bool]) -> int:
        """Remove what crashed writers left behind a day ago and no listing shows, under names that are `ours`.

        Returns how many.
        """
        ...


def check_key(key: str) -> str:
    """Refuse what could leave the store's root or would be spelt differently by another store."""
    parts = key.split("/")
    if not key or "\0" in key or any(part in {"", ".", ".."} for part in parts):
        raise BadStoreUrl(f"not an object key: {key!r}")
    if any(len(part.encode()) > 255 for part in parts):
        raise BadStoreUrl(f"a component of the object key is longer than 255 bytes: {key[:80]!r}…")
    return key


def check_prefix(prefix: str) -> str:
    if prefix and not prefix.endswith("/"):
        raise BadStoreUrl(f"a prefix ends with '/': {prefix!r}")
    if prefix:
        check_key(prefix[:-1])
    return prefix
