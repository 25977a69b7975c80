"""AWS credentials from files, through boto3: reloaded when a file changes, and when a store refuses them.

botocore renews credentials that expire (a role, SSO, a `credential_process` with an expiration). It reads files once
per session, so programs that rewrite them (agents, `cron`) need a new session.
"""

from __future__ import annotations

import os
from pathlib import Path

#: S3's codes for credentials that are expired, unknown or not valid yet; other credentials may be accepted.
REFUSED = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidToken",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
_FILES = {
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "",
}
Stamp = tuple[tuple[int, int, int] | None, ...]


def has_profiles() -> bool:
    """Return whether a file exists that may contain credentials."""
    return any(path is not None and path.is_file() for path in _paths()[:2])


def files_stamp() -> Stamp:
    """Return a value that changes when a file with credentials is created, rewritten or removed."""
    return tuple(_stamp(path) for path in _paths())


def is_static() -> bool:
    """Return whether the credentials are in the environment, which is constant for a process."""
    return bool(os.environ.get("AWS_ACCESS_KEY_ID"))


def _paths() -> list[Path | None]:
    named = [os.environ.get(name) or usual for name, usual in _FILES.items()]
    return [Path(name).expanduser() if name else None for name in named]


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    try:
        found = None if path is None else path.stat()
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)
