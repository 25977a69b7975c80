"""Tests that the key index is filled in small batches, because other clients wait for each batch."""

from __future__ import annotations

from typing import Any

import pytest

from broker.store.key_index import IndexFile
from tests.kit.store.small_store import OpenStore, put_one

MESSAGES = 1_000


def test_append_indexes_few_keys_in_one_turn(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    add, added = IndexFile.add, list[int]()

    def counted(self: IndexFile, hashes: Any, *columns: Any) -> int:
        added.append(add(self, hashes, *columns))
        return added[-1]

    monkeypatch.setattr(IndexFile, "add", counted)
    store = open_store(index_entries=10_000)
    for number in range(MESSAGES):
        put_one(store, keys=f"k{number}")
    assert max(added) <= 128
    assert sum(added) > MESSAGES - 128
