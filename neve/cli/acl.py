"""`neve acl`: policies of users, at all brokers and name servers of a cluster together."""

from __future__ import annotations

import asyncio
import fnmatch
from typing import Any

import click

from neve.cli.aliases import VerbGroup
from neve.cli.cluster import administer, cluster_options
from neve.cli.failures import NOT_FOUND, Failure
from neve.cli.options import yes_option
from neve.cli.output import ask, emit, output_option, say
from neve.cli.user import report_servers_without_users

_KINDS = {"topic": "Topic", "group": "Group", "cluster": "Cluster"}
_ACTIONS = {name.lower(): name for name in ("All", "Pub", "Sub", "Create", "Update", "Delete", "Get", "List")}


@click.group(cls=VerbGroup)
def acl() -> None:
    """Policies: what users may do with topics, groups and clusters, at all brokers and name servers together.

    A RESOURCE is topic:NAME, group:NAME or cluster:NAME. NAME may end in * for all names with that prefix; * alone is
    everything. The most specific rule decides, and among equal ones a denial. Everything else is denied.
    """


def resource_of(text: str) -> str:
    """Return a resource as servers spell it.

    Raises:
        click.BadParameter: the text is not a resource.
    """
    if text == "*":
        return text
    kind, colon, name = text.partition(":")
    if kind.lower() not in _KINDS or not colon or not name or "*" in name[:-1]:
        raise click.BadParameter(
            f"{text!r} is not topic:NAME, group:NAME or cluster:NAME; only the end of NAME may be *"
        )
    return f"{_KINDS[kind.lower()]}:{name}"


def _resources(_context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(resource_of, texts))


def _actions(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, ...]:
    words = [word.strip().lower() for word in text.split(",")]
    if unknown := [word for word in words if word not in _ACTIONS]:
        raise click.BadParameter(f"unknown action {', '.join(unknown)}: actions are {', '.join(_ACTIONS)}")
    return tuple(_ACTIONS[word] for word in words)


@acl.command(name="list")
@click.argument("name", required=False, metavar="[USER]")
@click.option("--resource", help="Only rules for this resource; may contain *.")
@cluster_options
@output_option
def list_rules(name: str | None, resource: str | None, namesrv: str, output: str) -> None:
    """List the rules of all users, or of one. MISSING_AT names servers without a rule that others have."""
    rows = [
        row
        for row in asyncio.run(_list(namesrv))
        if name in (None, row["user"])
        and (resource is None or fnmatch.fnmatchcase(row["resource"].lower(), resource.lower()))
    ]
    columns = ["user", "resource", "actions", "decision", "source"]
    emit(rows, [*columns, *(["missing_at"] if any(row["missing_at"] for row in rows) else [])], output)


async def _list(namesrv: str) -> list[dict[str, Any]]:
    async with administer(namesrv, may_lack_brokers=True) as admin:
        users = await admin.users()
        report_servers_without_users(users)
        return [
            {
                "user": rule.user,
                "resource": rule.resource,
                "actions": ",".join(rule.actions),
                "decision": rule.decision.lower(),
                "source": ",".join(rule.source_ips) or None,
                "missing_at": [server.label for server in users.keeping if server not in at],
            }
            for rule, at in (await users.rules()).items()
        ]


@acl.command()
@click.argument("name", metavar="USER")
@click.argument("resources", nargs=-1, required=True, metavar="RESOURCE...", callback=_resources)
@click.option(
    "-a", "--actions", required=True, callback=_actions, metavar="ACTION,...",
    help="Some of all, pub, sub, create, update, delete, get, list.",
)  # fmt: skip
@click.option("--deny", is_flag=True, help="Deny the actions. Without it they are allowed.")
@click.option("--source", "sources", multiple=True, metavar="IP", help="Only from this address or network: 10.0.0.0/8.")
@cluster_options
def create(
    *,
    name: str,
    resources: tuple[str, ...],
    actions: tuple[str, ...],
    deny: bool,
    sources: tuple[str, ...],
    namesrv: str,
) -> None:
    """Allow or deny a user actions on resources. The present rule of the user for the same resource is replaced."""
    from neve.admin.users import Rule

    decision = "Deny" if deny else "Allow"
    rules = [Rule(name, resource, actions, sources, decision) for resource in resources]
    at = asyncio.run(_create(namesrv, name, rules))
    for rule in rules:
        say(f"{name} {'may not' if deny else 'may'} {','.join(actions)} {rule.resource} at {', '.join(at)}")


async def _create(namesrv: str, name: str, rules: list[Any]) -> list[str]:
    async with administer(namesrv, may_lack_brokers=True) as admin:
        users = await admin.users()
        report_servers_without_users(users)
        present = (await users.all()).get(name, {})
        if missing := [server.label for server in users.keeping if server not in present]:
            raise Failure(NOT_FOUND, f"there is no user {name} at {', '.join(missing)}: neve user create creates it")
        for rule in rules:
            await users.put_rule(rule)
        return [one.label for one in users.keeping]


@acl.command()
@click.argument("name", metavar="USER")
@click.argument("resources", nargs=-1, metavar="[RESOURCE...]", callback=_resources)
@click.option("--all", "everything", is_flag=True, help="Delete all rules of the user.")
@yes_option
@cluster_options
def delete(name: str, resources: tuple[str, ...], everything: bool, yes: bool, namesrv: str) -> None:
    """Delete the rules of a user for resources, or all rules of the user."""
    if bool(resources) is everything:
        raise click.UsageError("give the resources, or --all")
    if not yes:
        ask(f"Delete the rules of {name} for {', '.join(resources) or 'all resources'}?")
    for resource in asyncio.run(_delete(namesrv, name, resources)):
        say(f"deleted the rule of {name} for {resource}")


async def _delete(namesrv: str, name: str, resources: tuple[str, ...]) -> tuple[str, ...]:
    async with administer(namesrv, may_lack_brokers=True) as admin:
        users = await admin.users()
        report_servers_without_users(users)
        present: dict[str, dict[Any, None]] = {}
        for rule, at in (await users.rules()).items():
            if rule.user == name:
                present.setdefault(rule.resource, {}).update(dict.fromkeys(at))
        chosen = resources or tuple(present)
        if missing := [one for one in chosen if one not in present] or ([] if present else ["any resource"]):
            raise Failure(NOT_FOUND, f"{name} has no rule for {', '.join(missing)}")
        for resource in chosen:
            await users.delete_rules(name, resource, present[resource])
        return chosen
