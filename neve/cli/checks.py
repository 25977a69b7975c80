"""Results of checks, and checks of directories, for `neve doctor` and the checks of servers."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import NamedTuple

from neve.entropy import system_entropy, unique_name

OK, WARN, FAIL = "ok", "warn", "fail"


class Check(NamedTuple):
    """The name, the state and the finding of a check."""

    check: str
    state: str
    found: str


def nearest(path: Path) -> Path:
    """Return the path itself, or its nearest ancestor that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def check_directory(name: str, root: Path) -> Check:
    """Check whether this user may write to a directory, or could create it. It is not created."""
    existing, user = nearest(root), _user()
    if existing != root.absolute():
        if not existing.is_dir():
            return Check(name, FAIL, f"cannot create {root}: Not a directory: {existing}")
        if not os.access(existing, os.W_OK | os.X_OK):
            return Check(name, FAIL, f"cannot create {root}: {user} may not write to {existing}")
        return Check(name, OK, f"{root} does not exist; {user} may create it")
    probe = root / f".neve-doctor-{unique_name(system_entropy)}"
    try:
        with probe.open("xb") as file:
            file.write(b"probe")
        probe.unlink()
    except OSError as error:
        return Check(name, FAIL, f"{user} cannot write to {root}: {error}")
    return Check(name, OK, f"{user} may write and delete in {root}")


def _user() -> str:
    """Return the name of this user; a user in a container may have none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"user {os.geteuid()}"
