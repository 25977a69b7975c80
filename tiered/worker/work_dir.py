"""Working directories of workers, named by process id.

The names identify the directories of a killed worker, which are removed before its death is reported.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def own_prefix(what: str) -> str:
    """Return the name prefix of this process's directories."""
    return f"neve-{what}-{os.getpid()}-"


def clear(work_dir: str, pid: int) -> None:
    """Remove the directories of a process that has ended. Raises OSError."""
    for left in Path(work_dir).glob(f"neve-*-{pid}-*"):
        shutil.rmtree(left)
