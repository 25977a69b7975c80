"""`neve.archive.open` and its readers: what they can't give is said."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from neve.archive.catalog import Location
from neve.archive.journal import Commit, Gap
from neve.archive.reader import NotCommitted, TopicReader
from tests.unit.archive.test_catalog_work import filled, name_of


@pytest.fixture
def _offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records without their objects: each is its offset."""

    def records(self: TopicReader, location: Location, offset: int) -> Iterator[Any]:
        yield from range(offset, location.last + 1)

    monkeypatch.setattr(TopicReader, "_records", records)


@pytest.mark.usefixtures("_offsets")
def test_a_range_that_is_not_committed_yet_ends_the_reading_and_says_so() -> None:
    catalog = filled(1)
    catalog.apply(1, Commit(round=2, names=[name_of(2)]))
    reader = TopicReader(None, catalog, "t")  # type: ignore[arg-type]
    found: list[object] = []
    with pytest.raises(NotCommitted, match="queue 0: offset 5 lies in a round that is not committed yet"):
        for record in reader.read_raw(0):
            found.append(record)
    assert found == [0, 1, 2, 3, 4]
    catalog.apply(2, Gap(topic="t", queue=0, first=5, last=6, reason="lost"))
    with pytest.raises(NotCommitted, match="offset 7"):
        list(reader.read_raw(0, 6))
    catalog.apply(3, Commit(round=3, names=[name_of(1)]))
    everything: list[object] = list(reader.read_raw(0))
    assert everything == list(range(15))
    assert list(reader.read_raw(0, 15)) == []
    assert list(reader.read_raw(7)) == []


@pytest.mark.parametrize("missing", ["pyarrow", "numpy"])
def test_without_its_extra_the_library_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import neve.archive; neve.archive.open('dir:.')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    last = ended.stderr.strip().splitlines()[-1]
    assert last == f"ImportError: reading an archive needs {missing}: pip install 'neve[archive]'"
    assert "ModuleNotFoundError" not in ended.stderr
