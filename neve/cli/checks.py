"""What a check says, and checks of directories: for `neve doctor` and for the servers' parts of it."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import NamedTuple

from neve.entropy import system_entropy, unique_name

OK, WARN, FAIL = "ok", "warn", "fail"


class Check(NamedTuple):
    """What was looked at, how it is, and what was found."""

    check: str
    state: str
    found: str


def nearest(path: Path) -> Path:
    """The path itself, or the lowest directory above it that is there."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


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
