"""The place of the server's packages.

Their names (`broker`, `infra`, …) are names of other projects, too. A wheel therefore contains them in `neve/_server`:
there they replace no file of another project, and only the server's own processes import them by these names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

DIRECTORY = Path(__file__).with_name("_server")


def make_importable() -> None:
    """Let this process and its children import the server's packages; in a checkout they can do so already."""
    if not DIRECTORY.is_dir() or str(DIRECTORY) in sys.path:
        return
    sys.path.insert(0, str(DIRECTORY))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(DIRECTORY), os.environ.get("PYTHONPATH"))))
