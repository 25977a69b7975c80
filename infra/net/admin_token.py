"""The secret that authorizes changes through an admin port: a file of the data directory that only its owner reads."""

import hmac
import logging
from pathlib import Path

from infra.disk.filesystem import Disk
from neve.entropy import Entropy

log = logging.getLogger(__name__)

#: In the data directory. The command line accepts no other name: see `neve/cli/admin.py`.
TOKEN_FILE = "adminToken"
_BYTES = 32


class AdminToken:
    """A random token, renewed at each start, so that a token leaked before a restart is worthless after it."""

    def __init__(self, disk: Disk, directory: Path, entropy: Entropy) -> None:
        self._disk, self._entropy = disk, entropy
        self.path = directory.absolute() / TOKEN_FILE
        self._token = b""

    def renew(self) -> None:
        """Write a new token. If the disk is full, the token of the last start stays valid.

        Blocking: call it in a thread.

        Raises:
            OSError: the file can't be written, and there is none of an earlier start.
        """
        token = self._entropy(_BYTES).hex().encode()
        try:
            self._disk.write_atomic(self.path, token + b"\n")
        except OSError as error:
            if not self._disk.exists(self.path):
                raise
            token = self._disk.read(self.path).strip()
            log.warning("admin token not renewed, the one of the last start stays valid: %s", error)
        self._token = token

    def accepts(self, authorization: str) -> bool:
        """Whether the value of an Authorization header is `Bearer` and this token."""
        scheme, _, given = authorization.partition(" ")
        is_equal = hmac.compare_digest(given.strip().encode(), self._token)
        return bool(self._token) and scheme.lower() == "bearer" and is_equal
