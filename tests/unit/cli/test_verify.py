"""Tests of archive verification that uses only the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from neve.archive.read.verify import tiling_faults
from neve.cli import main
from neve.cli.verify import verify_store
from tests.kit.archive.growing_journal import TOPICS, GrowingJournal
from tests.unit.cli.written_archive import DATA, write_archive


def test_holes_and_overlaps_between_runs_are_reported() -> None:
    assert list(tiling_faults([(0, 9), (10, 19)], 0)) == []
    assert [one.message() for one in tiling_faults([(0, 9), (15, 19)], 0)] == ["hole at offsets 10…14"]
    assert list(tiling_faults([(0, 9), (15, 19), (10, 14)], 0)) == []
    assert [one.message() for one in tiling_faults([(0, 9), (15, 19), (10, 12)], 0)] == ["hole at offsets 13…14"]
    assert list(tiling_faults([(0, 9), (15, 19)], 15)) == []
    assert [one.message() for one in tiling_faults([(0, 9), (15, 19)], 12)] == ["hole at offsets 12…14"]
    assert [one.message() for one in tiling_faults([(0, 9), (5, 19)], 0)] == ["overlap at offsets 5…9"]
    assert list(tiling_faults([(0, 9), (5, 7)], 8)) == []


def test_deep_verify_continues_after_its_checkpoint_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = GrowingJournal()
    for topic in TOPICS:
        for name in journal.commit(topic, 5):
            journal.store.put(name.key, bytes(name.size))
    journal.checkpoint()
    store, late = journal.store, []

    def checkpoints_go(verb: str, key: str) -> None:
        if verb == "head" and "/journal/" not in key:
            for name in [one for one in store.objects if "/checkpoint/" in one]:
                del store.objects[name]
        late.extend([key] if verb == "get" and not any("/checkpoint/" in one for one in store.objects) else [])

    store.on_call = checkpoints_go
    monkeypatch.setattr("neve.archive.catalog.lazy_topics.AHEAD_BYTES", 1)
    monkeypatch.setattr("neve.cli.verify.open_source", lambda url: store)
    findings, looked_at = verify_store("memory:", "b", deep=True)
    assert looked_at["objects"] == 5 * len(TOPICS)
    assert not any("missing" in finding for finding in findings)
    assert late == [], "the whole journal would be read again"


def test_sound_archive_verifies_without_findings(tmp_path: Path) -> None:
    write_archive(tmp_path)
    assert verify_store(f"dir:{tmp_path}", None, deep=True) == ([], {"objects": 1, "rows": 10})
    assert main.run(["archive", "verify", "--deep", "--store", f"dir:{tmp_path}"]) == 0
    assert main.run(["archive", "journal", "--store", f"dir:{tmp_path}", "-o", "json"]) == 0
    assert main.run(["archive", "list", "--store", f"dir:{tmp_path}"]) == 0


def test_verify_finds_damage(tmp_path: Path) -> None:
    data = write_archive(tmp_path)
    data.write_bytes(DATA.replace(b"rows", b"sows"))
    assert verify_store(f"dir:{tmp_path}", None, deep=False)[0] == []
    assert "CRC32" in verify_store(f"dir:{tmp_path}", None, deep=True)[0][0]
    data.write_bytes(DATA[:-1])
    assert "bytes, the journal records" in verify_store(f"dir:{tmp_path}", None, deep=False)[0][0]
    data.unlink()
    assert "missing" in verify_store(f"dir:{tmp_path}", None, deep=False)[0][0]
    assert main.run(["archive", "verify", "--store", f"dir:{tmp_path}"]) == 1
