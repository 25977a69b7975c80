"""`neve doctor`: what this machine, a store and a broker's configuration lack, each with what to do about it."""

from __future__ import annotations

import importlib
import os
import pwd
import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple

import click

from neve.cli.failures import FAILED, Failure
from neve.cli.output import emit, output_option, store_option
from neve.clock import system_now_ms
from neve.entropy import system_entropy, unique_name
from neve.extras import install_command

OK, WARN, FAIL = "ok", "warn", "fail"
MIN_MAP_COUNT = 65_530
MIN_FILES = 4_096
CLOCK_APART_S = 300  # where deleting stops: the archive's format says so
LOW_DISK = 0.15


class Check(NamedTuple):
    check: str
    state: str
    found: str


@click.command()
@click.option("-c", "--config", type=click.Path(path_type=Path), help="Check what this configuration file names.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="With -c, as `neve broker` takes it.")
@click.option("--data", type=click.Path(path_type=Path), help="Data directory of the broker.  [default: this one]")
@store_option()
@output_option
def doctor(config: Path | None, settings: tuple[str, ...], data: Path | None, store: str | None, output: str) -> None:
    """Check Java, disk, kernel limits, and with --store the rights in it and its clock. Exit code 1 on a fault.

    With -c FILE (broker.conf): its keys, the data directory and its disk, ports, TLS files, name servers and the store;
    or a namesrv.conf: its keys, directory, port and TLS files. Which one it is, its name or else its keys say.
    Run it as the user and with the environment that the broker will have.
    """
    checks = [check_java(), check_map_count(), check_files(), check_local_clock()]
    if config is not None:
        _refuse_beside_config()
        checks += _server_checks(config, settings)
    elif settings:
        raise click.UsageError("--set goes with -c")
    else:
        checks.append(check_disk(data or Path()))
        checks += check_store(store) if store is not None else ()
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
    """The server's part of this command, found by its name: nothing of `neve` imports the server."""
    try:
        found = importlib.import_module("namesrv.doctor" if _is_name_servers(config) else "broker.doctor")
    except ModuleNotFoundError as missing:
        raise click.UsageError(
            f"-c needs the server's packages, {missing.name} is missing: {install_command('server')}"
        ) from missing
    return list(found.checks(config, settings))


def _is_name_servers(config: Path) -> bool:
    """A key that only name servers have, in a file whose name does not say what it is."""
    for name, kind in (("namesrv", True), ("broker", False)):
        if name in config.name.lower():
            return kind
    try:
        lines = config.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    return bool({line.partition("=")[0].strip() for line in lines} & _NAME_SERVERS_KEYS)


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


def nearest(path: Path) -> Path:
    """The path itself, or the lowest directory above it that is there."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


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


def check_store(url: str) -> Iterator[Check]:
    """Write once, refuse a second write, read, list, delete: all that the archive does in a store."""
    from neve.cli.store import S3Source, open_source

    if url.startswith("dir:"):
        yield check_directory("store", Path(url.removeprefix("dir:")))
        return
    source = open_source(url)
    assert isinstance(source, S3Source)
    yield from _check_s3(source)


def check_directory(name: str, root: Path) -> Check:
    """Whether this user may write there, or make it where it is missing; it is not made, the user may be another."""
    existing, user = nearest(root), _user()
    if existing != root.absolute():
        if not existing.is_dir():
            return Check(name, FAIL, f"cannot make {root}: Not a directory: {existing}")
        if not os.access(existing, os.W_OK | os.X_OK):
            return Check(name, FAIL, f"cannot make {root}: {user} may not write to {existing}")
        return Check(name, OK, f"{root} will be made; {user} may")
    probe = root / f".neve-doctor-{unique_name(system_entropy)}"
    try:
        with probe.open("xb") as file:
            file.write(b"probe")
        probe.unlink()
    except OSError as error:
        return Check(name, FAIL, f"{user} cannot write to {root}: {error}")
    return Check(name, OK, f"{user} may write and delete in {root}")


def _user() -> str:
    """Whose rights these are; a container's user may have no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"user {os.geteuid()}"


def _check_s3(source: Any) -> Iterator[Check]:
    from botocore.exceptions import BotoCoreError, ClientError

    where: dict[str, str] = {"Bucket": source.bucket, "Key": source.name(f"_neve/.probe/{unique_name(system_entropy)}")}
    client = source.client
    steps: tuple[tuple[str, Any], ...] = (
        ("write once", lambda: client.put_object(**where, Body=b"probe", IfNoneMatch="*")),
        ("refuse a second write", lambda: _refused(client, where)),
        ("read", lambda: client.get_object(**where)),
        ("list", lambda: client.list_objects_v2(Bucket=source.bucket, Prefix=source.name("_neve/"), MaxKeys=1)),
        ("delete", lambda: client.delete_object(**where)),
    )
    answer: Any = None
    for name, step in steps:
        try:
            done = step()
        except (BotoCoreError, ClientError) as error:
            yield Check(f"store: {name}", FAIL, str(error))
            if name == "write once":
                return
            continue
        answer = done if isinstance(done, dict) else answer
        yield Check(f"store: {name}", FAIL if done is False else OK, "" if done is not False else "not honoured")
    yield _store_clock(answer)


def _refused(client: Any, where: dict[str, str]) -> bool:
    """Whether a conditional write to an existing key is refused: the archive's fence rests on it."""
    from botocore.exceptions import ClientError

    try:
        client.put_object(**where, Body=b"second", IfNoneMatch="*")
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] in {409, 412}:
            return True
        raise
    return False


def _store_clock(answer: Any) -> Check:
    header = answer["ResponseMetadata"]["HTTPHeaders"].get("date") if isinstance(answer, dict) else None
    if header is None:
        return Check("store: clock", WARN, "the store tells no time")
    apart = abs(parsedate_to_datetime(header).timestamp() - system_now_ms() / 1000)
    state = OK if apart < CLOCK_APART_S else FAIL
    return Check("store: clock", state, f"{apart:.0f} s apart from this machine's")
