"""Rewrite the assertions of helper modules, so that a failure shows the compared values."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "tests.kit", "tests.unit", "tests.integration", "tests.interop", "tests.differential", "tests.transcripts"
)
