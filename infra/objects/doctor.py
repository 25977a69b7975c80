"""The checks of `neve doctor --store`, which imports this module by its name."""

from __future__ import annotations

from collections.abc import Iterator

from infra.clock import Clock, SystemClock
from infra.objects.open import open_store
from infra.objects.probe import probe_steps
from infra.objects.s3 import S3Store
from infra.objects.store import ObjectStore, ObjectStoreError
from neve.archive.store.url import BadUrl, DirUrl, parse_store_url
from neve.cli.checks import FAIL, OK, WARN, Check, check_directory

CLOCK_APART_MS = 300_000  # a larger difference of the clocks stops deletion


def check_store(url: str, clock: Clock | None = None) -> Iterator[Check]:
    """Check write, refusal of a second write, read, list and delete; for S3 also multipart uploads.

    A directory is only inspected and not created, since the broker may run as another user. Raises BadStoreUrl.
    """
    try:
        where = parse_store_url(url)
    except BadUrl:
        where = None  # `open_store` raises the error
    if isinstance(where, DirUrl):
        yield check_directory("store", where.path)
        return
    store = open_store(url)
    steps = probe_steps(store)
    for step in steps:
        yield Check(f"store: {step.name}", OK if step.error is None else FAIL, str(step.error or ""))
    if steps[0].error is None and isinstance(store, S3Store):
        yield _check_multipart(store)
    if steps[0].error is None:
        yield _check_clock(store, clock or SystemClock())


def _check_multipart(store: S3Store) -> Check:
    try:
        store.check_multipart_rights()
    except ObjectStoreError as error:
        return Check("store: multipart uploads", FAIL, str(error))
    return Check("store: multipart uploads", OK, "")


def _check_clock(store: ObjectStore, clock: Clock) -> Check:
    try:
        remote = store.now_ms()
    except ObjectStoreError as error:
        return Check("store: clock", FAIL, str(error))
    if remote is None:
        return Check("store: clock", WARN, "the store reports no time")
    apart = abs(remote - clock.now_ms())
    return Check(
        "store: clock",
        OK if apart < CLOCK_APART_MS else FAIL,
        f"{apart / 1000:.0f} s apart from this machine's clock",
    )
