"""The files of a replay: atomic and durable, locked by one process, and cancellation."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

from neve.copy.task import CopyTarget, Filters, Range, Task
from neve.copy.task_files import BadName, Busy, TaskBook


def task(name: str = "r1") -> Task:
    return Task(
        name=name,
        source="orders",
        target=CopyTarget(topic="other"),
        namesrv="a:1",
        to_namesrv="b:1",
        filters=Filters(tags=("A",), since=5),
        rate=0.5,
        ranges=[Range("broker-a", 0, 0, 10, 4)],
    )


def test_saved_task_round_trips(tmp_path: Path) -> None:
    book = TaskBook(tmp_path / "deep" / "er")
    assert book.names() == []
    book.save(task())
    assert book.load("r1") == task()
    assert book.names() == ["r1"]
    assert (task().left, task().report()["left_offsets"]) == (6, 6)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b", "x" * 101])
def test_invalid_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadName):
        TaskBook(tmp_path).load(name)


def test_invalid_and_missing_task_files_are_errors(tmp_path: Path) -> None:
    (tmp_path / "r1.json").write_text('{"name": 1}')
    with pytest.raises(ValueError, match=r"r1\.json is not a task"):
        TaskBook(tmp_path).load("r1")
    with pytest.raises(FileNotFoundError, match="replay r2 does not exist"):
        TaskBook(tmp_path).load("r2")


def test_task_is_locked_by_one_process_and_cancelled_by_another(tmp_path: Path) -> None:
    book, other = TaskBook(tmp_path), TaskBook(tmp_path)
    book.save(task())
    with book.locked("r1"):
        assert other.is_locked("r1")
        with pytest.raises(Busy), other.locked("r1"):
            raise AssertionError
        with pytest.raises(Busy):
            other.forget("r1")
        assert not book.is_to_cancel("r1")
        assert other.cancel("r1").state == "running"
        assert book.is_to_cancel("r1")
        book.settle_cancel("r1")
        assert not book.is_to_cancel("r1")
    assert not other.is_locked("r1")
    assert other.cancel("r1").state == "cancelled"
    assert book.load("r1").state == "cancelled"
    other.forget("r1")
    assert list(tmp_path.iterdir()) == []


def test_lock_is_retaken_if_its_file_was_deleted_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book, other = TaskBook(tmp_path), TaskBook(tmp_path)
    book.save(task())
    flock, forgets = fcntl.flock, [lambda: other.forget("r1")]

    def another_is_quicker(file: Any, operation: int) -> None:
        if forgets:
            forgets.pop()()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", another_is_quicker)
    with book.locked("r1"):
        assert not forgets
        assert other.is_locked("r1")
