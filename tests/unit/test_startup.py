"""Tests of the checks before a server starts."""

from __future__ import annotations

import gc
import importlib.util
import re
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest

from infra.process.server_command import announce
from infra.process.startup import PACKAGES, REQUIRED, StartupError, check_installation, free_port


def test_required_packages_equal_the_server_extra() -> None:
    project: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [
        re.split(r"[<>=\[]", text)[0] for text in (*project["dependencies"], *extras["archive"], *extras["server"])
    ]
    assert sorted(REQUIRED) == sorted({name.replace("-", "_") for name in named} - {"neve"})


def test_startup_checks_cover_each_package_of_neve() -> None:
    project: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    shipped = project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert sorted((*PACKAGES, "pyspark_neve")) == sorted(shipped), "that one is Spark's to look for"


def test_missing_package_of_a_worker_is_reported_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installation()
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "xxhash" else found(name))
    with pytest.raises(StartupError, match=r"not installed: xxhash; run pip install .*\[server\]'"):
        check_installation()


def test_packages_of_two_installations_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    foreign = tmp_path / "broker" / "__init__.py"
    found = importlib.util.find_spec
    spec = importlib.util.spec_from_file_location("broker", foreign)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "broker" else found(name))
    with pytest.raises(StartupError, match=f"come from several directories .*{tmp_path}.*: install neve in its own"):
        check_installation()


def test_loaded_objects_are_frozen_when_a_server_is_ready(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = len(gc.get_objects())
    try:
        announce({"broker": "127.0.0.1:10911"})
        assert gc.get_freeze_count() > before / 2
        assert len(gc.get_objects()) < before / 2
    finally:
        gc.unfreeze()
    assert '"broker": "127.0.0.1:10911"' in capsys.readouterr().out


def test_free_port_is_outside_the_ephemeral_range() -> None:
    assert all(20_000 <= free_port("127.0.0.1") < 32_768 for _ in range(50))


def test_free_port_falls_back_to_any_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("infra.process.startup._NOT_EPHEMERAL", range(port, port + 1))
        found = free_port("127.0.0.1")
    assert found not in {0, port}
