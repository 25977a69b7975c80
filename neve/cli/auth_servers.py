"""Users and policies of all servers of a cluster together: its brokers' masters and its name servers, by codes that
Apache RocketMQ's brokers answer, too.

    3001 3002 3003  a user is made, changed, removed     3004 3005  one, all
    3006 3007 3008  a policy's rules                     3009 3010  of one user, of all

Each server has its own table. One that keeps none (authentication is off there, or it is an Apache name server, which
knows no such request) is told of and passed over; where no server keeps any, that is an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from neve.cli.broker_sets import new_pool
from neve.cli.cluster import connect, security_of_the_command
from neve.cli.failures import AUTH, FAILED, UNREACHABLE, Failure
from neve.client.net.answers import parse_body
from neve.client.net.connection import ConnectionPool
from neve.errors import NeveError
from neve.remoting.body import dumps
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

_ASK_S = 10.0
_SUBJECT = "User:"
#: What an Apache broker answers that has no provider of users configured.
_NO_TABLE = ("is not configured", "An system error occurred, please try again later.")
_REMOVALS = frozenset({RequestCode.AUTH_DELETE_USER, RequestCode.AUTH_DELETE_ACL})
#: What is to be removed is removed already, as by a server that shares its table.
_GONE = frozenset({ResponseCode.USER_NOT_EXIST, ResponseCode.POLICY_NOT_EXIST})


class Server(NamedTuple):
    """A broker's master, or a name server."""

    label: str
    address: str


class User(NamedTuple):
    """As a server has it; never with its password."""

    name: str
    is_super: bool
    is_enabled: bool


class Rule(NamedTuple):
    """What a user may, or may not, do with a resource."""

    user: str
    resource: str
    actions: tuple[str, ...]
    source_ips: tuple[str, ...]
    decision: str


class AuthServers:
    """Those of a cluster that keep users."""

    def __init__(self, pool: ConnectionPool, servers: Sequence[Server]) -> None:
        self._pool = pool
        self.keeping: list[Server] = [*servers]
        self.without: list[Server] = []

    async def look(self) -> None:
        """Which of them keep users. Raises Failure where none does, or one can't be asked."""
        answers = await self._at_all(RequestCode.AUTH_LIST_USER, {"filter": ""}, accept_all=True)
        self.without = [server for server, answer in answers.items() if _has_no_table(answer)]
        self.keeping = [server for server in self.keeping if server not in self.without]
        if not self.keeping:
            raise Failure(FAILED, "no server of this cluster keeps users: authenticationEnabled=false everywhere")
        for server in self.keeping:
            _require(server, answers[server])

    # ---- users

    async def users(self) -> dict[str, dict[Server, User]]:
        """By name, and by server that has it."""
        found: dict[str, dict[Server, User]] = {}
        for server, answer in (await self._at_all(RequestCode.AUTH_LIST_USER, {"filter": ""})).items():
            for row in _rows(answer):
                user = User(str(row["username"]), row.get("userType") == "Super", row.get("userStatus") != "disable")
                found.setdefault(user.name, {})[server] = user
        return dict(sorted(found.items()))

    async def create_user(self, name: str, settings: Mapping[str, str], at: Iterable[Server]) -> None:
        body = dumps({"username": name, **settings})
        for server in at:
            # Those of one process, as `neve up`'s, share a table: the first one made it for all.
            answer = await self._pool.invoke(
                server.address, RequestCode.AUTH_GET_USER, {"username": name}, timeout=_ASK_S
            )
            if answer.code == ResponseCode.USER_NOT_EXIST or not answer.body:
                await self._change(RequestCode.AUTH_CREATE_USER, {"username": name}, body, [server])

    async def update_user(self, name: str, settings: Mapping[str, str], at: Iterable[Server]) -> None:
        body = dumps({"username": name, **settings})
        await self._change(RequestCode.AUTH_UPDATE_USER, {"username": name}, body, at)

    async def delete_user(self, name: str, at: Iterable[Server]) -> None:
        await self._change(RequestCode.AUTH_DELETE_USER, {"username": name}, b"", at)

    # ---- policies

    async def rules(self) -> dict[Rule, list[Server]]:
        """With the servers that have each."""
        found: dict[Rule, list[Server]] = {}
        ext = {"subjectFilter": "", "resourceFilter": ""}
        for server, answer in (await self._at_all(RequestCode.AUTH_LIST_ACL, ext)).items():
            for row in _rows(answer):
                for policy in row.get("policies") or ():
                    for entry in policy.get("entries") or ():
                        found.setdefault(_rule(str(row["subject"]), entry), []).append(server)
        return dict(sorted(found.items()))

    async def put_rule(self, rule: Rule) -> None:
        """In the place of what the user's policy has of this resource."""
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
        """Of one resource, or all of the user."""
        ext = {"subject": _SUBJECT + user, **({} if resource is None else {"resource": resource})}
        await self._change(RequestCode.AUTH_DELETE_ACL, ext, b"", at)

    # ---- asking

    async def _change(
        self, code: RequestCode, ext: Mapping[str, str], body: bytes, at: Iterable[Server]
    ) -> None:  # fmt: skip
        """One server after the other: what one refuses, the next ones are not told."""
        done: list[str] = []
        for server in at:
            try:
                answer = await self._pool.invoke(server.address, code, ext, body=body, timeout=_ASK_S)
                if code not in _REMOVALS or answer.code not in _GONE:
                    _require(server, answer)
            except (Failure, NeveError) as error:
                exit_code = error.exit_code if isinstance(error, Failure) else UNREACHABLE
                text = str(error) if isinstance(error, Failure) else f"{server.label}: {error}"
                if done:
                    text += f"; changed already: {', '.join(done)}; the same command goes on"
                raise Failure(exit_code, text) from error
            done.append(server.label)

    async def _at_all(
        self, code: RequestCode, ext: Mapping[str, str], *, accept_all: bool = False
    ) -> dict[Server, RemotingCommand]:
        async def ask(server: Server) -> RemotingCommand:
            try:
                answer = await self._pool.invoke(server.address, code, ext, timeout=_ASK_S)
            except NeveError as error:
                raise Failure(UNREACHABLE, f"{server.label}: {error}") from error
            return answer if accept_all else _require(server, answer)

        answers = await asyncio.gather(*map(ask, self.keeping))
        return dict(zip(self.keeping, answers, strict=True))


