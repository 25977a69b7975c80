"""`neve archive verify --store`: checks an archive without a broker."""

from __future__ import annotations

from neve.archive.catalog.journal_reader import catalogs
from neve.archive.read.verify import verify
from neve.cli.store import open_source


def verify_store(store: str, broker: str | None, *, deep: bool) -> tuple[list[str], dict[str, int]]:
    """Return the findings, and the number of checked objects and rows."""
    source = open_source(store)
    findings: list[str] = []
    objects = rows = 0
    # A deep check takes hours, after which objects of the newest checkpoint may be deleted.
    for name, catalog in sorted(catalogs(source, broker, whole=deep).items()):
        report = verify(catalog, source, deep=deep)
        findings += (f"broker {name}: {text}" for text in report.problems)
        objects += report.objects
        rows += report.rows
    return findings, {"objects": objects, "rows": rows}
