"""Tests of `neve.archive.open` and its readers, with their errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from neve.archive.catalog.catalog import Catalog, Location
from neve.archive.format.journal import Commit, Gap
from neve.archive.read.reader import NotCommitted, TopicReader
from tests.unit.archive.hourly_catalog import HOUR, filled, name_of


@pytest.fixture
def _offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace reads of objects: the record of each offset is the offset itself."""

    def records(self: TopicReader, location: Location, offset: int) -> Iterator[Any]:
        yield from range(offset, location.last + 1)

    monkeypatch.setattr(TopicReader, "_records", records)


@pytest.mark.usefixtures("_offsets")
def test_reading_raises_not_committed_at_an_open_range() -> None:
    catalog = filled(1)
    catalog.apply(1, Commit(round=2, names=[name_of(2)]))
    reader = TopicReader(None, catalog, "t")  # type: ignore[arg-type]
    found: list[object] = []
    with pytest.raises(NotCommitted, match="queue 0: offset 5 is in a round that is not committed yet"):
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


def test_reader_span_follows_row_group_times_that_run_backwards() -> None:
    """Objects have five offsets each. Their times in hours are 0, 5, 2, unknown, 3 and, after a gap, 4."""
    names = []
    for number, hour in enumerate([0, 5, 2, None, 3, None, 4]):
        if number == 5:
            continue
        name = name_of(number, queues=1)
        time = -1 if hour is None else hour * HOUR
        (group,) = name.row_groups
        names.append(replace(name, row_groups=[replace(group, oldest_ms=time, newest_ms=time)]))
    catalog = Catalog()
    catalog.apply(0, Commit(round=1, names=names[:3]))
    reader = TopicReader(None, catalog, "t")  # type: ignore[arg-type]
    assert reader.span(0, 3 * HOUR, None) == (5, 10)
    catalog.apply(1, Commit(round=2, names=names[4:]))
    assert reader.span(0, 4 * HOUR, None) == (5, 35), "offsets 15 .. 19 are not committed: reading them is an error"
    catalog.apply(2, Commit(round=3, names=names[3:4]))
    catalog.apply(3, Gap(topic="t", queue=0, first=25, last=29, reason="lost"))
    assert reader.span(0, 4 * HOUR, None) == (5, 35)
    assert reader.span(0, 5 * HOUR, None) == (5, 20), "a row group of unknown time may hold any"
    assert reader.span(0, None, 3 * HOUR) == (0, 20)
    assert reader.span(0, 3 * HOUR, 4 * HOUR) == (15, 25)
    assert reader.span(0, 6 * HOUR, None) == (15, 20)
    assert reader.span(9, None, None) == (0, 0)


@pytest.mark.parametrize("missing", ["pyarrow", "numpy"])
def test_missing_extra_is_reported_with_its_install_command(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import neve.archive; neve.archive.open('dir:.')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    last = ended.stderr.strip().splitlines()[-1]
    assert last == f"ImportError: reading an archive needs {missing}: pip install 'neve[archive]'"
    assert "ModuleNotFoundError" not in ended.stderr
