"""Which rows of an archive a table has, gets and loses, and in which files, as arithmetic. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from neve.archive.format.journal import ERASED
from neve.spark.jobs.table_log import Commit, Span, TableFile
from neve.spark.planning.rows import Rows, minus, rows_of, runs_of, union
from neve.spark.planning.slices import Slice

if TYPE_CHECKING:
    from neve.archive.catalog.catalog import Catalog
    from neve.archive.format.journal import CommittedObject


class Written(NamedTuple):
    """A file that lies in the staging, and what it has."""

    key: str
    day: str
    size: int
    rows: int
    spans: tuple[Span, ...]


class Output(NamedTuple):
    """What came of rows: files, and of how many rows. A table of a half of them has the fewer."""

    files: list[Written]
    seen: int


def went(rows: Mapping[str, Rows], known: Mapping[str, Catalog], topic: str, *, expired: bool) -> dict[str, Rows]:
    """Those of a table's rows, by broker, that were erased, or have expired. A broker that is not known loses none."""
    gone: dict[str, Rows] = {}
    for broker, of_broker in rows.items():
        if broker not in known:
            continue
        catalog = known[broker]
        below = {queue: catalog.recorded_minimum(topic, queue) if expired else 0 for queue in of_broker.get(topic, {})}
        erased = rows_of(
            (topic, gap.queue, gap.first, gap.last) for gap in catalog.gaps(topic) if gap.reason.startswith(ERASED)
        )
        too_old = rows_of((topic, queue, 0, minimum - 1) for queue, minimum in below.items())
        found = minus(of_broker, minus(of_broker, union(erased, too_old)))
        if found:
            gone[broker] = found
    return gone


def hit(state: Commit, gone: Mapping[str, Rows]) -> tuple[list[TableFile], list[TableFile]]:
    """(files that have nothing else, files that may have something else) of those that may have such rows."""
    topic = state.settings["topic"]
    whole: list[TableFile] = []
    cut: list[TableFile] = []
    for file in state.files:
        left = hits = False
        for span in file.spans:
            of_span = rows_of([(topic, span.queue, span.first, span.last)])
            of_table = state.rows.get(span.broker, {})
            there = minus(of_span, minus(of_span, of_table))
            remaining = minus(there, gone.get(span.broker, {}))
            left |= bool(remaining)
            hits |= remaining != there
        if hits:
            (cut if left else whole).append(file)
    return whole, cut


def rows_in(slices: Iterable[Slice], names: Mapping[str, CommittedObject], topic: str) -> dict[str, Rows]:
    """Which offsets the rows of these slices are, by broker."""
    found: dict[str, list[tuple[str, int, int, int]]] = {}
    for one in slices:
        groups = names[one.key].row_groups
        for cut in one.cuts:
            row = 0
            for queue, first, last in groups[cut.group].runs:
                for low, high in cut.spans:
                    begin, end = max(low, row), min(high, row + last - first)
                    if begin <= end:
                        found.setdefault(one.broker, []).append((topic, queue, first + begin - row, first + end - row))
                row += last - first + 1
    return {broker: rows_of(runs) for broker, runs in found.items()}


def sorted_out(
    slices: Iterable[Slice], names: Mapping[str, CommittedObject]
) -> tuple[list[CommittedObject], list[Slice]]:
    """(objects of which all rows are wanted, the other slices). The JVM reads the first, and faster."""
    by_key: dict[str, list[Slice]] = {}
    for one in slices:
        by_key.setdefault(one.key, []).append(one)
    whole, parts = [], []
    for key, several in by_key.items():
        wanted = sum(last - first + 1 for one in several for cut in one.cuts for first, last in cut.spans)
        if key in names and wanted == names[key].rows:
            whole.append(names[key])
        else:
            parts += several
    return whole, parts


def positions_of(rows: Mapping[str, Rows]) -> list[tuple[str, int, int, int]]:
    """(broker, queue, first, last) of rows by broker."""
    return [(broker, *run[1:]) for broker, of_broker in rows.items() for run in runs_of(of_broker)]
