"""Users and policies, and the decision that policies give.

A resource is `Topic:name`, `Group:name` or `Cluster:name`. A pattern that ends in `*` is a prefix; `*` alone matches
any resource. The most specific matching pattern decides: a whole name before a prefix, a longer prefix before a shorter
one. Among equal patterns a denial wins. Without a matching rule the answer is a denial.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable

import msgspec

ACTIONS = frozenset({"All", "Pub", "Sub", "Create", "Update", "Delete", "Get", "List"})
KINDS = ("Topic", "Group", "Cluster")
SUPER, NORMAL = "Super", "Normal"
ENABLED, DISABLED = "enable", "disable"
MAX_NAME = 64
MAX_ENTRIES = 1024


class AuthError(ValueError):
    """A user or policy in a request is invalid."""


class User(msgspec.Struct, rename="camel", frozen=True):
    """A user. `password` is the secret key of signatures; no answer contains it."""

    password: str
    user_type: str = NORMAL
    user_status: str = ENABLED


class PolicyEntry(msgspec.Struct, rename="camel", frozen=True):
    """One rule."""

    resource: str
    actions: tuple[str, ...]
    source_ips: tuple[str, ...] = ()
    decision: str = "Allow"

    def applies_to(self, kind: str, action: str, source: str) -> bool:
        """Return whether the rule concerns an action on resources of a kind, from the address `source`."""
        if "All" not in self.actions and action not in self.actions:
            return False
        own_kind = self.resource.partition(":")[0]
        return own_kind in (kind, "*") and (not self.source_ips or _in_any(source, self.source_ips))

    @property
    def rank(self) -> tuple[int, int, int]:
        """The precedence: higher first, and a denial before a permission."""
        _, _, pattern = self.resource.partition(":")
        literal = self.resource != "*" and not pattern.endswith("*")
        return (2 if literal else 1 if pattern else 0, len(pattern), self.decision == "Deny")


class Policy(msgspec.Struct, rename="camel", frozen=True):
    """The rules of one type; `Custom` rules precede `Default` ones."""

    policy_type: str
    entries: tuple[PolicyEntry, ...]


class _Rules:
    """The rules of one policy type for one action, indexed by name."""

    __slots__ = ("_prefixes", "_whole")

    def __init__(self, rules: Iterable[PolicyEntry]) -> None:
        self._whole: dict[str, bool] = {}
        self._prefixes: list[tuple[str, bool]] = []
        for rule in sorted(rules, key=lambda rule: rule.rank, reverse=True):
            _, _, pattern = rule.resource.partition(":")
            allows = rule.decision == "Allow"
            if rule.resource == "*" or pattern.endswith("*"):
                self._prefixes.append((pattern[:-1], allows))
            else:
                self._whole.setdefault(pattern, allows)

    def decide(self, name: str) -> bool | None:
        """Return whether the name is allowed; None if no rule matches."""
        allows = self._whole.get(name)
        if allows is not None:
            return allows
        for prefix, allows_all in self._prefixes:
            if name.startswith(prefix):
                return allows_all
        return None


class PermissionCheck:
    """Decides whether policies allow one of `actions` on resources of a kind, for a client at `source`."""

    __slots__ = ("_in_turn",)

    def __init__(self, policies: Collection[Policy], kind: str, actions: frozenset[str], source: str) -> None:
        self._in_turn: list[list[_Rules]] = []
        for wanted in ("Custom", "Default"):
            rules = [entry for policy in policies if policy.policy_type == wanted for entry in policy.entries]
            by_action = ([rule for rule in rules if rule.applies_to(kind, action, source)] for action in actions)
            if ranked := [_Rules(found) for found in by_action if found]:
                self._in_turn.append(ranked)

    def __call__(self, name: str) -> bool:
        for by_action in self._in_turn:
            is_denied = False
            for rules in by_action:
                allows = rules.decide(name)
                if allows:
                    return True
                is_denied |= allows is False
            if is_denied:
                return False
        return False


def check_name(name: str) -> str:
    """Raises AuthError."""
    if not 1 <= len(name) <= MAX_NAME or not all(char.isalnum() or char in "-_.@" for char in name):
        raise AuthError(f"a user name must have 1 to {MAX_NAME} letters, digits or - _ . @")
    return name


def check_user(user: User) -> User:
    """Raises AuthError."""
    if not user.password:
        raise AuthError("the password is empty")
    if user.user_type not in (SUPER, NORMAL):
        raise AuthError(f"userType must be {SUPER} or {NORMAL}, got {user.user_type!r}")
    if user.user_status not in (ENABLED, DISABLED):
        raise AuthError(f"userStatus must be {ENABLED} or {DISABLED}, got {user.user_status!r}")
    return user


def check_policy(policy: Policy) -> Policy:
    """Raises AuthError."""
    if policy.policy_type not in ("Custom", "Default"):
        raise AuthError(f"policyType must be Custom or Default, got {policy.policy_type!r}")
    if not 1 <= len(policy.entries) <= MAX_ENTRIES:
        raise AuthError(f"a policy must have 1 to {MAX_ENTRIES} entries, got {len(policy.entries)}")
    for entry in policy.entries:
        kind, separator, pattern = entry.resource.partition(":")
        if entry.resource != "*" and (kind not in KINDS or not separator or not pattern or "*" in pattern[:-1]):
            raise AuthError(f"resource {entry.resource!r} must be {' or '.join(KINDS)}, a colon, and a name or prefix*")
        if not entry.actions or not ACTIONS.issuperset(entry.actions):
            raise AuthError(f"actions must be among {', '.join(sorted(ACTIONS))}")
        if entry.decision not in ("Allow", "Deny"):
            raise AuthError(f"decision must be Allow or Deny, got {entry.decision!r}")
        for source in entry.source_ips:
            try:
                ipaddress.ip_network(source, strict=False)
            except ValueError as error:
                raise AuthError(f"source IP {source!r} must be an address or a network such as 10.0.0.0/8") from error
    return policy


def _in_any(source: str, networks: Iterable[str]) -> bool:
    try:
        address = ipaddress.ip_address(source)
    except ValueError:
        return False
    return any(address in ipaddress.ip_network(network, strict=False) for network in networks)
