"""Metadata of a package: the README, whose links an index cannot resolve as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE_LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")


class ReadmeWithAbsoluteLinks(MetadataHookInterface):
    """Sets the description to README.md with each relative link below the URL `files`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme`."""
        text = Path(self.root, "README.md").read_text("utf-8")
        text = _RELATIVE_LINK.sub(rf"]({self.config['files']}\1)", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
