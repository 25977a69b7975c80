"""Tests of concurrent upload requests: worker death, hanging workers and stops, per object."""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Any

import numpy as np
from typing_extensions import override

from infra.objects.store import StoreUnavailable
from infra.process.processor import ProcessorDemand
from neve.archive.format.journal import CommittedObject, PlannedObject
from tiered.worker import frames
from tiered.worker.failed import MadeRoom
from tiered.worker.patience import Patience
from tiered.worker.pipeline import Pipeline
from tiered.write.entry_run import PartOfRun
from tiered.write.uploader import EncodeFailed, NamedEntries


class Worker:
    """A worker that answers after `resume` and dies of the object `poison`."""

    def __init__(self, poison: str = "") -> None:
        self.poison = poison
        self.asked: list[str] = []
        self.pending: list[tuple[frames.EncodeUpload, Future[Any]]] = []
        self.hung = self.rooms = 0
        self.told: list[frames.GiveUp] = []
        self.patience = Patience(10.0, 2)
        self.is_to_give_way = False
        self.is_slow = True

    def submit(self, request: frames.EncodeUpload, descriptor: int) -> Future[Any]:
        total = sum(count for one in request.objects for _, _, count in one.runs)
        assert os.fstat(descriptor).st_size == 12 * total
        self.asked.append("".join(one.name.key for one in request.objects))
        request.id = len(self.asked)
        future: Future[Any] = Future()
        self.pending.append((request, future))
        if not self.is_slow:
            self.resume()
        return future

    def resume(self) -> None:
        """Let the worker answer or die, and answer at once from then on."""
        self.is_slow = False
        if any(one.name.key == self.poison for request, _ in self.pending for one in request.objects):
            self.die()
        else:
            self.answer()

    def die(self) -> None:
        dying, self.pending = self.pending, []
        for _, future in dying:
            future.set_exception(ConnectionError("the tier worker ended"))

    def answer(self) -> None:
        for request, future in self.pending:
            outcomes: list[Any] = [frames.Committed(committed(one.name), 0, 0) for one in request.objects]
            future.set_result(frames.Uploaded(request.id, outcomes, 0.0))
        self.pending = []

    def hangs(self) -> None:
        self.hung += 1
        self.die()

    def make_room(self) -> None:
        self.rooms += 1
        self.is_to_give_way = self.is_slow = False  # for later requests
        owed, self.pending = self.pending, []
        for _, future in owed:
            future.set_exception(MadeRoom("for another"))

    def pipeline(self) -> Pipeline:
        return Pipeline(
            "dir:/x", {}, "/tmp", submit=self.submit, patience=self.patience, hangs=self.hangs,
            notify=self.told.append, gives_way=lambda: self.is_to_give_way, make_room=self.make_room,
        )  # fmt: skip


def entries(key: str) -> NamedEntries:
    name = PlannedObject(key, key, "2026-01-02", 0, 100, {0: (0, 1)})
    return NamedEntries(name, {0: PartOfRun(0, np.array([0, 50]), np.array([50, 50], np.int32))})


def committed(name: PlannedObject) -> CommittedObject:
    return CommittedObject(
        key=name.key, topic=name.topic, day=name.day, start=0, end=100, size=1, footer=1, etag="", checksum=("", ""),
        sha256="", rows=2, wire_bytes=100, min_time=0, max_time=0, queues={0: (0, 1, 0)}, row_groups=[],
    )  # fmt: skip


def begin(pipeline: Pipeline, *groups: str) -> None:
    for group in groups:
        pipeline.begin([entries(key) for key in group], [])


def all_done(pipeline: Pipeline) -> dict[str, str]:
    found: dict[str, str] = {}
    while ended := pipeline.done():
        found.update({name.key: type(outcome).__name__ for name, outcome in ended})
    return found


def test_objects_are_grouped_in_concurrent_requests() -> None:
    worker = Worker()
    pipeline = worker.pipeline()
    begin(pipeline, "abc", "d", "ef")
    assert worker.asked == ["abc", "d", "ef"]
    worker.resume()
    assert all_done(pipeline) == dict.fromkeys("abcdef", "CommittedObject")


