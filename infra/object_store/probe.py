"""What the archive's safety rests on, proven on the real store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from infra.object_store.protocol import (
    NO_LEASE,
    AccessDenied,
    NotFound,
    ObjectStore,
    ObjectStoreError,
    PreconditionFailed,
    ProbeFailed,
    StoreUnavailable,
    UnknownOutcome,
)
from neve.entropy import Entropy, system_entropy, unique_name

PROBE_RACERS = 4


def probe(store: ObjectStore, entropy: Entropy = system_entropy) -> None:
    """Prove on the real store what the fence rests on: one winner in a race of conditional PUTs; read; delete."""
    key = f".probe-{unique_name(entropy)}"  # hidden from Hadoop readers, and no folder remains

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
