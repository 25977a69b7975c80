"""Tests of log formatting: names chosen by clients cannot forge log lines."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from infra.observe import log as logs

FORGED = "x\n2026-01-01 00:00:00,000 CRITICAL broker the disk is on fire\r\x1b[2K\x85\u2028end"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    stream, root = io.StringIO(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr("sys.stderr", stream)
    logs.configure("INFO")
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def test_log_event_is_one_bounded_line_for_any_content(written: io.StringIO) -> None:
    logging.getLogger("room").warning("topic %s is refused", FORGED)
    logging.getLogger("room").warning("%s", "y" * 1_000_000)
    first, second = written.getvalue().splitlines()
    assert "is refused" in first
    assert "\\n2026" in first
    assert "\\x1b[2K" in first
    assert len(second) < 10_000


def test_traceback_lines_are_indented(written: io.StringIO) -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        logging.getLogger("room").exception("failed")
    first, *rest = written.getvalue().splitlines()
    assert first.endswith("ERROR room failed")
    assert len(rest) > 2
    assert all(line.startswith("  ") for line in rest)
