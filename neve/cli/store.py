"""Opens archive stores; a wrong URL is wrong usage."""

from __future__ import annotations

import click

from neve.archive.store import source
from neve.archive.store.source import Source

__all__ = ["Source", "open_source"]


def open_source(url: str) -> Source:
    """Open a store: `dir:PATH` or `s3://BUCKET/PREFIX?endpoint=URL&region=NAME`."""
    try:
        return source.open_source(url)
    except source.BadSource as error:
        raise click.UsageError(str(error)) from error
