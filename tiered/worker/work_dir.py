"""Directories in which a worker makes objects. They have its process in their names: by that it is known what a killed
one has left, and that goes before anybody hears of its death."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def own_prefix(what: str) -> str:
    """How the name begins of a directory of this process."""
    return f"neve-{what}-{os.getpid()}-"


def clear(work_dir: str, pid: int) -> None:
    """Nothing is left there of a process that has ended. Raises OSError."""
    for left in Path(work_dir).glob(f"neve-*-{pid}-*"):
        shutil.rmtree(left)
