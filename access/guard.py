"""Authentication and authorization before a server's handlers: the signature of a request, and its permissions."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import msgspec

from access.config import SecurityConfig
from access.model import ENABLED, MAX_NAME, SUPER, PermissionCheck, User, check_name, check_user
from access.permissions import (
    RETRY_TOPIC,
    Need,
    NeedOfAll,
    Permission,
    RetryOwners,
    of_owners,
    super_users,
    topic_need,
)
from access.signed_sends import SignedSends
from access.store import NO_CHANGE_LOG, AuthStore, AuthTables, ChangeLog
from infra.disk.filesystem import Disk
from infra.net.remoting_server import Answer, Connection
from infra.net.request_router import RequestRouter
from infra.process.startup import StartupError
from neve.errors import BrokerError, NeveError
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.signature import ACCESS_KEY, verify

log = logging.getLogger(__name__)

# Cached decisions, one per user, kind, actions and address.
_MOST_DECISIONS = 4096


class _Credentials(msgspec.Struct, rename="camel"):
    """RocketMQ's two notations: of initAuthenticationUser, and of client credentials."""

    username: str = ""
    password: str = ""
    access_key: str = ""
    secret_key: str = ""


def read_credentials(text: str, key: str) -> tuple[str, str]:
    """Parse a configuration value into (user, secret). Raises StartupError, without the value."""
    try:
        found = msgspec.json.decode(text, type=_Credentials)
        name, secret = found.username or found.access_key, found.password or found.secret_key
        check_name(name)
        check_user(User(secret))
    except (ValueError, msgspec.MsgspecError):
        raise StartupError(f'{key}: expected {{"username":"…","password":"…"}}') from None
    return name, secret


def inner_credentials(config: SecurityConfig) -> tuple[str, str] | None:
    """Return the credentials for requests to other servers; None: they are not signed."""
    text = config.inner_client_authentication_credentials
    return read_credentials(text, "innerClientAuthenticationCredentials") if text else None


class Guard(Protocol):
    """Checks each request; handlers call it for permissions that only they can determine."""

    #: For the express lane; None: requests need no signature.
    signed_sends: SignedSends | None

    def refusal(self, connection: Connection, command: RemotingCommand) -> str | None:
        """Return why the request is refused; None if it is allowed."""

    def require(self, connection: Connection, command: RemotingCommand) -> None:
        """Check a request again that was held. Raises BrokerError."""

    def require_super(self, connection: Connection, command: RemotingCommand) -> None:
        """Check that the user may see everything, secrets included. Raises BrokerError."""

    def require_topic(self, connection: Connection, command: RemotingCommand, topic: str, action: str) -> None:
        """Check a permission on a topic that the handler read from a record. Raises BrokerError."""

    def may_use_topic(self, connection: Connection, name: str, topic: str, action: str) -> bool:
        """Return whether a user may receive messages of a topic; `name` signed for the connection."""


class Unguarded:
    """The guard of a server without authentication: every request is allowed."""

    signed_sends: SignedSends | None = None
    refused = 0

    def refusal(self, connection: Connection, command: RemotingCommand) -> str | None:
        return None

    def require(self, connection: Connection, command: RemotingCommand) -> None:
        """Nothing is asked."""

    def require_super(self, connection: Connection, command: RemotingCommand) -> None:
        """Without authentication there are no secrets."""

    def require_topic(self, connection: Connection, command: RemotingCommand, topic: str, action: str) -> None:
        """Nothing is asked."""

    def may_use_topic(self, connection: Connection, name: str, topic: str, action: str) -> bool:
        return True


class _Allowed(NamedTuple):
    """The last allowed heartbeat of a connection; clients repeat it unchanged."""

    user: str
    body: tuple[int, int]
    again: list[Need]  # needs that depend on more than the policies: they are checked every time


