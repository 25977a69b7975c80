"""`neve.archive.dataset` on S3: the same rows as from a directory, in each engine."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pytest

import neve.archive
from infra.objects import minio
from infra.objects.open import open_store
from neve.archive.format.journal import Expire
from tests.kit.archive.archive_on_paper import T0, ArchiveOnPaper

pytestmark = pytest.mark.servers


def test_each_engine_reads_each_row_once_from_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with minio.running(tmp_path / "minio") as server:
        minio.create_bucket(server, "archive")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
        url = f"s3://archive/some%20prefix?endpoint={server.endpoint}&region=us-east-1"
        archive = ArchiveOnPaper(open_store(url), "a", "%RETRY%g|x")
        gone = archive.write(0, 0, 0, 10, hour=0)
        archive.write(100, 0, 10, 10, hour=1)
        archive.append(Expire(keys=[gone], delete_after_ms=T0, minimums={"%RETRY%g|x": {0: 15}}))
        archive.write(200, 0, 20, 10, hour=2, commit=False)
        rows = neve.archive.dataset(url, "%RETRY%g|x")
        sent = [(offset, b'{"n": %d, "q": 0}' % offset) for offset in range(15, 20)]
        by_sql = duckdb.sql("SELECT queue_offset, body FROM rows ORDER BY 1")
        assert by_sql is not None
        assert by_sql.fetchall() == sent
        lazy = pl.scan_pyarrow_dataset(rows).select("queue_offset", "body").sort("queue_offset")
        assert lazy.collect().rows() == sent
        frame = pd.DataFrame.from_arrow(rows).sort_values("queue_offset")
        assert list(zip(frame["queue_offset"], frame["body"], strict=True)) == sent
