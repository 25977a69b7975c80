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


def test_the_required_packages_are_those_of_the_server_extra() -> None:
    project: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [
        re.split(r"[<>=\[]", text)[0] for text in (*project["dependencies"], *extras["archive"], *extras["server"])
    ]
    assert sorted(REQUIRED) == sorted({name.replace("-", "_") for name in named} - {"neve"})


def test_each_package_of_the_house_is_looked_at() -> None:
    project: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    shipped = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted((*PACKAGES, "pyspark_neve")) == sorted(shipped), "that one is Spark's to look for"


def test_a_package_that_only_a_worker_needs_is_missed_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installation()
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "xxhash" else found(name))
    with pytest.raises(StartupError, match=r"not installed: xxhash; run pip install .*\[server\]'"):
        check_installation()


def test_what_a_server_has_loaded_when_it_is_ready_is_out_of_the_collectors_way(
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


def test_a_free_port_is_none_that_an_outgoing_connection_is_given() -> None:
    assert all(20_000 <= free_port("127.0.0.1") < 32_768 for _ in range(50))


def test_where_all_of_those_are_taken_a_free_port_is_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("infra.process.startup._NOT_EPHEMERAL", range(port, port + 1))
        found = free_port("127.0.0.1")
    assert found not in {0, port}
