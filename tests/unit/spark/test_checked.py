"""What a check that was broken off has noted is taken over by the same check, and by no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from neve.archive.read.verify import Fault
from neve.spark.jobs.checked import Checked, OtherCheck
from tests.unit.archive.test_verify_rows import row, written

NAME, _ = written([[row(0, 0)]], "orders")
FAULT = Fault("orders", NAME.key, "what a library says: caf\u00e9\u2028", 0, 1, 2)


def test_a_quick_check_is_not_taken_for_one_that_read_the_objects(tmp_path: Path) -> None:
    note = tmp_path / "note"
    Checked(note, "dir:/a", deep=False).add([(NAME, [])])
    with pytest.raises(OtherCheck, match='"deep": false'):
        Checked(note, "dir:/a", deep=True)
    assert Checked(note, "dir:/a", deep=False).faults_of(NAME) == []


def test_what_was_noted_is_what_is_taken_over_whatever_is_cut_off_at_the_end(tmp_path: Path) -> None:
    note = tmp_path / "note"
    Checked(note, "dir:/a", deep=True).add([(NAME, [FAULT])])
    whole = note.read_bytes()
    head = whole.index(b"\n") + 1
    for end in range(head, len(whole) + 1):
        note.write_bytes(whole[:end])
        assert Checked(note, "dir:/a", deep=True).faults_of(NAME) == ([FAULT] if end >= len(whole) - 1 else None)
        Checked(note, "dir:/a", deep=True).add([(NAME, [FAULT])])
        assert Checked(note, "dir:/a", deep=True).faults_of(NAME) == [FAULT]


def test_a_file_of_something_else_is_refused_and_left(tmp_path: Path) -> None:
    note = tmp_path / "note"
    for data in (b"caf\xe9, and more\n", b'{"store": "dir:/b", "deep": true}\n', b'{"store": "dir:/a"}\n'):
        note.write_bytes(data)
        with pytest.raises(OtherCheck, match="not of this check"):
            Checked(note, "dir:/a", deep=True)
        assert note.read_bytes() == data
