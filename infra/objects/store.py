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
"""Called with a number of bytes before they are sent; it may block."""


def unpaced(count: int) -> None:
    """Do not limit the rate."""


class ObjectStoreError(Exception):
    """A request to the archive store failed."""


class PreconditionFailed(ObjectStoreError, FileExistsError):
    """The object exists already, perhaps from an earlier attempt of the caller: read it back."""


class UnknownOutcome(ObjectStoreError):
    """The write may have happened or not: read it back."""


class StoreUnavailable(ObjectStoreError, ConnectionError):
    """The store is unreachable or answered with a server error; the result of a read is unknown."""


class NoSuchBucket(StoreUnavailable):
    """The bucket does not exist. Unlike after NotFound, the state of the object is unknown."""


class AccessDenied(ObjectStoreError, PermissionError):
    """The credentials are missing or invalid, or lack a permission.

    `of_credentials`: the credentials themselves are invalid; other ones may succeed.
    """

    of_credentials = False


class NotFound(ObjectStoreError, FileNotFoundError):
    """The object does not exist."""


class BadStoreUrl(ObjectStoreError, ValueError):
    """The URL is invalid, or contains a secret."""


class ProbeFailed(ObjectStoreError):
    """The store lacks a guarantee that the archive depends on."""


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """The result of a PUT: the etag of the object."""

    etag: str


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """The metadata of one object: size in bytes, time of its PUT in ms by the store's clock."""

    key: str
    size: int
    etag: str
    modified_ms: int


class ObjectStore(Protocol):
    """The operations of a store; `requests` counts the calls by verb.

    NotFound and PreconditionFailed are definite answers. After any other ObjectStoreError the effect of the call is
    unknown: read back before you act on it.
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
        """Delete all keys, with fewer requests or syncs. After an error some of them may be deleted."""
        ...

    def now_ms(self) -> int | None:
        """Return the time of the store's clock; None if it has none."""
        ...

    def remove_stale_uploads(self, ours: Callable[[str], bool]) -> int:
        """Remove unfinished uploads of crashed writers, older than a day, of keys for which `ours` is true.

        Return their number.
        """
        ...


def check_key(key: str) -> str:
    """Raise BadStoreUrl for a key that could escape the root, or that other stores would normalize."""
    parts = key.split("/")
    if not key or "\0" in key or any(part in {"", ".", ".."} for part in parts):
        raise BadStoreUrl(f"not an object key: {key!r}")
    if any(len(part.encode()) > 255 for part in parts):
        raise BadStoreUrl(f"a component of the object key is longer than 255 bytes: {key[:80]!r}…")
    return key


def check_prefix(prefix: str) -> str:
    if prefix and not prefix.endswith("/"):
        raise BadStoreUrl(f"a prefix must end with '/', got {prefix!r}")
    if prefix:
        check_key(prefix[:-1])
    return prefix
