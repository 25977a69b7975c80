"""Query an archived topic with DuckDB. It needs no broker and no Java.

neve archive offload --roll && python examples/duckdb_query.py
"""

import duckdb

import neve.archive

STORE = "dir:/tmp/neve-archive"

orders = neve.archive.dataset(STORE, "orders")
query = """
    SELECT tags, count(*) AS orders, sum((decode(body)->>'$.amount')::DOUBLE) AS amount
    FROM orders GROUP BY tags ORDER BY tags
"""
print(duckdb.sql(query))
