"""The signing keys of users for the express lane of sends, if the user may send to the topic.

The result is cached by user, topic and address. Every change of users and policies makes new tables, which invalidate
the cache.
"""

from __future__ import annotations

from collections.abc import Callable

from access.model import ENABLED
from access.store import AuthStore, AuthTables
from infra.net.remoting_server import Connection
from infra.process.startup import StartupError
from neve.remoting.signature import SigningKey, signing_key

_KNOWN_MAX = 10_000
_Asked = tuple[str, str, str]


class SignedSends:
    """The cache of signing keys."""

    def __init__(self, store: AuthStore, may_send: Callable[[Connection, str, str], bool]) -> None:
        """`may_send(connection, user, topic)` decides about a permission."""
        self._store, self._may_send = store, may_send
        self._tables: AuthTables | None = None
        self._known: dict[_Asked, SigningKey | None] = {}

    def key_of(self, connection: Connection, name: str, topic: str) -> SigningKey | None:
        """Return the key; None if the express lane must not serve the send: `Guard.refusal` has the reason."""
        try:
            tables = self._store.tables
        except (StartupError, OSError):
            return None
        if tables is not self._tables or len(self._known) >= _KNOWN_MAX:
            self._tables, self._known = tables, {}
        asked = (name, topic, connection.remote[0])
        if asked not in self._known:
            user = tables.users.get(name)
            may = user is not None and user.user_status == ENABLED and self._may_send(connection, name, topic)
            self._known[asked] = signing_key(user.password) if user is not None and may else None
        return self._known[asked]
