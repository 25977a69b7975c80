"""The commands of docs/get-started/install.md work, and print what the page shows.

Dependencies are not installed: an environment has the few that `neve --version` imports, from the environment of the
tests. So the test needs no index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests.kit.docs.page import Page

ROOT = Path(__file__).parents[2]
PAGE = Page("get-started/install.md")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WHEEL = f"neve-{PROJECT['version']}-py3-none-any.whl"
#: Pip reads its options from the environment: no index, no dependencies, hatchling from the environment of the tests.
PIP = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def test_page_lists_the_extras_for_users() -> None:
    listed = re.findall(r"^\| .* \| `(\w+)` \|$", PAGE.text, re.MULTILINE)
    assert sorted([*listed, "dev"]) == sorted(PROJECT["optional-dependencies"])


def test_wheel_is_built_installed_checked_and_removed(tmp_path: Path) -> None:
    (make, no_output), _checkout = PAGE.steps("Install from a checkout")
    (build, _), (install, _) = PAGE.steps("Install from a wheel")
    (remove, _) = PAGE.steps("Upgrade and uninstall")[0]
    home = tmp_path / "opt"
    imported = tmp_path / "imported"
    imported.mkdir()
    for package in ("click", "msgspec"):
        for installed in Path(sysconfig.get_path("purelib")).glob(f"{package}*"):
            (imported / installed.name).symlink_to(installed)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, **PIP, "PATH": path, "PYTHONPATH": str(imported)}

    def run(command: str) -> subprocess.CompletedProcess[str]:
        here = command.replace("/opt/neve", str(home)).replace("/path/to", str(tmp_path / "dist"))
        here = here.replace("-w dist", f"-w {tmp_path / 'dist'}")
        return subprocess.run(
            ["bash", "-c", here], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
        )

    for command in (make, build, install):
        done = run(command)
        assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    assert no_output == []
    assert (tmp_path / "dist" / WHEEL).exists()
    (version, (printed,)), (broker, error) = PAGE.steps("Check the installation")
    assert run(version).stdout.splitlines() == [printed]
    done = run(broker)
    assert done.returncode == 2
    assert done.stderr.replace(str(tmp_path / "dist"), "/path/to").splitlines() == error
    assert run(remove).returncode == 0
    assert not home.exists()


@pytest.mark.parametrize("heading", ["Install from a checkout", "Install from an index of your own"])
def test_requirements_name_extras_of_the_project(heading: str) -> None:
    """These commands need an index, so only their requirements are checked."""
    (command, _) = PAGE.steps(heading)[-1]
    (extra,) = re.findall(r"\[(\w+)\]", command)
    assert extra in PROJECT["optional-dependencies"]