class SignatureGuard:
    """Allows requests with the signature of a known user and, with authorization, the permissions in its policies.

    A heartbeat may name ten thousand topics. While users and policies are unchanged, a heartbeat equal to the last one
    of its connection is allowed without another check of its topics.
    """

    def __init__(
        self,
        store: AuthStore,
        permissions: Mapping[int, Permission],
        *,
        authorize: bool,
        cluster: str,
        retry_owners: RetryOwners,
    ) -> None:
        """Create a guard; `permissions` has those of all codes that the server answers."""
        self.store, self.permissions = store, permissions
        self.signed_sends: SignedSends | None = SignedSends(
            store, lambda connection, name, topic: self.may_use_topic(connection, name, topic, "Pub")
        )
        self._authorize, self._cluster, self._retry_owners = authorize, cluster, retry_owners
        # The caches below are valid for these tables.
        self._tables: AuthTables | None = None
        self._decisions: dict[tuple[str, str, frozenset[str], str], PermissionCheck] = {}
        self._allowed: WeakKeyDictionary[Connection, _Allowed] = WeakKeyDictionary()
        self.refused = 0  # requests

    def refusal(self, connection: Connection, command: RemotingCommand) -> str | None:
        refusal = self._refusal(connection, command)
        if refusal is not None:
            self.refused += 1
        return refusal

    def _refusal(self, connection: Connection, command: RemotingCommand) -> str | None:
        try:
            tables = self.store.tables
        except (StartupError, OSError) as error:
            log.error("users and policies: %s", error)
            return "users and policies cannot be read"
        name = command.ext.get(ACCESS_KEY, "")
        user = tables.users.get(name)
        is_right = user is not None and verify(user.password, command.ext, command.body)
        # RocketMQ's texts. As in RocketMQ, they reveal which users exist.
        if not name:
            return "username cannot be null: the request is not signed."
        if user is None:
            shown = name if name.isprintable() else ascii(name)
            return f"User:{shown[:MAX_NAME]} is not found."
        if user.user_status != ENABLED:
            return f"User:{name} is disabled."
        if not is_right:
            return "check signature failed."
        if user.user_type == SUPER:
            return None
        permission = self.permissions.get(command.code)
        if permission is super_users:
            return f"user {name!r} is not a super user"
        if permission is None or not self._authorize:  # a code without a permission has no handler
            return None
        return self._denied(permission, tables, name, connection, command)

    def _denied(
        self, permission: Permission, tables: AuthTables, name: str, connection: Connection, command: RemotingCommand
    ) -> str | None:
        self._follow(tables)
        try:
            if command.code == RequestCode.HEART_BEAT:
                return self._heartbeat_denied(permission, tables, name, connection, command)
            return self._first_refusal(tables, name, connection, permission(command, self._cluster))
        except NeveError:
            return "the request's body does not parse"

    def _heartbeat_denied(
        self, permission: Permission, tables: AuthTables, name: str, connection: Connection, command: RemotingCommand
    ) -> str | None:
        body, known = (len(command.body), hash(command.body)), self._allowed.get(connection)
        if known is not None and known.user == name and known.body == body:
            return self._first_refusal(tables, name, connection, known.again)
        needs = list(permission(command, self._cluster))
        refusal = self._first_refusal(tables, name, connection, needs)
        if refusal is None:
            again = [need for need in needs if isinstance(need, Need) and need.kind == RETRY_TOPIC]
            self._allowed[connection] = _Allowed(name, body, again)
        return refusal

    def _first_refusal(
        self, tables: AuthTables, name: str, connection: Connection, needs: Iterable[Need | NeedOfAll]
    ) -> str | None:
        refusals = (self._refused(tables, name, connection, need) for need in needs)
        return next((refusal for refusal in refusals if refusal is not None), None)

    def _follow(self, tables: AuthTables) -> None:
        if tables is not self._tables:
            self._tables = tables
            self._decisions.clear()
            self._allowed.clear()

    def require(self, connection: Connection, command: RemotingCommand) -> None:
        refusal = self.refusal(connection, command)
        if refusal is not None:
            raise BrokerError(ResponseCode.NO_PERMISSION, refusal)

    def require_super(self, connection: Connection, command: RemotingCommand) -> None:
        self.require(connection, command)
        name = command.ext[ACCESS_KEY]
        if self.store.tables.users[name].user_type != SUPER:
            raise BrokerError(ResponseCode.NO_PERMISSION, f"user {name!r} is not a super user")
        if not connection.is_encrypted:
            raise BrokerError(ResponseCode.NO_PERMISSION, "secrets are returned over TLS only")

    def require_topic(self, connection: Connection, command: RemotingCommand, topic: str, action: str) -> None:
        refusal = self._topic_refused(connection, command.ext.get(ACCESS_KEY, ""), topic, action)
        if refusal is not None:
            raise BrokerError(ResponseCode.NO_PERMISSION, refusal)

    def may_use_topic(self, connection: Connection, name: str, topic: str, action: str) -> bool:
        return self._topic_refused(connection, name, topic, action) is None

    def _topic_refused(self, connection: Connection, name: str, topic: str, action: str) -> str | None:
        if not self._authorize:
            return None
        tables = self.store.tables
        user = tables.users.get(name)
        if user is not None and user.user_type == SUPER:
            return None
        return self._refused(tables, name, connection, topic_need(topic, frozenset({action})))

    def _refused(self, tables: AuthTables, name: str, connection: Connection, need: Need | NeedOfAll) -> str | None:
        source = connection.remote[0]
        if isinstance(need, NeedOfAll):
            decide = self._decision(tables, name, need.kind, need.actions, source)
            denied = next((resource for resource in need.names if not decide(resource)), None)
            return None if denied is None else _denial(name, Need(need.kind, denied, need.actions))
        for one in of_owners(need, self._retry_owners):
            if not self._decision(tables, name, one.kind, one.actions, source)(one.name):
                return _denial(name, one)
        return None

    def _decision(
        self, tables: AuthTables, name: str, kind: str, actions: frozenset[str], source: str
    ) -> PermissionCheck:
        self._follow(tables)
        key = (name, kind, actions, source)
        decision = self._decisions.get(key)
        if decision is None:
            if len(self._decisions) >= _MOST_DECISIONS:
                self._decisions.clear()
            decision = PermissionCheck(tables.policies.get(f"User:{name}", ()), kind, actions, source)
            self._decisions[key] = decision
        return decision


