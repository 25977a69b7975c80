"""Uploads of a round in the broker: concurrent requests to a worker, and their outcomes.

If a worker dies, all of its requests are lost, and a single object may be the cause. So each object in progress is
requested again alone, one after another, before anything else. If a worker dies during such a request, its successor
gets the same request first. If that one dies as well, the object fails. An upload may have reached the store before its
worker died; the next worker adopts the object that it finds.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from neve.archive.format.journal import PlannedObject
from tiered.worker import frames
from tiered.worker.failed import MadeRoom, WorkerFailed, of_an_upload
from tiered.worker.patience import Patience
from tiered.write.uploader import EncodeFailed, NamedEntries, Outcome

#: After this many deaths, the next one fails the object. The first, in a group, and the second, alone, may be chance.
_DEATHS = 2


class UploadBatch(NamedTuple):
    """Objects of one request. `deaths`: number of workers that died during it."""

    objects: Sequence[NamedEntries]
    files: Sequence[tuple[str, int, int]]
    deaths: int = 0


class _UnderWay(NamedTuple):
    wanted: UploadBatch
    number: int


class Pipeline:
    """The `Uploads` of one round, for use by one thread."""

    def __init__(
        self,
        store_url: str,
        metadata: Mapping[str, str],
        work_dir: str,
        *,
        submit: Callable[[frames.EncodeUpload, int], Future[Any]],
        patience: Patience,
        hangs: Callable[[], None],
        notify: Callable[[frames.GiveUp], None],
        gives_way: Callable[[], bool] = lambda: False,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the pipeline with the client's methods.

        Args:
            patience: the time limit for answers. After it, `hangs` is called.
            gives_way: whether the worker should be replaced by a successor. That happens when no request is in
                progress, so no further request is sent until then.
            make_room: replaces the worker at once; its requests in progress are lost.
        """
        self._store_url, self._metadata, self._work_dir = store_url, dict(metadata), work_dir
        self._submit, self._patience, self._hangs, self._notify = submit, patience, hangs, notify
        self._gives_way, self._make_room = gives_way, make_room
        self._suspects: deque[UploadBatch] = deque()
        self._wanted: deque[UploadBatch] = deque()
        self._under_way: dict[Future[Any], _UnderWay] = {}
        self._settled: list[tuple[PlannedObject, Outcome]] = []
        self._given_up = False

    def begin(self, objects: Sequence[NamedEntries], files: Sequence[tuple[str, int, int]]) -> None:
        self._wanted.append(UploadBatch(objects, files))
        self._ask_next()

    def done(self) -> Sequence[tuple[PlannedObject, Outcome]]:
        while not self._settled and self._under_way:
            ended, waited = self._patience.first_of(self._under_way, self._starves)
            if not ended:
                self._hung(waited)
            for future in [future for future in self._under_way if future in ended]:
                self._ended(future, self._under_way.pop(future).wanted)
            self._ask_next()
        settled, self._settled = self._settled, []
        return settled

    def give_up(self) -> None:
        self._given_up = True
        for wanted in (*self._suspects, *self._wanted):
            self._fail(wanted, of_an_upload(WorkerFailed("GivenUp", "not begun")))
        self._suspects.clear()
        self._wanted.clear()
        if self._under_way:
            self._notify(frames.GiveUp(max(one.number for one in self._under_way.values())))

    # ---- requests

    def _ask_next(self) -> None:
        while self._suspects and not self._under_way:
            self._ask(self._suspects.popleft())
        while self._wanted and not self._suspects and not self._has_suspect():
            if self._under_way and self._gives_way():
                return
            self._ask(self._wanted.popleft())

    def _has_suspect(self) -> bool:
        return any(one.wanted.deaths for one in self._under_way.values())

    def _ask(self, wanted: UploadBatch) -> None:
        request, arrays = described(wanted, self._store_url, self._metadata, self._work_dir)
        try:
            descriptor = frames.shared([array.data for array in arrays])
            try:
                future = self._submitted(request, descriptor)
            finally:
                os.close(descriptor)
        except WorkerFailed as error:
            self._fail(wanted, of_an_upload(error))
        except OSError as error:  # no memory or descriptor for the request, or no process can be started
            self._fail(wanted, EncodeFailed(f"no worker for {wanted.objects[0].name.key}: {error}"))
        else:
            self._under_way[future] = _UnderWay(wanted, request.id)
            self._patience.uploads(int(arrays[1].sum(dtype=np.int64)), future)

    def _submitted(self, request: frames.EncodeUpload, descriptor: int) -> Future[Any]:
        try:
            return self._submit(request, descriptor)
        except ConnectionError:  # the worker has just ended; this attempt starts a new one
            return self._submit(request, descriptor)

    def _starves(self) -> None:
        """Replace a worker without a processor, if the successor has another priority."""
        if self._gives_way() and not self._given_up:
            self._make_room()

    # ---- outcomes

    def _ended(self, future: Future[Any], wanted: UploadBatch) -> None:
        error = future.exception()
        if error is None:
            self._answered(wanted, future.result())
        elif isinstance(error, MadeRoom) and not self._given_up:
            (self._suspects if wanted.deaths else self._wanted).append(wanted)  # it was not the cause
        elif not isinstance(error, ConnectionError):
            assert isinstance(error, WorkerFailed), error
            self._fail(wanted, of_an_upload(error))
        elif wanted.deaths == _DEATHS or self._given_up:
            self._fail(wanted, of_an_upload(WorkerFailed("WorkerDied", str(error))))
        elif wanted.deaths:
            self._suspects.appendleft(wanted._replace(deaths=wanted.deaths + 1))
        else:
            self._suspects += [UploadBatch([one], wanted.files, deaths=1) for one in wanted.objects]

    def _answered(self, wanted: UploadBatch, answer: frames.Uploaded) -> None:
        for (name, _), outcome in zip(wanted.objects, answer.outcomes, strict=True):
            if isinstance(outcome, frames.Committed):
                self._settled.append((name, outcome.name))
            else:
                self._settled.append((name, of_an_upload(WorkerFailed(outcome.kind, outcome.message))))

    def _hung(self, seconds: float) -> None:
        """Fail all requests in progress: none was answered in the time allowed for all of them."""
        silent, self._under_way = list(self._under_way.values()), {}
        self._hangs()
        for one in silent:
            error = WorkerFailed("StoreUnavailable", f"the tier worker has not answered for {seconds:.0f} s")
            self._fail(one.wanted, of_an_upload(error))

    def _fail(self, wanted: UploadBatch, error: Exception) -> None:
        self._settled += [(name, error) for name, _ in wanted.objects]


def described(
    wanted: UploadBatch, store_url: str, metadata: dict[str, str], work_dir: str
) -> tuple[frames.EncodeUpload, tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]]:
    """Return the request, and its arrays: the CommitLog offsets and sizes of the entries."""
    objects: list[frames.ObjectToWrite] = []
    physical: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    sizes: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)]
    for name, entries in wanted.objects:
        filled = [(queue, run) for queue, run in sorted(entries.items()) if len(run.physical)]
        runs = [(queue, int(run.first_offset), len(run.physical)) for queue, run in filled]
        objects.append(frames.ObjectToWrite(name, runs))
        physical += [run.physical for _, run in filled]
        sizes += [run.sizes for _, run in filled]
    arrays = np.concatenate(physical).astype(np.int64), np.concatenate(sizes).astype(np.int32)
    return frames.EncodeUpload(0, store_url, objects, list(wanted.files), metadata, work_dir), arrays
