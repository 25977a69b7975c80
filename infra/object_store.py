"""Object stores: one small synchronous protocol, its errors, a memory double, and the probe.

Keys are relative to the store's URL, use "/" and never start or end with it. A `prefix` names a folder and
ends with "/" (or is empty). Callers run these calls in threads; each store is safe to share between threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from infra.clock import Clock, SystemClock

PROBE_RACERS = 4
# A write that was sent under a lease may land after it, over an entry of the next owner, and no clock can prevent that.
NO_LEASE = "a lease can't replace that (fencing=lease is not offered, docs/archive-format.md says why)"

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


class AccessDenied(ObjectStoreError, PermissionError):
    """The credentials are missing, wrong or too weak."""


class NotFound(ObjectStoreError, FileNotFoundError):
    """There is no such object."""


class BadStoreUrl(ObjectStoreError, ValueError):
    """The URL does not name a store, or carries what must not stand in a URL."""


class ProbeFailed(ObjectStoreError):
    """The store lacks something that the archive's safety rests on."""


@dataclass(frozen=True, slots=True)
class PutOutcome:
    etag: str


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    key: str
    size: int
    etag: str
    modified_ms: int


class ObjectStore(Protocol):
    url: str
    requests: Counter[str]

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False, pace: Pace = unpaced) -> PutOutcome: ...

    def get(self, key: str) -> bytes: ...

    def get_range(self, key: str, start: int, length: int) -> bytes: ...

    def head(self, key: str) -> ObjectInfo: ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]: ...

    def list_prefixes(self, prefix: str) -> Sequence[str]: ...

    def delete(self, key: str) -> None: ...

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


