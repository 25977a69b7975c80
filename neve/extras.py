"""How to install what an optional part of neve needs, as a command that works for this installation."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit


def install_command(extra: str) -> str:
    """`pip install …` of the extra, from where this neve came: a checkout, a wheel, or an index."""
    try:
        origin = distribution("neve").read_text("direct_url.json")
    except PackageNotFoundError:
        origin = None
    if origin is None:
        return f"pip install 'neve[{extra}]'"
    about = json.loads(origin)
    url = urlsplit(about["url"])
    if url.scheme != "file":
        return f"pip install 'neve[{extra}] @ {about['url']}'"
    editable = "-e " if about.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}'{unquote(url.path)}[{extra}]'"
