"""Requests to an admin port that require its token."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path


def post_request(url: str) -> urllib.request.Request:
    """Return a POST request with the token; the port names the token file when it refuses a first attempt."""
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60).close()
    except urllib.error.HTTPError as error:
        with error:
            found = re.search(r'token_file="([^"]+)"', error.headers.get("WWW-Authenticate", ""))
        assert error.code == 401 and found is not None, error
        token = Path(found[1]).read_text(encoding="ascii").strip()
        return urllib.request.Request(url, method="POST", headers={"Authorization": f"Bearer {token}"})
    raise AssertionError(f"POST {url} needs no token")
