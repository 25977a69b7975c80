"""The secret that authorizes changes through an admin port: a file of the data directory that only its owner reads."""

import hmac
import logging
from pathlib import Path

from infra.disk.filesystem import Disk
from neve.admin_token import SCHEME, TOKEN_FILE, signature
from neve.entropy import Entropy

log = logging.getLogger(__name__)

_BYTES, _NONCE_BYTES = 32, 16


class AdminToken:
    """A random token, renewed at each start, so that a token leaked before a restart is worthless after it."""

    def __init__(self, disk: Disk, directory: Path, entropy: Entropy) -> None:
        self._disk, self._entropy = disk, entropy
        self.path = directory.absolute() / TOKEN_FILE
        self._token = ""
        #: Of this start: a signature that was made for an earlier one is refused, whether the token was renewed or not.
        self.nonce = entropy(_NONCE_BYTES).hex()

    def renew(self) -> None:
        """Write a new token. If the disk is full, the token of the last start stays valid.

        Blocking: call it in a thread.

        Raises:
            OSError: the file cannot be written, and no file of an earlier start exists.
        """
        token = self._entropy(_BYTES).hex()
        try:
            self._disk.write_atomic(self.path, f"{token}\n".encode())
        except OSError as error:
            if not self._disk.exists(self.path):
                raise
            token = self._disk.read(self.path).decode("ascii", "replace").strip()
            log.warning("admin token not renewed, the one of the last start stays valid: %s", error)
        self._token = token

    def accepts(self, authorization: str, port: int, method: str, target: str) -> bool:
        """Return whether an Authorization header proves the token: by `Bearer` and the token, or by a signature."""
        scheme, _, given = authorization.partition(" ")
        expected = {
            "bearer": self._token,
            SCHEME.lower(): signature(self._token, self.nonce, port, method, target),
        }.get(scheme.lower(), "")
        return bool(self._token and expected) and hmac.compare_digest(given.strip().encode(), expected.encode())
