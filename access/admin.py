"""Requests 3001 to 3010: management of users and policies, by mqadmin. No answer contains a secret."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from access.model import AuthError, Policy, PolicyEntry, User, check_name, check_policy, check_user
from access.permissions import super_users
from access.route import Route, routes_of
from access.store import AuthStore, AuthTables
from infra.net.remoting_server import Connection
from neve.errors import BrokerError
from neve.remoting.body import dumps, lenient_loads
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

_SUBJECT = "User:"


class AuthAdmin:
    """The handlers, registered on a server with authentication."""

    def __init__(self, store: AuthStore) -> None:
        self._store = store

    # ---- users

    @Route(RequestCode.AUTH_CREATE_USER, super_users, reads=False)
    async def create_user(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """3001"""
        body = _object(request)

        def edit(tables: AuthTables) -> None:
            name = check_name(_field(request, "username") or str(body.get("username") or ""))
            if name in tables.users:
                raise AuthError(f"the user {name} exists")
            tables.users[name] = check_user(_changed(User(""), body))

        return await self._apply(request, edit)

    @Route(RequestCode.AUTH_UPDATE_USER, super_users, reads=False)
    async def update_user(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """3002: fields that the body lacks stay unchanged."""
        body = _object(request)

        def edit(tables: AuthTables) -> None:
            name = _field(request, "username")
            tables.users[name] = check_user(_changed(_known(tables, name), body))

        return await self._apply(request, edit)

    @Route(RequestCode.AUTH_DELETE_USER, super_users, reads=False)
    async def delete_user(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """3003: delete a user with its policies."""

        def edit(tables: AuthTables) -> None:
            name = _field(request, "username")
            tables.users.pop(name, None)
            tables.policies.pop(_SUBJECT + name, None)

        return await self._apply(request, edit)

    @Route(RequestCode.AUTH_GET_USER, super_users, reads=True)
    def get_user(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """3004"""
        name = _field(request, "username")
        return _answer(request, _user_info(name, _known(self._store.tables, name)))

    @Route(RequestCode.AUTH_LIST_USER, super_users, reads=True)
    def list_users(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """3005"""
        wanted = _field(request, "filter")
        users = self._store.tables.users
        return _answer(request, [_user_info(name, users[name]) for name in sorted(users) if wanted in name])

    # ---- policies

    @Route(RequestCode.AUTH_CREATE_ACL, super_users, reads=False)
    async def create_acl(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """3006: add rules; they replace the subject's rules for the same resources."""
        return await self._merge(request)

    @Route(RequestCode.AUTH_UPDATE_ACL, super_users, reads=False)
    async def update_acl(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """3007: as 3006, since mqadmin sends one resource per request."""
        return await self._merge(request)

    @Route(RequestCode.AUTH_DELETE_ACL, super_users, reads=False)
    async def delete_acl(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """3008: delete all rules of a subject, or of one type or one resource."""
        kind, resource = _field(request, "policyType"), _field(request, "resource")

        def edit(tables: AuthTables) -> None:
            subject = _field(request, "subject")
            if subject not in tables.policies:
                raise BrokerError(ResponseCode.POLICY_NOT_EXIST, f"the acl of {subject} does not exist")
            kept = [
                policy
                if kind and policy.policy_type != kind
                else Policy(policy.policy_type, tuple(e for e in policy.entries if resource and e.resource != resource))
                for policy in tables.policies[subject]
            ]
            _put(tables, subject, kept)

        return await self._apply(request, edit)

    @Route(RequestCode.AUTH_GET_ACL, super_users, reads=True)
    def get_acl(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """3009"""
        subject = _field(request, "subject")
        found = self._store.tables.policies.get(subject)
        if found is None:
            raise BrokerError(ResponseCode.POLICY_NOT_EXIST, f"the acl of {subject} does not exist")
        return _answer(request, _acl_info(subject, found))

    @Route(RequestCode.AUTH_LIST_ACL, super_users, reads=True)
    def list_acls(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """3010"""
        subject, resource = _field(request, "subjectFilter"), _field(request, "resourceFilter")
        policies = self._store.tables.policies
        return _answer(
            request,
            [
                _acl_info(name, policies[name])
                for name in sorted(policies)
                if subject in name and any(resource in e.resource for policy in policies[name] for e in policy.entries)
            ],
        )

    # ---- inside

    async def _merge(self, request: RemotingCommand) -> RemotingCommand:
        body = _object(request)

        def edit(tables: AuthTables) -> None:
            subject = _field(request, "subject") or str(body.get("subject") or "")
            if not subject.startswith(_SUBJECT):
                raise AuthError(f"the subject must be {_SUBJECT}name, got {subject!r}")
            _known(tables, subject.removeprefix(_SUBJECT))
            merged = {policy.policy_type: policy for policy in tables.policies.get(subject, ())}
            for policy in _policies(body.get("policies")):
                fresh = {entry.resource for entry in policy.entries}
                old = merged[policy.policy_type].entries if policy.policy_type in merged else ()
                entries = (*(entry for entry in old if entry.resource not in fresh), *policy.entries)
                merged[policy.policy_type] = check_policy(Policy(policy.policy_type, entries))
            _put(tables, subject, merged.values())

        return await self._apply(request, edit)

    async def _apply(self, request: RemotingCommand, edit: Any) -> RemotingCommand:
        try:
            await self._store.change(edit)
        except AuthError as error:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, str(error)) from error
        return RemotingCommand.response(request, ResponseCode.SUCCESS)


ROUTES = routes_of(Route, [AuthAdmin])


def _field(request: RemotingCommand, name: str) -> str:
    return request.ext.get(name, "")


def _object(request: RemotingCommand) -> dict[str, Any]:
    value = lenient_loads(request.body) if request.body else {}
    if not isinstance(value, dict):
        raise BrokerError(ResponseCode.INVALID_PARAMETER, "the body is not a JSON object")
    return value


def _known(tables: AuthTables, name: str) -> User:
    user = tables.users.get(name)
    if user is None:
        raise BrokerError(ResponseCode.USER_NOT_EXIST, f"the user {name} does not exist")
    return user


def _changed(user: User, body: dict[str, Any]) -> User:
    def value(name: str, old: str) -> str:
        return str(body.get(name) or old)

    return User(
        value("password", user.password), value("userType", user.user_type), value("userStatus", user.user_status)
    )


def _policies(value: Any) -> list[Policy]:
    rows = value if isinstance(value, list) else []
    for row in rows:  # mqadmin omits default values, or sends null
        if isinstance(row, dict):
            row["policyType"] = row.get("policyType") or "Custom"
            for entry in row.get("entries") or []:
                if isinstance(entry, dict):
                    entry["sourceIps"] = entry.get("sourceIps") or []
    try:
        found = msgspec.convert(rows, list[Policy])
    except msgspec.ValidationError as error:
        raise AuthError(f"policies: {error}") from error
    if not found:
        raise AuthError("no policies given")
    return [check_policy(policy) for policy in found]


def _put(tables: AuthTables, subject: str, policies: Iterable[Policy]) -> None:
    kept = [policy for policy in policies if policy.entries]
    if kept:
        tables.policies[subject] = kept
    else:
        tables.policies.pop(subject, None)


def _user_info(name: str, user: User) -> dict[str, str]:
    return {"username": name, "userType": user.user_type, "userStatus": user.user_status}


def _acl_info(subject: str, policies: Iterable[Policy]) -> dict[str, Any]:
    return {"subject": subject, "policies": [{"policyType": p.policy_type, "entries": _entries(p)} for p in policies]}


def _entries(policy: Policy) -> list[dict[str, Any]]:
    def info(entry: PolicyEntry) -> dict[str, Any]:
        ips = list(entry.source_ips)
        return {
            "resource": entry.resource, "actions": list(entry.actions), "sourceIps": ips, "decision": entry.decision
        }  # fmt: skip

    return [info(entry) for entry in policy.entries]


def _answer(request: RemotingCommand, value: Any) -> RemotingCommand:
    return RemotingCommand.response(request, ResponseCode.SUCCESS, body=dumps(value))
