"""`neve acl`: what users may do, at all brokers and name servers of a cluster together."""

from __future__ import annotations

import asyncio
import fnmatch
from typing import Any

import click

from neve.cli.aliases import AliasedGroup
from neve.cli.cluster import cluster_options
from neve.cli.failures import NOT_FOUND, Failure
from neve.cli.output import ask, emit, output_option, say
from neve.cli.user import say_who_keeps_none

_KINDS = {"topic": "Topic", "group": "Group", "cluster": "Cluster"}
_ACTIONS = {name.lower(): name for name in ("All", "Pub", "Sub", "Create", "Update", "Delete", "Get", "List")}


@click.group(cls=AliasedGroup)
def acl() -> None:
    """Policies: what users may do with topics, groups and clusters, at all brokers and name servers together.

    A RESOURCE is topic:NAME, group:NAME or cluster:NAME; NAME may end in * for all that begin so, and * alone is
    everything. The most specific one decides, among equals a denial, and what nobody allowed is denied.
    """


def resource_of(text: str) -> str:
    """As the servers spell it. Raises click.BadParameter."""
    if text == "*":
        return text
    kind, colon, name = text.partition(":")
    if kind.lower() not in _KINDS or not colon or not name or "*" in name[:-1]:
        raise click.BadParameter(
            f"{text!r} is not topic:NAME, group:NAME, cluster:NAME, NAME perhaps with * at its end"
        )
    return f"{_KINDS[kind.lower()]}:{name}"


def _resources(_context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(resource_of, texts))


def _actions(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, ...]:
    words = [word.strip().lower() for word in text.split(",")]
    if unknown := [word for word in words if word not in _ACTIONS]:
        raise click.BadParameter(f"{', '.join(unknown)}: some of {', '.join(_ACTIONS)}")
    return tuple(_ACTIONS[word] for word in words)


@acl.command(name="ls")
@click.argument("name", required=False, metavar="[USER]")
@click.option("--resource", help="Only of these; may have * in it.")
@cluster_options
@output_option
def list_rules(name: str | None, resource: str | None, namesrv: str, output: str) -> None:
    """List policies, all or a user's. MISSING_AT: servers that do not have what others have."""
    rows = [
        row
        for row in asyncio.run(_list(namesrv))
        if name in (None, row["user"])
        and (resource is None or fnmatch.fnmatchcase(row["resource"].lower(), resource.lower()))
    ]
    columns = ["user", "resource", "actions", "decision", "source"]
    emit(rows, [*columns, *(["missing_at"] if any(row["missing_at"] for row in rows) else [])], output)


async def _list(namesrv: str) -> list[dict[str, Any]]:
    from neve.cli.auth_servers import auth_servers

    async with auth_servers(namesrv) as servers:
        say_who_keeps_none(servers)
        return [
            {
                "user": rule.user,
                "resource": rule.resource,
                "actions": ",".join(rule.actions),
                "decision": rule.decision.lower(),
                "source": ",".join(rule.source_ips) or None,
                "missing_at": [server.label for server in servers.keeping if server not in at],
            }
            for rule, at in (await servers.rules()).items()
        ]


@acl.command()
@click.argument("name", metavar="USER")
@click.argument("resources", nargs=-1, required=True, metavar="RESOURCE...", callback=_resources)
@click.option(
    "-a", "--actions", required=True, callback=_actions, metavar="ACTION,...",
    help="Some of all, pub, sub, create, update, delete, get, list.",
)  # fmt: skip
@click.option("--deny", is_flag=True, help="Forbid it, in place of allowing it.")
@click.option("--source", "sources", multiple=True, metavar="IP", help="Only from an address, or 10.0.0.0/8.")
@cluster_options
def add(
    *,
    name: str,
    resources: tuple[str, ...],
    actions: tuple[str, ...],
    deny: bool,
    sources: tuple[str, ...],
    namesrv: str,
) -> None:
    """Let a user do something with resources; what it had of the same resource is replaced."""
    from neve.cli.auth_servers import Rule

    decision = "Deny" if deny else "Allow"
    rules = [Rule(name, resource, actions, sources, decision) for resource in resources]
    at = asyncio.run(_add(namesrv, name, rules))
    for rule in rules:
        say(f"{name} {'may not' if deny else 'may'} {','.join(actions)} {rule.resource} at {', '.join(at)}")


async def _add(namesrv: str, name: str, rules: list[Any]) -> list[str]:
    from neve.cli.auth_servers import auth_servers

    async with auth_servers(namesrv) as servers:
        say_who_keeps_none(servers)
        known = (await servers.users()).get(name, {})
        if missing := [server.label for server in servers.keeping if server not in known]:
            raise Failure(NOT_FOUND, f"there is no user {name} at {', '.join(missing)}: neve user add makes it")
        for rule in rules:
            await servers.put_rule(rule)
        return [one.label for one in servers.keeping]


@acl.command()
@click.argument("name", metavar="USER")
@click.argument("resources", nargs=-1, metavar="[RESOURCE...]", callback=_resources)
@click.option("--all", "everything", is_flag=True, help="All of the user.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@cluster_options
def rm(name: str, resources: tuple[str, ...], everything: bool, yes: bool, namesrv: str) -> None:
    """Take back what `acl add` said of resources, or all of a user."""
    if bool(resources) is everything:
        raise click.UsageError("which resources, or --all")
    if not yes:
        ask(f"Remove the policies of {name} for {', '.join(resources) or 'everything'}?")
    for line in asyncio.run(_rm(namesrv, name, resources)):
        say(line)


async def _rm(namesrv: str, name: str, resources: tuple[str, ...]) -> list[str]:
    from neve.cli.auth_servers import auth_servers

    async with auth_servers(namesrv) as servers:
        say_who_keeps_none(servers)
        having: dict[str, dict[Any, None]] = {}
        for rule, at in (await servers.rules()).items():
            if rule.user == name:
                having.setdefault(rule.resource, {}).update(dict.fromkeys(at))
        wanted = resources or tuple(having)
        if missing := [one for one in wanted if one not in having] or ([] if having else ["anything"]):
            raise Failure(NOT_FOUND, f"{name} has no policy for {', '.join(missing)}")
        for resource in wanted:
            await servers.delete_rules(name, resource, having[resource])
        return [f"{one}: {name} has no policy any more" for one in wanted]
