"""Parse the tables of docs/reference/archive-format.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from neve.archive.rows.schema import FIELD_ID

_REFERENCE = Path(__file__).parents[3] / "docs" / "reference"
PAGE = (_REFERENCE / "archive-format.md").read_text("utf-8")
GOLDEN_PAGE = (_REFERENCE / "archive-golden-bytes.md").read_text("utf-8")


def table(first_cell: str) -> list[list[str]]:
    """Return the rows of the table whose header starts with this cell."""
    text = PAGE.split(f"| {first_cell} |")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def ids(fields: Iterable[pa.Field]) -> dict[str, int]:
    """Return the ids of fields and nested fields. Raises an error if a field has none."""
    found: dict[str, int] = {}
    for field in fields:
        found[field.name] = int(field.metadata[FIELD_ID.encode()])
        if pa.types.is_list(field.type):
            found |= ids([field.type.value_field])
        if pa.types.is_map(field.type):
            found |= ids([field.type.key_field, field.type.item_field])
    return found
