"""The command line on an S3 store: rights, and the archive read without a broker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra import minio
from infra.object_store import open_store
from neve.archive.journal import Epoch, encode_entry
from neve.archive.keys import journal_key
from neve.cli import main

pytestmark = pytest.mark.servers


def test_doctor_and_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with minio.running(tmp_path / "minio") as server:
        minio.create_bucket(server, "archive")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
        url = server.url("archive", "some%20prefix")

        assert main.run(["doctor", "--store", url, "-o", "json"]) == 0
        states = {check["check"]: check["state"] for check in json.loads(capsys.readouterr().out)}
        assert states["store: refuse a second write"] == states["store: delete"] == states["store: clock"] == "ok"
        assert list(open_store(url).list("")) == []

        assert main.run(["archive", "ls", "--store", url]) == 3
        open_store(url).put(journal_key("", "b", 0), encode_entry(Epoch(epoch=7, owner="o", log_uuid="l")))
        capsys.readouterr()
        assert main.run(["archive", "journal", "--store", url, "-o", "json"]) == 0
        (entry,) = json.loads(capsys.readouterr().out)
        assert (entry["broker"], entry["type"], entry["epoch"]) == ("b", "EPOCH", 7)

        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        assert main.run(["archive", "ls", "--store", url]) == 4
        assert main.run(["doctor", "--store", url]) == 1
