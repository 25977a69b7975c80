"""Users and policies of all servers of a cluster together: the masters of its brokers, and its name servers.

    3001 create a user, 3002 change, 3003 delete, 3004 one, 3005 all
    3006 put rules of a policy, 3007 change, 3008 delete, 3009 one, 3010 all

Each server keeps its own table. A server without one (authentication is off, or an Apache name server, which does not
support the requests) is passed over. A change goes to one server after the other and stops at the first that refuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from neve.admin.errors import AdminError, NotPermitted, Unreachable
from neve.admin.requests import ServerRequests
from neve.client.net.answers import parse_body
from neve.errors import NeveError
from neve.remoting.body import dumps
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

_SUBJECT = "User:"
# Answers of an Apache broker without a configured provider of users.
_NO_TABLE = ("is not configured", "An system error occurred, please try again later.")
_REMOVALS = frozenset({RequestCode.AUTH_DELETE_USER, RequestCode.AUTH_DELETE_ACL})
# Servers that share a table have removed the entry already.
_REMOVED = frozenset({ResponseCode.USER_NOT_EXIST, ResponseCode.POLICY_NOT_EXIST})


class Server(NamedTuple):
    """The master of a broker, or a name server."""

    label: str
    address: str


class User(NamedTuple):
    """A user as a server has it, without the password."""

    name: str
    is_super: bool
    is_enabled: bool


class Rule(NamedTuple):
    """Actions on a resource that a user may or may not take."""

    user: str
    resource: str
    actions: tuple[str, ...]
    source_ips: tuple[str, ...]
    decision: str


class Users:
    """The users and policies of a cluster. Call `discover` first."""

    def __init__(self, requests: ServerRequests) -> None:
        self._requests = requests
        self.keeping: list[Server] = []
        self.without: list[Server] = []

    async def discover(self) -> None:
        """Find the servers that keep users.

        Raises:
            AdminError: no server keeps users.
            Unreachable: a broker has no master, or a server does not answer.
        """
        brokers = sorted(self._requests.brokers.items())
        if headless := [name for name, info in brokers if info.master is None]:
            raise Unreachable(f"users cannot be read or changed while brokers have no master: {', '.join(headless)}")
        servers = [Server(f"name server {address}", address) for address in self._requests.name_servers]
        servers += [Server(f"broker {name}", info.master) for name, info in brokers if info.master is not None]
        answers = await self._ask_all(servers, RequestCode.AUTH_LIST_USER, {"filter": ""}, accept_all=True)
        self.without = [server for server, answer in answers.items() if _has_no_table(answer)]
        self.keeping = [server for server in servers if server not in self.without]
        if not self.keeping:
            raise AdminError("no server of this cluster keeps users: set authenticationEnabled=true on each")
        for server in self.keeping:
            _require(server, answers[server])

    # ---- users

    async def all(self) -> dict[str, dict[Server, User]]:
        """Return all users, by name and by server that has them."""
        found: dict[str, dict[Server, User]] = {}
        answers = await self._ask_all(self.keeping, RequestCode.AUTH_LIST_USER, {"filter": ""})
        for server, answer in answers.items():
            for row in _rows(answer):
                user = User(str(row["username"]), row.get("userType") == "Super", row.get("userStatus") != "disable")
                found.setdefault(user.name, {})[server] = user
        return dict(sorted(found.items()))

    async def create(self, name: str, settings: Mapping[str, str], at: Iterable[Server]) -> None:
        """Create a user at these servers."""
        body = dumps({"username": name, **settings})
        for server in at:
            # Servers of one process, as those of `neve up`, share a table: the first one created it for all.
            answer = await self._requests.ask(server.address, RequestCode.AUTH_GET_USER, {"username": name})
            if answer.code == ResponseCode.USER_NOT_EXIST or not answer.body:
                await self._change(RequestCode.AUTH_CREATE_USER, {"username": name}, body, [server])

    async def change(self, name: str, settings: Mapping[str, str], at: Iterable[Server]) -> None:
        """Change settings of a user at these servers; settings that are not named stay."""
        body = dumps({"username": name, **settings})
        await self._change(RequestCode.AUTH_UPDATE_USER, {"username": name}, body, at)

    async def delete(self, name: str, at: Iterable[Server]) -> None:
        """Delete a user with its policies at these servers."""
        await self._change(RequestCode.AUTH_DELETE_USER, {"username": name}, b"", at)

    # ---- policies

    async def rules(self) -> dict[Rule, list[Server]]:
        """Return all rules with the servers that have each."""
        found: dict[Rule, list[Server]] = {}
        ext = {"subjectFilter": "", "resourceFilter": ""}
        for server, answer in (await self._ask_all(self.keeping, RequestCode.AUTH_LIST_ACL, ext)).items():
            for row in _rows(answer):
                for policy in row.get("policies") or ():
                    for entry in policy.get("entries") or ():
                        found.setdefault(_rule(str(row["subject"]), entry), []).append(server)
        return dict(sorted(found.items()))

    async def put_rule(self, rule: Rule) -> None:
        """Set the rule of a user for a resource, at all servers; it replaces the present one."""
        entry = {
            "resource": rule.resource,
            "actions": list(rule.actions),
            "sourceIps": list(rule.source_ips),
            "decision": rule.decision,
        }
        subject = _SUBJECT + rule.user
        body = dumps({"subject": subject, "policies": [{"policyType": "Custom", "entries": [entry]}]})
        await self._change(RequestCode.AUTH_CREATE_ACL, {"subject": subject}, body, self.keeping)

    async def delete_rules(self, user: str, resource: str | None, at: Iterable[Server]) -> None:
        """Delete the rule of a user for a resource, or all rules of the user, at these servers."""
        ext = {"subject": _SUBJECT + user, **({} if resource is None else {"resource": resource})}
        await self._change(RequestCode.AUTH_DELETE_ACL, ext, b"", at)

    # ---- requests

    async def _change(self, code: RequestCode, ext: Mapping[str, str], body: bytes, at: Iterable[Server]) -> None:
        changed: list[str] = []
        for server in at:
            try:
                answer = await self._ask(server, code, ext, body)
                if code not in _REMOVALS or answer.code not in _REMOVED:
                    _require(server, answer)
            except AdminError as error:
                if not changed:
                    raise
                done = ", ".join(changed)
                raise type(error)(f"{error}; changed already: {done}. Repeat the command to complete it") from error
            changed.append(server.label)

    async def _ask_all(
        self, servers: Iterable[Server], code: RequestCode, ext: Mapping[str, str], *, accept_all: bool = False
    ) -> dict[Server, RemotingCommand]:
        servers = list(servers)
        answers = await asyncio.gather(*(self._ask(server, code, ext) for server in servers))
        found = dict(zip(servers, answers, strict=True))
        return found if accept_all else {server: _require(server, answer) for server, answer in found.items()}

    async def _ask(
        self, server: Server, code: RequestCode, ext: Mapping[str, str], body: bytes = b""
    ) -> RemotingCommand:
        try:
            return await self._requests.ask(server.address, code, ext, body)
        except NeveError as error:
            raise Unreachable(f"{server.label}: {error}") from error


def _require(server: Server, answer: RemotingCommand) -> RemotingCommand:
    if answer.code != ResponseCode.SUCCESS:
        failure = NotPermitted if answer.code == ResponseCode.NO_PERMISSION else AdminError
        raise failure(f"{server.label}: {answer.remark or f'code {answer.code}'}")
    return answer


def _has_no_table(answer: RemotingCommand) -> bool:
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        return True
    return answer.code == ResponseCode.SYSTEM_ERROR and any(text in (answer.remark or "") for text in _NO_TABLE)


def _rows(answer: RemotingCommand) -> list[dict[str, Any]]:
    """Return the rows of a list; Apache's broker sends no body for an empty one."""
    return list(parse_body(answer) or ()) if answer.body else []


def _rule(subject: str, entry: Mapping[str, Any]) -> Rule:
    return Rule(
        subject.removeprefix(_SUBJECT),
        str(entry.get("resource")),
        tuple(map(str, entry.get("actions") or ())),
        tuple(map(str, entry.get("sourceIps") or ())),
        str(entry.get("decision") or "Allow"),
    )
