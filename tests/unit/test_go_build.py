"""Test that the build of a server, which takes minutes, is announced."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from infra.objects import minio
from infra.objects.s3_server import ServerMissing, running
from tests.kit.server import go_build


def test_build_is_announced_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    go = tools / "go"
    go.write_text(f'#!{sys.executable}\nimport os, sys\nprint("go begins", file=sys.__stderr__)\n'
                  'open(os.environ["GOBIN"] + "/no-such-server", "w").close()\n')  # fmt: skip
    go.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    program = dataclasses.replace(minio.PROGRAM, binary="no-such-server")
    with pytest.raises(ServerMissing, match="`no-such-server` is not on PATH"), running(program, tmp_path):
        pass
    built = go_build.ensure("no-such-server", go_build.GoPackage("example.org/no-such-server"))
    assert built == tmp_path / "cache" / "neve" / "bin" / "no-such-server"
    said = capfd.readouterr().err
    assert said.startswith("building no-such-server")
    assert "some minutes, once" in said
    assert go_build.ensure("no-such-server", go_build.GoPackage("")) == built
    assert capfd.readouterr().err == ""
