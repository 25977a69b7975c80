"""Check on a real store the guarantees that the archive depends on, step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from infra.objects.store import (
    AccessDenied,
    NoSuchBucket,
    NotFound,
    ObjectStore,
    ObjectStoreError,
    PreconditionFailed,
    ProbeFailed,
    StoreUnavailable,
    UnknownOutcome,
)
from neve.archive.store.url import NO_LEASE
from neve.entropy import Entropy, system_entropy, unique_name

PROBE_RACERS = 4
#: S3's error codes for invalid credentials; a missing permission is AccessDenied.
_WRONG_CREDENTIALS = ("SignatureDoesNotMatch", "InvalidAccessKeyId", "ExpiredToken", "InvalidToken")


class ProbeStep(NamedTuple):
    """One check and its error."""

    name: str
    error: ObjectStoreError | None


def probe(store: ObjectStore, entropy: Entropy = system_entropy) -> None:
    """Run the checks. Raises the error of the first one that fails."""
    with contextlib.closing(_steps(store, entropy)) as steps:
        for step in steps:
            if step.error is not None:
                raise step.error


def probe_steps(store: ObjectStore, entropy: Entropy = system_entropy) -> list[ProbeStep]:
    """Run all checks and return their outcomes; none after a failed first one, on which the others depend."""
    return list(_steps(store, entropy))


def _steps(store: ObjectStore, entropy: Entropy) -> Generator[ProbeStep, None, None]:
    """A race of conditional PUTs with one winner; a second PUT; read; list; delete. The object is removed."""
    trial = _Trial(store, entropy)
    try:
        first = _tried("write once", trial.write_once)
        yield first
        if first.error is not None:
            return
        yield _tried("refuse a second write", trial.write_again)
        yield _tried("read", trial.read)
        yield _tried("list", trial.list)
        yield _tried("delete", trial.delete)
    finally:
        _remove_quietly(store, trial.key)


def _tried(name: str, work: Callable[[], None]) -> ProbeStep:
    try:
        work()
    except ObjectStoreError as error:
        return ProbeStep(name, error)
    return ProbeStep(name, None)


class _Trial:
    """The probe object, with a unique name."""

    def __init__(self, store: ObjectStore, entropy: Entropy) -> None:
        self._store = store
        self.key = f".probe-{unique_name(entropy)}"  # hidden from Hadoop readers, and no folder remains
        self._content = b""

    def write_once(self) -> None:
        with _granted(self._store, "PUT", "s3:PutObject"), ThreadPoolExecutor(PROBE_RACERS, "probe") as pool:
            try:
                won = list(pool.map(self._put, range(PROBE_RACERS)))
            except UnknownOutcome as error:
                raise _why_undecided(self._store, f"{self.key}-plain", error) from error
        if sum(won) != 1:
            raise ProbeFailed(
                f"{self._store.url}: {sum(won)} of {PROBE_RACERS} racing PUTs with If-None-Match: * won, not exactly "
                f"one; this store cannot fence a second writer, and {NO_LEASE}"
            )
        self._content = str(won.index(True)).encode()

    def write_again(self) -> None:
        with _granted(self._store, "PUT", "s3:PutObject"):
            if self._put(99):
                raise ProbeFailed(f"{self._store.url}: PUT with If-None-Match: * replaced an existing object")

    def read(self) -> None:
        with _granted(self._store, "GET", "s3:GetObject"):
            found = self._store.get(self.key)
        if found != self._content:
            raise ProbeFailed(f"{self._store.url}: reading back a new object gave other bytes than the winner wrote")

    def list(self) -> None:
        # Without the right to list, S3 answers 403 for a missing object, so that the end of a journal is unknown.
        with _granted(self._store, "LIST", "s3:ListBucket on the bucket"):
            for _ in self._store.list(f"{self.key}/"):
                break

    def delete(self) -> None:
        _remove_quietly(self._store, self.key)  # the HEAD below detects a failure, with a better message
        try:
            self._store.head(self.key)
        except NotFound:
            return
        raise ProbeFailed(
            f"{self._store.url}: DELETE left the object; grant the right to delete (in S3: s3:DeleteObject)"
        )

    def _put(self, number: int) -> bool:
        try:
            self._store.put(self.key, str(number).encode(), if_absent=True)
        except PreconditionFailed:
            return False
        return True


def _why_undecided(store: ObjectStore, key: str, error: UnknownOutcome) -> ObjectStoreError:
    """Distinguish a store that rejects all conditional PUTs from one that is failing, by a plain PUT."""
    try:
        store.put(key, b"")
        try:
            store.put(f"{key}-2", b"", if_absent=True)
        except UnknownOutcome as again:
            return ProbeFailed(
                f"{store.url}: PUT works, but not with If-None-Match: * ({again}); this store cannot fence a second "
                f"writer, and {NO_LEASE}"
            )
    except ObjectStoreError:
        return error
    finally:
        _remove_quietly(store, key)
        _remove_quietly(store, f"{key}-2")
    return error


@contextlib.contextmanager
def _granted(store: ObjectStore, call: str, right: str) -> Generator[None, None, None]:
    """Add the refused call and the missing permission to an error."""
    try:
        yield
    except (NoSuchBucket, NotFound) as error:
        raise ProbeFailed(f"{store.url}: the bucket does not exist: create it") from error
    except AccessDenied as error:
        if any(code in str(error) for code in _WRONG_CREDENTIALS):
            raise AccessDenied(f"{call} was refused by {store.url}, the credentials are wrong: {error}") from error
        raise AccessDenied(f"{call} was refused; grant access (in S3: {right}) to {store.url}: {error}") from error


def _remove_quietly(store: ObjectStore, key: str) -> None:
    with contextlib.suppress(AccessDenied, StoreUnavailable, UnknownOutcome, NotFound):
        store.delete(key)