def _require(server: Server, answer: RemotingCommand) -> RemotingCommand:
    if answer.code != ResponseCode.SUCCESS:
        denied = answer.code == ResponseCode.NO_PERMISSION
        raise Failure(AUTH if denied else FAILED, f"{server.label}: {answer.remark or f'code {answer.code}'}")
    return answer


def _has_no_table(answer: RemotingCommand) -> bool:
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        return True
    return answer.code == ResponseCode.SYSTEM_ERROR and any(text in (answer.remark or "") for text in _NO_TABLE)


def _rows(answer: RemotingCommand) -> list[dict[str, Any]]:
    """Apache's broker sends no body for an empty list."""
    return list(parse_body(answer) or ()) if answer.body else []


def _rule(subject: str, entry: Mapping[str, Any]) -> Rule:
    return Rule(
        subject.removeprefix(_SUBJECT),
        str(entry.get("resource")),
        tuple(map(str, entry.get("actions") or ())),
        tuple(map(str, entry.get("sourceIps") or ())),
        str(entry.get("decision") or "Allow"),
    )


@asynccontextmanager
async def auth_servers(namesrv: str) -> AsyncGenerator[AuthServers]:
    """Of these name servers and the brokers that they know. Raises Failure where none of them keeps users."""
    async with connect(namesrv) as client:
        known = await client.cluster_info()
    name_servers = [Server(f"name server {one}", one) for one in map(str.strip, namesrv.split(";")) if one]
    masters = [Server(f"broker {name}", info.master) for name, info in sorted(known.items()) if info.master is not None]
    if without := [name for name, info in sorted(known.items()) if info.master is None]:
        raise Failure(UNREACHABLE, f"no master now, so its users can't be changed: {', '.join(without)}")
    pool = new_pool(*security_of_the_command())
    try:
        servers = AuthServers(pool, [*name_servers, *masters])
        await servers.look()
        yield servers
    finally:
        await pool.close()
