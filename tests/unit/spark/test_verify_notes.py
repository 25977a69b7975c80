"""Tests of the notes of an interrupted verification: only the same verification can resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from neve.archive.read.verify import Fault
from neve.spark.verify_notes import OtherCheck, VerifyNotes
from tests.kit.archive.written_rows import row, written

NAME, _ = written([[row(0, 0)]], "orders")
FAULT = Fault("orders", NAME.key, "an error of a library: caf\u00e9\u2028", 0, 1, 2)


def test_notes_of_a_quick_check_are_refused_by_a_deep_one(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    VerifyNotes(file, "dir:/a", deep=False).add([(NAME, [])])
    with pytest.raises(OtherCheck, match='"deep": false'):
        VerifyNotes(file, "dir:/a", deep=True)
    assert VerifyNotes(file, "dir:/a", deep=False).faults_of(NAME) == []


def test_notes_truncated_anywhere_resume_with_the_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    VerifyNotes(file, "dir:/a", deep=True).add([(NAME, [FAULT])])
    whole = file.read_bytes()
    head = whole.index(b"\n") + 1
    for end in range(head, len(whole) + 1):
        file.write_bytes(whole[:end])
        assert VerifyNotes(file, "dir:/a", deep=True).faults_of(NAME) == ([FAULT] if end >= len(whole) - 1 else None)
        VerifyNotes(file, "dir:/a", deep=True).add([(NAME, [FAULT])])
        assert VerifyNotes(file, "dir:/a", deep=True).faults_of(NAME) == [FAULT]


def test_file_without_notes_is_refused_and_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    for data in (b"caf\xe9, and more\n", b'{"store": "dir:/b", "deep": true}\n', b'{"store": "dir:/a"}\n'):
        file.write_bytes(data)
        with pytest.raises(OtherCheck, match="belongs to another check"):
            VerifyNotes(file, "dir:/a", deep=True)
        assert file.read_bytes() == data
