"""`neve doctor`: checks this machine, a store and the configuration of a server, with remedies."""

from __future__ import annotations

import importlib
import resource
import shutil
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from neve.cli.checks import FAIL, OK, WARN, Check, nearest
from neve.cli.failures import FAILED, Failure
from neve.cli.output import emit, output_option, store_option
from neve.clock import system_now_ms
from neve.extras import install_command
from neve.server_packages import make_importable

MIN_MAP_COUNT = 65_530
MIN_FILES = 4_096
LOW_DISK = 0.15


@click.command()
@click.option(
    "-c", "--config", type=click.Path(path_type=Path), help="Check this configuration file, and what it names."
)
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="With -c: override a key, as in `neve broker`."
)
@click.option("--keys", is_flag=True, help="With -c: list the effect of each key, and check nothing else.")
@click.option("--data", type=click.Path(path_type=Path), help="Data directory of the broker.  [default: this one]")
@store_option()
@output_option
def doctor(  # noqa: PLR0917 - the command line's own
    config: Path | None, settings: tuple[str, ...], keys: bool, data: Path | None, store: str | None, output: str
) -> None:
    """Check Java, disk, kernel limits, and with --store the permissions and the clock of a store. Exit code 1: a fault.

    -c FILE checks a broker.conf: keys, data directory and disk, ports, TLS files, name servers and store. It checks
    a namesrv.conf or controller.conf: keys, directory, port and TLS files. The name of the file or its keys decide.
    Run it as the user and in the environment of the server.

    --keys lists the keys of a file for Apache RocketMQ: those with an effect, those without and why, those refused, and
    replacements. Secrets are not shown.
    """
    if keys:
        if config is None:
            raise click.UsageError("--keys needs -c")
        _refuse_beside_config()
        _report(list(_part(_doctor_of(config), "-c").keys(config, settings)), output)
        return
    checks = [check_java(), check_map_count(), check_files(), check_local_clock()]
    if config is not None:
        _refuse_beside_config()
        checks += _server_checks(config, settings)
    elif settings:
        raise click.UsageError("--set needs -c")
    else:
        checks.append(check_disk(data or Path()))
        checks += _check_store(store) if store is not None else ()
    _report(checks, output)


def _report(checks: Sequence[Check], output: str) -> None:
    emit([check._asdict() for check in checks], Check._fields, output)
    failed = [check.check for check in checks if check.state == FAIL]
    if failed:
        raise Failure(FAILED, f"failed: {', '.join(failed)}")


def _refuse_beside_config() -> None:
    context = click.get_current_context()
    for name in ("data", "store"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"the file names it: leave --{name} out, or use --set")


def _server_checks(config: Path, settings: Sequence[str]) -> list[Check]:
    found = _part(_doctor_of(config), "-c")
    return list(found.checks(config, settings))


def _check_store(url: str) -> list[Check]:
    """Check every kind of request of an archive; a wrong URL is wrong usage."""
    found = _part("infra.objects.doctor", "--store")
    try:
        return list(found.check_store(url))
    except ValueError as error:  # BadStoreUrl
        raise click.UsageError(str(error)) from error


def _part(module: str, option: str) -> Any:
    """Import a module of the server by name: packages of `neve` do not depend on the server."""
    make_importable()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise click.UsageError(
            f"{option} needs the server's packages, {missing.name} is missing: {install_command('server')}"
        ) from missing


def _doctor_of(config: Path) -> str:
    """Return the checks for a file, by its name or by keys that only one kind of server has."""
    for name, doctor in _DOCTORS.items():
        if name in config.name.lower():
            return doctor
    try:
        lines = config.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return _DOCTORS["broker"]
    keys = {line.partition("=")[0].strip() for line in lines}
    kind = "controller" if keys & _CONTROLLER_KEYS else "namesrv" if keys & _NAME_SERVER_KEYS else "broker"
    return _DOCTORS[kind]


_DOCTORS = {"namesrv": "namesrv.doctor", "controller": "controller.doctor", "broker": "broker.doctor"}


_CONTROLLER_KEYS = frozenset({"controllerStorePath", "controllerDLegerPeers", "enableElectUncleanMaster"})
_NAME_SERVER_KEYS = frozenset(
    {"kvConfigPath", "scanNotActiveBrokerInterval", "orderMessageEnable", "deleteTopicWithBrokerRegistration",
     "enableAllTopicList", "returnOrderTopicConfigToBroker"}
)  # fmt: skip


def check_java() -> Check:
    """Check Java, which only Spark needs."""
    found = shutil.which("java")
    if found is None:
        return Check("java", WARN, "not found: only Spark needs it (Debian: apt install openjdk-17-jre-headless)")
    try:
        done = subprocess.run([found, "-version"], capture_output=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return Check("java", WARN, f"{found} -version does not answer")
    lines = done.stderr.decode("utf-8", "replace").splitlines()
    return Check("java", OK if done.returncode == 0 else WARN, lines[0] if lines else found)


def check_disk(data: Path) -> Check:
    """Check free space: a broker refuses writes when its disk is nearly full."""
    existing = nearest(data)
    usage = shutil.disk_usage(existing)
    free = usage.free / usage.total
    text = f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} at {existing}"
    return Check("disk", OK if free > LOW_DISK else WARN, text)


def check_map_count() -> Check:
    """Check the number of mappings: each open store file is one."""
    path = Path("/proc/sys/vm/max_map_count")
    if not path.exists():
        return Check("vm.max_map_count", OK, "no such limit here")
    count = int(path.read_text())
    if count < MIN_MAP_COUNT:
        return Check("vm.max_map_count", WARN, f"{count}: sysctl -w vm.max_map_count=262144")
    return Check("vm.max_map_count", OK, str(count))


def check_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = OK if hard == resource.RLIM_INFINITY or hard >= MIN_FILES else WARN  # a broker raises its soft limit
    return Check("open files", state, f"{soft} (at most {hard})" + ("" if state == OK else ": raise the hard limit"))


def check_local_clock() -> Check:
    now = datetime.fromtimestamp(system_now_ms() / 1000, UTC)
    return Check("clock", OK if 2024 < now.year < 2100 else FAIL, f"{now:%Y-%m-%dT%H:%M:%SZ}")