class GuardedHandler:
    """A handler that passes allowed requests to another handler."""

    def __init__(self, guard: Guard, behind: RequestRouter) -> None:
        self._guard, self._behind = guard, behind

    def __call__(self, connection: Connection, command: RemotingCommand) -> Answer | Awaitable[Answer]:
        refusal = self._guard.refusal(connection, command)
        if refusal is None:
            return self._behind(connection, command)
        log.warning("request refused: code=%d client=%s:%d: %s", command.code, *connection.remote, refusal)
        return RemotingCommand.response(command, ResponseCode.NO_PERMISSION, refusal)


def _denial(name: str, need: Need) -> str:
    actions = "/".join(sorted(need.actions))
    return f"User:{name} has no permission to access {need.kind}:{need.name} ({actions})"


def open_store(config: SecurityConfig, path: Path, disk: Disk, changes: ChangeLog = NO_CHANGE_LOG) -> AuthStore | None:
    """Open the users and policies of a server; None without authentication.

    Raises StartupError for settings that would leave the server open, or without any user.
    """
    if config.authorization_enabled and not config.authentication_enabled:
        raise StartupError("authorizationEnabled needs authenticationEnabled: user names would be unverified")
    if not config.authentication_enabled:
        return None
    store = AuthStore(Path(config.auth_config_path).expanduser() if config.auth_config_path else path, disk, changes)
    store.open()

    def add_configured(tables: AuthTables) -> None:
        if config.init_authentication_user:
            name, secret = read_credentials(config.init_authentication_user, "initAuthenticationUser")
            tables.users.setdefault(name, User(secret, SUPER))
        inner = inner_credentials(config)
        if inner is not None:
            tables.users[inner[0]] = User(inner[1], SUPER)

    store.change_now(add_configured)
    if not store.tables.users:
        raise StartupError('authenticationEnabled without any user: set initAuthenticationUser={"username":…}')
    return store
