"""`neve doctor`: what this machine, a store and a broker's configuration lack, each with what to do about it."""

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

MIN_MAP_COUNT = 65_530
MIN_FILES = 4_096
LOW_DISK = 0.15


@click.command()
@click.option("-c", "--config", type=click.Path(path_type=Path), help="Check what this configuration file names.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="With -c, as `neve broker` takes it.")
@click.option("--keys", is_flag=True, help="With -c only this: what becomes of each of its keys.")
@click.option("--data", type=click.Path(path_type=Path), help="Data directory of the broker.  [default: this one]")
@store_option()
@output_option
def doctor(  # noqa: PLR0917 - the command line's own
    config: Path | None, settings: tuple[str, ...], keys: bool, data: Path | None, store: str | None, output: str
) -> None:
    """Check Java, disk, kernel limits, and with --store the rights in it and its clock. Exit code 1 on a fault.

    With -c FILE (broker.conf): its keys, the data directory and its disk, ports, TLS files, name servers and the store;
    or a namesrv.conf or controller.conf: its keys, directory, port and TLS files. Which one it is, its name or else its
    keys say.
    Run it as the user and with the environment that the broker will have.

    With --keys a file that was written for Apache RocketMQ is told key by key: honoured, without effect and why,
    refused, what to write instead. Secrets are not shown.
    """
    if keys:
        if config is None:
            raise click.UsageError("--keys goes with -c")
        _refuse_beside_config()
        _tell(list(_part(_doctor_of(config), "-c").keys(config, settings)), output)
        return
    checks = [check_java(), check_map_count(), check_files(), check_local_clock()]
    if config is not None:
        _refuse_beside_config()
        checks += _server_checks(config, settings)
    elif settings:
        raise click.UsageError("--set goes with -c")
    else:
        checks.append(check_disk(data or Path()))
        checks += _check_store(store) if store is not None else ()
    _tell(checks, output)


def _tell(checks: Sequence[Check], output: str) -> None:
    emit([check._asdict() for check in checks], Check._fields, output)
    failed = [check.check for check in checks if check.state == FAIL]
    if failed:
        raise Failure(FAILED, f"failed: {', '.join(failed)}")


def _refuse_beside_config() -> None:
    context = click.get_current_context()
    for name in ("data", "store"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"-c names it: leave --{name} out, or use --set")


def _server_checks(config: Path, settings: Sequence[str]) -> list[Check]:
    found = _part(_doctor_of(config), "-c")
    return list(found.checks(config, settings))


def _check_store(url: str) -> list[Check]:
    """All that the archive does in a store; what is wrong with its URL is wrong usage."""
    found = _part("infra.objects.doctor", "--store")
    try:
        return list(found.check_store(url))
    except ValueError as error:  # BadStoreUrl
        raise click.UsageError(str(error)) from error


def _part(module: str, option: str) -> Any:
    """The server's part of this command, found by its name: nothing of `neve` imports the server."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise click.UsageError(
            f"{option} needs the server's packages, {missing.name} is missing: {install_command('server')}"
        ) from missing


def _doctor_of(config: Path) -> str:
    """By the file's name, or by a key in it that only that kind of server has."""
    for name, doctor in _DOCTORS.items():
        if name in config.name.lower():
            return doctor
    try:
        lines = config.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return _DOCTORS["broker"]
    keys = {line.partition("=")[0].strip() for line in lines}
    kind = "controller" if keys & _CONTROLLERS_KEYS else "namesrv" if keys & _NAME_SERVERS_KEYS else "broker"
    return _DOCTORS[kind]


_DOCTORS = {"namesrv": "namesrv.doctor", "controller": "controller.doctor", "broker": "broker.doctor"}


_CONTROLLERS_KEYS = frozenset({"controllerStorePath", "controllerDLegerPeers", "enableElectUncleanMaster"})
_NAME_SERVERS_KEYS = frozenset(
    {"kvConfigPath", "scanNotActiveBrokerInterval", "orderMessageEnable", "deleteTopicWithBrokerRegistration",
     "enableAllTopicList", "returnOrderTopicConfigToBroker"}
)  # fmt: skip


def check_java() -> Check:
    """Spark needs one; nothing else does."""
    found = shutil.which("java")
    if found is None:
        return Check("java", WARN, "none: only Spark needs it (Debian: apt install openjdk-17-jre-headless)")
    try:
        done = subprocess.run([found, "-version"], capture_output=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return Check("java", WARN, f"{found} -version does not answer")
    lines = done.stderr.decode("utf-8", "replace").splitlines()
    return Check("java", OK if done.returncode == 0 else WARN, lines[0] if lines else found)


def check_disk(data: Path) -> Check:
    """The broker refuses writes when its disk is nearly full."""
    existing = nearest(data)
    usage = shutil.disk_usage(existing)
    free = usage.free / usage.total
    text = f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} at {existing}"
    return Check("disk", OK if free > LOW_DISK else WARN, text)


def check_map_count() -> Check:
    """Each open store file is one mapping."""
    path = Path("/proc/sys/vm/max_map_count")
    if not path.exists():
        return Check("vm.max_map_count", OK, "no such limit here")
    count = int(path.read_text())
    if count < MIN_MAP_COUNT:
        return Check("vm.max_map_count", WARN, f"{count}: sysctl -w vm.max_map_count=262144")
    return Check("vm.max_map_count", OK, str(count))


def check_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = OK if hard == resource.RLIM_INFINITY or hard >= MIN_FILES else WARN  # a broker takes all that it may
    return Check("open files", state, f"{soft} (at most {hard})" + ("" if state == OK else ": raise the hard limit"))


def check_local_clock() -> Check:
    now = datetime.fromtimestamp(system_now_ms() / 1000, UTC)
    return Check("clock", OK if 2024 < now.year < 2100 else FAIL, f"{now:%Y-%m-%dT%H:%M:%SZ}")