def open_store(url: str) -> ObjectStore:
    """`dir:PATH`, or `s3://bucket/prefix?endpoint=…&region=…&multipartAbove=BYTES`.

    Credentials come from AWS_* variables or a profile.
    """
    if url.startswith("dir:"):
        from infra.directory_store import DirectoryStore  # noqa: PLC0415 - stores import this module

        path = url.removeprefix("dir:")
        if not path:
            raise BadStoreUrl("dir: needs a path")
        return DirectoryStore(Path(path))
    parts = urlsplit(url)
    if parts.scheme != "s3":
        raise BadStoreUrl(f"storeUrl must be dir:PATH or s3://BUCKET/PREFIX, not {parts.scheme or url[:20]!r}")
    if "@" in parts.netloc:
        raise BadStoreUrl("credentials don't belong in storeUrl: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    if "fencing" in options:
        raise BadStoreUrl(f"the fence rests on the store's If-None-Match: * alone; {NO_LEASE}")
    unknown = sorted(set(options) - {"endpoint", "region", "multipartAbove"})
    if unknown:
        raise BadStoreUrl(
            f"storeUrl knows only endpoint, region and multipartAbove, not {', '.join(unknown)}; "
            "credentials come from AWS_* variables"
        )
    if not parts.netloc:
        raise BadStoreUrl("storeUrl names no bucket")
    from infra.s3_store import MULTIPART_ABOVE, S3Store, parse_multipart_above  # noqa: PLC0415 - only where S3 is used

    return S3Store(
        url,
        parts.netloc,
        unquote(parts.path).strip("/"),
        endpoint=options.get("endpoint"),
        region=options.get("region"),
        multipart_above=parse_multipart_above(options["multipartAbove"])
        if "multipartAbove" in options
        else MULTIPART_ABOVE,
    )


def probe(store: ObjectStore) -> None:
    """Prove on the real store what the fence rests on: one winner in a race of conditional PUTs; read; delete."""
    key = f".probe-{uuid.uuid4().hex}"  # hidden from Hadoop readers, and no folder remains

    def race(number: int) -> bool:
        try:
            store.put(key, str(number).encode(), if_absent=True)
        except PreconditionFailed:
            return False
        return True

    try:
        with _granted(store, "PUT", "s3:PutObject"), ThreadPoolExecutor(PROBE_RACERS) as pool:
            try:
                won = list(pool.map(race, range(PROBE_RACERS)))
            except UnknownOutcome as error:
                raise _why_undecided(store, f"{key}-plain", error) from error
        if sum(won) != 1:
            raise ProbeFailed(
                f"{store.url}: {sum(won)} of {PROBE_RACERS} racing PUTs with If-None-Match: * won, not exactly one; "
                f"this store can't fence off a second writer, and {NO_LEASE}"
            )
        with _granted(store, "GET", "s3:GetObject"):
            found = store.get(key)
        if found != str(won.index(True)).encode():
            raise ProbeFailed(f"{store.url}: reading back a new object gave other bytes than the winner wrote")
        if race(99):
            raise ProbeFailed(f"{store.url}: PUT with If-None-Match: * replaced an existing object")
    finally:
        _remove_quietly(store, key)
    # Without the right to list, S3 answers 403 where there is no object, and a journal's end can't be found.
    with _granted(store, "LIST", "s3:ListBucket on the bucket"):
        list(store.list(f"{key}/"))
    try:
        store.head(key)
    except NotFound:
        return
    raise ProbeFailed(f"{store.url}: DELETE left the object; grant the right to delete (in S3: s3:DeleteObject)")


def _why_undecided(store: ObjectStore, key: str, error: UnknownOutcome) -> ObjectStoreError:
    """Some stores answer a conditional PUT with an error, always: told from a store that is ill by a plain one."""
    try:
        store.put(key, b"")
        try:
            store.put(f"{key}-2", b"", if_absent=True)
        except UnknownOutcome as again:
            return ProbeFailed(
                f"{store.url}: PUT works, with If-None-Match: * it does not ({again}); this store can't fence off a "
                f"second writer, and {NO_LEASE}"
            )
    except ObjectStoreError:
        return error
    finally:
        _remove_quietly(store, key)
        _remove_quietly(store, f"{key}-2")
    return error


@contextlib.contextmanager
def _granted(store: ObjectStore, call: str, right: str) -> Iterator[None]:
    """Says of a refusal which call it met and which right is missing."""
    try:
        yield
    except NotFound as error:
        raise ProbeFailed(f"{store.url}: no such bucket: create it, neve does not") from error
    except AccessDenied as error:
        raise AccessDenied(f"{call} was refused; grant access (in S3: {right}) to {store.url}: {error}") from error


def _remove_quietly(store: ObjectStore, key: str) -> None:
    try:
        store.delete(key)
    except (AccessDenied, StoreUnavailable, UnknownOutcome, NotFound):
        return  # head() above tells whether it worked, and with a better message


# --- the double ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Fault:
    """Fails the nth matching call, before or after its effect."""

    verb: str
    error: Exception
    after: bool = False
    match: str = ""
    skip: int = 0
    times: int = 1


class MemoryStore:
    """A store in a dictionary. `fail()` arms faults, `on_call` lets a test act between two calls."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.url = "memory:"
        self.requests: Counter[str] = Counter()
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.faults: list[Fault] = []
        self.on_call: Callable[[str, str], None] | None = None
        self.clock_offset_ms = 0
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()

    def fail(
        self, verb: str, error: Exception, *, after: bool = False, match: str = "", skip: int = 0, times: int = 1
    ) -> None:
        self.faults.append(Fault(verb, error, after, match, skip, times))

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False, pace: Pace = unpaced) -> PutOutcome:
        check_key(key)
        content = data.read_bytes() if isinstance(data, Path) else bytes(data)
        pace(len(content))
        self._enter("put", key)
        with self._lock:
            if if_absent and key in self.objects:
                raise PreconditionFailed(key)
            self.objects[key] = (content, self._clock.now_ms() + self.clock_offset_ms)
        self._leave("put", key)
        return PutOutcome(_etag(content))

    def get(self, key: str) -> bytes:
        self._enter("get", key)
        content = self._find(key)[0]
        self._leave("get", key)
        return content

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._enter("get_range", key)
        content = self._find(key)[0][start : start + length]
        self._leave("get_range", key)
        return content

    def head(self, key: str) -> ObjectInfo:
        self._enter("head", key)
        content, modified = self._find(key)
        self._leave("head", key)
        return ObjectInfo(key, len(content), _etag(content), modified)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        self._enter("list", prefix)
        with self._lock:
            found = sorted((key, value) for key, value in self.objects.items() if key.startswith(prefix))
        for key, (content, modified) in found:
            yield ObjectInfo(key, len(content), _etag(content), modified)

    def list_prefixes(self, prefix: str) -> Sequence[str]:
        check_prefix(prefix)
        self._enter("list_prefixes", prefix)
        with self._lock:
            tails = [key[len(prefix) :] for key in self.objects if key.startswith(prefix)]
        return sorted({f"{prefix}{tail.split('/', 1)[0]}/" for tail in tails if "/" in tail})

    def delete(self, key: str) -> None:
        check_key(key)
        self._enter("delete", key)
        with self._lock:
            self.objects.pop(key, None)
        self._leave("delete", key)

    def now_ms(self) -> int | None:
        self._enter("now_ms", "")
        return self._clock.now_ms() + self.clock_offset_ms

    def remove_stale_uploads(self, ours: Callable[[str], bool]) -> int:
        return 0

    def _find(self, key: str) -> tuple[bytes, int]:
        with self._lock:
            if key not in self.objects:
                raise NotFound(key)
            return self.objects[key]

    def _enter(self, verb: str, key: str) -> None:
        self.requests[verb] += 1
        if self.on_call is not None:
            self.on_call(verb, key)
        self._strike(verb, key, after=False)

    def _leave(self, verb: str, key: str) -> None:
        self._strike(verb, key, after=True)

    def _strike(self, verb: str, key: str, *, after: bool) -> None:
        for fault in self.faults:
            if fault.after != after or fault.verb not in {verb, "*"} or fault.match not in key or not fault.times:
                continue
            if fault.skip:
                fault.skip -= 1
                continue
            fault.times -= 1
            raise fault.error


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
