"""What the archive's safety rests on, proven on the real store, step by step."""

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
#: Codes of S3 for credentials that it does not accept; AccessDenied is for a right that is missing.
_WRONG_CREDENTIALS = ("SignatureDoesNotMatch", "InvalidAccessKeyId", "ExpiredToken", "InvalidToken")


class Step(NamedTuple):
    """What was tried, and what was wrong with it."""

    name: str
    error: ObjectStoreError | None


def probe(store: ObjectStore, entropy: Entropy = system_entropy) -> None:
    """Raises what the first step finds that fails."""
    with contextlib.closing(_steps(store, entropy)) as steps:
        for step in steps:
            if step.error is not None:
                raise step.error


def probe_steps(store: ObjectStore, entropy: Entropy = system_entropy) -> list[Step]:
    """Each of them, for who wants to know all that is missing; only the first is in vain for all others."""
    return list(_steps(store, entropy))


def _steps(store: ObjectStore, entropy: Entropy) -> Generator[Step, None, None]:
    """One winner in a race of conditional PUTs; no second one; read; list; delete. Nothing is left behind."""
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


def _tried(name: str, work: Callable[[], None]) -> Step:
    try:
        work()
    except ObjectStoreError as error:
        return Step(name, error)
    return Step(name, None)


class _Trial:
    """One object, of a name that nobody has."""

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
                f"one; this store can't fence off a second writer, and {NO_LEASE}"
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
        # Without the right to list, S3 answers 403 where there is no object, and a journal's end can't be found.
        with _granted(self._store, "LIST", "s3:ListBucket on the bucket"):
            for _ in self._store.list(f"{self.key}/"):
                break

    def delete(self) -> None:
        _remove_quietly(self._store, self.key)  # whether it worked, the next question tells, with a better message
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
def _granted(store: ObjectStore, call: str, right: str) -> Generator[None, None, None]:
    """Says of a refusal which call it met and which right is missing."""
    try:
        yield
    except (NoSuchBucket, NotFound) as error:
        raise ProbeFailed(f"{store.url}: no such bucket: create it, neve does not") from error
    except AccessDenied as error:
        if any(code in str(error) for code in _WRONG_CREDENTIALS):
            raise AccessDenied(f"{call} was refused by {store.url}, the credentials are wrong: {error}") from error
        raise AccessDenied(f"{call} was refused; grant access (in S3: {right}) to {store.url}: {error}") from error


def _remove_quietly(store: ObjectStore, key: str) -> None:
    with contextlib.suppress(AccessDenied, StoreUnavailable, UnknownOutcome, NotFound):
        store.delete(key)
