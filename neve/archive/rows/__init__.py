"""Parquet rows: their schema, encoding of stored records and rebuilding of records byte for byte. Pure."""
