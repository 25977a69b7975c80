"""`neve doctor`: what this machine and an archive store lack, each with what to do about it."""

from __future__ import annotations

import resource
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple

import click

from neve.cli.failures import FAILED, Failure
from neve.cli.output import emit, output_option, store_option

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
@click.option("--data", type=click.Path(path_type=Path), default=Path(), help="Data directory of the broker.")
@store_option()
@output_option
def doctor(data: Path, store: str | None, output: str) -> None:
    """Check Java, disk, kernel limits, and with --store the rights in it and its clock. Exit code 1 on a fault."""
    checks = [check_java(), check_disk(data), check_map_count(), check_files(), check_local_clock()]
    if store is not None:
        checks += check_store(store)
    emit([check._asdict() for check in checks], Check._fields, output)
    failed = [check.check for check in checks if check.state == FAIL]
    if failed:
        raise Failure(FAILED, f"failed: {', '.join(failed)}")


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
    existing = next(path for path in (data.absolute(), *data.absolute().parents) if path.exists())
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
    year = time.gmtime().tm_year
    return Check("clock", OK if 2024 < year < 2100 else FAIL, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


def check_store(url: str) -> Iterator[Check]:
    """Write once, refuse a second write, read, list, delete: all that the archive does in a store."""
    from neve.cli.store import S3Source, open_source

    if url.startswith("dir:"):
        yield _check_directory(Path(url.removeprefix("dir:")))
        return
    source = open_source(url)
    assert isinstance(source, S3Source)
    yield from _check_s3(source)


def _check_directory(root: Path) -> Check:
    probe = root / f".neve-doctor-{uuid.uuid4().hex}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with probe.open("xb") as file:
            file.write(b"probe")
        probe.unlink()
    except OSError as error:
        return Check("store", FAIL, f"cannot write to {root}: {error}")
    return Check("store", OK, f"write and delete in {root}")


def _check_s3(source: Any) -> Iterator[Check]:
    from botocore.exceptions import BotoCoreError, ClientError

    where: dict[str, str] = {"Bucket": source.bucket, "Key": source.name(f"_neve/.probe/{uuid.uuid4().hex}")}
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
    apart = abs(parsedate_to_datetime(header).timestamp() - time.time_ns() / 1e9)
    state = OK if apart < CLOCK_APART_S else FAIL
    return Check("store: clock", state, f"{apart:.0f} s apart from this machine's")
