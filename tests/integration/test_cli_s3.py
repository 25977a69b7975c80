"""The command line on an S3 store: permissions, and reading the archive without a broker."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from infra.objects import minio
from infra.objects.open import open_store
from neve.archive.format.journal import Epoch, encode_entry
from neve.archive.format.keys import journal_key
from neve.cli import main
from tests.kit.server.neve import NEVE

pytestmark = pytest.mark.servers


def test_minio_serve_prints_settings_and_keeps_data_over_restart(tmp_path: Path) -> None:
    """`--serve` prints shell variables, keeps bucket and keys over a restart, and ends on a signal."""
    command = [sys.executable, "-m", "infra.objects.minio", "--serve", str(tmp_path / "minio")]
    exports: dict[str, str] = {}
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **exports}) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(3)]
            before, exports = exports, dict(shlex.split(line)[1].split("=", 1) for line in lines)
            doctor = [NEVE, "doctor", "--store", exports["NEVE_STORE"], "-o", "json"]
            told = subprocess.run(doctor, capture_output=True, text=True, env={**os.environ, **exports}, check=False)
            process.terminate()
            assert process.wait(30) == 0
        assert {check["state"] for check in json.loads(told.stdout) if "store" in check["check"]} == {"ok"}, told.stderr
        assert [exports[key] for key in before if key.startswith("AWS_")] == [
            before[key] for key in before if key.startswith("AWS_")
        ]


def test_doctor_and_journal_commands_work_on_s3(
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
        conf = tmp_path / "broker.conf"
        conf.write_text(f"storeUrl={url}\nstorePathRootDir={tmp_path / 'data'}\nlistenPort=0\nadminPort=0\n")
        main.run(["doctor", "-c", str(conf), "-o", "json"])
        of_file = {check["check"]: check["state"] for check in json.loads(capsys.readouterr().out)}
        in_store = {check: state for check, state in states.items() if check.startswith("store")}
        assert {check: of_file[check] for check in in_store} == in_store

        assert main.run(["archive", "list", "--store", url]) == 3
        open_store(url).put(journal_key("", "b", 0), encode_entry(Epoch(epoch=7, owner="o", log_uuid="l")))
        capsys.readouterr()
        assert main.run(["archive", "journal", "--store", url, "-o", "json"]) == 0
        (entry,) = json.loads(capsys.readouterr().out)
        assert (entry["broker"], entry["type"], entry["epoch"]) == ("b", "EPOCH", 7)

        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        assert main.run(["archive", "list", "--store", url]) == 4
        assert main.run(["doctor", "--store", url]) == 1
        assert main.run(["doctor", "-c", str(conf)]) == 1
