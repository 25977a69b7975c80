"""Pictures of the documentation: `docs/pictures/NAME.d2` is the source of `docs/assets/NAME.svg`.

python -m tests.pictures     draw all pictures with D2, which is built from source if it is missing

Each picture ends with the hash of its source and of the options. A test compares them without D2.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.kit.server.go_build import GoPackage, ensure

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "docs" / "pictures"
PICTURES = ROOT / "docs" / "assets"
D2 = GoPackage("oss.terrastruct.com/d2", "v0.7.1")
#: A light and a dark theme in one file: the viewer's preference selects one.
OPTIONS = (
    "--layout=elk",
    "--elk-nodeNodeBetweenLayers=40",
    "--theme=0",
    "--dark-theme=200",
    "--pad=16",
    "--scale=0.8",
)


def mark_of(source: bytes) -> str:
    """Return the comment at the end of a picture that was drawn from a source."""
    digest = hashlib.sha256(" ".join((D2.version, *OPTIONS)).encode() + b"\n" + source)
    return f"<!-- source sha256: {digest.hexdigest()} -->\n"


def draw(d2: Path, source: Path) -> Path:
    """Draw the picture of a source."""
    picture = PICTURES / f"{source.stem}.svg"
    with tempfile.TemporaryDirectory() as directory:
        drawn = Path(directory, picture.name)
        subprocess.run([d2, *OPTIONS, source, drawn], check=True, capture_output=True)
        svg = drawn.read_text("utf-8").rstrip("\n")
    picture.write_text(f"{svg}\n{mark_of(source.read_bytes())}", "utf-8")
    return picture


def main() -> None:
    """Draw all pictures."""
    d2 = ensure("d2", D2)
    for source in sorted(SOURCES.glob("*.d2")):
        sys.stdout.write(f"{draw(d2, source).relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