def test_only_the_object_that_crashes_a_worker_fails() -> None:
    worker = Worker(poison="e")
    pipeline = worker.pipeline()
    begin(pipeline, "abc", "def")
    worker.resume()
    assert all_done(pipeline) == {**dict.fromkeys("abcdf", "CommittedObject"), "e": EncodeFailed.__name__}
    assert worker.asked == ["abc", "def", *"abcdeef"], "the second time first of all, of a new worker"


def test_worker_that_dies_of_every_second_object_fails_none() -> None:
    class Forgetful(Worker):
        """A worker that dies after each object, like one out of memory."""

        made = 0

        @override
        def resume(self) -> None:
            self.is_slow = False
            self.made += sum(len(request.objects) for request, _ in self.pending)
            if self.made > 1:
                self.made = 0
                self.die()
            else:
                self.answer()

    worker = Forgetful()
    pipeline = worker.pipeline()
    begin(pipeline, "abc")
    worker.resume()
    assert all_done(pipeline) == dict.fromkeys("abc", "CommittedObject")
    assert worker.asked == ["abc", *"abbcc"]


def test_death_of_a_worker_without_cause_fails_no_object() -> None:
    worker = Worker()
    pipeline = worker.pipeline()
    begin(pipeline, "ab", "c")
    worker.die()
    worker.is_slow = False
    begin(pipeline, "d")
    assert all_done(pipeline) == dict.fromkeys("abcd", "CommittedObject")


def test_hanging_worker_fails_its_requests_and_is_killed_once() -> None:
    worker = Worker()
    pipeline = worker.pipeline()
    begin(pipeline, "ab", "c")
    worker.patience.seconds = 0.0
    assert all_done(pipeline) == dict.fromkeys("abc", StoreUnavailable.__name__)
    assert worker.hung == 1


def test_worker_to_be_replaced_gets_no_requests_until_idle() -> None:
    worker = Worker()
    pipeline = worker.pipeline()
    begin(pipeline, "ab", "c")
    worker.is_to_give_way = True
    begin(pipeline, "d", "e")
    assert worker.asked == ["ab", "c"]
    worker.answer()
    worker.is_slow = False
    assert all_done(pipeline) == dict.fromkeys("abcde", "CommittedObject")
    assert worker.asked == ["ab", "c", "d", "e"]


def test_starved_worker_hands_its_requests_to_the_next() -> None:
    worker = Worker()
    looks = 0

    def look() -> ProcessorDemand:
        nonlocal looks
        looks += 1
        worker.is_to_give_way = looks > 20  # like a backlog that needs a faster worker
        return ProcessorDemand(1, 0.0, wants_more=True)

    worker.patience = Patience(0.02, 2, look, check_seconds=0.002)
    pipeline = worker.pipeline()
    begin(pipeline, "ab", "c")
    assert all_done(pipeline) == dict.fromkeys("abc", "CommittedObject")
    assert (worker.asked, worker.hung, worker.rooms) == (["ab", "c", "ab", "c"], 0, 1), "it dies of nothing"


def test_cancelled_fetch_is_never_requested() -> None:
    worker = Worker()
    pipeline = worker.pipeline()
    begin(pipeline, "ab", "c")
    pipeline.give_up()
    assert [one.through for one in worker.told] == [2]
    worker.die()
    assert all_done(pipeline) == dict.fromkeys("abc", EncodeFailed.__name__)
    assert worker.asked == ["ab", "c"]


def test_missing_worker_process_fails_each_object() -> None:
    def none_to_be_had(request: frames.EncodeUpload, descriptor: int) -> Future[Any]:
        raise BlockingIOError("no more processes")

    worker = Worker()
    worker.submit = none_to_be_had  # type: ignore[method-assign]
    pipeline = worker.pipeline()
    begin(pipeline, "ab")
    assert all_done(pipeline) == dict.fromkeys("ab", EncodeFailed.__name__)
