"""Tests that engines which resolve columns by Parquet field ids can read archive objects."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow.parquet as pq

from neve.archive.rows.schema import FIELD_ID, SCHEMA
from tests.unit.archive.format_page import ids

OBJECT = Path(__file__).with_name("golden.parquet")


def test_object_has_the_ids_and_types_of_the_schema_without_arrow_metadata() -> None:
    with pq.ParquetFile(OBJECT) as file:
        assert ids(file.schema_arrow) == ids(SCHEMA)
        assert file.schema_arrow.remove_metadata() == SCHEMA
        assert b"ARROW:schema" not in file.metadata.metadata


def test_pyarrow_reports_the_ids_of_columns() -> None:
    by_id = {int(field.metadata[FIELD_ID.encode()]): field.name for field in pq.read_table(OBJECT).schema}
    assert by_id[10] == "body"


def test_duckdb_finds_renamed_columns_by_their_ids() -> None:
    query = """
        SELECT place, content, named FROM read_parquet(?, schema = MAP {
            2: {name: 'place', type: 'BIGINT', default_value: NULL},
            10: {name: 'content', type: 'BLOB', default_value: NULL},
            8: {name: 'named', type: 'MAP(VARCHAR, VARCHAR)', default_value: NULL}
        })
    """
    columns = pq.read_table(OBJECT).select(["queue_offset", "body", "properties"]).to_pylist()
    expected = [(row["queue_offset"], row["body"], dict(row["properties"])) for row in columns]
    assert len(expected) == 5
    assert duckdb.connect().execute(query, [str(OBJECT)]).fetchall() == expected
