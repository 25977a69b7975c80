"""Engines that find columns by Parquet's field ids find them, also beside objects that were written without."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from neve.archive.rows.schema import FIELD_ID, SCHEMA
from tests.unit.archive.test_format_page import ids

OLD, NEW = (Path(__file__).with_name(name) for name in ("golden.parquet", "golden-with-ids.parquet"))


def test_an_object_has_the_ids_of_the_schema_and_its_types_without_arrows_own_copy() -> None:
    with pq.ParquetFile(NEW) as file:
        assert ids(file.schema_arrow) == ids(SCHEMA)
        assert file.schema_arrow.remove_metadata() == SCHEMA
        assert b"ARROW:schema" not in file.metadata.metadata
    with pq.ParquetFile(OLD) as file:
        assert file.schema_arrow.remove_metadata() == SCHEMA
        assert not [field for field in file.schema_arrow if field.metadata]


def test_pyarrow_finds_columns_by_their_ids() -> None:
    table = pq.read_table(NEW)
    by_id = {int(field.metadata[FIELD_ID.encode()]): field.name for field in table.schema}
    assert by_id[10] == "body"
    assert table.column(by_id[10]).to_pylist() == pq.read_table(OLD).column("body").to_pylist()


def test_duckdb_finds_columns_by_their_ids_whatever_they_are_called() -> None:
    query = """
        SELECT place, content, named FROM read_parquet(?, schema = MAP {
            2: {name: 'place', type: 'BIGINT', default_value: NULL},
            10: {name: 'content', type: 'BLOB', default_value: NULL},
            8: {name: 'named', type: 'MAP(VARCHAR, VARCHAR)', default_value: NULL}
        })
    """
    columns = pq.read_table(OLD).select(["queue_offset", "body", "properties"]).to_pylist()
    expected = [(row["queue_offset"], row["body"], dict(row["properties"])) for row in columns]
    assert len(expected) == 5
    connection = duckdb.connect()
    assert connection.execute(query, [str(NEW)]).fetchall() == expected
    without = connection.execute(query, [str(OLD)]).fetchall()
    assert without == [(None, None, None)] * 5, "the page says that they need a name mapping"


def test_objects_with_and_without_ids_are_one_table() -> None:
    paths = [str(OLD), str(NEW)]
    table = ds.dataset(paths, format="parquet").to_table()
    old = pq.read_table(OLD).replace_schema_metadata(None)
    new = pa.table(pq.read_table(NEW).columns, old.schema)
    assert table.replace_schema_metadata(None).cast(old.schema).equals(pa.concat_tables([old, new]))
    query = "SELECT count(*), count(DISTINCT body) FROM read_parquet(?)"
    assert duckdb.connect().execute(query, [paths]).fetchall() == [(10, 5)]
