"""Columns, file metadata and journal entries on `docs/reference/archive-format.md` equal those of the code."""

from __future__ import annotations

import re
from typing import get_args

import pyarrow as pa

from neve.archive.format.journal import AnyEntry, Entry
from neve.archive.format.keys import topic_component
from neve.archive.rows.schema import FILTERED, SCHEMA, STATISTICS, ObjectFacts, file_metadata
from tests.unit.archive.format_page import PAGE, ids, names, table

TYPES = {
    "int32": pa.int32(),
    "int64": pa.int64(),
    "timestamp(ms, UTC)": pa.timestamp("ms", tz="UTC"),
    "string": pa.string(),
    "list<string>": pa.list_(pa.field("element", pa.string())),
    "map<string, string>": pa.map_(pa.string(), pa.string()),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
}


def test_page_lists_the_schema_columns_in_order() -> None:
    rows = table("column")
    documented = [(name, TYPES[row[1]]) for row in rows for name in names(row[0])]
    assert sorted(documented) == sorted((field.name, field.type) for field in SCHEMA)
    order = [field.name for field in SCHEMA]
    assert [names(row[0])[0] for row in rows] == [name for name in order if name in {names(row[0])[0] for row in rows}]


def test_column_ids_match_the_page_and_are_unique() -> None:
    documented: dict[str, int] = {}
    for row in table("column"):
        own, _, nested = row[2].partition(";")
        documented |= dict(zip(names(row[0]), map(int, own.split(",")), strict=True))
        documented |= {name: int(number) for name, number in re.findall(r"(\w+) (\d+)", nested)}
    assert ids(SCHEMA) == documented
    assert sorted(documented.values()) == list(range(1, len(documented) + 1))


def test_page_names_columns_with_statistics_and_filters() -> None:
    statistics, _, filters = PAGE.split("statistics on")[1].partition("; bloom filters on ")
    assert names(statistics) == STATISTICS
    assert names(filters)[: len(FILTERED)] == list(FILTERED)


def test_page_names_all_file_metadata() -> None:
    facts = ObjectFacts("c", "b", "t", "2026-01-01", 1, 0, 1)
    written = file_metadata(facts, "0" * 64, [])
    assert {name for row in table("metadata") for name in names(row[0])} == set(written)


def test_page_lists_every_entry_and_the_common_fields() -> None:
    tags = {kind.__struct_config__.tag for kind in get_args(AnyEntry)}
    assert {name for row in table("entry") for name in names(row[0])} == tags
    carried = PAGE.split("Every entry carries ")[1].split(".")[0]
    assert set(Entry.__struct_fields__) == set(names(carried))


def test_page_examples_of_topic_components_are_correct() -> None:
    def spelt(cell: str) -> str:
        """Expand a notation like "`a` and 3 times `b` and `c`" to "abbbc"."""
        return "".join(part * int(count or 1) for count, part in re.findall(r"(?:(\d+) times )?`([^`]+)`", cell))

    rows = table("topic")
    assert len(rows) == 4
    for topic, component in rows:
        assert topic_component(spelt(topic)) == spelt(component)
