"""Users and policies, and the decision that policies give.

A resource is `Topic:name`, `Group:name`, `Cluster:name`; a pattern ends in `*` for a prefix; `*` alone is any resource.
The most specific pattern that fits decides: a whole name before a prefix, a longer prefix before a shorter one; among
equals, and for everything nobody allowed, the answer is no.
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
    """What a caller asked for does not fit."""


class User(msgspec.Struct, rename="camel", frozen=True):
    """`password` is the secret key of signatures: stored, never told."""

    password: str
    user_type: str = NORMAL
    user_status: str = ENABLED


class Entry(msgspec.Struct, rename="camel", frozen=True):
    """One rule."""

    resource: str
    actions: tuple[str, ...]
    source_ips: tuple[str, ...] = ()
    decision: str = "Allow"

    def fits_asker(self, kind: str, action: str, source: str) -> bool:
        """Whether it says something of an action of this caller on resources of a kind."""
        if "All" not in self.actions and action not in self.actions:
            return False
        own_kind = self.resource.partition(":")[0]
        return own_kind in (kind, "*") and (not self.source_ips or _in_any(source, self.source_ips))

    @property
    def rank(self) -> tuple[int, int, int]:
        """Higher decides first; a denial before a permission of the same rank."""
        _, _, pattern = self.resource.partition(":")
        literal = self.resource != "*" and not pattern.endswith("*")
        return (2 if literal else 1 if pattern else 0, len(pattern), self.decision == "Deny")


class Policy(msgspec.Struct, rename="camel", frozen=True):
    """`Custom` rules decide before `Default` ones."""

    policy_type: str
    entries: tuple[Entry, ...]


class _Rules:
    """Those of one kind of policy that say something of one action, by the names that they fit."""

    __slots__ = ("_prefixes", "_whole")

    def __init__(self, rules: Iterable[Entry]) -> None:
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
        """None: no rule fits."""
        allows = self._whole.get(name)
        if allows is not None:
            return allows
        for prefix, allows_all in self._prefixes:
            if name.startswith(prefix):
                return allows_all
        return None


class Decision:
    """Whether one of `actions` is allowed to who has these policies and calls from `source`, on resources of a kind."""

    __slots__ = ("_in_turn",)

    def __init__(self, policies: Collection[Policy], kind: str, actions: frozenset[str], source: str) -> None:
        self._in_turn: list[list[_Rules]] = []
        for wanted in ("Custom", "Default"):
            rules = [entry for policy in policies if policy.policy_type == wanted for entry in policy.entries]
            by_action = ([rule for rule in rules if rule.fits_asker(kind, action, source)] for action in actions)
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
        raise AuthError(f"a user's name has 1 to {MAX_NAME} letters, digits and - _ . @")
    return name


def check_user(user: User) -> User:
    """Raises AuthError."""
    if not user.password:
        raise AuthError("the password is blank")
    if user.user_type not in (SUPER, NORMAL):
        raise AuthError(f"userType: {SUPER} or {NORMAL}")
    if user.user_status not in (ENABLED, DISABLED):
        raise AuthError(f"userStatus: {ENABLED} or {DISABLED}")
    return user


def check_policy(policy: Policy) -> Policy:
    """Raises AuthError."""
    if policy.policy_type not in ("Custom", "Default"):
        raise AuthError("policyType: Custom or Default")
    if not 1 <= len(policy.entries) <= MAX_ENTRIES:
        raise AuthError(f"a policy has 1 to {MAX_ENTRIES} entries")
    for entry in policy.entries:
        kind, separator, pattern = entry.resource.partition(":")
        if entry.resource != "*" and (kind not in KINDS or not separator or not pattern or "*" in pattern[:-1]):
            raise AuthError(f"resource {entry.resource!r}: {' or '.join(KINDS)}, a colon, and a name or prefix*")
        if not entry.actions or not ACTIONS.issuperset(entry.actions):
            raise AuthError(f"actions are some of {', '.join(sorted(ACTIONS))}")
        if entry.decision not in ("Allow", "Deny"):
            raise AuthError("decision: Allow or Deny")
        for source in entry.source_ips:
            try:
                ipaddress.ip_network(source, strict=False)
            except ValueError as error:
                raise AuthError(f"source IP {source!r}: an address, or a network as 10.0.0.0/8") from error
    return policy


def _in_any(source: str, networks: Iterable[str]) -> bool:
    try:
        address = ipaddress.ip_address(source)
    except ValueError:
        return False
    return any(address in ipaddress.ip_network(network, strict=False) for network in networks)
