"""Reads of a cold reader that block the caller's thread."""

from __future__ import annotations

from tiered.read.cold_reader import ColdReader, ColdResult, ColdUnavailable
from tiered.read.read_request import ReadRequest


def read_cold(reader: ColdReader, read: ReadRequest) -> ColdResult:
    """Read in all three steps, as the broker does without blocking. Raises ColdUnavailable."""
    located = reader.locate(read)
    if isinstance(located, ColdResult):
        return located
    try:
        decoded = located.decoded.result()
    except ColdUnavailable:
        if not reader.has_moved(located):
            raise
        return read_cold(reader, read)
    return reader.take(located, decoded, read)
